// SPDX-License-Identifier: GPL-2.0-only
/* Requests, the rings they travel on, and waiting for the answer. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cred.h>
#include <linux/delay.h>
#include <linux/file.h>
#include <linux/gfp.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uidgid.h>
#include <linux/user_namespace.h>
#include <linux/vmalloc.h>

#include "nvguest.h"

/* Up to here a buffer is one piece; beyond, pieces of this size. */
#define NVG_PIECE_ORDER		PAGE_ALLOC_COSTLY_ORDER
#define NVG_PIECE		(PAGE_SIZE << NVG_PIECE_ORDER)

#define NVG_PROBE_TIMEOUT_MS	10000
#define NVG_END_TIMEOUT_MS	1000
#define NVG_PING_ROOM		2	/* descriptors that slow calls leave */

static unsigned int poll_us = 500;
module_param(poll_us, uint, 0644);
MODULE_PARM_DESC(poll_us, "Microseconds to poll for an answer before sleeping (at most 1000)");

static struct kmem_cache *nvg_request_cache;

int nvg_requests_init(void)
{
	nvg_request_cache = KMEM_CACHE(nvg_request, 0);
	return nvg_request_cache ? 0 : -ENOMEM;
}

void nvg_requests_exit(void)
{
	kmem_cache_destroy(nvg_request_cache);
}

void nvg_buf_free(struct nvg_buf *buf)
{
	u32 i;

	if (!buf->npieces) {
		kfree(buf->va);
	} else {
		if (buf->va)
			vunmap(buf->va);
		for (i = 0; i < buf->npieces; i++)
			__free_pages(buf->pages[i << NVG_PIECE_ORDER],
				     NVG_PIECE_ORDER);
		kvfree(buf->pages);
		kfree(buf->sg);
	}
	memset(buf, 0, sizeof(*buf));
}

static int nvg_buf_alloc_pieces(struct nvg_buf *buf, u32 size, gfp_t gfp)
{
	u32 n = DIV_ROUND_UP(size, NVG_PIECE);
	struct page *page;
	u32 i;

	buf->pages = kvcalloc(n << NVG_PIECE_ORDER, sizeof(*buf->pages),
			      GFP_KERNEL);
	buf->sg = kcalloc(n, sizeof(*buf->sg), GFP_KERNEL);
	if (!buf->pages || !buf->sg)
		goto fail;

	while (buf->npieces < n) {
		page = alloc_pages(gfp, NVG_PIECE_ORDER);
		if (!page)
			goto fail;
		for (i = 0; i < 1U << NVG_PIECE_ORDER; i++)
			buf->pages[(buf->npieces << NVG_PIECE_ORDER) + i] =
				page + i;
		buf->npieces++;
	}
	buf->va = vmap(buf->pages, n << NVG_PIECE_ORDER, VM_MAP, PAGE_KERNEL);
	if (!buf->va)
		goto fail;
	return 0;

fail:
	if (!buf->npieces) {
		kvfree(buf->pages);
		kfree(buf->sg);
	}
	nvg_buf_free(buf);
	return -ENOMEM;
}

/**
 * nvg_buf_alloc() - memory for a message or a reply
 * @buf: zero
 * @size: bytes
 * @gfp: GFP_KERNEL, and __GFP_ZERO where not every byte will be written
 *
 * Return: 0 or -ENOMEM.
 */
int nvg_buf_alloc(struct nvg_buf *buf, u32 size, gfp_t gfp)
{
	if (size > NVG_MAX_MESSAGE)
		return -ENOMEM;
	if (size > NVG_PIECE) {
		int ret = nvg_buf_alloc_pieces(buf, size, gfp);

		if (ret)
			return ret;
	} else {
		buf->va = kmalloc(size, gfp);
		if (!buf->va)
			return -ENOMEM;
	}
	buf->size = size;
	return 0;
}

/* The scatterlist of @len bytes from @at on. */
static struct scatterlist *nvg_buf_sg(struct nvg_buf *buf, u32 at, u32 len)
{
	u32 first = at / NVG_PIECE;
	u32 last = (at + len - 1) / NVG_PIECE;
	u32 i, part;

	if (!buf->npieces) {
		sg_init_one(&buf->one, buf->va + at, len);
		return &buf->one;
	}
	sg_init_table(buf->sg, last - first + 1);
	at %= NVG_PIECE;
	for (i = first; i <= last; i++) {
		part = min_t(u32, len, NVG_PIECE - at);
		sg_set_page(&buf->sg[i - first],
			    buf->pages[i << NVG_PIECE_ORDER], part, at);
		len -= part;
		at = 0;
	}
	return buf->sg;
}

/* The thread group that runs now, as the wire names it. */
void nvg_fill_caller(struct nvg_caller *who)
{
	who->tgid = cpu_to_le32(task_tgid_nr(current));
	who->euid = cpu_to_le32(from_kuid_munged(&init_user_ns,
						 current_euid()));
	who->start_ns = cpu_to_le64(current->group_leader->start_boottime);
}

static void nvg_request_work(struct work_struct *work)
{
	struct nvg_request *req = container_of(work, struct nvg_request, work);

	if (req->late && !req->error)
		req->late(req);
	nvg_request_free(req);
}

/**
 * nvg_request_new() - a request of the current process
 * @dev: the device
 * @epoch: the instance of it that the request makes sense to
 * @type: goes into the header, with caller and length
 * @out: bytes of the message, zeroed; 0 if its buffer comes later
 * @in: bytes of the longest reply; 0 likewise
 *
 * Return: the request or NULL.
 */
struct nvg_request *nvg_request_new(struct nvg_device *dev, u32 epoch,
				    enum nvg_type type, u32 out, u32 in)
{
	struct nvg_request *req;
	struct nvg_req *head;

	req = kmem_cache_zalloc(nvg_request_cache, GFP_KERNEL);
	if (!req)
		return NULL;

	req->dev = dev;
	req->epoch = epoch;
	init_completion(&req->done);
	INIT_WORK(&req->work, nvg_request_work);
	INIT_LIST_HEAD(&req->node);
	if (out) {
		if (nvg_buf_alloc(&req->out, out, GFP_KERNEL | __GFP_ZERO))
			goto fail;
		head = req->out.va;
		head->type = cpu_to_le32(type);
		head->len = cpu_to_le32(out);
		nvg_fill_caller(&head->caller);
	}
	if (in && nvg_buf_alloc(&req->in, in, GFP_KERNEL))
		goto fail;
	return req;

fail:
	nvg_request_free(req);
	return NULL;
}

/* In an interrupt only for small requests that keep no file. */
void nvg_request_free(struct nvg_request *req)
{
	if (!req)
		return;
	nvg_pin_put(req);
	while (req->nfiles)
		fput(req->files[--req->nfiles]);
	if (req->undo)
		nvg_request_free(req->undo);
	nvg_buf_free(&req->out);
	nvg_buf_free(&req->in);
	kmem_cache_free(nvg_request_cache, req);
}

/* The answer to a request that nobody waits for: only a failed ARM matters. */
static void nvg_answered(const struct nvg_request *req)
{
	const struct nvg_req *head = nvg_message(req);
	const struct nvg_resp *resp = req->in.va;

	if (head->type == cpu_to_le32(NVG_ARM) && !req->error &&
	    req->used >= sizeof(*resp) && resp->status)
		nvg_arm_failed(req->dev, le32_to_cpu(head->file),
			       le32_to_cpu(resp->status));
}

/* The device is done with @req, or never saw it. */
static void nvg_finish_locked(struct nvg_queue *q, struct nvg_request *req,
			      int error, u32 used)
{
	req->error = error;
	req->used = min(used, req->in.size);
	req->finished = true;
	if (req->urgent)
		q->urgent--;
	if (req == q->ping) {
		q->ping = NULL;
		q->missed = 0;
	}

	switch (req->owner) {
	case NVG_OWNER_CALLER:
		complete(&req->done);
		break;
	case NVG_OWNER_QUEUE:
		nvg_answered(req);
		nvg_request_free(req);
		break;
	case NVG_OWNER_WORK:
		queue_work(nvg_wq, &req->work);
		break;
	}
}

static int nvg_add_locked(struct nvg_queue *q, struct nvg_request *req)
{
	u32 pieces = max(req->out.npieces, 1U) + max(req->in.npieces, 1U);
	struct scatterlist *sgs[2];

	/* No chain is longer than the ring, indirect or not. */
	if (pieces > virtqueue_get_vring_size(q->vq))
		return -EMSGSIZE;
	sgs[0] = nvg_buf_sg(&req->out, req->message,
			    le32_to_cpu(((struct nvg_req *)nvg_message(req))->len));
	sgs[1] = nvg_buf_sg(&req->in, 0, req->in.size);
	return virtqueue_add_sgs(q->vq, sgs, 1, 1, req, GFP_ATOMIC);
}

/* Moves what waits into the ring. Returns whether to notify the device. */
static bool nvg_push_locked(struct nvg_queue *q)
{
	struct nvg_request *req;
	bool added = false;
	int ret;

	while (!list_empty(&q->pending)) {
		req = list_first_entry(&q->pending, struct nvg_request, node);
		if (q->vq->num_free <= NVG_PING_ROOM && req != q->ping &&
		    q->inflight)
			break;
		ret = nvg_add_locked(q, req);
		if ((ret == -ENOSPC || ret == -ENOMEM) && q->inflight)
			break;
		list_del_init(&req->node);
		req->queued = false;
		if (ret) {
			nvg_finish_locked(q, req, ret == -EIO ? -ENODEV : ret,
					  0);
		} else {
			q->inflight++;
			added = true;
		}
	}
	return added && virtqueue_kick_prepare(q->vq);
}

/*
 * Reaps, refills, and lets the device interrupt only while somebody sleeps.
 * Returns whether to notify the device.
 */
static bool nvg_service_locked(struct nvg_queue *q)
{
	struct nvg_request *req;
	bool kick = false;
	u32 used;

	do {
		while ((req = virtqueue_get_buf(q->vq, &used))) {
			q->inflight--;
			nvg_finish_locked(q, req, 0, used);
		}
		kick |= nvg_push_locked(q);
		if (!q->urgent && list_empty(&q->pending)) {
			if (q->cb_on)
				virtqueue_disable_cb(q->vq);
			WRITE_ONCE(q->cb_on, false);
			break;
		}
		nvg_queue_listen_locked(q);
	} while (virtqueue_poll(q->vq, q->seen));

	return kick;
}

/* Lets the device interrupt for whatever comes after what has been taken. */
void nvg_queue_listen_locked(struct nvg_queue *q)
{
	WRITE_ONCE(q->cb_on, true);
	WRITE_ONCE(q->seen, virtqueue_enable_cb_prepare(q->vq));
}

/* Whether an interrupt is not for this queue. Takes no lock. */
bool nvg_queue_is_idle(struct nvg_queue *q)
{
	struct virtqueue *vq;
	bool idle;

	rcu_read_lock();
	vq = READ_ONCE(q->vq);
	idle = !vq || !READ_ONCE(q->cb_on) ||
	       !virtqueue_poll(vq, READ_ONCE(q->seen));
	rcu_read_unlock();
	return idle;
}

/* Serves a queue; in any context. */
void nvg_queue_drain(struct nvg_queue *q)
{
	struct virtqueue *vq;
	unsigned long flags;
	bool kick = false;

	rcu_read_lock();
	spin_lock_irqsave(&q->lock, flags);
	vq = q->vq;
	if (vq)
		kick = q->events ? nvg_events_locked(q) : nvg_service_locked(q);
	spin_unlock_irqrestore(&q->lock, flags);
	if (kick)
		virtqueue_notify(vq);
	rcu_read_unlock();
}

static void nvg_submit(struct nvg_queue *q, struct nvg_request *req,
		       enum nvg_owner owner)
{
	struct virtqueue *vq;
	unsigned long flags;
	bool kick = false;

	rcu_read_lock();
	spin_lock_irqsave(&q->lock, flags);
	vq = q->vq;
	req->queue = q;
	req->owner = owner;
	if (req->urgent)
		q->urgent++;
	if (!vq || req->epoch != READ_ONCE(q->dev->epoch)) {
		nvg_finish_locked(q, req, -ENODEV, 0);
	} else {
		if (req == q->ping)
			list_add(&req->node, &q->pending);
		else
			list_add_tail(&req->node, &q->pending);
		req->queued = true;
		kick = nvg_service_locked(q);
	}
	spin_unlock_irqrestore(&q->lock, flags);
	if (kick)
		virtqueue_notify(vq);
	rcu_read_unlock();
}

/* Sends a request that nobody waits for. Never sleeps; @req is gone. */
void nvg_post(struct nvg_queue *q, struct nvg_request *req)
{
	nvg_submit(q, req, NVG_OWNER_QUEUE);
}

/**
 * nvg_ping() - ask for a sign of life
 * @q: the queue of the broker, whose answer takes no worker
 *
 * Nothing is asked while an answer is owed.
 *
 * Return: how often in a row this has found it owed.
 */
u32 nvg_ping(struct nvg_queue *q)
{
	struct nvg_request *req;
	u32 missed = 0;

	nvg_queue_drain(q);
	spin_lock_irq(&q->lock);
	req = q->ping;
	/* What the ring had no room for, nobody has been asked. */
	if (req && !req->queued)
		missed = ++q->missed;
	spin_unlock_irq(&q->lock);
	if (req)
		return missed;

	req = nvg_request_new(q->dev, q->dev->epoch, NVG_CLOCK,
			      sizeof(struct nvg_req),
			      sizeof(struct nvg_clock_resp));
	if (!req)
		return 0;
	req->urgent = true;
	spin_lock_irq(&q->lock);
	q->ping = req;
	spin_unlock_irq(&q->lock);
	nvg_post(q, req);
	return 0;
}

/* Looks for the answer for a short while: cheaper than an interrupt. */
static bool nvg_spin(struct nvg_queue *q, struct nvg_request *req)
{
	u64 end = ktime_get_ns() +
		  min(READ_ONCE(poll_us), 1000U) * (u64)NSEC_PER_USEC;
	unsigned long flags;
	bool kick;

	while (!completion_done(&req->done)) {
		if (need_resched() || ktime_get_ns() >= end)
			return false;
		rcu_read_lock();
		if (spin_trylock_irqsave(&q->lock, flags)) {
			struct virtqueue *vq = q->vq;

			kick = vq && nvg_service_locked(q);
			spin_unlock_irqrestore(&q->lock, flags);
			if (kick)
				virtqueue_notify(vq);
		}
		rcu_read_unlock();
		cpu_relax();
	}
	return true;
}

/* From now on the answer interrupts. */
static void nvg_make_urgent(struct nvg_queue *q, struct nvg_request *req)
{
	unsigned long flags;

	spin_lock_irqsave(&q->lock, flags);
	if (!req->finished) {
		req->urgent = true;
		q->urgent++;
	}
	spin_unlock_irqrestore(&q->lock, flags);
	nvg_queue_drain(q);
}

static int nvg_wait_polled(struct nvg_queue *q, struct nvg_request *req)
{
	ktime_t end = ktime_add_ms(ktime_get(), READ_ONCE(q->dev->ending) ?
				   NVG_END_TIMEOUT_MS : NVG_PROBE_TIMEOUT_MS);

	while (!completion_done(&req->done)) {
		if (fatal_signal_pending(current))
			return -EINTR;
		if (ktime_after(ktime_get(), end))
			return -ETIMEDOUT;
		fsleep(100);
		nvg_queue_drain(q);
	}
	return 0;
}

/*
 * Sleeps until the answer, a kill, or the end of the device's instance, which
 * waits for a second at most.
 */
static int nvg_wait(struct nvg_queue *q, struct nvg_request *req)
{
	long ret;

	do {
		ret = wait_for_completion_killable_timeout(&req->done, HZ);
	} while (!ret && req->epoch == READ_ONCE(q->dev->epoch) &&
		 !READ_ONCE(q->dev->ending));

	if (ret < 0)
		return -EINTR;
	return ret ? 0 : -ENODEV;
}

/* Gives @req away, unless it has finished meanwhile. */
static bool nvg_abandon(struct nvg_queue *q, struct nvg_request *req)
{
	unsigned long flags;
	bool mine = false;

	spin_lock_irqsave(&q->lock, flags);
	if (req->finished) {
		spin_unlock_irqrestore(&q->lock, flags);
		return false;
	}
	if (req->queued) {
		list_del_init(&req->node);
		if (req->urgent)
			q->urgent--;
		mine = true;
	}
	req->owner = NVG_OWNER_WORK;
	spin_unlock_irqrestore(&q->lock, flags);
	if (mine)
		nvg_request_free(req);
	return true;
}

/**
 * nvg_call() - send a request and wait for the answer
 * @q: the queue
 * @req: the request; set to NULL if the caller was killed or the backend is
 *       gone. It then stays in flight, and what it creates is closed.
 *
 * Return: 0 if there is a reply, or why not.
 */
int nvg_call(struct nvg_queue *q, struct nvg_request **req)
{
	struct nvg_request *r = *req;
	int ret;

	nvg_submit(q, r, NVG_OWNER_CALLER);
	if (!nvg_spin(q, r)) {
		nvg_make_urgent(q, r);
		if (READ_ONCE(q->dev->polled))
			ret = nvg_wait_polled(q, r);
		else
			ret = nvg_wait(q, r);
		if (ret && nvg_abandon(q, r)) {
			*req = NULL;
			return ret;
		}
	}
	return r->error;
}

/**
 * nvg_reply() - check an answered request's reply
 * @req: the request
 * @least: bytes it must have if its status is 0
 *
 * Return: 0, the device's errno, or -EPROTO.
 */
int nvg_reply(const struct nvg_request *req, u32 least)
{
	const struct nvg_resp *resp = req->in.va;
	u32 status;

	if (req->used < sizeof(*resp) ||
	    le32_to_cpu(resp->len) < sizeof(*resp) ||
	    le32_to_cpu(resp->len) > req->used)
		return -EPROTO;
	status = le32_to_cpu(resp->status);
	if (status > NVG_MAX_ERRNO)
		return -EPROTO;
	if (status)
		return -(int)status;
	return le32_to_cpu(resp->len) < least ? -EPROTO : 0;
}

/* No request goes in any more. The ring still is the device's. */
void nvg_queue_detach(struct nvg_queue *q)
{
	unsigned long flags;

	spin_lock_irqsave(&q->lock, flags);
	q->vq = NULL;
	spin_unlock_irqrestore(&q->lock, flags);
}

/* The device has let go of the ring: whatever is in it gets no answer. */
void nvg_queue_discard(struct nvg_queue *q, struct virtqueue *vq)
{
	struct nvg_request *req;
	unsigned long flags;
	void *token;

	spin_lock_irqsave(&q->lock, flags);
	while ((token = virtqueue_detach_unused_buf(vq)))
		if (!q->events)
			nvg_finish_locked(q, token, -ENODEV, 0);
	while (!list_empty(&q->pending)) {
		req = list_first_entry(&q->pending, struct nvg_request, node);
		list_del_init(&req->node);
		req->queued = false;
		nvg_finish_locked(q, req, -ENODEV, 0);
	}
	q->inflight = 0;
	q->cb_on = false;
	spin_unlock_irqrestore(&q->lock, flags);
}
