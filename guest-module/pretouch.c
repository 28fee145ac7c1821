// SPDX-License-Identifier: GPL-2.0-only
/*
 * Fresh memory of the card is touched before the program gets to it. Where the
 * hypervisor fills a second page table as pages are first touched, a program's
 * first writes cost it a fault for each page.
 *
 * Only what is write-combined: that is memory. Uncached means registers, which
 * a read may change, and the arena is never the card's.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/io.h>
#include <linux/kstrtox.h>
#include <linux/kvm_para.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/string.h>

#include "nvguest.h"

static char *pretouch = "auto";
module_param(pretouch, charp, 0444);
MODULE_PARM_DESC(pretouch, "Touch fresh memory of the card in advance: 0, 1, or auto (under KVM)");

static struct workqueue_struct *nvg_touch_wq;
static bool nvg_touch_wanted;

static void __iomem *nvg_touch_map(u64 at, u32 len)
{
	cond_resched();
	return ioremap_wc(at, len);
}

static void nvg_touch_unmap(void __iomem *va)
{
	iounmap(va);
}

static void nvg_touch_read(void __iomem *va)
{
	ioread32(va);
}

static bool nvg_touch_over(const struct nvg_touch *t)
{
	const struct nvg_pretouch *pre =
		container_of(t, struct nvg_pretouch, touch);

	return READ_ONCE(pre->over) || nvg_file_lost(pre->file) ||
	       READ_ONCE(pre->file->dev->untouchable);
}

static const struct nvg_touch_ops nvg_touch_ops = {
	.map = nvg_touch_map,
	.unmap = nvg_touch_unmap,
	.read = nvg_touch_read,
	.over = nvg_touch_over,
};

static void nvg_pretouch_work(struct work_struct *work)
{
	struct nvg_pretouch *pre = container_of(work, struct nvg_pretouch,
						work);
	struct nvg_touch *t = &pre->touch;

	nvg_touch_all(t, &nvg_touch_ops);
	pr_debug("touched %llu of %llu pages at %#llx\n",
		 t->done / NVG_TOUCH_PAGE, t->len / NVG_TOUCH_PAGE, t->base);
}

/* @file outlives @pre. */
void nvg_pretouch_prepare(struct nvg_pretouch *pre, struct nvg_file *file)
{
	INIT_WORK(&pre->work, nvg_pretouch_work);
	pre->file = file;
}

/**
 * nvg_pretouch_start() - begin to touch memory of the card
 * @pre: prepared; stopped before the memory may be another's
 * @base: physical address, of a page
 * @len: whole pages
 */
void nvg_pretouch_start(struct nvg_pretouch *pre, u64 base, u64 len)
{
	if (!nvg_touch_wanted)
		return;
	pre->touch.base = base;
	pre->touch.len = len;
	queue_work(nvg_touch_wq, &pre->work);
}

/* Nothing is touched from now on. Waits for a page at most. */
void nvg_pretouch_stop(struct nvg_pretouch *pre)
{
	WRITE_ONCE(pre->over, true);
	cancel_work_sync(&pre->work);
}

/* The same for all of a device, until it starts again. */
void nvg_pretouch_stop_all(struct nvg_device *dev)
{
	WRITE_ONCE(dev->untouchable, true);
	flush_workqueue(nvg_touch_wq);
}

int nvg_pretouch_init(void)
{
	if (!strcmp(pretouch, "auto")) {
		nvg_touch_wanted = kvm_para_available();
	} else if (kstrtobool(pretouch, &nvg_touch_wanted)) {
		pr_err("pretouch=%s: it is 0, 1 or auto\n", pretouch);
		return -EINVAL;
	}
	/* One at a time: it is to take a processor at most. */
	nvg_touch_wq = alloc_workqueue("nvguest-touch", WQ_UNBOUND, 1);
	return nvg_touch_wq ? 0 : -ENOMEM;
}

void nvg_pretouch_exit(void)
{
	destroy_workqueue(nvg_touch_wq);
}
