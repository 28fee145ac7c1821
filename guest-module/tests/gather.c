// SPDX-License-Identifier: GPL-2.0-only
/*
 * gather SCHEMA KIND CMD < MEMORY > MESSAGE
 *
 * Runs one call through the interpreter, for comparing it with the backend's:
 * the caller's memory begins at 0x10000, and the argument is what lies there.
 * Exit status 0 and the message, or the positive errno that the call fails
 * with; 255 for a schema that is refused.
 */
#include <stdio.h>
#include "memory.h"

static void *slurp(const char *path, size_t *len)
{
	FILE *f = fopen(path, "rb");
	u8 *bytes = malloc(1 << 24);

	if (!f || !bytes) {
		perror(path);
		exit(254);
	}
	*len = fread(bytes, 1, 1 << 24, f);
	fclose(f);
	return bytes;
}

int main(int argc, char **argv)
{
	static struct caller c;
	struct nvg_rules rules;
	size_t len;
	void *schema;
	int ret;

	if (argc != 4) {
		fprintf(stderr, "usage: gather SCHEMA KIND CMD < MEMORY\n");
		return 254;
	}
	schema = slurp(argv[1], &len);
	if (nvg_rules_init(&rules, schema, len))
		return 255;
	caller_init(&c, &rules);
	c.len = fread(c.memory, 1, sizeof(c.memory), stdin);
	ret = nvg_gather_call(&c.g, strtoul(argv[2], NULL, 0),
			      strtoul(argv[3], NULL, 0), BASE);
	if (!ret)
		fwrite(c.g.buf + c.g.start, 1, c.g.used - c.g.start, stdout);
	free(c.g.buf);
	free(schema);
	return -ret;
}
