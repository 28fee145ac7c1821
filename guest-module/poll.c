// SPDX-License-Identifier: GPL-2.0-only
/*
 * Readiness: an event sets bits in the file's word, poll takes them. Only a
 * poll that found none asks for an event, and only if none is promised.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/mm.h>
#include <linux/slab.h>

#include "nvguest.h"

#define NVG_EVENT_BUFFERS	32
#define NVG_READY_BITS		(EPOLLIN | EPOLLPRI | EPOLLOUT | EPOLLERR | \
				 EPOLLHUP | EPOLLRDNORM | EPOLLRDBAND | \
				 EPOLLWRNORM | EPOLLWRBAND | EPOLLMSG)

static __poll_t nvg_take_ready(struct nvg_file *file)
{
	return (__force __poll_t)atomic_xchg(&file->ready, 0);
}

/* Asks to be told when @file is ready; the answer comes as an event. */
static int nvg_arm(struct nvg_file *file)
{
	struct nvg_request *req;
	struct nvg_req *head;

	req = nvg_request_new(file->dev, file->epoch, NVG_ARM, sizeof(*head),
			      sizeof(struct nvg_resp));
	if (!req)
		return -ENOMEM;
	head = nvg_message(req);
	head->file = cpu_to_le32(file->id);
	/*
	 * A refusal must be seen at once: the first time, and if a worker was
	 * lost since before this file was opened, whose event may have been for
	 * it and come too early.
	 */
	req->urgent = !test_and_set_bit(NVG_FILE_ASKED, &file->flags) ||
		      READ_ONCE(file->dev->lost_count) != file->lost_count;
	nvg_post(file->queue, req);
	return 0;
}

__poll_t nvg_poll(struct file *filp, struct poll_table_struct *table)
{
	struct nvg_file *file = filp->private_data;
	__poll_t mask;

	poll_wait(filp, &file->wait, table);

	if (nvg_file_lost(file))
		return EPOLLHUP | EPOLLERR;
	mask = nvg_take_ready(file);
	if (mask || file->kind == NVG_FILE_CAP)
		return mask;

	if (!test_and_set_bit(NVG_FILE_ARMED, &file->flags) && nvg_arm(file)) {
		clear_bit(NVG_FILE_ARMED, &file->flags);
		return EPOLLERR;
	}
	/* The event may have come between the two looks. */
	mask = nvg_take_ready(file);
	if (nvg_file_lost(file))
		mask |= EPOLLHUP | EPOLLERR;
	return mask;
}

static void nvg_ready(struct nvg_device *dev, u32 id, u32 mask, u32 more)
{
	__poll_t bits = (__force __poll_t)mask & NVG_READY_BITS;
	struct nvg_file *file;
	unsigned long flags;

	xa_lock_irqsave(&dev->files, flags);
	file = xa_load(&dev->files, id);
	if (file) {
		atomic_or((__force int)bits, &file->ready);
		if (!more)
			clear_bit(NVG_FILE_ARMED, &file->flags);
		wake_up_poll(&file->wait, bits);
	}
	xa_unlock_irqrestore(&dev->files, flags);
}

/* Nothing will tell when file @id is ready. Its poll must not sleep on. */
void nvg_arm_failed(struct nvg_device *dev, u32 id, u32 status)
{
	if (status == ENODEV || status == EBADF)
		nvg_lost(dev, id, id);
	else
		nvg_ready(dev, id, (__force u32)EPOLLERR, 0);
}

/* Files @first to @last have no worker any more. In any context. */
void nvg_lost(struct nvg_device *dev, u32 first, u32 last)
{
	unsigned long flags, id;
	struct nvg_file *file;

	xa_lock_irqsave(&dev->files, flags);
	WRITE_ONCE(dev->lost_count, dev->lost_count + 1);
	xa_for_each_range(&dev->files, id, file, first, last) {
		set_bit(NVG_FILE_LOST, &file->flags);
		wake_up_poll(&file->wait, EPOLLHUP | EPOLLERR);
	}
	xa_unlock_irqrestore(&dev->files, flags);
	queue_work(nvg_wq, &dev->lost_work);
}

/* What losing a file takes that cannot be done in an interrupt. */
void nvg_lost_work(struct work_struct *work)
{
	struct nvg_device *dev = container_of(work, struct nvg_device,
					      lost_work);
	unsigned long id = 0;
	struct nvg_file *file;

	for (;;) {
		xa_lock_irq(&dev->files);
		for (file = xa_find(&dev->files, &id, ULONG_MAX, XA_PRESENT);
		     file && !nvg_file_lost(file);
		     file = xa_find_after(&dev->files, &id, ULONG_MAX,
					  XA_PRESENT))
			;
		if (file)
			kref_get(&file->ref);
		xa_unlock_irq(&dev->files);
		if (!file)
			return;

		mutex_lock(&dev->procs_lock);
		if (file->queue == nvg_slot_queue(dev, file->proc->slot))
			file->proc->slot = NVG_NO_SLOT;
		mutex_unlock(&dev->procs_lock);
		nvg_file_zap(file);
		nvg_file_put(file);
		id++;
	}
}

static void nvg_event(struct nvg_device *dev, const struct nvg_event *event)
{
	u32 id = le32_to_cpu(event->file);

	switch (le32_to_cpu(event->kind)) {
	case NVG_EVENT_READY:
		nvg_ready(dev, id, le32_to_cpu(event->mask),
			  le32_to_cpu(event->more));
		break;
	case NVG_EVENT_LOST:
		nvg_lost(dev, id, NVG_FILE_NUMBER(id) ? id : id | 0xffff);
		nvg_pins_released(dev, id,
				  NVG_FILE_NUMBER(id) ? id : id | 0xffff);
		break;
	case NVG_EVENT_RELEASED:
		nvg_pin_released(dev, id);
		break;
	default:
		pr_warn_ratelimited("event of unknown kind %u ignored\n",
				    le32_to_cpu(event->kind));
	}
}

static int nvg_event_add_locked(struct nvg_queue *q, struct nvg_event *event)
{
	struct scatterlist sg;

	sg_init_one(&sg, event, sizeof(*event));
	return virtqueue_add_inbuf(q->vq, &sg, 1, event, GFP_ATOMIC);
}

/* Handles what came and posts the buffers again. Returns whether to notify. */
bool nvg_events_locked(struct nvg_queue *q)
{
	struct nvg_event *event;
	bool kick = false;
	u32 used;

	do {
		while ((event = virtqueue_get_buf(q->vq, &used))) {
			if (used >= sizeof(*event))
				nvg_event(q->dev, event);
			if (!nvg_event_add_locked(q, event))
				kick = true;
		}
		nvg_queue_listen_locked(q);
	} while (virtqueue_poll(q->vq, q->seen));

	return kick && virtqueue_kick_prepare(q->vq);
}

/**
 * nvg_events_post() - give the device the buffers of an event queue
 * @q: the queue, whose ring is empty; nothing runs on it yet
 *
 * Return: 0 or -ENOMEM.
 */
int nvg_events_post(struct nvg_queue *q)
{
	u32 n = min_t(u32, NVG_EVENT_BUFFERS, virtqueue_get_vring_size(q->vq));
	u32 i;

	if (!q->events)
		q->events = kcalloc(NVG_EVENT_BUFFERS, sizeof(*q->events),
				    GFP_KERNEL);
	if (!q->events)
		return -ENOMEM;
	for (i = 0; i < n; i++)
		if (nvg_event_add_locked(q, &q->events[i]))
			return -ENOMEM;
	return 0;
}
