/* SPDX-License-Identifier: GPL-2.0-only */
/* A caller's memory and files, made up. */
#ifndef NVG_MEMORY_H
#define NVG_MEMORY_H

#include <stdlib.h>
#include "../schema.h"

#define BASE	0x10000u	/* where the caller's memory begins */

struct caller {
	struct nvg_gather g;
	u8 memory[65536];
	u32 len;		/* of it */
	u32 reads;
};

static inline struct caller *caller_of(struct nvg_gather *g)
{
	return (struct caller *)((char *)g - offsetof(struct caller, g));
}

static inline u8 *caller_at(struct nvg_gather *g, u64 at, u32 len)
{
	struct caller *c = caller_of(g);

	if (at < BASE || at - BASE > c->len || len > c->len - (at - BASE))
		return NULL;
	return c->memory + (at - BASE);
}

static inline int caller_read(struct nvg_gather *g, void *to, u64 from, u32 len)
{
	u8 *p = caller_at(g, from, len);

	caller_of(g)->reads++;
	if (!len)
		return 0;
	if (!p)
		return -EFAULT;
	memcpy(to, p, len);
	return 0;
}

static inline int caller_write(struct nvg_gather *g, u64 to, const void *from,
			       u32 len)
{
	u8 *p = caller_at(g, to, len);

	if (!len)
		return 0;
	if (!p)
		return -EFAULT;
	memcpy(p, from, len);
	return 0;
}

/* Exactly as much as was asked for, so that a sanitizer sees every overrun. */
static inline int caller_grow(struct nvg_gather *g, u32 size)
{
	u8 *buf = malloc(size);

	if (!buf)
		return -ENOMEM;
	if (g->used)
		memcpy(buf, g->buf, g->used);
	free(g->buf);
	g->buf = buf;
	g->size = size;
	return 0;
}

/* Descriptors 10 to 14 are files 0x1000a to 0x1000e. */
static inline int caller_file(struct nvg_gather *g, int fd, u32 *file)
{
	(void)g;
	if (fd < 10 || fd > 14)
		return -EBADF;
	*file = 0x10000 + fd;
	return 0;
}

/* Pages lie in pairs, each pair at twice the address; none is beyond the memory. */
static inline int caller_pin(struct nvg_gather *g, u64 user, u32 npages,
			     struct nvg_pinned *pinned)
{
	static struct nvg_run runs[16];
	u32 i;

	pinned->registration = 7;
	if (npages > 16 || (npages && !caller_at(g, user, npages * 4096)))
		return -EFAULT;
	for (i = 0; i < npages; i += 2) {
		runs[i / 2].address = cpu_to_le64(2 * (user + i * 4096));
		runs[i / 2].length = cpu_to_le64(npages - i > 1 ? 8192 : 4096);
	}
	pinned->nruns = (npages + 1) / 2;
	pinned->runs = runs;
	return 0;
}

static const struct nvg_gather_ops caller_ops = {
	.read = caller_read,
	.write = caller_write,
	.grow = caller_grow,
	.file = caller_file,
	.pin = caller_pin,
};

static inline void caller_init(struct caller *c, const struct nvg_rules *rules)
{
	memset(c, 0, sizeof(*c));
	c->len = sizeof(c->memory);
	c->g.ops = &caller_ops;
	c->g.rules = rules;
	c->g.max_request = 1 << 20;
	c->g.max_response = 1 << 20;
	c->g.max_segments = 7;
}

#endif
