// SPDX-License-Identifier: GPL-2.0-only
/*
 * gather SCHEMA KIND CMD < MEMORY > MESSAGE
 * gather < CASES > ANSWERS
 *
 * Runs one call through the interpreter, for comparing it with the backend's:
 * the caller's memory begins at 0x10000, and the argument is what lies there.
 * Exit status 0 and the message, or the positive errno that the call fails
 * with; 255 for a schema that is refused.
 *
 * Without arguments, as many as there are: a case is four words (bytes of
 * schema, kind, cmd, bytes of memory), schema, memory; a schema of no bytes is
 * the one before. An answer is two words (status, bytes of message), message.
 */
#include <stdio.h>
#include "memory.h"

#define SCHEMA_MAX	(1u << 24)

static struct caller c;

static void *slurp(const char *path, size_t *len)
{
	FILE *f = fopen(path, "rb");
	u8 *bytes = malloc(SCHEMA_MAX);

	if (!f || !bytes) {
		perror(path);
		exit(254);
	}
	*len = fread(bytes, 1, SCHEMA_MAX, f);
	fclose(f);
	return bytes;
}

/* The caller's memory is set; 0 and the message in c.g, or a negative errno. */
static int call(u8 kind, u32 cmd)
{
	return nvg_gather_call(&c.g, kind, cmd, BASE);
}

static void answer(u32 status)
{
	u32 head[2] = { status, status ? 0 : c.g.used - c.g.start };

	fwrite(head, sizeof(head), 1, stdout);
	if (!status)
		fwrite(c.g.buf + c.g.start, 1, head[1], stdout);
	fflush(stdout);
	free(c.g.buf);
	c.g.buf = NULL;
}

static bool all(void *to, u32 len)
{
	return !len || fread(to, len, 1, stdin) == 1;
}

/* Each schema in memory of just its size, so that a sanitizer sees every overrun. */
static int serve(void)
{
	struct nvg_rules rules;
	void *schema = NULL;
	bool sound = false;
	u32 head[4];

	while (all(head, sizeof(head))) {
		if (head[0] > SCHEMA_MAX || head[3] > sizeof(c.memory))
			return 254;
		if (head[0]) {
			free(schema);
			schema = malloc(head[0]);
			if (!schema || !all(schema, head[0]))
				return 254;
			sound = !nvg_rules_init(&rules, schema, head[0]);
		}
		caller_init(&c, &rules);
		c.len = head[3];
		if (!all(c.memory, head[3]))
			return 254;
		answer(sound ? -call(head[1], head[2]) : 255);
	}
	free(schema);
	return 0;
}

int main(int argc, char **argv)
{
	struct nvg_rules rules;
	size_t len;
	void *schema;
	int ret;

	if (argc == 1)
		return serve();
	if (argc != 4) {
		fprintf(stderr, "usage: gather [SCHEMA KIND CMD] < MEMORY\n");
		return 254;
	}
	schema = slurp(argv[1], &len);
	if (nvg_rules_init(&rules, schema, len))
		return 255;
	caller_init(&c, &rules);
	c.len = fread(c.memory, 1, sizeof(c.memory), stdin);
	ret = call(strtoul(argv[2], NULL, 0), strtoul(argv[3], NULL, 0));
	if (!ret)
		fwrite(c.g.buf + c.g.start, 1, c.g.used - c.g.start, stdout);
	free(c.g.buf);
	free(schema);
	return -ret;
}
