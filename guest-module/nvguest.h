/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Inside virtio_nvguest.ko.
 *
 * main.c     probe and remove, HELLO, the blobs
 * transport.c  configuration, queues, interrupts
 * queue.c    requests, rings, waiting
 * chardev.c  open, close, ioctl, processes
 * rules.c    the schema's tables
 * schema.c   by them from an ioctl to its message and back
 * window.c   mmap: placements and their life
 * pages.c    memory of programs that the host has
 * pretouch.c fresh memory of the card is touched in advance
 * touch.c    which pages of it, in which pieces
 * caching.c  whether the window is write-back for the guest
 * mtrr.c     what the MTRRs say of an address
 * poll.c     readiness, lost workers, the event queues
 * nodes.c    device nodes, /proc files, /sys/module gates
 * pci.c      the card's PCI identity
 *
 * Locks, outermost first: mmap_lock, nvg_device.procs_lock, nvg_queue.lock,
 * the xa_lock of nvg_device.files. nvg_file.lock and the xa_lock of
 * nvg_device.pins are innermost.
 */
#ifndef NVGUEST_H
#define NVGUEST_H

#include <linux/atomic.h>
#include <linux/completion.h>
#include <linux/fs.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mm_types.h>
#include <linux/mutex.h>
#include <linux/poll.h>
#include <linux/scatterlist.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "schema.h"
#include "touch.h"

#define NVG_MAX_QUEUES		(2 + 2 * NVG_MAX_SLOTS)
#define NVG_MAX_MESSAGE		(4U << 20)
#define NVG_MAX_BLOB		(16U << 20)

struct nvg_device;
struct nvg_pci;
struct nvg_pin;

struct nvg_queue {
	struct nvg_device *dev;
	u32 index;
	/*
	 * Protects everything below, the ring, and who owns a request. Taken
	 * in interrupts. A stop clears vq and waits for RCU before it frees it.
	 */
	spinlock_t lock;
	struct virtqueue *vq;		/* NULL: there is no device */
	struct list_head pending;	/* requests the ring had no room for */
	u32 inflight;			/* requests in the ring */
	u32 urgent;			/* requests whose end must interrupt */
	struct nvg_request *ping;	/* the one that is not answered */
	u32 missed;			/* beats that found it so */
	bool cb_on;			/* the device may interrupt */
	unsigned int seen;		/* what was, when that was asked for */
	struct nvg_event *events;	/* the buffers, if it is an event queue */
};

/* Memory of a message: one piece, or pieces with a contiguous view. */
struct nvg_buf {
	void *va;
	u32 size;
	u32 npieces;			/* 0: va is kmalloc()ed */
	struct page **pages;
	struct scatterlist *sg;
	struct scatterlist one;
};

enum nvg_owner {
	NVG_OWNER_CALLER,	/* who waits for it, and frees it */
	NVG_OWNER_QUEUE,	/* nobody waits: freed when answered */
	NVG_OWNER_WORK,		/* abandoned: undone, then freed, by a work */
};

/*
 * A message and its reply. It has one owner at a time and lies on nobody's
 * stack: whatever happens to a caller, the device's memory stays.
 */
struct nvg_request {
	struct nvg_device *dev;
	struct nvg_queue *queue;
	u32 epoch;			/* the device instance it is meant for */
	u32 message;			/* where it begins in out */
	struct nvg_buf out;
	struct nvg_buf in;
	struct completion done;
	struct work_struct work;
	/* Closes what the reply of an abandoned request created. */
	void (*late)(struct nvg_request *req);
	struct nvg_request *undo;	/* for late to send */
	struct nvg_pin *pin;		/* memory that it registers */

	/* Under the queue's lock until done: */
	struct list_head node;
	enum nvg_owner owner;
	bool queued;			/* on pending */
	bool finished;
	bool urgent;
	int error;			/* why there is no reply */
	u32 used;			/* bytes of the reply */

	u32 nfiles;			/* kept open until the answer */
	struct file *files[NVG_MAX_FDS + 1];
};

/* A guest process with files of ours. */
struct nvg_proc {
	struct list_head node;
	struct nvg_caller who;
	u32 users;			/* under procs_lock */
	u32 slot;			/* of its worker, or NVG_NO_SLOT; ditto */
};

#define NVG_FILE_ARMED	0		/* a READY will come unasked */
#define NVG_FILE_ASKED	1		/* an ARM has been sent before */
#define NVG_FILE_LOST	2		/* its worker, or the device, is gone */

struct nvg_file {
	struct kref ref;
	struct nvg_device *dev;
	struct nvg_proc *proc;
	struct nvg_queue *queue;	/* of the worker that opened it */
	struct nvg_request *close;	/* ready to send: close cannot fail */
	struct address_space mapping;	/* its own, so that it can be zapped */
	u32 id;				/* on the wire */
	u32 epoch;
	u32 lost_count;			/* the device's before OPEN */
	u8 kind;
	unsigned long flags;
	atomic_t ready;			/* poll bits that nobody took yet */
	wait_queue_head_t wait;
	spinlock_t lock;		/* protects placements and their unmap */
	struct list_head placements;
};

/* The touching of a placement, and when it is over. */
struct nvg_pretouch {
	struct work_struct work;
	struct nvg_touch touch;
	struct nvg_file *file;
	bool over;
};

/* A record of NODES. */
struct nvg_record {
	struct nvg_node node;
	char *name;
	const u8 *data;
	u32 data_len;
	int major;			/* CDEV: as registered */
};

struct nvg_device {
	struct kref ref;
	struct virtio_device *vdev;
	u32 epoch;			/* of this instance; a stop ends it */
	bool polled;			/* at start and end: no interrupts */
	bool ending;			/* no answer is waited for for long */
	bool silent;			/* the host did not say that it let go */
	const char *interrupts;		/* how they come, in words */
	u32 slots;
	u32 nqueues;
	struct nvg_queue *queues;

	u32 max_request;
	u32 max_response;
	u32 max_segments;
	u32 nodes_len;
	u32 schema_len;
	u64 window_base;
	u64 window_len;			/* 0: nothing can be mapped */
	bool untouchable;		/* what is in the window may be gone */

	struct nvg_rules rules;
	void *schema;
	void *nodes;
	struct nvg_record *records;
	u32 nrecords;

	struct class *class;
	struct list_head regions;
	struct list_head procfs;
	struct list_head gates;
	struct nvg_pci *pci;

	struct mutex procs_lock;	/* protects procs and their members */
	struct list_head procs;

	struct xarray files;		/* by wire file, under its xa_lock */
	u32 lost_count;			/* LOST events; under that xa_lock */
	struct xarray pins;		/* by registration, under its xa_lock */
	u32 next_pin;
	atomic_long_t pinned;		/* pages */
	struct work_struct lost_work;
	struct delayed_work beat;	/* is the backend there? */
};

extern struct workqueue_struct *nvg_wq;
extern struct workqueue_struct *nvg_pci_wq;
extern const struct file_operations nvg_fops;

/* main.c */
struct nvg_device *nvg_device_get(void);
void nvg_device_put(struct nvg_device *dev);

/* transport.c */
int nvg_read_config(struct virtio_device *vdev, struct nvg_config *config);
int nvg_start(struct nvg_device *dev);
void nvg_stop(struct nvg_device *dev);
void nvg_beat(struct work_struct *work);
void nvg_config_changed(struct virtio_device *vdev);

/* queue.c */
int nvg_requests_init(void);
void nvg_requests_exit(void);
int nvg_buf_alloc(struct nvg_buf *buf, u32 size, gfp_t gfp);
void nvg_buf_free(struct nvg_buf *buf);
struct nvg_request *nvg_request_new(struct nvg_device *dev, u32 epoch,
				    enum nvg_type type, u32 out, u32 in);
void nvg_request_free(struct nvg_request *req);
void nvg_fill_caller(struct nvg_caller *who);
void nvg_post(struct nvg_queue *q, struct nvg_request *req);
u32 nvg_ping(struct nvg_queue *q);
int nvg_call(struct nvg_queue *q, struct nvg_request **req);
int nvg_reply(const struct nvg_request *req, u32 least);
void nvg_queue_listen_locked(struct nvg_queue *q);
bool nvg_queue_is_idle(struct nvg_queue *q);
void nvg_queue_drain(struct nvg_queue *q);
void nvg_queue_detach(struct nvg_queue *q);
void nvg_queue_discard(struct nvg_queue *q, struct virtqueue *vq);

/* The message of a request, once its buffer is there. */
static inline void *nvg_message(const struct nvg_request *req)
{
	return req->out.va + req->message;
}

static inline struct nvg_queue *nvg_slot_queue(struct nvg_device *dev, u32 slot)
{
	if (slot >= dev->slots)
		return &dev->queues[NVG_QUEUE_CONTROL];
	return &dev->queues[NVG_QUEUE_SLOT(slot)];
}

/* chardev.c */
void nvg_file_put(struct nvg_file *file);

static inline bool nvg_file_lost(const struct nvg_file *file)
{
	return test_bit(NVG_FILE_LOST, &file->flags);
}

/* window.c */
int nvg_mmap(struct file *filp, struct vm_area_struct *vma);
void nvg_file_zap(struct nvg_file *file);

/* pages.c */
int nvg_pin(struct nvg_request *req, u32 file, u64 user, u32 npages,
	    u32 reply_at, struct nvg_pinned *pinned);
void nvg_pin_answered(struct nvg_request *req);
void nvg_pin_put(struct nvg_request *req);
void nvg_pin_released(struct nvg_device *dev, u32 file);
void nvg_pins_released(struct nvg_device *dev, u32 first, u32 last);

/* pretouch.c */
int nvg_pretouch_init(void);
void nvg_pretouch_exit(void);
void nvg_pretouch_prepare(struct nvg_pretouch *pre, struct nvg_file *file);
void nvg_pretouch_start(struct nvg_pretouch *pre, u64 base, u64 len);
void nvg_pretouch_stop(struct nvg_pretouch *pre);
void nvg_pretouch_stop_all(struct nvg_device *dev);

/* caching.c */
void nvg_check_caching(const struct nvg_device *dev);

/* poll.c */
__poll_t nvg_poll(struct file *filp, struct poll_table_struct *table);
void nvg_lost(struct nvg_device *dev, u32 first, u32 last);
void nvg_arm_failed(struct nvg_device *dev, u32 id, u32 status);
void nvg_lost_work(struct work_struct *work);
int nvg_events_post(struct nvg_queue *q);
bool nvg_events_locked(struct nvg_queue *q);

/* nodes.c */
int nvg_nodes_parse(struct nvg_device *dev);
int nvg_nodes_create(struct nvg_device *dev);
void nvg_nodes_remove(struct nvg_device *dev);
const struct nvg_record *nvg_nodes_find(const struct nvg_device *dev,
					unsigned int major, unsigned int minor);

/* pci.c */
int nvg_pci_add(struct nvg_device *dev, const struct nvg_record *rec);
void nvg_pci_remove(struct nvg_device *dev);

#endif
