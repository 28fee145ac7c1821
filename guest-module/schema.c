// SPDX-License-Identifier: GPL-2.0-only
/*
 * The interpreter of the schema: from an ioctl to the message that carries it,
 * and from the reply back to the caller. It knows no NVIDIA struct.
 *
 * Every block of the caller is copied once, straight into the message; lengths
 * and pointers are read from that copy only.
 */
#include "schema.h"

#define NVG_PAD(len)	ALIGN((u32)(len), 8)
#define NVG_PAGE	4096u	/* the host's, and ours */

static u64 nvg_read_uint(const u8 *p, u8 width)
{
	switch (width) {
	case 1:
		return *p;
	case 2:
		return get_unaligned_le16(p);
	case 4:
		return get_unaligned_le32(p);
	default:
		return get_unaligned_le64(p);
	}
}

/* Room for @len more bytes of the message; their place, padded, or an error. */
static int nvg_append(struct nvg_gather *g, u32 len, u32 *at)
{
	u32 end;
	int ret;

	if (len > g->max_request || NVG_PAD(len) > g->max_request - g->used)
		return -ENOMEM;
	end = g->used + NVG_PAD(len);
	if (end > g->size) {
		ret = g->ops->grow(g, end);
		if (ret)
			return ret;
	}
	memset(g->buf + g->used + len, 0, NVG_PAD(len) - len);
	*at = g->used;
	g->used = end;
	return 0;
}

static int nvg_copy_in(struct nvg_gather *g, u64 from, u32 len, u32 *at)
{
	int ret = nvg_append(g, len, at);

	return ret ?: g->ops->read(g, g->buf + *at, from, len);
}

/*
 * A descriptor in a block: which of our files the caller means. Whether it may
 * be one of that kind is the backend's to say.
 */
static int nvg_gather_fd(struct nvg_gather *g, u32 segment, const u8 *block,
			 u32 len, const struct nvg_schema_rule *rule)
{
	u32 offset = le16_to_cpu(rule->offset);
	bool negative;
	u32 file = 0;
	s64 value;
	int ret;

	if (!nvg_in_block(offset, rule->fd_width, len))
		return 0;
	if (g->nfds == NVG_MAX_FDS)
		return -EINVAL;

	value = nvg_read_uint(block + offset, rule->fd_width);
	/* Drivers read a wide one as an int, or as 64 bits. */
	negative = value < 0 || (s32)value < 0;

	if (!((negative && rule->flags & NVG_RULE_NEGATIVE_NONE) ||
	      (!value && rule->flags & NVG_RULE_ZERO_NONE))) {
		ret = -EBADF;
		if (!negative && value <= INT_MAX)
			ret = g->ops->file(g, value, &file);
		if (ret == -EBADF && rule->flags & NVG_RULE_FOREIGN_OK)
			file = 0;
		else if (ret)
			return ret;
	}

	g->fds[g->nfds++] = (struct nvg_fd) {
		.segment = cpu_to_le16(segment),
		.offset = cpu_to_le16(offset),
		.file = cpu_to_le32(file),
	};
	return 0;
}

/*
 * A buffer that a block points to. A field outside the block reaches nothing:
 * the backend sees the short block and answers as the driver would.
 * Returns 1 if there is a segment now, 0 if not.
 */
static int nvg_gather_buffer(struct nvg_gather *g, const u8 *block, u32 len,
			     const struct nvg_schema_rule *rule)
{
	u32 offset = le16_to_cpu(rule->offset);
	u32 count_off = le16_to_cpu(rule->count_off);
	u64 bytes = le32_to_cpu(rule->add);
	u64 user, count;
	struct nvg_segment *seg;
	int ret;

	if (!nvg_in_block(offset, 8, len))
		return 0;
	user = get_unaligned_le64(block + offset);
	if (!user)
		return rule->flags & NVG_RULE_NULL_OK ? 0 : -EFAULT;

	if (count_off != NVG_NO_OFFSET) {
		if (!nvg_in_block(count_off, rule->count_width, len))
			return 0;
		count = nvg_read_uint(block + count_off, rule->count_width);
		if (count > U32_MAX)
			return -EINVAL;
		bytes += count * le32_to_cpu(rule->elem);
	}
	if (bytes > le32_to_cpu(rule->max))
		return -EINVAL;
	if (g->nsegs == min_t(u32, NVG_MAX_SEGS, g->max_segments))
		return -EINVAL;

	seg = &g->segs[g->nsegs];
	seg->user = user;
	seg->len = bytes;
	seg->flags = rule->flags & (NVG_RULE_IN | NVG_RULE_OUT);
	if (rule->flags & NVG_RULE_IN) {
		ret = nvg_copy_in(g, user, bytes, &seg->at);
		if (ret)
			return ret;
	}
	if (rule->flags & NVG_RULE_OUT) {
		if (bytes > g->max_response ||
		    NVG_PAD(bytes) > g->max_response - g->reply_len)
			return -ENOMEM;
		g->reply_len += NVG_PAD(bytes);
	}
	g->nsegs++;
	return 1;
}

/*
 * Memory of the caller that the call registers. Whatever is wrong with it, the
 * call goes on: the backend answers as the driver would.
 */
static int nvg_gather_pages(struct nvg_gather *g, const u8 *block, u32 len,
			    const struct nvg_schema_rule *rule)
{
	u32 offset = le16_to_cpu(rule->offset);
	u32 count_off = le16_to_cpu(rule->count_off);
	u32 max = le32_to_cpu(rule->max);
	struct nvg_pinned pinned = {};
	struct nvg_pages head = {};
	struct nvg_segment *seg;
	u64 user, bytes;
	u32 npages = 0;
	int ret;

	if (!nvg_in_block(offset, 8, len) || !nvg_in_block(count_off, 8, len))
		return 0;
	if (!g->ops->pin ||
	    g->nsegs == min_t(u32, NVG_MAX_SEGS, g->max_segments) ||
	    g->max_response - g->reply_len < sizeof(head))
		return -EINVAL;

	user = get_unaligned_le64(block + offset);
	bytes = get_unaligned_le64(block + count_off) + le32_to_cpu(rule->add);
	if (!(user % NVG_PAGE) && bytes && (bytes - 1) / NVG_PAGE < max)
		npages = (bytes - 1) / NVG_PAGE + 1;
	ret = g->ops->pin(g, user, npages, &pinned);
	if (!pinned.registration)
		return ret ?: -EINVAL;
	if (!ret && !npages)
		ret = -EINVAL;

	seg = &g->segs[g->nsegs];
	seg->len = sizeof(head);
	if (!ret && pinned.nruns <= U32_MAX / 2 / sizeof(*pinned.runs))
		seg->len += pinned.nruns * sizeof(*pinned.runs);
	if (nvg_append(g, seg->len, &seg->at)) {
		/* In too many pieces for a message. */
		ret = -ENOMEM;
		seg->len = sizeof(head);
		if (nvg_append(g, seg->len, &seg->at))
			return ret;
	}
	head.registration = cpu_to_le32(pinned.registration);
	head.error = cpu_to_le32(-ret);
	memcpy(g->buf + seg->at, &head, sizeof(head));
	if (seg->len > sizeof(head))
		memcpy(g->buf + seg->at + sizeof(head), pinned.runs,
		       seg->len - sizeof(head));
	seg->user = user;
	seg->flags = NVG_RULE_OUT;
	seg->pages = true;
	g->reply_len += sizeof(head);
	g->nsegs++;
	return 0;
}

/* What a gathered segment reaches itself, if the driver reads it. */
static int nvg_gather_subs(struct nvg_gather *g,
			   const struct nvg_schema_rule *rule)
{
	const struct nvg_schema_rule *sub = g->rules->rules +
					    le32_to_cpu(rule->first_sub);
	u32 n = g->nsegs;	/* segments count from 1 */
	const struct nvg_segment *seg = &g->segs[n - 1];
	int ret;
	u32 i;

	if (!(seg->flags & NVG_RULE_IN))
		return 0;
	for (i = 0; i < le32_to_cpu(rule->nsubs); i++, sub++) {
		if (sub->op == NVG_RULE_FD)
			ret = nvg_gather_fd(g, n, g->buf + seg->at, seg->len,
					    sub);
		else
			ret = nvg_gather_buffer(g, g->buf + seg->at, seg->len,
						sub);
		if (ret < 0)
			return ret;
	}
	return 0;
}

static int nvg_gather_rules(struct nvg_gather *g,
			    const struct nvg_schema_rule *rule, u32 nrules)
{
	int ret;
	u32 i;

	for (i = 0; i < nrules; i++, rule++) {
		if (rule->op == NVG_RULE_FD)
			ret = nvg_gather_fd(g, 0, g->buf + g->arg_at,
					    g->arg_len, rule);
		else if (rule->op == NVG_RULE_PAGES)
			ret = nvg_gather_pages(g, g->buf + g->arg_at,
					       g->arg_len, rule);
		else
			ret = nvg_gather_buffer(g, g->buf + g->arg_at,
						g->arg_len, rule);
		if (ret > 0)
			ret = nvg_gather_subs(g, rule);
		if (ret < 0)
			return ret;
	}
	return 0;
}

/* {u32 nr, u32 size, u64 pointer} names the call that is really meant. */
static int nvg_follow(struct nvg_gather *g, u8 kind,
		      const struct nvg_schema_ioctl **entry)
{
	u8 named[16];
	u32 nr, size;
	int ret;

	ret = g->ops->read(g, named, g->arg, sizeof(named));
	if (ret)
		return ret;

	nr = get_unaligned_le32(named);
	size = get_unaligned_le32(named + 4);
	g->arg = get_unaligned_le64(named + 8);
	if (nr > 0xff || size > NVG_MAX_ARG)
		return -EINVAL;

	g->cmd = (u32)(_IOC_READ | _IOC_WRITE) << _IOC_DIRSHIFT |
		 (size & _IOC_SIZEMASK) << _IOC_SIZESHIFT |
		 (u32)'F' << _IOC_TYPESHIFT | nr << _IOC_NRSHIFT;
	g->arg_len = size;
	*entry = nvg_rules_find(g->rules, kind, g->cmd, size);
	if (*entry && (*entry)->flags & NVG_IOCTL_INDIRECT)
		return -EINVAL;
	return 0;
}

/* The tables go before the argument, where room for all of them was left. */
static void nvg_put_tables(struct nvg_gather *g)
{
	u32 segs = NVG_PAD(g->nsegs * sizeof(__le32));
	u32 fds = g->nfds * sizeof(struct nvg_fd);
	struct nvg_ioctl *head;
	__le32 len;
	u8 *to;
	u32 i;

	g->start = g->arg_at - fds - segs - sizeof(*head);
	to = g->buf + g->start;
	memset(to, 0, g->arg_at - g->start);

	head = (void *)to;
	head->req.type = cpu_to_le32(NVG_IOCTL);
	head->req.len = cpu_to_le32(g->used - g->start);
	head->cmd = cpu_to_le32(g->cmd);
	head->arg_len = cpu_to_le32(g->arg_len);
	head->nsegs = cpu_to_le16(g->nsegs);
	head->nfds = cpu_to_le16(g->nfds);

	to += sizeof(*head);
	for (i = 0; i < g->nsegs; i++) {
		len = cpu_to_le32(g->segs[i].len);
		memcpy(to + i * sizeof(len), &len, sizeof(len));
	}
	memcpy(to + segs, g->fds, fds);
}

/**
 * nvg_gather_call() - build the message of one ioctl
 * @g: ops, rules, limits and buffer set, the rest zero
 * @kind: of the file
 * @cmd: as the caller passed it
 * @arg: as the caller passed it
 *
 * The message is buf[start..used]; file and caller are still to be filled in.
 * A call that the schema does not know goes flat: the backend refuses it.
 *
 * Return: 0, or what the call fails with.
 */
int nvg_gather_call(struct nvg_gather *g, u8 kind, u32 cmd, u64 arg)
{
	u32 front = sizeof(struct nvg_ioctl) + NVG_MAX_SEGS * sizeof(__le32) +
		    NVG_MAX_FDS * sizeof(struct nvg_fd);
	const struct nvg_schema_ioctl *entry;
	const struct nvg_schema_rule *rules;
	u32 nrules, at;
	int ret;

	g->cmd = cmd;
	g->arg = arg;
	g->arg_len = _IOC_SIZE(cmd);
	entry = nvg_rules_find(g->rules, kind, cmd, g->arg_len);
	if (entry && entry->flags & NVG_IOCTL_INDIRECT)
		ret = nvg_follow(g, kind, &entry);
	else
		ret = 0;
	if (ret)
		return ret;
	if (entry && entry->size)
		g->arg_len = le32_to_cpu(entry->size);

	ret = nvg_append(g, front, &at);
	if (ret)
		return ret;
	ret = nvg_copy_in(g, g->arg, g->arg_len, &g->arg_at);
	if (ret == -EFAULT && !entry) {
		/* What we took for a size need not be one. */
		g->arg_len = 0;
		g->used = g->arg_at;
		ret = 0;
	}
	if (ret)
		return ret;

	g->reply_len = sizeof(struct nvg_ioctl_resp) + NVG_PAD(g->arg_len);
	if (g->reply_len > g->max_response)
		return -ENOMEM;
	if (entry) {
		nrules = nvg_rules_select(g->rules, entry, g->buf + g->arg_at,
				    g->arg_len, &rules);
		ret = nvg_gather_rules(g, rules, nrules);
		if (ret)
			return ret;
	}
	nvg_put_tables(g);
	return 0;
}

static int nvg_copy_out(struct nvg_gather *g, const u8 *reply, u32 len)
{
	u32 at = sizeof(struct nvg_ioctl_resp);
	const struct nvg_segment *seg;
	int ret;
	u32 i;

	ret = g->ops->write(g, g->arg, reply + at, g->arg_len);
	at += NVG_PAD(g->arg_len);
	for (i = 0; i < g->nsegs && at < len && !ret; i++) {
		seg = &g->segs[i];
		if (seg->pages)
			at += sizeof(struct nvg_pages);
		if (!(seg->flags & NVG_RULE_OUT) || seg->pages)
			continue;
		ret = g->ops->write(g, seg->user, reply + at, seg->len);
		at += NVG_PAD(seg->len);
	}
	return ret;
}

/**
 * nvg_scatter_reply() - give a reply to the caller
 * @g: as nvg_gather_call() left it
 * @reply: what the device wrote
 * @len: how much of it
 *
 * Pointers come from the caller's own argument, never from the reply. A call
 * that failed may bring its argument back, alone or with everything.
 *
 * Return: what the ioctl returns.
 */
int nvg_scatter_reply(struct nvg_gather *g, const void *reply, u32 len)
{
	const struct nvg_ioctl_resp *head = reply;
	u32 status;
	int ret;

	if (len < sizeof(head->resp) || le32_to_cpu(head->resp.len) > len ||
	    le32_to_cpu(head->resp.len) < sizeof(head->resp))
		return -EPROTO;
	len = le32_to_cpu(head->resp.len);
	status = le32_to_cpu(head->resp.status);
	if (status > NVG_MAX_ERRNO)
		return -EPROTO;
	if (status && len == sizeof(head->resp))
		return -(int)status;

	if (len != g->reply_len &&
	    !(status && len == sizeof(*head) + NVG_PAD(g->arg_len)))
		return -EPROTO;
	if (le32_to_cpu(head->arg_len) != g->arg_len)
		return -EPROTO;
	ret = nvg_copy_out(g, reply, len);
	if (status)
		return -(int)status;
	return ret ?: (int)le32_to_cpu(head->ret);
}
