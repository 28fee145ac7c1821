// SPDX-License-Identifier: GPL-2.0-only
/* The files of the device nodes, and the processes that opened them. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/compat.h>
#include <linux/file.h>
#include <linux/log2.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "nvguest.h"

#define NVG_SMALL_CALL	1024	/* most ioctls fit */

/* The process that runs now, known from now on. */
static struct nvg_proc *nvg_proc_get(struct nvg_device *dev)
{
	struct nvg_caller who = {};
	struct nvg_proc *proc;

	nvg_fill_caller(&who);
	mutex_lock(&dev->procs_lock);
	list_for_each_entry(proc, &dev->procs, node) {
		if (proc->who.tgid == who.tgid &&
		    proc->who.start_ns == who.start_ns)
			goto found;
	}
	proc = kzalloc(sizeof(*proc), GFP_KERNEL);
	if (!proc)
		goto out;
	proc->who = who;
	proc->slot = NVG_NO_SLOT;
	list_add(&proc->node, &dev->procs);
found:
	proc->users++;
out:
	mutex_unlock(&dev->procs_lock);
	return proc;
}

static void nvg_proc_put(struct nvg_device *dev, struct nvg_proc *proc)
{
	mutex_lock(&dev->procs_lock);
	if (!--proc->users) {
		list_del(&proc->node);
		kfree(proc);
	}
	mutex_unlock(&dev->procs_lock);
}

static void nvg_file_free(struct kref *ref)
{
	struct nvg_file *file = container_of(ref, struct nvg_file, ref);
	struct nvg_device *dev = file->dev;

	if (file->proc)
		nvg_proc_put(dev, file->proc);
	nvg_request_free(file->close);
	kfree(file);
	nvg_device_put(dev);
}

/* In process context. */
void nvg_file_put(struct nvg_file *file)
{
	kref_put(&file->ref, nvg_file_free);
}

static const struct address_space_operations nvg_aops = {};

/* Takes over the reference to @dev, also if it fails. */
static struct nvg_file *nvg_file_new(struct nvg_device *dev,
				     struct inode *inode, u8 kind)
{
	struct nvg_file *file;

	file = kzalloc(sizeof(*file), GFP_KERNEL);
	if (!file) {
		nvg_device_put(dev);
		return NULL;
	}
	kref_init(&file->ref);
	file->dev = dev;
	file->kind = kind;
	file->epoch = READ_ONCE(dev->epoch);
	file->lost_count = READ_ONCE(dev->lost_count);
	init_waitqueue_head(&file->wait);
	spin_lock_init(&file->lock);
	INIT_LIST_HEAD(&file->placements);
	address_space_init_once(&file->mapping);
	file->mapping.host = inode;
	file->mapping.a_ops = &nvg_aops;

	file->proc = nvg_proc_get(dev);
	if (file->proc)
		return file;
	nvg_file_put(file);
	return NULL;
}

static void nvg_fill_close(struct nvg_request *close, __le32 id)
{
	struct nvg_req *head = nvg_message(close);

	head->file = id;
}

/* The opener was killed: what its OPEN opened is closed. */
static void nvg_open_late(struct nvg_request *req)
{
	const struct nvg_open_resp *resp = req->in.va;
	struct nvg_queue *q = req->queue;

	if (nvg_reply(req, sizeof(*resp)))
		return;
	nvg_fill_close(req->undo, resp->file);
	if (q->index == NVG_QUEUE_CONTROL)
		q = nvg_slot_queue(req->dev, le32_to_cpu(resp->slot));
	nvg_post(q, req->undo);
	req->undo = NULL;
}

/* One OPEN on @q. On success the file has its id, queue and CLOSE. */
static int nvg_send_open(struct nvg_file *file, struct nvg_queue *q, u32 node,
			 u32 flags)
{
	struct nvg_device *dev = file->dev;
	const struct nvg_open_resp *resp;
	struct nvg_request *req;
	struct nvg_open *head;
	int ret;

	req = nvg_request_new(dev, file->epoch, NVG_OPEN, sizeof(*head),
			      sizeof(*resp));
	if (!req)
		return -ENOMEM;
	req->undo = nvg_request_new(dev, file->epoch, NVG_CLOSE,
				    sizeof(struct nvg_req),
				    sizeof(struct nvg_resp));
	if (!req->undo) {
		ret = -ENOMEM;
		goto out;
	}
	req->late = nvg_open_late;
	head = nvg_message(req);
	head->node = cpu_to_le32(node);
	head->flags = cpu_to_le32(flags);

	ret = nvg_call(q, &req);
	if (!ret)
		ret = nvg_reply(req, sizeof(*resp));
	if (ret)
		goto out;

	resp = req->in.va;
	file->id = le32_to_cpu(resp->file);
	if (!NVG_FILE_NUMBER(file->id) || file->id > INT_MAX) {
		ret = -EPROTO;
		goto out;
	}
	mutex_lock(&dev->procs_lock);
	file->proc->slot = le32_to_cpu(resp->slot);
	mutex_unlock(&dev->procs_lock);
	file->queue = nvg_slot_queue(dev, le32_to_cpu(resp->slot));
	nvg_fill_close(req->undo, resp->file);
	file->close = req->undo;
	req->undo = NULL;
out:
	nvg_request_free(req);
	return ret;
}

/* Opens on the host: through the process's worker, if it has one already. */
static int nvg_file_open(struct nvg_file *file, u32 node, u32 flags)
{
	struct nvg_queue *control = &file->dev->queues[NVG_QUEUE_CONTROL];
	struct nvg_device *dev = file->dev;
	struct nvg_queue *q;
	u32 slot;
	int ret;

	mutex_lock(&dev->procs_lock);
	slot = file->proc->slot;
	mutex_unlock(&dev->procs_lock);

	q = nvg_slot_queue(dev, slot);
	ret = nvg_send_open(file, q, node, flags);
	if (ret == -ENODEV && q != control) {
		/* The worker is gone. The broker starts another. */
		mutex_lock(&dev->procs_lock);
		if (file->proc->slot == slot)
			file->proc->slot = NVG_NO_SLOT;
		mutex_unlock(&dev->procs_lock);
		ret = nvg_send_open(file, control, node, flags);
	}
	if (ret)
		return ret;

	ret = xa_insert_irq(&dev->files, file->id, file, GFP_KERNEL);
	if (ret == -EBUSY)
		return -EPROTO;		/* another's: not ours to close */
	if (ret) {
		nvg_post(file->queue, file->close);
		file->close = NULL;
		return ret;
	}
	/* The device may have been stopped since, without seeing this file. */
	if (file->epoch != READ_ONCE(dev->epoch))
		set_bit(NVG_FILE_LOST, &file->flags);
	return 0;
}

static int nvg_open(struct inode *inode, struct file *filp)
{
	struct nvg_device *dev = nvg_device_get();
	const struct nvg_record *rec;
	struct nvg_file *file;
	int ret;

	if (!dev)
		return -ENODEV;
	rec = nvg_nodes_find(dev, imajor(inode), iminor(inode));
	if (!rec) {
		nvg_device_put(dev);
		return -ENXIO;
	}
	file = nvg_file_new(dev, inode, rec->node.file_kind);
	if (!file)
		return -ENOMEM;

	ret = nvg_file_open(file, rec - dev->records,
			    filp->f_flags & (O_ACCMODE | O_NONBLOCK));
	if (ret) {
		nvg_file_put(file);
		return ret;
	}
	filp->private_data = file;
	filp->f_mapping = &file->mapping;
	return nonseekable_open(inode, filp);
}

static int nvg_release(struct inode *inode, struct file *filp)
{
	struct nvg_file *file = filp->private_data;

	xa_erase_irq(&file->dev->files, file->id);
	if (!nvg_file_lost(file)) {
		nvg_post(file->queue, file->close);
		file->close = NULL;
	}
	nvg_file_put(file);
	return 0;
}

/* An ioctl under way. */
struct nvg_call_state {
	struct nvg_gather g;
	struct nvg_request *req;
	struct nvg_device *dev;
};

static struct nvg_call_state *nvg_state(struct nvg_gather *g)
{
	return container_of(g, struct nvg_call_state, g);
}

static int nvg_user_read(struct nvg_gather *g, void *to, u64 from, u32 len)
{
	return copy_from_user(to, u64_to_user_ptr(from), len) ? -EFAULT : 0;
}

static int nvg_user_write(struct nvg_gather *g, u64 to, const void *from,
			  u32 len)
{
	return copy_to_user(u64_to_user_ptr(to), from, len) ? -EFAULT : 0;
}

static int nvg_grow(struct nvg_gather *g, u32 size)
{
	struct nvg_request *req = nvg_state(g)->req;
	struct nvg_buf buf = {};
	int ret;

	size = roundup_pow_of_two(max_t(u32, size, NVG_SMALL_CALL));
	ret = nvg_buf_alloc(&buf, size, GFP_KERNEL);
	if (ret)
		return ret;
	if (g->used)
		memcpy(buf.va, g->buf, g->used);
	nvg_buf_free(&req->out);
	req->out = buf;
	g->buf = buf.va;
	g->size = size;
	return 0;
}

/* The file stays open until the call is answered. */
static int nvg_named_file(struct nvg_gather *g, int fd, u32 *id)
{
	struct nvg_request *req = nvg_state(g)->req;
	struct file *filp = fget(fd);
	struct nvg_file *file;
	int ret = -EBADF;

	if (!filp)
		return -EBADF;
	if (filp->f_op == &nvg_fops) {
		file = filp->private_data;
		if (file->dev == nvg_state(g)->dev)
			ret = nvg_file_lost(file) ? -ENODEV : 0;
	}
	if (ret || req->nfiles == ARRAY_SIZE(req->files)) {
		fput(filp);
		return ret ?: -EINVAL;
	}
	req->files[req->nfiles++] = filp;
	*id = file->id;
	return 0;
}

static int nvg_pin_named(struct nvg_gather *g, u64 user, u32 npages,
			 struct nvg_pinned *pinned)
{
	struct nvg_request *req = nvg_state(g)->req;
	struct nvg_file *file = req->files[0]->private_data;

	return nvg_pin(req, file->id, user, npages, g->reply_len, pinned);
}

static const struct nvg_gather_ops nvg_gather_ops = {
	.read = nvg_user_read,
	.write = nvg_user_write,
	.grow = nvg_grow,
	.file = nvg_named_file,
	.pin = nvg_pin_named,
};

static int nvg_send_ioctl(struct nvg_call_state *call, struct nvg_file *file)
{
	struct nvg_request *req = call->req;
	struct nvg_req *head;
	int ret;

	ret = nvg_buf_alloc(&req->in, call->g.reply_len, GFP_KERNEL);
	if (ret)
		return ret;
	req->message = call->g.start;
	head = nvg_message(req);
	head->file = cpu_to_le32(file->id);
	nvg_fill_caller(&head->caller);

	req->late = nvg_pin_answered;
	ret = nvg_call(file->queue, &call->req);
	if (ret)
		return ret;
	nvg_pin_answered(req);
	return nvg_scatter_reply(&call->g, req->in.va, req->used);
}

static long nvg_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	struct nvg_file *file = filp->private_data;
	struct nvg_device *dev = file->dev;
	struct nvg_call_state *call;
	long ret = -ENOMEM;

	if (nvg_file_lost(file))
		return -ENODEV;
	if (file->kind == NVG_FILE_CAP)
		return -ENOTTY;

	call = kzalloc(sizeof(*call), GFP_KERNEL);
	if (!call)
		return -ENOMEM;
	call->dev = dev;
	call->g.ops = &nvg_gather_ops;
	call->g.rules = &dev->rules;
	call->g.max_request = dev->max_request;
	call->g.max_response = dev->max_response;
	call->g.max_segments = dev->max_segments;
	call->req = nvg_request_new(dev, file->epoch, NVG_IOCTL, 0, 0);
	if (!call->req)
		goto out;
	call->req->files[call->req->nfiles++] = get_file(filp);

	ret = nvg_gather_call(&call->g, file->kind, cmd, arg);
	if (!ret)
		ret = nvg_send_ioctl(call, file);
	nvg_request_free(call->req);
out:
	kfree(call);
	return ret;
}

const struct file_operations nvg_fops = {
	.owner = THIS_MODULE,
	.open = nvg_open,
	.release = nvg_release,
	.unlocked_ioctl = nvg_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = nvg_mmap,
	.poll = nvg_poll,
};
