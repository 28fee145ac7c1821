// SPDX-License-Identifier: GPL-2.0-only
/* What is touched in advance, case by case. */
#include "check.h"
#include "../touch.h"

#define MiB		(1ULL << 20)
#define BASE		(0x380000000000ULL + 12 * MiB)
#define PAGES		4096	/* of a placement at most */

static struct {
	struct nvg_touch t;
	u32 touched[PAGES];
	u32 maps, reads;
	u32 reads_allowed, maps_allowed;
	u64 at;			/* what is mapped */
	u32 len;		/* 0: nothing */
} fake;

/* A mapping is a name; nothing is behind it. */
static u8 window[NVG_TOUCH_PIECE];

static void *fake_map(u64 at, u32 len)
{
	CHECK(!fake.len);
	CHECK(len && len <= NVG_TOUCH_PIECE && len % NVG_TOUCH_PAGE == 0);
	CHECK(at >= fake.t.base && at + len <= fake.t.base + fake.t.len);
	CHECK(at / NVG_TOUCH_PIECE == (at + len - 1) / NVG_TOUCH_PIECE);
	if (fake.maps == fake.maps_allowed)
		return NULL;
	fake.maps++;
	fake.at = at;
	fake.len = len;
	return window;
}

static void fake_unmap(void *va)
{
	CHECK(va == window && fake.len);
	fake.len = 0;
}

static void fake_read(void *va)
{
	u64 offset = (u8 *)va - window;

	CHECK(offset < fake.len && offset % NVG_TOUCH_PAGE == 0);
	CHECK(fake.reads < fake.reads_allowed);
	fake.reads++;
	fake.touched[(fake.at + offset - fake.t.base) / NVG_TOUCH_PAGE]++;
}

static bool fake_over(const struct nvg_touch *t)
{
	CHECK(t == &fake.t);
	return fake.reads == fake.reads_allowed;
}

static const struct nvg_touch_ops ops = {
	.map = fake_map,
	.unmap = fake_unmap,
	.read = fake_read,
	.over = fake_over,
};

static void begin(u64 base, u64 len)
{
	memset(&fake, 0, sizeof(fake));
	fake.t.base = base;
	fake.t.len = len;
	fake.reads_allowed = U32_MAX;
	fake.maps_allowed = U32_MAX;
}

/* Each of the first pages once, and no other. */
static bool touched(u32 pages)
{
	u32 i;

	for (i = 0; i < PAGES; i++)
		if (fake.touched[i] != (i < pages ? 1 : 0))
			return false;
	return !fake.len;
}

static void every_page_is_touched_once_a_piece_at_a_time(void)
{
	begin(BASE, 8 * MiB);
	nvg_touch_all(&fake.t, &ops);
	CHECK(touched(2048));
	CHECK(fake.maps == 4);
	CHECK(fake.t.done == fake.t.len);
}

static void pieces_keep_to_their_boundaries(void)
{
	begin(BASE + MiB, 4 * MiB);
	nvg_touch_all(&fake.t, &ops);
	CHECK(touched(1024));
	CHECK(fake.maps == 3);
}

static void a_single_page_is_one_piece(void)
{
	begin(BASE + 2 * MiB - NVG_TOUCH_PAGE, NVG_TOUCH_PAGE);
	nvg_touch_all(&fake.t, &ops);
	CHECK(touched(1));
	CHECK(fake.maps == 1);
}

static void nothing_is_touched_of_nothing(void)
{
	begin(BASE, 0);
	nvg_touch_all(&fake.t, &ops);
	CHECK(!fake.maps && touched(0));
}

static void nothing_is_mapped_once_it_is_over(void)
{
	begin(BASE, 8 * MiB);
	fake.reads_allowed = 0;
	nvg_touch_all(&fake.t, &ops);
	CHECK(!fake.maps && touched(0) && !fake.t.done);
}

static void it_stops_at_the_page_where_it_is_told(void)
{
	u32 stop;

	for (stop = 1; stop < 2048; stop += 37) {
		begin(BASE, 8 * MiB);
		fake.reads_allowed = stop;
		nvg_touch_all(&fake.t, &ops);
		CHECK(touched(stop));
		CHECK(fake.t.done == (u64)stop * NVG_TOUCH_PAGE);
	}
}

static void without_a_mapping_the_rest_is_left(void)
{
	begin(BASE, 8 * MiB);
	fake.maps_allowed = 2;
	nvg_touch_all(&fake.t, &ops);
	CHECK(touched(1024));
	CHECK(fake.t.done == 4 * MiB);
}

int main(void)
{
	every_page_is_touched_once_a_piece_at_a_time();
	pieces_keep_to_their_boundaries();
	a_single_page_is_one_piece();
	nothing_is_touched_of_nothing();
	nothing_is_mapped_once_it_is_over();
	it_stops_at_the_page_where_it_is_told();
	without_a_mapping_the_rest_is_left();
	return verdict("touch");
}
