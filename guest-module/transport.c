// SPDX-License-Identifier: GPL-2.0-only
/*
 * The virtio device under us: is it ours, its queues, how they interrupt, and
 * the end of an instance.
 *
 * Stock QEMU gives one MSI-X vector, for the configuration. Without callbacks
 * virtio-pci takes no more; every queue is then pointed at that vector too, and
 * the rings are drained when the "configuration changes".
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/virtio_pci.h>
#include <linux/virtio_ring.h>

#include "nvguest.h"

static unsigned int patience_s = 5;
module_param(patience_s, uint, 0644);
MODULE_PARM_DESC(patience_s, "Seconds without a sign of life until the backend is taken for gone (0: never)");

/* Where a capability of a modern virtio-pci device points to. */
struct nvg_cap {
	u32 offset;
	u32 length;
	u8 bar;
};

static struct pci_dev *nvg_pci_dev(struct virtio_device *vdev)
{
	struct device *parent = vdev->dev.parent;

	return parent && dev_is_pci(parent) ? to_pci_dev(parent) : NULL;
}

static bool nvg_find_cap(struct pci_dev *pdev, u8 type, struct nvg_cap *cap)
{
	u8 pos, found;

	for (pos = pci_find_capability(pdev, PCI_CAP_ID_VNDR); pos;
	     pos = pci_find_next_capability(pdev, pos, PCI_CAP_ID_VNDR)) {
		pci_read_config_byte(pdev, pos +
				     offsetof(struct virtio_pci_cap, cfg_type),
				     &found);
		if (found != type)
			continue;
		pci_read_config_byte(pdev, pos +
				     offsetof(struct virtio_pci_cap, bar),
				     &cap->bar);
		pci_read_config_dword(pdev, pos +
				      offsetof(struct virtio_pci_cap, offset),
				      &cap->offset);
		pci_read_config_dword(pdev, pos +
				      offsetof(struct virtio_pci_cap, length),
				      &cap->length);
		return cap->bar < PCI_STD_NUM_BARS;
	}
	return false;
}

/**
 * nvg_read_config() - is this device ours?
 * @vdev: the device
 * @config: filled
 *
 * The configuration is read once: each access is a round trip to the backend.
 *
 * Return: 0, or -ENODEV with one line that says why.
 */
int nvg_read_config(struct virtio_device *vdev, struct nvg_config *config)
{
	struct pci_dev *pdev = nvg_pci_dev(vdev);
	struct nvg_cap cap;
	u32 at;

	/* The transport does not survive a read past the end. */
	if (!vdev->config->get ||
	    (pdev && (!nvg_find_cap(pdev, VIRTIO_PCI_CAP_DEVICE_CFG, &cap) ||
		      cap.length < sizeof(*config)))) {
		pr_err("%s: virtio id %u is not nvguest: its configuration is too short\n",
		       dev_name(&vdev->dev), vdev->id.device);
		return -ENODEV;
	}
	for (at = 0; at < sizeof(*config); at += sizeof(u64))
		vdev->config->get(vdev, at, (u8 *)config + at, sizeof(u64));

	if (le32_to_cpu(config->magic) != NVG_MAGIC) {
		pr_err("%s: virtio id %u is not nvguest: magic %#x\n",
		       dev_name(&vdev->dev), vdev->id.device,
		       le32_to_cpu(config->magic));
		return -ENODEV;
	}
	if (le16_to_cpu(config->version) != NVG_VERSION ||
	    memchr_inv(config->reserved, 0, sizeof(config->reserved))) {
		pr_err("%s: the host speaks version %u, this module %u; install the module of the host's release\n",
		       dev_name(&vdev->dev), le16_to_cpu(config->version),
		       NVG_VERSION);
		return -ENODEV;
	}
	return 0;
}

/*
 * The one vector of stock QEMU belongs to the configuration: rings first. It
 * is for one or two of all of them.
 */
void nvg_config_changed(struct virtio_device *vdev)
{
	struct nvg_device *dev = vdev->priv;
	u32 i;

	for (i = 0; i < dev->nqueues; i++)
		if (!nvg_queue_is_idle(&dev->queues[i]))
			nvg_queue_drain(&dev->queues[i]);
}

static void nvg_vq_callback(struct virtqueue *vq)
{
	struct nvg_device *dev = vq->vdev->priv;

	nvg_queue_drain(&dev->queues[vq->index]);
}

/* Lets every queue interrupt through vector 0, which is the configuration's. */
static bool nvg_share_vector(struct nvg_device *dev)
{
	struct pci_dev *pdev = nvg_pci_dev(dev->vdev);
	struct virtio_pci_common_cfg __iomem *cfg;
	bool shared = true;
	struct nvg_cap cap;
	u32 i;

	if (!pdev || !pdev->msix_enabled ||
	    !nvg_find_cap(pdev, VIRTIO_PCI_CAP_COMMON_CFG, &cap) ||
	    cap.length < sizeof(*cfg))
		return false;
	cfg = pci_iomap_range(pdev, cap.bar, cap.offset, sizeof(*cfg));
	if (!cfg)
		return false;
	for (i = 0; i < dev->nqueues && shared; i++) {
		iowrite16(i, &cfg->queue_select);
		iowrite16(0, &cfg->queue_msix_vector);
		shared = !ioread16(&cfg->queue_msix_vector);
	}
	pci_iounmap(pdev, cfg);
	return shared;
}

/* A queue once enabled is so until a reset: back to where probe began. */
static int nvg_begin_again(struct virtio_device *vdev)
{
	int ret;

	vdev->config->del_vqs(vdev);
	virtio_reset_device(vdev);
	virtio_add_status(vdev, VIRTIO_CONFIG_S_ACKNOWLEDGE |
			  VIRTIO_CONFIG_S_DRIVER);
	ret = vdev->config->finalize_features(vdev);
	if (ret)
		return ret;
	virtio_add_status(vdev, VIRTIO_CONFIG_S_FEATURES_OK);
	return 0;
}

/* Finds the queues of dev->slots workers, with the best interrupts there are. */
static int nvg_find_queues(struct nvg_device *dev)
{
	static const char * const names[] = { "control", "events" };
	struct pci_dev *pdev = nvg_pci_dev(dev->vdev);
	struct virtqueue *vqs[NVG_MAX_QUEUES];
	const char *name[NVG_MAX_QUEUES];
	u32 n = 2 + 2 * dev->slots, i;
	int ret;

	for (i = 0; i < n; i++)
		name[i] = names[i & 1];
	dev->nqueues = n;

	if (pdev && pci_msix_vec_count(pdev) > (int)n) {
		dev->interrupts = "MSI-X, a vector for each queue";
		ret = nvg_find_vqs(dev->vdev, n, vqs, nvg_vq_callback, name);
	} else {
		dev->interrupts = "MSI-X, one vector for all queues";
		ret = nvg_find_vqs(dev->vdev, n, vqs, NULL, name);
		if (!ret && !nvg_share_vector(dev)) {
			dev->interrupts = pdev ? "INTx" : "the transport's";
			ret = nvg_begin_again(dev->vdev);
			if (!ret)
				ret = nvg_find_vqs(dev->vdev, n, vqs,
						   nvg_vq_callback, name);
		}
	}
	for (i = 0; i < n && !ret; i++)
		dev->queues[i].vq = vqs[i];
	return ret;
}

/**
 * nvg_start() - queues, event buffers, DRIVER_OK
 * @dev: the device; until polled is cleared again nothing interrupts
 *
 * Return: 0 or an error, with one line that says why.
 */
int nvg_start(struct nvg_device *dev)
{
	int ret;
	u32 i;

	WRITE_ONCE(dev->polled, true);
	/* A VMM may give fewer queues than there are workers. */
	while ((ret = nvg_find_queues(dev)) && dev->slots)
		dev->slots /= 2;
	if (ret) {
		pr_err("no queues: error %d; the VMM must give at least 2\n",
		       ret);
		return ret;
	}

	for (i = NVG_QUEUE_EVENTS; i < dev->nqueues; i += 2) {
		ret = nvg_events_post(&dev->queues[i]);
		if (ret) {
			nvg_stop(dev);
			return ret;
		}
	}
	virtio_device_ready(dev->vdev);
	for (i = NVG_QUEUE_EVENTS; i < dev->nqueues; i += 2) {
		virtqueue_kick(dev->queues[i].vq);
		nvg_queue_drain(&dev->queues[i]);
	}
	return 0;
}

/* No request goes out any more, and nobody waits for one. */
static void nvg_cut(struct nvg_device *dev)
{
	u32 i;

	WRITE_ONCE(dev->epoch, dev->epoch + 1);
	for (i = 0; i < dev->nqueues; i++)
		nvg_queue_detach(&dev->queues[i]);
}

/*
 * Once a second while a process has files. Stock QEMU does not tell that the
 * backend died: answers and events stop, and a reset or a look at the
 * configuration would end the VM. Beats are counted and not time, of which a
 * VM that was paused finds much gone.
 */
void nvg_beat(struct work_struct *work)
{
	struct nvg_device *dev = container_of(to_delayed_work(work),
					      struct nvg_device, beat);
	u32 patience = READ_ONCE(patience_s);

	if (patience && !list_empty_careful(&dev->procs) &&
	    nvg_ping(&dev->queues[NVG_QUEUE_CONTROL]) >= patience) {
		pr_err("the host's backend is gone: no sign of life for %u s. Open files are lost, new ones fail until the host replaces the device (nvguest recover) or starts the VM again\n",
		       patience);
		nvg_cut(dev);
		nvg_lost(dev, 0, U32_MAX);
		/* Its workers went with it, seconds ago. */
		nvg_pins_released(dev, 0, U32_MAX);
		return;
	}
	queue_delayed_work(nvg_wq, &dev->beat, HZ);
}

/*
 * Ends this instance: no request goes out any more, none in flight comes back,
 * and no page table reaches the window.
 */
void nvg_stop(struct nvg_device *dev)
{
	struct virtio_device *vdev = dev->vdev;
	struct virtqueue *vq, *next;

	cancel_delayed_work_sync(&dev->beat);
	nvg_cut(dev);
	virtio_reset_device(vdev);
	list_for_each_entry_safe(vq, next, &vdev->vqs, list)
		nvg_queue_discard(&dev->queues[vq->index], vq);

	nvg_lost(dev, 0, U32_MAX);
	flush_workqueue(nvg_wq);
	synchronize_rcu();	/* who still notifies a queue */
	vdev->config->del_vqs(vdev);
}
