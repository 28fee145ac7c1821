// SPDX-License-Identifier: GPL-2.0-only
/* One word of each page, a piece at a time, until it is over. */
#ifdef __KERNEL__
#include <linux/minmax.h>
#endif

#include "touch.h"

/* Up to the next multiple of a piece, where large pages could map it. */
static u32 nvg_touch_piece(const struct nvg_touch *t)
{
	u64 to_boundary = NVG_TOUCH_PIECE -
			  ((t->base + t->done) & (NVG_TOUCH_PIECE - 1));

	return min(to_boundary, t->len - t->done);
}

/**
 * nvg_touch_all() - read a word of every page that has none read yet
 * @t: the pages; says afterwards how far it got
 * @ops: how
 *
 * Once ops->over() has said so, nothing is read any more.
 */
void nvg_touch_all(struct nvg_touch *t, const struct nvg_touch_ops *ops)
{
	void __iomem *va;
	u32 len, at;

	while (t->done < t->len && !ops->over(t)) {
		len = nvg_touch_piece(t);
		va = ops->map(t->base + t->done, len);
		if (!va)
			return;
		for (at = 0; at < len && !ops->over(t); at += NVG_TOUCH_PAGE)
			ops->read(va + at);
		ops->unmap(va);
		t->done += at;
	}
}
