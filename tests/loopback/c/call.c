// SPDX-License-Identifier: GPL-2.0-only
/*
 * An ioctl through the guest module's interpreter of the schema, with a process
 * as the caller: what chardev.c does around it in the kernel.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#include "schema.h"

/* What the library does for a call. */
struct nvl_ops {
	/* Sends a message; bytes of the reply, or a negative errno. */
	long (*send)(void *ctx, void *message, u32 len, void *reply, u32 room);
	/* The wire file that a descriptor names, or a negative errno. */
	int (*file)(void *ctx, int fd, u32 *file);
	/* Told of each buffer when the call is over; may be null. */
	void (*seen)(void *ctx, u64 user, u32 len, u32 flags);
};

struct nvl_limits {
	u32 max_request;
	u32 max_response;
	u32 max_segments;
	u32 trusting;	/* the caller's pointers are good: copy without asking the kernel */
};

#define NVL_SMALL	2048

struct nvl_call {
	struct nvg_gather g;
	const struct nvl_ops *ops;
	void *ctx;
	bool trusting;
	u8 *large;
	u8 small[NVL_SMALL] __attribute__((aligned(16)));
};

static struct nvl_call *nvl_of(struct nvg_gather *g)
{
	return (struct nvl_call *)((char *)g - offsetof(struct nvl_call, g));
}

/* An address that is not the caller's is an EFAULT here too, not a signal. */
static int nvl_move(const struct iovec *ours, u64 theirs, u32 len, bool out)
{
	struct iovec remote = {
		.iov_base = (void *)(uintptr_t)theirs,
		.iov_len = len,
	};
	ssize_t n;

	if (!len)
		return 0;
	n = out ? process_vm_writev(getpid(), ours, 1, &remote, 1, 0) :
		  process_vm_readv(getpid(), ours, 1, &remote, 1, 0);
	if (n == (ssize_t)len)
		return 0;
	if (n < 0 && (errno == EPERM || errno == ENOSYS)) {
		/* The host forbids it: then as a trusting caller. */
		if (out)
			memcpy(remote.iov_base, ours->iov_base, len);
		else
			memcpy(ours->iov_base, remote.iov_base, len);
		return 0;
	}
	return -EFAULT;
}

static int nvl_read(struct nvg_gather *g, void *to, u64 from, u32 len)
{
	struct iovec ours = { .iov_base = to, .iov_len = len };

	if (nvl_of(g)->trusting) {
		if (len)
			memcpy(to, (const void *)(uintptr_t)from, len);
		return 0;
	}
	return nvl_move(&ours, from, len, false);
}

static int nvl_write(struct nvg_gather *g, u64 to, const void *from, u32 len)
{
	struct iovec ours = { .iov_base = (void *)from, .iov_len = len };

	if (nvl_of(g)->trusting) {
		if (len)
			memcpy((void *)(uintptr_t)to, from, len);
		return 0;
	}
	return nvl_move(&ours, to, len, true);
}

static int nvl_grow(struct nvg_gather *g, u32 size)
{
	struct nvl_call *call = nvl_of(g);
	u8 *buf;

	if (size <= NVL_SMALL) {
		g->buf = call->small;
		g->size = NVL_SMALL;
		return 0;
	}
	size = size * 2 < g->max_request ? size * 2 : size;
	buf = malloc(size);
	if (!buf)
		return -ENOMEM;
	if (g->used)
		memcpy(buf, g->buf, g->used);
	free(call->large);
	call->large = buf;
	g->buf = buf;
	g->size = size;
	return 0;
}

static int nvl_file(struct nvg_gather *g, int fd, u32 *file)
{
	return nvl_of(g)->ops->file(nvl_of(g)->ctx, fd, file);
}

static const struct nvg_gather_ops nvl_gather_ops = {
	.read = nvl_read,
	.write = nvl_write,
	.grow = nvl_grow,
	.file = nvl_file,
};

/* The schema's tables, or null if it is unsound. The blob must stay. */
struct nvg_rules *nvl_rules(const void *blob, size_t len)
{
	struct nvg_rules *rules = calloc(1, sizeof(*rules));

	if (rules && nvg_rules_init(rules, blob, len)) {
		free(rules);
		return NULL;
	}
	return rules;
}

static int nvl_send(struct nvl_call *call)
{
	struct nvg_gather *g = &call->g;
	u8 small[NVL_SMALL] __attribute__((aligned(16)));
	u8 *reply = small;
	long n;
	int ret;

	if (g->reply_len > NVL_SMALL) {
		reply = malloc(g->reply_len);
		if (!reply)
			return -ENOMEM;
	}
	n = call->ops->send(call->ctx, g->buf + g->start, g->used - g->start,
			    reply, g->reply_len);
	ret = n < 0 ? (int)n : nvg_scatter_reply(g, reply, (u32)n);
	if (reply != small)
		free(reply);
	return ret;
}

/* What the ioctl returns, or a negative errno. */
int nvl_call(const struct nvg_rules *rules, const struct nvl_limits *limits,
	     const struct nvl_ops *ops, void *ctx, u8 kind, u32 cmd, u64 arg)
{
	struct nvl_call call;
	u32 i;
	int ret;

	memset(&call, 0, offsetof(struct nvl_call, small));
	call.ops = ops;
	call.ctx = ctx;
	call.trusting = limits->trusting;
	call.g.ops = &nvl_gather_ops;
	call.g.rules = rules;
	call.g.max_request = limits->max_request;
	call.g.max_response = limits->max_response;
	call.g.max_segments = limits->max_segments;

	ret = nvg_gather_call(&call.g, kind, cmd, arg);
	if (!ret)
		ret = nvl_send(&call);
	if (ops->seen) {
		ops->seen(ctx, call.g.arg, call.g.arg_len, NVG_RULE_IN | NVG_RULE_OUT);
		for (i = 0; i < call.g.nsegs; i++)
			ops->seen(ctx, call.g.segs[i].user, call.g.segs[i].len,
				  call.g.segs[i].flags);
	}
	free(call.large);
	return ret;
}
