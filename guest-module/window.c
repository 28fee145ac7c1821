// SPDX-License-Identifier: GPL-2.0-only
/*
 * mmap: the host's memory is placed in the window, and our page tables point
 * there. One MAP, any number of vmas (fork, split, mremap), one UNMAP, sent
 * once no page table reaches the range.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kref.h>
#include <linux/mm.h>
#include <linux/pfn.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "nvguest.h"

/* A range of the window, and the vmas that map it. */
struct nvg_placement {
	struct kref ref;		/* one for all vmas; one for each zap */
	refcount_t vmas;
	struct nvg_file *file;		/* the vmas hold it open */
	struct mm_struct *mm;		/* of the mmap() that made it */
	struct nvg_pretouch pretouch;
	bool synced;			/* with that mmap(); under file->lock */
	struct nvg_request *unmap;	/* ready to send; under file->lock */
	struct list_head node;		/* under file->lock */
};

static void nvg_placement_free(struct kref *ref)
{
	struct nvg_placement *place =
		container_of(ref, struct nvg_placement, ref);

	mmdrop(place->mm);
	kfree(place);
}

/*
 * Sends the one UNMAP: the range may be another's from then on, so nobody
 * touches it any more. That of a lost worker's placement goes to the broker.
 */
static void nvg_placement_unmap(struct nvg_placement *place)
{
	struct nvg_file *file = place->file;
	struct nvg_request *unmap;

	spin_lock(&file->lock);
	unmap = place->unmap;
	place->unmap = NULL;
	spin_unlock(&file->lock);

	nvg_pretouch_stop(&place->pretouch);
	if (unmap)
		nvg_post(nvg_file_lost(file) ?
			 &file->dev->queues[NVG_QUEUE_CONTROL] : file->queue,
			 unmap);
}

static void nvg_placement_put(struct nvg_placement *place)
{
	struct nvg_file *file = place->file;

	if (!refcount_dec_and_test(&place->vmas))
		return;

	nvg_placement_unmap(place);
	spin_lock(&file->lock);
	list_del(&place->node);
	spin_unlock(&file->lock);
	kref_put(&place->ref, nvg_placement_free);
}

static void nvg_vma_open(struct vm_area_struct *vma)
{
	struct nvg_placement *place = vma->vm_private_data;

	refcount_inc(&place->vmas);
}

static void nvg_vma_close(struct vm_area_struct *vma)
{
	nvg_placement_put(vma->vm_private_data);
}

static const struct vm_operations_struct nvg_vm_ops = {
	.open = nvg_vma_open,
	.close = nvg_vma_close,
};

/* A placement that is not synced yet, with a reference, or NULL. */
static struct nvg_placement *nvg_unsynced(struct nvg_file *file)
{
	struct nvg_placement *place;

	spin_lock(&file->lock);
	list_for_each_entry(place, &file->placements, node) {
		if (place->synced)
			continue;
		place->synced = true;
		kref_get(&place->ref);
		spin_unlock(&file->lock);
		return place;
	}
	spin_unlock(&file->lock);
	return NULL;
}

/*
 * An mmap() fills in page tables before its vma can be found by the file. Once
 * we have had its mmap_lock it is over, or it saw that the file is lost; and it
 * starts no touching any more.
 */
static void nvg_file_sync(struct nvg_file *file)
{
	struct nvg_placement *place;

	while ((place = nvg_unsynced(file))) {
		if (mmget_not_zero(place->mm)) {
			mmap_read_lock(place->mm);
			mmap_read_unlock(place->mm);
			mmput(place->mm);
		}
		nvg_pretouch_stop(&place->pretouch);
		kref_put(&place->ref, nvg_placement_free);
	}
}

/* A placement whose UNMAP is not sent yet, with a reference, or NULL. */
static struct nvg_placement *nvg_placed(struct nvg_file *file)
{
	struct nvg_placement *place;

	spin_lock(&file->lock);
	list_for_each_entry(place, &file->placements, node) {
		if (!place->unmap)
			continue;
		kref_get(&place->ref);
		spin_unlock(&file->lock);
		return place;
	}
	spin_unlock(&file->lock);
	return NULL;
}

/**
 * nvg_file_zap() - take every page of a lost file from all address spaces
 * @file: the file
 *
 * What its placements cover may be another's soon; whoever still touches it
 * gets SIGBUS.
 */
void nvg_file_zap(struct nvg_file *file)
{
	struct nvg_placement *place;

	nvg_file_sync(file);
	unmap_mapping_range(&file->mapping, 0, 0, 1);

	while ((place = nvg_placed(file))) {
		nvg_placement_unmap(place);
		kref_put(&place->ref, nvg_placement_free);
	}
}

static void nvg_fill_unmap(struct nvg_request *unmap, struct nvg_file *file,
			   const struct nvg_map_resp *resp)
{
	struct nvg_unmap *head = nvg_message(unmap);

	head->req.file = cpu_to_le32(file->id);
	head->placement = resp->placement;
}

/* The caller was killed: what its MAP placed goes again. */
static void nvg_map_late(struct nvg_request *req)
{
	struct nvg_file *file = req->files[0]->private_data;

	if (nvg_reply(req, sizeof(struct nvg_map_resp)))
		return;
	nvg_fill_unmap(req->undo, file, req->in.va);
	nvg_post(req->queue, req->undo);
	req->undo = NULL;
}

/* Asks for the placement. The UNMAP for it comes back in @unmap. */
static int nvg_map(struct file *filp, const struct vm_area_struct *vma,
		   struct nvg_map_resp *resp, struct nvg_request **unmap)
{
	struct nvg_file *file = filp->private_data;
	struct nvg_request *req;
	struct nvg_map *head;
	int ret;

	req = nvg_request_new(file->dev, file->epoch, NVG_MAP, sizeof(*head),
			      sizeof(*resp));
	if (!req)
		return -ENOMEM;
	req->undo = nvg_request_new(file->dev, file->epoch, NVG_UNMAP,
				    sizeof(struct nvg_unmap),
				    sizeof(struct nvg_resp));
	if (!req->undo) {
		ret = -ENOMEM;
		goto out;
	}
	req->late = nvg_map_late;
	req->files[req->nfiles++] = get_file(filp);

	head = nvg_message(req);
	head->req.file = cpu_to_le32(file->id);
	head->offset = cpu_to_le64((u64)vma->vm_pgoff << PAGE_SHIFT);
	head->length = cpu_to_le64(vma->vm_end - vma->vm_start);
	if (vma->vm_flags & VM_READ)
		head->prot |= cpu_to_le32(NVG_PROT_READ);
	if (vma->vm_flags & VM_WRITE)
		head->prot |= cpu_to_le32(NVG_PROT_WRITE);

	ret = nvg_call(file->queue, &req);
	if (!ret)
		ret = nvg_reply(req, sizeof(*resp));
	if (!ret) {
		memcpy(resp, req->in.va, sizeof(*resp));
		nvg_fill_unmap(req->undo, file, resp);
		*unmap = req->undo;
		req->undo = NULL;
	}
out:
	nvg_request_free(req);
	return ret;
}

static bool nvg_map_sound(const struct nvg_device *dev,
			  const struct nvg_map_resp *resp, u64 length)
{
	u64 offset = le64_to_cpu(resp->window_offset);
	u64 placed = le64_to_cpu(resp->length);

	return PAGE_ALIGNED(offset) && placed >= length &&
	       placed <= dev->window_len && offset <= dev->window_len - placed &&
	       resp->cache <= NVG_CACHE_UC &&
	       !(resp->flags & ~NVG_MAP_READ_ONLY) && !resp->reserved;
}

static int nvg_map_pages(struct vm_area_struct *vma,
			 struct nvg_placement *place,
			 const struct nvg_map_resp *resp)
{
	u64 base = place->file->dev->window_base +
		   le64_to_cpu(resp->window_offset);
	bool read_only = resp->flags & NVG_MAP_READ_ONLY;
	int ret;

	nvg_vm_flags(vma, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP,
		     read_only ? VM_WRITE | VM_MAYWRITE : 0);
	vma->vm_page_prot = vm_get_page_prot(vma->vm_flags);
	if (resp->cache == NVG_CACHE_WC)
		vma->vm_page_prot = pgprot_writecombine(vma->vm_page_prot);
	else if (resp->cache == NVG_CACHE_UC)
		vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);

	ret = io_remap_pfn_range(vma, vma->vm_start, PHYS_PFN(base),
				 vma->vm_end - vma->vm_start,
				 vma->vm_page_prot);
	if (ret)
		nvg_undo_remap(vma);
	else if (resp->cache == NVG_CACHE_WC)
		nvg_pretouch_start(&place->pretouch, base,
				   vma->vm_end - vma->vm_start);
	return ret;
}

int nvg_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct nvg_file *file = filp->private_data;
	struct nvg_placement *place;
	struct nvg_map_resp resp;
	int ret;

	if (nvg_file_lost(file) || !file->dev->window_len)
		return -ENODEV;
	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;

	place = kzalloc(sizeof(*place), GFP_KERNEL);
	if (!place)
		return -ENOMEM;
	ret = nvg_map(filp, vma, &resp, &place->unmap);
	if (ret) {
		kfree(place);
		return ret;
	}

	kref_init(&place->ref);
	refcount_set(&place->vmas, 1);
	place->file = file;
	nvg_pretouch_prepare(&place->pretouch, file);
	place->mm = current->mm;
	mmgrab(place->mm);
	spin_lock(&file->lock);
	list_add(&place->node, &file->placements);
	spin_unlock(&file->lock);

	if (nvg_file_lost(file))
		ret = -ENODEV;
	else if (!nvg_map_sound(file->dev, &resp, vma->vm_end - vma->vm_start))
		ret = -EPROTO;
	else
		ret = nvg_map_pages(vma, place, &resp);
	if (ret) {
		nvg_placement_put(place);
		return ret;
	}

	vma->vm_private_data = place;
	vma->vm_ops = &nvg_vm_ops;
	return 0;
}
