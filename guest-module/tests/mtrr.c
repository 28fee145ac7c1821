// SPDX-License-Identifier: GPL-2.0-only
/* Memory types by the MTRRs, case by case. */
#include "check.h"
#include "../mtrr.h"

#define GiB		(1ULL << 30)
#define WINDOW		(64 * GiB)
#define LENGTH		(64 * GiB)
#define ENABLED		(1ULL << 11)
#define BITS		46

static struct nvg_mtrrs m;
static u64 from, to;
static u8 type;

static void begin(u64 def_type)
{
	nvg_mtrrs_init(&m, def_type, BITS);
}

/* A range of a power of two, as firmware writes it. */
static void range(u64 base, u64 size, u8 of)
{
	nvg_mtrrs_add(&m, base | of,
		      (~(size - 1) & ((1ULL << BITS) - 1)) | ENABLED);
}

static bool window_is_slow(void)
{
	from = WINDOW;
	to = WINDOW + LENGTH - 1;
	return nvg_mtrrs_not_wb(&m, &from, &to, &type);
}

static u8 type_at(u64 at)
{
	u64 end;

	return nvg_mtrrs_type(&m, at, &end);
}

/* What SeaBIOS leaves: all is write-back but the PCI hole below 4 GiB. */
static void a_default_of_write_back_covers_the_window(void)
{
	begin(ENABLED | NVG_MTRR_WB);
	range(3 * GiB, GiB, NVG_MTRR_UC);
	CHECK(!window_is_slow());
	CHECK(type_at(4 * GiB - 1) == NVG_MTRR_UC);
	CHECK(type_at(4 * GiB) == NVG_MTRR_WB);
	CHECK(type_at(3 * GiB - 1) == NVG_MTRR_WB);
}

static void a_default_of_uncached_leaves_it_uncached(void)
{
	begin(ENABLED | NVG_MTRR_UC);
	range(0, 4 * GiB, NVG_MTRR_WB);
	CHECK(window_is_slow());
	CHECK(type == NVG_MTRR_UC);
	CHECK(from == WINDOW && to == WINDOW + LENGTH - 1);
}

static void disabled_registers_make_all_uncached(void)
{
	begin(NVG_MTRR_WB);
	range(WINDOW, LENGTH, NVG_MTRR_WB);
	CHECK(window_is_slow());
	CHECK(type == NVG_MTRR_UC && to == WINDOW + LENGTH - 1);
}

static void an_invalid_range_says_nothing(void)
{
	begin(ENABLED | NVG_MTRR_WB);
	nvg_mtrrs_add(&m, WINDOW | NVG_MTRR_UC, ~(LENGTH - 1) & ~0xfffULL);
	CHECK(m.nranges == 0);
	CHECK(!window_is_slow());
}

static void the_first_part_that_is_not_write_back_is_told(void)
{
	begin(ENABLED | NVG_MTRR_WB);
	range(WINDOW + 16 * GiB, 4 * GiB, NVG_MTRR_UC);
	range(WINDOW + 20 * GiB, 4 * GiB, NVG_MTRR_UC);
	range(WINDOW + 24 * GiB, 8 * GiB, NVG_MTRR_WC);
	CHECK(window_is_slow());
	CHECK(from == WINDOW + 16 * GiB);
	CHECK(to == WINDOW + 24 * GiB - 1);
	CHECK(type == NVG_MTRR_UC);
	CHECK(type_at(WINDOW + 24 * GiB) == NVG_MTRR_WC);
	CHECK(type_at(WINDOW + 32 * GiB) == NVG_MTRR_WB);
}

static void ranges_that_together_cover_the_window_do(void)
{
	begin(ENABLED | NVG_MTRR_UC);
	range(WINDOW, LENGTH / 2, NVG_MTRR_WB);
	CHECK(window_is_slow());
	CHECK(from == WINDOW + LENGTH / 2);
	range(WINDOW + LENGTH / 2, LENGTH / 2, NVG_MTRR_WB);
	CHECK(!window_is_slow());
}

static void where_ranges_overlap(const u8 *types, u32 count, u8 result)
{
	u32 i, turned;

	for (turned = 0; turned < 2; turned++) {
		begin(ENABLED | NVG_MTRR_WP);
		for (i = 0; i < count; i++)
			range(0, 256 * GiB, types[turned ? count - 1 - i : i]);
		CHECK(type_at(WINDOW) == result);
	}
}

static void the_overlap_rules_are_intels(void)
{
	where_ranges_overlap((u8[]){ NVG_MTRR_WB, NVG_MTRR_WB }, 2,
			     NVG_MTRR_WB);
	where_ranges_overlap((u8[]){ NVG_MTRR_WB, NVG_MTRR_UC }, 2,
			     NVG_MTRR_UC);
	where_ranges_overlap((u8[]){ NVG_MTRR_WC, NVG_MTRR_UC }, 2,
			     NVG_MTRR_UC);
	where_ranges_overlap((u8[]){ NVG_MTRR_WT, NVG_MTRR_WB }, 2,
			     NVG_MTRR_WT);
	where_ranges_overlap((u8[]){ NVG_MTRR_WB, NVG_MTRR_WT, NVG_MTRR_UC }, 3,
			     NVG_MTRR_UC);
	where_ranges_overlap((u8[]){ NVG_MTRR_WB, NVG_MTRR_WC }, 2,
			     NVG_MTRR_UNDEFINED);
	/* Undefined or not: no other range makes uncached memory faster. */
	where_ranges_overlap((u8[]){ NVG_MTRR_WB, NVG_MTRR_WC, NVG_MTRR_UC }, 3,
			     NVG_MTRR_UC);
	where_ranges_overlap((u8[]){}, 0, NVG_MTRR_WP);
}

static void a_small_range_within_a_large_one_is_found(void)
{
	begin(ENABLED | NVG_MTRR_UC);
	range(0, 1ULL << BITS, NVG_MTRR_WB);
	CHECK(!window_is_slow());
	range(WINDOW + LENGTH - 4096, 4096, NVG_MTRR_WC);
	CHECK(window_is_slow());
	CHECK(from == WINDOW + LENGTH - 4096 && to == WINDOW + LENGTH - 1);
	CHECK(type == NVG_MTRR_UNDEFINED);
}

static void a_mask_with_a_gap_matches_where_it_says(void)
{
	u64 mask = ~(GiB - 1) & ~(4 * GiB) & ((1ULL << BITS) - 1);

	begin(ENABLED | NVG_MTRR_WB);
	nvg_mtrrs_add(&m, (WINDOW + 2 * GiB) | NVG_MTRR_UC, mask | ENABLED);
	CHECK(type_at(WINDOW) == NVG_MTRR_WB);
	CHECK(type_at(WINDOW + 2 * GiB) == NVG_MTRR_UC);
	CHECK(type_at(WINDOW + 3 * GiB) == NVG_MTRR_WB);
	CHECK(type_at(WINDOW + 6 * GiB) == NVG_MTRR_UC);
	CHECK(window_is_slow());
	CHECK(from == WINDOW + 2 * GiB && to == WINDOW + 3 * GiB - 1);
}

static void any_width_of_an_address_does(void)
{
	nvg_mtrrs_init(&m, ENABLED | NVG_MTRR_UC, 64);
	nvg_mtrrs_add(&m, NVG_MTRR_WB, ENABLED);
	CHECK(!window_is_slow());
	nvg_mtrrs_init(&m, ENABLED | NVG_MTRR_UC, 36);
	nvg_mtrrs_add(&m, (32 * GiB) | NVG_MTRR_WB, (32 * GiB) | ENABLED);
	from = 32 * GiB;
	to = 64 * GiB - 1;
	CHECK(!nvg_mtrrs_not_wb(&m, &from, &to, &type));
	CHECK(type_at(64 * GiB) == NVG_MTRR_UC);
}

static void more_ranges_than_a_processor_has_are_dropped(void)
{
	u32 i;

	begin(ENABLED | NVG_MTRR_WB);
	for (i = 0; i < NVG_MTRR_RANGES + 10; i++)
		range(0, GiB, NVG_MTRR_UC);
	CHECK(m.nranges == NVG_MTRR_RANGES);
}

int main(void)
{
	a_default_of_write_back_covers_the_window();
	a_default_of_uncached_leaves_it_uncached();
	disabled_registers_make_all_uncached();
	an_invalid_range_says_nothing();
	the_first_part_that_is_not_write_back_is_told();
	ranges_that_together_cover_the_window_do();
	the_overlap_rules_are_intels();
	a_small_range_within_a_large_one_is_found();
	a_mask_with_a_gap_matches_where_it_says();
	any_width_of_an_address_does();
	more_ranges_than_a_processor_has_are_dropped();
	return verdict("mtrr");
}
