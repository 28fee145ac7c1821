/* SPDX-License-Identifier: GPL-2.0-only */
/* What differs between the supported kernels, 6.1 and later. Nowhere else. */
#ifndef NVG_COMPAT_H
#define NVG_COMPAT_H

#include <linux/device/class.h>
#include <linux/mm.h>
#include <linux/version.h>
#include <linux/virtio_config.h>

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
#include <linux/unaligned.h>
#else
#include <asm/unaligned.h>
#endif

static inline int nvg_find_vqs(struct virtio_device *vdev, unsigned int n,
			       struct virtqueue **vqs, vq_callback_t *callback,
			       const char *const *names)
{
	int ret = -ENOMEM;
	unsigned int i;
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
	struct virtqueue_info *info;

	info = kcalloc(n, sizeof(*info), GFP_KERNEL);
	if (info) {
		for (i = 0; i < n; i++) {
			info[i].name = names[i];
			info[i].callback = callback;
		}
		ret = virtio_find_vqs(vdev, n, vqs, info, NULL);
		kfree(info);
	}
#else
	vq_callback_t **callbacks;

	callbacks = kcalloc(n, sizeof(*callbacks), GFP_KERNEL);
	if (callbacks) {
		for (i = 0; i < n; i++)
			callbacks[i] = callback;
		ret = virtio_find_vqs(vdev, n, vqs, callbacks, names, NULL);
		kfree(callbacks);
	}
#endif
	return ret;
}

static inline struct class *nvg_class_create(const char *name)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
	return class_create(name);
#else
	return class_create(THIS_MODULE, name);
#endif
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
typedef const struct device nvg_devnode_device;
#else
typedef struct device nvg_devnode_device;
#endif

static inline void nvg_vm_flags(struct vm_area_struct *vma, unsigned long set,
				unsigned long clear)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_mod(vma, set, clear);
#else
	vma->vm_flags = (vma->vm_flags | set) & ~clear;
#endif
}

/* Newer kernels undo a failed remap_pfn_range() themselves. */
static inline void nvg_undo_remap(struct vm_area_struct *vma)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 12, 0)
	zap_vma_ptes(vma, vma->vm_start, vma->vm_end - vma->vm_start);
#endif
}

#endif
