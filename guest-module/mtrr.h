/* SPDX-License-Identifier: GPL-2.0-only */
/* What memory type the MTRRs give an address: logic alone, tested in user space. */
#ifndef NVG_MTRR_H
#define NVG_MTRR_H

#ifdef __KERNEL__
#include <linux/types.h>
#else
#include "tests/shim.h"
#endif

#define NVG_MTRR_RANGES		256	/* as many as IA32_MTRRCAP can tell */

/* Memory types as the registers encode them. */
#define NVG_MTRR_UC		0
#define NVG_MTRR_WC		1
#define NVG_MTRR_WT		4
#define NVG_MTRR_WP		5
#define NVG_MTRR_WB		6
#define NVG_MTRR_UNDEFINED	0xff

struct nvg_mtrr_range {
	u64 base;
	u64 mask;
	u8 type;
};

struct nvg_mtrrs {
	bool enabled;
	u8 default_type;
	u32 phys_bits;
	u32 nranges;
	struct nvg_mtrr_range ranges[NVG_MTRR_RANGES];
};

void nvg_mtrrs_init(struct nvg_mtrrs *m, u64 def_type, u32 phys_bits);
void nvg_mtrrs_add(struct nvg_mtrrs *m, u64 physbase, u64 physmask);
u8 nvg_mtrrs_type(const struct nvg_mtrrs *m, u64 at, u64 *end);
bool nvg_mtrrs_not_wb(const struct nvg_mtrrs *m, u64 *from, u64 *to, u8 *type);
const char *nvg_mtrr_name(u8 type);

#endif
