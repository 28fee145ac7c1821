// SPDX-License-Identifier: GPL-2.0-only
/* What the interpreter gathers and refuses, case by case. */
#include "check.h"
#include "memory.h"

#define NONE	NVG_NO_OFFSET
#define IN	NVG_RULE_IN
#define OUT	NVG_RULE_OUT
#define CTL	(1u << NVG_FILE_CTL)

/* A schema for tests. Little-endian hosts only, as these tests are. */
static struct {
	struct nvg_schema head;
	struct nvg_schema_ioctl ioctls[7];
	struct nvg_schema_case cases[2];
	struct nvg_schema_rule rules[9];
} schema;

enum { PARAMS, PARAMS_LIST, LIST, FD, FD_WIDE, LIST_FD, SMALL, UNREAD, PAGES };

static void make_schema(void)
{
	memset(&schema, 0, sizeof(schema));
	schema.head.magic = NVG_SCHEMA_MAGIC;
	schema.head.version = NVG_VERSION;
	schema.head.nioctls = 7;
	schema.head.ncases = 2;
	schema.head.nrules = 9;

	/* {u32 key, u32 size, u64 params}: params, and for a key what they reach */
	schema.ioctls[0] = (struct nvg_schema_ioctl) {
		.flags = NVG_IOCTL_BY_NR, .select = 0, .nr = 0x2a, .size = 16,
		.ncases = 2, .first_rule = PARAMS, .nrules = 1 };
	/* {s32 fd, u32 pad, u64 fd} */
	schema.ioctls[1] = (struct nvg_schema_ioctl) {
		.flags = NVG_IOCTL_BY_NR, .select = NONE, .nr = 0x2b, .size = 16,
		.first_rule = FD, .nrules = 2 };
	/* of any size, reaching nothing */
	schema.ioctls[2] = (struct nvg_schema_ioctl) {
		.flags = NVG_IOCTL_BY_NR, .select = NONE, .nr = 0xc9 };
	schema.ioctls[3] = (struct nvg_schema_ioctl) {
		.flags = NVG_IOCTL_BY_NR | NVG_IOCTL_INDIRECT, .select = NONE,
		.nr = 0xd3, .size = 16 };
	/* a pointer that must be there, one that is not followed */
	schema.ioctls[4] = (struct nvg_schema_ioctl) {
		.kind = NVG_FILE_GPU, .flags = NVG_IOCTL_BY_NR, .select = NONE,
		.nr = 1, .size = 16, .first_rule = SMALL, .nrules = 2 };
	/* {u64 address, u64 bytes less one} */
	schema.ioctls[5] = (struct nvg_schema_ioctl) {
		.kind = NVG_FILE_GPU, .flags = NVG_IOCTL_BY_NR, .select = NONE,
		.nr = 2, .size = 16, .first_rule = PAGES, .nrules = 1 };
	schema.ioctls[6] = (struct nvg_schema_ioctl) {
		.kind = NVG_FILE_UVM, .select = NONE, .nr = 0x30000001,
		.size = 24 };
	schema.cases[0] = (struct nvg_schema_case) {
		.key = 0x101, .first_rule = PARAMS_LIST, .nrules = 1 };
	schema.cases[1] = (struct nvg_schema_case) { .key = 0x102 };

	schema.rules[PARAMS] = (struct nvg_schema_rule) {
		.op = NVG_RULE_BUFFER, .flags = IN | OUT | NVG_RULE_NULL_OK,
		.offset = 8, .count_off = 4, .count_width = 4, .elem = 1,
		.max = 4096 };
	schema.rules[PARAMS_LIST] = schema.rules[PARAMS];
	schema.rules[PARAMS_LIST].first_sub = LIST;
	schema.rules[PARAMS_LIST].nsubs = 1;
	/* in params: {u32 count, u32 pad, u64 list of 12-byte items} */
	schema.rules[LIST] = (struct nvg_schema_rule) {
		.op = NVG_RULE_BUFFER, .flags = OUT | NVG_RULE_NULL_OK,
		.offset = 8, .count_off = 0, .count_width = 4, .elem = 12,
		.add = 1, .max = 1000 };
	schema.rules[FD] = (struct nvg_schema_rule) {
		.op = NVG_RULE_FD, .flags = NVG_RULE_NEGATIVE_NONE,
		.fd_width = 4, .fd_kinds = CTL };
	schema.rules[FD_WIDE] = (struct nvg_schema_rule) {
		.op = NVG_RULE_FD, .offset = 8, .fd_width = 8, .fd_kinds = CTL,
		.flags = NVG_RULE_NEGATIVE_NONE | NVG_RULE_ZERO_NONE |
			 NVG_RULE_FOREIGN_OK };
	schema.rules[LIST_FD] = schema.rules[FD];
	schema.rules[SMALL] = (struct nvg_schema_rule) {
		.op = NVG_RULE_BUFFER, .flags = IN, .count_off = NONE,
		.add = 5, .max = 5 };
	schema.rules[UNREAD] = (struct nvg_schema_rule) {
		.op = NVG_RULE_BUFFER, .flags = NVG_RULE_NULL_OK, .offset = 8,
		.count_off = NONE, .add = 4, .max = 4 };
	schema.rules[PAGES] = (struct nvg_schema_rule) {
		.op = NVG_RULE_PAGES, .count_off = 8, .count_width = 8,
		.add = 1, .max = 8 };
}

static int load(struct nvg_rules *rules)
{
	return nvg_rules_init(rules, &schema, sizeof(schema));
}

static struct caller c;
static struct nvg_rules rules;

static void begin(void)
{
	make_schema();
	CHECK(!load(&rules));
	free(c.g.buf);
	caller_init(&c, &rules);
}

static void put32(u32 at, u32 value)
{
	memcpy(c.memory + at, &value, 4);
}

static void put64(u32 at, u64 value)
{
	memcpy(c.memory + at, &value, 8);
}

static const struct nvg_ioctl *message(void)
{
	return (const void *)(c.g.buf + c.g.start);
}

static const u8 *body(u32 at)
{
	return c.g.buf + c.g.start + sizeof(struct nvg_ioctl) + at;
}

static void a_control_brings_its_params_and_what_they_reach(void)
{
	begin();
	put32(0, 0x101);
	put32(4, 20);
	put64(8, BASE + 100);
	put32(100, 3);
	put64(108, BASE + 300);
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), BASE));
	CHECK(message()->req.len == sizeof(struct nvg_ioctl) + 8 + 16 + 24);
	CHECK(message()->nsegs == 2 && !message()->nfds);
	CHECK(message()->arg_len == 16);
	CHECK(get_unaligned_le32(body(0)) == 20);
	CHECK(get_unaligned_le32(body(4)) == 37);
	CHECK(!memcmp(body(8), c.memory, 16));
	CHECK(!memcmp(body(24), c.memory + 100, 20));
	CHECK(c.g.reply_len == 16 + 16 + 24 + 40);
	CHECK(c.reads == 2);
}

static void another_key_has_the_ioctls_own_rules(void)
{
	begin();
	put32(0, 0x999);
	put32(4, 20);
	put64(8, BASE + 100);
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), BASE));
	CHECK(message()->nsegs == 1);

	begin();
	put32(0, 0x102);
	put64(8, BASE + 100);
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), BASE));
	CHECK(!message()->nsegs);
}

static void a_null_pointer_makes_no_segment_or_fails(void)
{
	begin();
	put32(4, 20);
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), BASE));
	CHECK(!message()->nsegs);

	begin();
	CHECK(nvg_gather_call(&c.g, NVG_FILE_GPU, _IOWR('F', 1, u64[2]), BASE) == -EFAULT);
}

static void a_pointer_that_is_not_followed_is_counted_and_not_sent(void)
{
	begin();
	put64(0, BASE + 16);
	put64(8, 0xdead0000);
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_GPU, _IOWR('F', 1, u64[2]), BASE));
	CHECK(message()->nsegs == 2);
	CHECK(message()->req.len == sizeof(struct nvg_ioctl) + 8 + 16 + 8);
	CHECK(c.g.reply_len == 16 + 16);
}

static void a_length_over_the_maximum_is_refused(void)
{
	begin();
	put32(4, 4097);
	put64(8, BASE);
	CHECK(nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), BASE) == -EINVAL);
}

static void a_short_block_reaches_nothing(void)
{
	begin();
	put32(0, 0x101);
	put32(4, 12);
	put64(8, BASE + 100);
	put64(108, BASE + 300);
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), BASE));
	CHECK(message()->nsegs == 1);
}

static void a_descriptor_is_translated_or_none_or_bad(void)
{
	static const struct {
		s32 fd;
		s64 wide;
		int ret;
		u32 file, wide_file;
	} table[] = {
		{ 10, 10, 0, 0x1000a, 0x1000a },
		{ -1, -1, 0, 0, 0 },
		{ -5, 0, 0, 0, 0 },
		{ 10, 0xffffffff, 0, 0x1000a, 0 },
		{ 10, 77, 0, 0x1000a, 0 },
		{ 10, 11, 0, 0x1000a, 0x1000b },
		{ 10, 0x10000000aLL, 0, 0x1000a, 0 },
		{ 9, 0, -EBADF, 0, 0 },
		{ 0, 0, -EBADF, 0, 0 },
	};
	const struct nvg_fd *fds;
	size_t i;

	for (i = 0; i < ARRAY_SIZE(table); i++) {
		begin();
		put32(0, table[i].fd);
		put64(8, table[i].wide);
		CHECK(nvg_gather_call(&c.g, NVG_FILE_CTL,
				      _IOWR('F', 0x2b, u64[2]), BASE) == table[i].ret);
		if (table[i].ret)
			continue;
		fds = (const void *)body(0);
		CHECK(message()->nfds == 2);
		CHECK(fds[0].file == table[i].file && !fds[0].offset);
		CHECK(fds[1].file == table[i].wide_file && fds[1].offset == 8);
	}
}

static void an_indirect_call_goes_as_the_call_it_names(void)
{
	begin();
	put32(0, 0x2a);
	put32(4, 16);
	put64(8, BASE + 100);
	put32(104, 8);
	put64(108, BASE + 200);
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0xd3, u64[2]), BASE));
	CHECK(message()->cmd == _IOWR('F', 0x2a, u64[2]));
	CHECK(message()->nsegs == 1 && get_unaligned_le32(body(0)) == 8);
	CHECK(!memcmp(body(8), c.memory + 100, 16));

	begin();
	put32(0, 0xd3);
	put32(4, 16);
	put64(8, BASE);
	CHECK(nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0xd3, u64[2]), BASE) == -EINVAL);
	put32(0, 0x2a);
	put32(4, 16385);
	CHECK(nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0xd3, u64[2]), BASE) == -EINVAL);
}

static void sizes_come_from_the_entry_or_the_number(void)
{
	begin();
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_UVM, 0x30000001, BASE));
	CHECK(message()->arg_len == 24);
	begin();
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0xc9, u32[5]), BASE));
	CHECK(message()->arg_len == 20);
}

static void an_unknown_call_goes_flat(void)
{
	begin();
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x77, u32[3]), BASE));
	CHECK(message()->arg_len == 12 && !message()->nsegs);
	begin();
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x77, u32[3]), 1));
	CHECK(!message()->arg_len);
	begin();
	CHECK(nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), 1) == -EFAULT);
}

static void limits_of_the_device_hold(void)
{
	begin();
	c.g.max_request = 1024;
	put32(4, 900);
	put64(8, BASE);
	CHECK(nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), BASE) == -ENOMEM);
	begin();
	c.g.max_response = 64;
	put32(4, 900);
	put64(8, BASE);
	CHECK(nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), BASE) == -ENOMEM);
	begin();
	c.g.max_segments = 0;
	put32(4, 8);
	put64(8, BASE);
	CHECK(nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), BASE) == -EINVAL);
}

static int reply(u32 status, u32 ret, u32 len, u32 resp_len, u32 arg_len)
{
	u8 bytes[256];
	struct nvg_ioctl_resp *head = (void *)bytes;

	memset(bytes, 0xee, sizeof(bytes));
	head->resp.status = status;
	head->resp.len = resp_len;
	head->ret = ret;
	head->arg_len = arg_len;
	return nvg_scatter_reply(&c.g, bytes, len);
}

static void a_reply_goes_to_the_callers_own_pointers(void)
{
	begin();
	put32(4, 20);
	put64(8, BASE + 100);
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), BASE));
	put64(8, BASE + 200);	/* changed meanwhile: not looked at */
	CHECK(reply(0, 7, 56, 56, 16) == 7);
	CHECK(c.memory[0] == 0xee && c.memory[15] == 0xee && !c.memory[16]);
	CHECK(c.memory[100] == 0xee && c.memory[119] == 0xee && !c.memory[120]);
	CHECK(!c.memory[200]);
}

static void a_failed_call_may_bring_its_argument_back(void)
{
	begin();
	put32(4, 20);
	put64(8, BASE + 100);
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), BASE));
	CHECK(reply(EBUSY, 0, 8, 8, 0) == -EBUSY);
	CHECK(!c.memory[0]);
	CHECK(reply(EBUSY, 0, 32, 32, 16) == -EBUSY);
	CHECK(c.memory[0] == 0xee && !c.memory[100]);
}

static int gather_pages(u64 user, u64 bytes)
{
	begin();
	put64(0, user);
	put64(8, bytes - 1);
	return nvg_gather_call(&c.g, NVG_FILE_GPU, _IOWR('F', 2, u64[2]), BASE);
}

static void memory_that_is_registered_goes_as_runs_of_pages(void)
{
	const struct nvg_pages *head;
	const struct nvg_run *runs;

	CHECK(!gather_pages(BASE + 4096, 2 * 4096 + 1));
	CHECK(message()->nsegs == 1);
	CHECK(get_unaligned_le32(body(0)) == sizeof(*head) + 2 * sizeof(*runs));
	head = (const void *)body(8 + 16);
	runs = (const void *)(head + 1);
	CHECK(head->registration == 7 && !head->error && !head->held);
	CHECK(runs[0].address == 2 * (BASE + 4096) && runs[0].length == 8192);
	CHECK(runs[1].address == 2 * (BASE + 3 * 4096) && runs[1].length == 4096);
	CHECK(message()->req.len == sizeof(struct nvg_ioctl) + 8 + 16 + 16 + 32);
	CHECK(c.g.reply_len == 16 + 16 + sizeof(*head));
}

static void memory_that_cannot_be_registered_goes_as_the_reason_why(void)
{
	static const struct {
		u64 user, bytes;
		u32 error;
	} cases[] = {
		{ BASE + 4096 + 8, 4096, EINVAL },
		{ BASE + 4096, 0, EINVAL },
		{ BASE + 4096, 8 * 4096 + 1, EINVAL },
		{ BASE + 4096, U64_MAX, EINVAL },
		{ 0, 4096, EFAULT },
		{ BASE + sizeof(c.memory), 4096, EFAULT },
	};
	const struct nvg_pages *head;
	u32 i;

	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		CHECK(!gather_pages(cases[i].user, cases[i].bytes));
		CHECK(get_unaligned_le32(body(0)) == sizeof(*head));
		head = (const void *)body(8 + 16);
		CHECK(head->registration == 7 && head->error == cases[i].error);
	}
}

static void pages_in_too_many_pieces_for_a_message_go_as_no_memory(void)
{
	const struct nvg_pages *head;

	u32 whole;

	CHECK(!gather_pages(BASE + 4096, 8 * 4096));
	whole = c.g.used;
	begin();
	put64(0, BASE + 4096);
	put64(8, 8 * 4096 - 1);
	c.g.max_request = whole - 1;
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_GPU, _IOWR('F', 2, u64[2]), BASE));
	CHECK(get_unaligned_le32(body(0)) == sizeof(*head));
	head = (const void *)body(8 + 16);
	CHECK(head->registration == 7 && head->error == ENOMEM);
}

static void a_reply_writes_nothing_to_registered_memory(void)
{
	CHECK(!gather_pages(BASE + 4096, 4096));
	CHECK(reply(0, 7, 48, 48, 16) == 7);
	CHECK(c.memory[0] == 0xee && !c.memory[4096] && !c.memory[8191]);
	CHECK(reply(0, 7, 32, 32, 16) == -EPROTO);
	CHECK(reply(EIO, 7, 32, 32, 16) == -EIO);
}

static void a_malformed_reply_is_refused(void)
{
	begin();
	put32(4, 20);
	put64(8, BASE + 100);
	CHECK(!nvg_gather_call(&c.g, NVG_FILE_CTL, _IOWR('F', 0x2a, u64[2]), BASE));
	CHECK(reply(0, 0, 4, 4, 16) == -EPROTO);
	CHECK(reply(0, 0, 48, 56, 16) == -EPROTO);
	CHECK(reply(0, 0, 56, 48, 16) == -EPROTO);
	CHECK(reply(0, 0, 56, 56, 12) == -EPROTO);
	CHECK(reply(0, 0, 8, 8, 16) == -EPROTO);
	CHECK(reply(4096, 0, 56, 56, 16) == -EPROTO);
	CHECK(!c.memory[100]);
}

static void an_unsound_schema_is_refused(void)
{
	struct nvg_rules r;

#define BAD(change) do {			\
	make_schema();				\
	change;					\
	CHECK(load(&r) == -EPROTO);		\
} while (0)
	BAD(schema.head.magic++);
	BAD(schema.head.version++);
	BAD(schema.head.reserved[2] = 1);
	BAD(schema.head.nioctls++);
	BAD(schema.head.nrules = 0x08000009);
	BAD(schema.ioctls[0].kind = NVG_FILE_KINDS);
	BAD(schema.ioctls[0].flags = 4);
	BAD(schema.ioctls[0].size = NVG_MAX_ARG + 1);
	BAD(schema.ioctls[0].ncases = 3);
	BAD(schema.ioctls[0].first_rule = 0xffffffff);
	BAD(schema.ioctls[1].nr = 0x29);
	BAD(schema.ioctls[1].nr = 0x2a);
	BAD(schema.ioctls[3].size = 0);
	BAD(schema.cases[1].key = 0x101);
	BAD(schema.cases[1].nrules = 10);
	BAD(schema.rules[LIST].first_sub = FD; schema.rules[LIST].nsubs = 1);
	BAD(schema.rules[PARAMS].nsubs = 10);
	BAD(schema.rules[PARAMS].op = 4);
	BAD(schema.rules[PAGES].flags = IN);
	BAD(schema.rules[PAGES].count_width = 4);
	BAD(schema.rules[PAGES].nsubs = 1);
	BAD(schema.rules[LIST].op = 3; schema.rules[LIST].flags = 0;
	    schema.rules[LIST].count_width = 8);
	BAD(schema.rules[PARAMS].flags = 0x80);
	BAD(schema.rules[PARAMS].count_width = 3);
	BAD(schema.rules[FD].fd_width = 2);
	BAD(schema.rules[FD].nsubs = 1);
}

static u32 noise(u32 below)
{
	static u32 seed = 1;

	seed = seed * 1664525 + 1013904223;
	return (seed >> 8) % below;
}

/* Whatever the schema and the memory say, the sanitizers have the last word. */
static void noise_never_leaves_the_buffers(void)
{
	struct nvg_rules r;
	u32 i, n;
	u8 *bytes = (u8 *)&schema;

	begin();
	for (n = 0; n < 200000; n++) {
		make_schema();
		for (i = noise(4); i; i--)
			bytes[noise(sizeof(schema))] = noise(256);
		if (load(&r))
			continue;
		caller_init(&c, &r);
		c.len = 512;
		for (i = 0; i < 64; i++)
			put64(8 * i, noise(3) ? BASE + noise(600) :
				     noise(40));
		put32(0, noise(2) ? 0x101 : 0x2a);
		put32(4, noise(64));
		if (!nvg_gather_call(&c.g, noise(3),
				     schema.ioctls[noise(7)].nr |
				     (noise(2) ? 0xc0104600 : 0), BASE))
			reply(noise(2), 0, noise(257), c.g.reply_len,
			      c.g.arg_len);
		free(c.g.buf);
		c.g.buf = NULL;
	}
}

int main(void)
{
	a_control_brings_its_params_and_what_they_reach();
	another_key_has_the_ioctls_own_rules();
	a_null_pointer_makes_no_segment_or_fails();
	a_pointer_that_is_not_followed_is_counted_and_not_sent();
	a_length_over_the_maximum_is_refused();
	a_short_block_reaches_nothing();
	a_descriptor_is_translated_or_none_or_bad();
	an_indirect_call_goes_as_the_call_it_names();
	sizes_come_from_the_entry_or_the_number();
	an_unknown_call_goes_flat();
	limits_of_the_device_hold();
	a_reply_goes_to_the_callers_own_pointers();
	a_failed_call_may_bring_its_argument_back();
	memory_that_is_registered_goes_as_runs_of_pages();
	memory_that_cannot_be_registered_goes_as_the_reason_why();
	pages_in_too_many_pieces_for_a_message_go_as_no_memory();
	a_reply_writes_nothing_to_registered_memory();
	a_malformed_reply_is_refused();
	an_unsound_schema_is_refused();
	noise_never_leaves_the_buffers();
	free(c.g.buf);
	return verdict("schema");
}
