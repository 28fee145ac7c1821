// SPDX-License-Identifier: GPL-2.0-only
/*
 * Memory of a program's own that it registers: pinned for as long as the host
 * has it, whatever becomes of the program.
 *
 * A registration is its request's until the answer. If that says that the host
 * has the memory, it is the host's until RELEASED comes for it, or its worker
 * is lost. RELEASED may overtake the answer.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/mm.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "nvguest.h"

struct nvg_pin {
	struct nvg_device *dev;
	struct work_struct work;	/* unpins and frees */
	u32 number;
	u32 file;			/* that the call is on */
	u32 reply_at;			/* where the reply speaks of it */
	bool held;			/* by the host; under the xa_lock of pins */
	bool released;			/* before the answer; ditto */
	u32 npages;			/* pinned */
	u32 nruns;
	struct page **pages;
	struct nvg_run *runs;
};

static void nvg_pin_free(struct work_struct *work)
{
	struct nvg_pin *pin = container_of(work, struct nvg_pin, work);

	/* The card may have written to any of them. */
	unpin_user_pages_dirty_lock(pin->pages, pin->npages, true);
	atomic_long_sub(pin->npages, &pin->dev->pinned);
	kvfree(pin->pages);
	kvfree(pin->runs);
	kfree(pin);
}

/* Pins one page after another; what was pinned stays so if one cannot be. */
static int nvg_pin_pages(struct nvg_pin *pin, u64 user, u32 npages)
{
	int n;

	while (pin->npages < npages) {
		n = pin_user_pages_fast(user + (u64)pin->npages * PAGE_SIZE,
					npages - pin->npages,
					FOLL_WRITE | FOLL_LONGTERM,
					pin->pages + pin->npages);
		if (n <= 0)
			return n ?: -EFAULT;
		pin->npages += n;
		cond_resched();
	}
	return 0;
}

static bool nvg_pages_meet(const struct nvg_pin *pin, u32 i)
{
	return page_to_phys(pin->pages[i]) ==
	       page_to_phys(pin->pages[i - 1]) + PAGE_SIZE;
}

static int nvg_pin_runs(struct nvg_pin *pin)
{
	struct nvg_run *run;
	u32 i, start = 0;

	pin->nruns = 1;
	for (i = 1; i < pin->npages; i++)
		pin->nruns += !nvg_pages_meet(pin, i);
	pin->runs = kvmalloc_array(pin->nruns, sizeof(*run), GFP_KERNEL);
	if (!pin->runs)
		return -ENOMEM;
	run = pin->runs;
	for (i = 1; i <= pin->npages; i++) {
		if (i < pin->npages && nvg_pages_meet(pin, i))
			continue;
		run->address = cpu_to_le64(page_to_phys(pin->pages[start]));
		run->length = cpu_to_le64((u64)(i - start) * PAGE_SIZE);
		run++;
		start = i;
	}
	return 0;
}

/* Half of the guest's memory stays movable, whatever a program registers. */
static int nvg_pin_memory(struct nvg_pin *pin, u64 user, u32 npages)
{
	atomic_long_t *pinned = &pin->dev->pinned;
	int ret;

	if (atomic_long_add_return(npages, pinned) > totalram_pages() / 2) {
		atomic_long_sub(npages, pinned);
		return -ENOMEM;
	}
	pin->pages = kvcalloc(npages, sizeof(*pin->pages), GFP_KERNEL);
	ret = pin->pages ? nvg_pin_pages(pin, user, npages) : -ENOMEM;
	atomic_long_sub(npages - pin->npages, pinned);
	return ret ?: nvg_pin_runs(pin);
}

/**
 * nvg_pin() - pin memory of the caller and number it
 * @req: the request that owns it for now
 * @file: wire file that the call is on
 * @user: where the memory begins
 * @npages: pages of it; 0: a number alone
 * @reply_at: where the reply will speak of it
 * @pinned: filled if there is a number
 *
 * Return: 0, or why the memory could not be pinned.
 */
int nvg_pin(struct nvg_request *req, u32 file, u64 user, u32 npages,
	    u32 reply_at, struct nvg_pinned *pinned)
{
	struct nvg_device *dev = req->dev;
	struct nvg_pin *pin;
	int ret;

	if (req->pin)
		return -EINVAL;
	pin = kzalloc(sizeof(*pin), GFP_KERNEL);
	if (!pin)
		return -ENOMEM;
	pin->dev = dev;
	pin->file = file;
	pin->reply_at = reply_at;
	INIT_WORK(&pin->work, nvg_pin_free);
	ret = xa_alloc_cyclic_irq(&dev->pins, &pin->number, pin,
				  XA_LIMIT(1, NVG_MAX_REGISTRATIONS),
				  &dev->next_pin, GFP_KERNEL);
	if (ret < 0) {
		kfree(pin);
		return ret == -EBUSY ? -ENOMEM : ret;
	}
	req->pin = pin;
	ret = npages ? nvg_pin_memory(pin, user, npages) : 0;
	pinned->registration = pin->number;
	pinned->nruns = pin->nruns;
	pinned->runs = pin->runs;
	return ret;
}

/**
 * nvg_pin_answered() - the host's answer to a call that registers memory
 * @req: the request, whose reply is there
 */
void nvg_pin_answered(struct nvg_request *req)
{
	struct nvg_pin *pin = req->pin;
	const struct nvg_pages *head;

	if (!pin || nvg_reply(req, pin->reply_at + sizeof(*head)))
		return;
	head = req->in.va + pin->reply_at;
	if (head->held != cpu_to_le32(1))
		return;
	xa_lock_irq(&pin->dev->pins);
	pin->held = !pin->released;
	xa_unlock_irq(&pin->dev->pins);
}

/* The request is no more: what it still owns is unpinned. In process context. */
void nvg_pin_put(struct nvg_request *req)
{
	struct nvg_pin *pin = req->pin;
	bool held;

	if (!pin)
		return;
	req->pin = NULL;
	xa_lock_irq(&pin->dev->pins);
	/* Of a host that does not answer nobody knows what it has. */
	pin->held |= READ_ONCE(pin->dev->silent);
	held = pin->held;
	if (!held)
		__xa_erase(&pin->dev->pins, pin->number);
	xa_unlock_irq(&pin->dev->pins);
	if (!held)
		nvg_pin_free(&pin->work);
}

static void nvg_pin_release_locked(struct nvg_device *dev, struct nvg_pin *pin)
{
	pin->released = true;
	if (!pin->held)
		return;
	__xa_erase(&dev->pins, pin->number);
	queue_work(nvg_wq, &pin->work);
}

/* RELEASED came for @number of the worker with file @file. In any context. */
void nvg_pin_released(struct nvg_device *dev, u32 file)
{
	struct nvg_pin *pin;
	unsigned long flags;

	xa_lock_irqsave(&dev->pins, flags);
	pin = xa_load(&dev->pins, NVG_FILE_NUMBER(file));
	if (pin && NVG_FILE_WORKER(pin->file) == NVG_FILE_WORKER(file))
		nvg_pin_release_locked(dev, pin);
	xa_unlock_irqrestore(&dev->pins, flags);
}

/* The host has let go of all that files @first to @last registered. */
void nvg_pins_released(struct nvg_device *dev, u32 first, u32 last)
{
	unsigned long flags, number;
	struct nvg_pin *pin;

	xa_lock_irqsave(&dev->pins, flags);
	xa_for_each(&dev->pins, number, pin)
		if (pin->file >= first && pin->file <= last)
			nvg_pin_release_locked(dev, pin);
	xa_unlock_irqrestore(&dev->pins, flags);
}
