// SPDX-License-Identifier: GPL-2.0-only
/*
 * The memory type of an address by the variable-range MTRRs (Intel SDM vol. 3,
 * "Memory Type Range Registers (MTRRs)"). Fixed ranges end at 1 MiB, where no
 * window is.
 */
#ifdef __KERNEL__
#include <linux/limits.h>
#include <linux/minmax.h>
#endif

#include "mtrr.h"

#define NVG_DEF_TYPE_ENABLE	(1ULL << 11)
#define NVG_PHYSMASK_VALID	(1ULL << 11)
#define NVG_TYPE_BITS		0xffULL
#define NVG_LOW_BITS		0xfffULL

/**
 * nvg_mtrrs_init() - without variable ranges yet
 * @m: filled
 * @def_type: IA32_MTRR_DEF_TYPE
 * @phys_bits: width of a physical address
 */
void nvg_mtrrs_init(struct nvg_mtrrs *m, u64 def_type, u32 phys_bits)
{
	m->enabled = def_type & NVG_DEF_TYPE_ENABLE;
	m->default_type = def_type & NVG_TYPE_BITS;
	m->phys_bits = phys_bits;
	m->nranges = 0;
}

/**
 * nvg_mtrrs_add() - one more variable range, if it is a valid one
 * @m: from nvg_mtrrs_init()
 * @physbase: IA32_MTRR_PHYSBASEn
 * @physmask: IA32_MTRR_PHYSMASKn
 */
void nvg_mtrrs_add(struct nvg_mtrrs *m, u64 physbase, u64 physmask)
{
	u64 above = m->phys_bits < 64 ? ~0ULL << m->phys_bits : 0;
	struct nvg_mtrr_range *range;

	if (!(physmask & NVG_PHYSMASK_VALID) || m->nranges == NVG_MTRR_RANGES)
		return;
	range = &m->ranges[m->nranges++];
	range->type = physbase & NVG_TYPE_BITS;
	range->mask = (physmask & ~NVG_LOW_BITS) | above;
	range->base = physbase & ~NVG_LOW_BITS & range->mask;
}

/* The rules where ranges overlap; what they do not name is undefined. */
static u8 nvg_mtrr_merge(u8 one, u8 two)
{
	if (one == two)
		return one;
	if (one == NVG_MTRR_UC || two == NVG_MTRR_UC)
		return NVG_MTRR_UC;
	if ((one == NVG_MTRR_WT && two == NVG_MTRR_WB) ||
	    (one == NVG_MTRR_WB && two == NVG_MTRR_WT))
		return NVG_MTRR_WT;
	return NVG_MTRR_UNDEFINED;
}

/* The last address from @at on for which @range matches as it does for @at. */
static u64 nvg_mtrr_reach(const struct nvg_mtrr_range *range, u64 at)
{
	u64 step = range->mask & -range->mask;
	u64 last = at | (step - 1);

	/* A mask with a gap makes a range with gaps: look again soon. */
	if (range->mask != -step || (at & range->mask) == range->base)
		return last;
	return at < range->base ? range->base - 1 : U64_MAX;
}

/**
 * nvg_mtrrs_type() - the memory type of an address
 * @m: the registers
 * @at: the address, above 1 MiB
 * @end: the last address that surely is of the same type
 *
 * Return: the type.
 */
u8 nvg_mtrrs_type(const struct nvg_mtrrs *m, u64 at, u64 *end)
{
	const struct nvg_mtrr_range *range;
	u8 type = m->default_type;
	bool found = false;
	u32 i;

	*end = U64_MAX;
	if (!m->enabled)
		return NVG_MTRR_UC;
	for (i = 0; i < m->nranges; i++) {
		range = &m->ranges[i];
		*end = min(*end, nvg_mtrr_reach(range, at));
		if ((at & range->mask) != range->base)
			continue;
		type = found ? nvg_mtrr_merge(type, range->type) : range->type;
		found = true;
	}
	return type;
}

/**
 * nvg_mtrrs_not_wb() - is all of a range write-back?
 * @m: the registers
 * @from: the first address; if not, that of the first part that is not
 * @to: the last address, inclusive; if not, that of this part
 * @type: if not, the type of this part
 *
 * Return: true if some of it is not.
 */
bool nvg_mtrrs_not_wb(const struct nvg_mtrrs *m, u64 *from, u64 *to, u8 *type)
{
	u64 at = *from, last = *to, end;

	while ((*type = nvg_mtrrs_type(m, at, &end)) == NVG_MTRR_WB) {
		if (end >= last)
			return false;
		at = end + 1;
	}
	*from = at;
	while (end < last && nvg_mtrrs_type(m, end + 1, &at) == *type)
		end = at;
	*to = min(end, last);
	return true;
}

const char *nvg_mtrr_name(u8 type)
{
	switch (type) {
	case NVG_MTRR_UC:
		return "uncached";
	case NVG_MTRR_WC:
		return "write-combined";
	case NVG_MTRR_WT:
		return "write-through";
	case NVG_MTRR_WP:
		return "write-protected";
	case NVG_MTRR_WB:
		return "write-back";
	}
	return "of no defined type";
}
