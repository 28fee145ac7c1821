/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The gather rules and their interpreter. Pure: no kernel service but those
 * behind struct nvg_gather_ops, so that it runs and is fuzzed in user space.
 */
#ifndef NVG_SCHEMA_H
#define NVG_SCHEMA_H

#ifdef __KERNEL__
#include <linux/types.h>
#include <linux/errno.h>
#include <linux/string.h>
#include <linux/minmax.h>
#include <linux/limits.h>
#include <linux/align.h>
#include <linux/ioctl.h>
#include <asm/byteorder.h>
#include "compat.h"
#else
#include "tests/shim.h"
#endif

#include "virtio_nvguest.h"

/* An argument as large as the driver itself takes. */
#define NVG_MAX_ARG		16384
#define NVG_MAX_SEGS		32
#define NVG_MAX_FDS		16
#define NVG_MAX_ERRNO		4095

/* A schema that nvg_rules_init() found sound. */
struct nvg_rules {
	const struct nvg_schema_ioctl *ioctls;
	const struct nvg_schema_case *cases;
	const struct nvg_schema_rule *rules;
	u32 nioctls;
	u32 ncases;
	u32 nrules;
};

struct nvg_gather;

/* Memory of the caller that stays where it is, as guest-physical pages. */
struct nvg_pinned {
	u32 registration;
	u32 nruns;
	const struct nvg_run *runs;
};

struct nvg_gather_ops {
	/* Copies from the caller's memory; -EFAULT. */
	int (*read)(struct nvg_gather *g, void *to, u64 from, u32 len);
	/* Copies to the caller's memory; -EFAULT. */
	int (*write)(struct nvg_gather *g, u64 to, const void *from, u32 len);
	/* Makes g->buf at least @size bytes, keeping its content; -ENOMEM. */
	int (*grow)(struct nvg_gather *g, u32 size);
	/* The wire file that @fd names; -EBADF if it is none of ours. */
	int (*file)(struct nvg_gather *g, int fd, u32 *file);
	/*
	 * Gives memory a registration and pins it: all of @npages pages from
	 * @user on, or an error that is told to the backend. 0: the memory is
	 * not what a driver would take, and only numbered.
	 */
	int (*pin)(struct nvg_gather *g, u64 user, u32 npages,
		   struct nvg_pinned *pinned);
};

struct nvg_segment {
	u64 user;	/* where the caller has it */
	u32 len;
	u32 at;		/* in the buffer, if it is sent */
	u8 flags;	/* NVG_RULE_IN, NVG_RULE_OUT */
	bool pages;	/* not the caller's bytes: nothing is written back */
};

/* One call on its way: filled by nvg_gather_call(). */
struct nvg_gather {
	const struct nvg_gather_ops *ops;
	const struct nvg_rules *rules;
	u32 max_request;
	u32 max_response;
	u32 max_segments;

	u8 *buf;	/* grown by ops->grow */
	u32 size;	/* of buf */
	u32 used;	/* of buf */

	u32 cmd;	/* as it is sent */
	u64 arg;	/* the caller's argument */
	u32 arg_len;
	u32 arg_at;	/* in buf */
	u32 start;	/* of the message in buf */
	u32 reply_len;	/* of a reply that carries everything */

	u32 nsegs;
	u32 nfds;
	struct nvg_segment segs[NVG_MAX_SEGS];
	struct nvg_fd fds[NVG_MAX_FDS];
};

/* rules.c */
int nvg_rules_init(struct nvg_rules *rules, const void *blob, size_t len);
const struct nvg_schema_ioctl *nvg_rules_find(const struct nvg_rules *rules,
					      u8 kind, u32 cmd, u32 size);
u32 nvg_rules_select(const struct nvg_rules *rules,
		     const struct nvg_schema_ioctl *entry, const u8 *arg,
		     u32 len, const struct nvg_schema_rule **first);

static inline bool nvg_in_block(u32 offset, u32 width, u32 len)
{
	return offset <= len && width <= len - offset;
}

/* schema.c */
int nvg_gather_call(struct nvg_gather *g, u8 kind, u32 cmd, u64 arg);
int nvg_scatter_reply(struct nvg_gather *g, const void *reply, u32 len);

#endif
