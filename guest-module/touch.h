/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Which pages of a placement are touched in advance, in which pieces. Pure: no
 * kernel service but those behind struct nvg_touch_ops, so that it runs in
 * user space.
 */
#ifndef NVG_TOUCH_H
#define NVG_TOUCH_H

#ifdef __KERNEL__
#include <linux/types.h>
#else
#include "tests/shim.h"
#endif

/* One kernel mapping at a time, of so much. */
#define NVG_TOUCH_PIECE		(2U << 20)
#define NVG_TOUCH_PAGE		4096U

struct nvg_touch;

struct nvg_touch_ops {
	/* A mapping of physical memory, or NULL: then the rest is left. */
	void __iomem *(*map)(u64 at, u32 len);
	void (*unmap)(void __iomem *va);
	void (*read)(void __iomem *va);
	/* Whether the memory must be left alone from now on. */
	bool (*over)(const struct nvg_touch *t);
};

/* Whole pages, and how many bytes from the start have been touched. */
struct nvg_touch {
	u64 base;
	u64 len;
	u64 done;
};

void nvg_touch_all(struct nvg_touch *t, const struct nvg_touch_ops *ops);

#endif
