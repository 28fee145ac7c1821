// SPDX-License-Identifier: GPL-2.0-only
/*
 * The guest's half of nvguest: what NVIDIA's user-mode driver says to its
 * kernel driver goes over virtio to the host. nvguest.h has the map.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/slab.h>

#include "nvguest.h"

static unsigned int virtio_id = NVG_VIRTIO_ID;
module_param(virtio_id, uint, 0444);
MODULE_PARM_DESC(virtio_id, "Virtio device id to bind to");

struct workqueue_struct *nvg_wq;
struct workqueue_struct *nvg_pci_wq;	/* ordered: a card goes before the next */

/* Protects nvg_the_device: there is one in a guest, its majors being fixed. */
static DEFINE_MUTEX(nvg_device_lock);
static struct nvg_device *nvg_the_device;

/* The device with a reference, or NULL. */
struct nvg_device *nvg_device_get(void)
{
	struct nvg_device *dev;

	mutex_lock(&nvg_device_lock);
	dev = nvg_the_device;
	if (dev)
		kref_get(&dev->ref);
	mutex_unlock(&nvg_device_lock);
	return dev;
}

static void nvg_device_free(struct kref *ref)
{
	struct nvg_device *dev = container_of(ref, struct nvg_device, ref);
	u32 i;

	for (i = 0; i < dev->nrecords; i++)
		kfree(dev->records[i].name);
	kvfree(dev->records);
	kvfree(dev->nodes);
	kvfree(dev->schema);
	for (i = 0; i < dev->nqueues; i++)
		kfree(dev->queues[i].events);
	kfree(dev->queues);
	xa_destroy(&dev->files);
	xa_destroy(&dev->pins);
	kfree(dev);
}

void nvg_device_put(struct nvg_device *dev)
{
	kref_put(&dev->ref, nvg_device_free);
}

static int nvg_hello(struct nvg_device *dev)
{
	const struct nvg_hello_resp *resp;
	struct nvg_request *req;
	struct nvg_hello *head;
	int ret;

	req = nvg_request_new(dev, dev->epoch, NVG_HELLO, sizeof(*head),
			      sizeof(*resp));
	if (!req)
		return -ENOMEM;
	head = nvg_message(req);
	head->version = cpu_to_le32(NVG_VERSION);
	head->flags = cpu_to_le32(NVG_HELLO_FRESH);
	ret = nvg_call(&dev->queues[NVG_QUEUE_CONTROL], &req);
	if (!ret)
		ret = nvg_reply(req, sizeof(*resp));
	if (ret)
		goto out;

	resp = req->in.va;
	dev->max_request = min(le32_to_cpu(resp->max_request), NVG_MAX_MESSAGE);
	dev->max_response = min(le32_to_cpu(resp->max_response),
				NVG_MAX_MESSAGE);
	dev->max_segments = le32_to_cpu(resp->max_segments);
	dev->nodes_len = le32_to_cpu(resp->nodes_len);
	dev->schema_len = le32_to_cpu(resp->schema_len);
	dev->window_len = min(dev->window_len, le64_to_cpu(resp->window_size));
	if (le32_to_cpu(resp->version) != NVG_VERSION ||
	    dev->max_request < PAGE_SIZE || dev->max_response < PAGE_SIZE ||
	    dev->nodes_len > NVG_MAX_BLOB || dev->schema_len > NVG_MAX_BLOB)
		ret = -EPROTO;
	else
		pr_info("host driver %.*s, profile %.*s, capabilities %#x\n",
			(int)sizeof(resp->driver), resp->driver,
			(int)sizeof(resp->profile), resp->profile,
			le32_to_cpu(resp->caps));
out:
	nvg_request_free(req);
	return ret;
}

static int nvg_read_chunk(struct nvg_device *dev, enum nvg_type type, u8 *to,
			  u32 offset, u32 size)
{
	struct nvg_request *req;
	struct nvg_read *head;
	int ret;

	req = nvg_request_new(dev, dev->epoch, type, sizeof(*head),
			      sizeof(struct nvg_resp) + size);
	if (!req)
		return -ENOMEM;
	head = nvg_message(req);
	head->offset = cpu_to_le32(offset);
	head->size = cpu_to_le32(size);
	ret = nvg_call(&dev->queues[NVG_QUEUE_CONTROL], &req);
	if (!ret)
		ret = nvg_reply(req, sizeof(struct nvg_resp) + size);
	if (!ret)
		memcpy(to, req->in.va + sizeof(struct nvg_resp), size);
	nvg_request_free(req);
	return ret;
}

/* NODES or SCHEMA, chunk by chunk; an ERR_PTR on failure. */
static void *nvg_read_blob(struct nvg_device *dev, enum nvg_type type, u32 len)
{
	u32 chunk = min_t(u32, dev->max_response, SZ_32K) -
		    sizeof(struct nvg_resp);
	u8 *blob = kvmalloc(len ?: 1, GFP_KERNEL);
	u32 at, size;
	int ret;

	if (!blob)
		return ERR_PTR(-ENOMEM);
	for (at = 0; at < len; at += size) {
		size = min(len - at, chunk);
		ret = nvg_read_chunk(dev, type, blob + at, at, size);
		if (ret) {
			kvfree(blob);
			return ERR_PTR(ret);
		}
	}
	return blob;
}

/* The rules, checked. */
static int nvg_load_schema(struct nvg_device *dev)
{
	void *schema = nvg_read_blob(dev, NVG_SCHEMA, dev->schema_len);

	if (IS_ERR(schema))
		return PTR_ERR(schema);
	dev->schema = schema;
	return nvg_rules_init(&dev->rules, schema, dev->schema_len);
}

static int nvg_load_nodes(struct nvg_device *dev)
{
	void *nodes = nvg_read_blob(dev, NVG_NODES, dev->nodes_len);

	if (IS_ERR(nodes))
		return PTR_ERR(nodes);
	dev->nodes = nodes;
	return nvg_nodes_parse(dev);
}

static struct nvg_device *nvg_device_new(struct virtio_device *vdev, u32 slots)
{
	struct nvg_device *dev = kzalloc(sizeof(*dev), GFP_KERNEL);
	u32 i;

	if (!dev)
		return NULL;
	dev->queues = kcalloc(2 + 2 * slots, sizeof(*dev->queues), GFP_KERNEL);
	if (!dev->queues) {
		kfree(dev);
		return NULL;
	}
	for (i = 0; i < 2 + 2 * slots; i++) {
		dev->queues[i].dev = dev;
		dev->queues[i].index = i;
		spin_lock_init(&dev->queues[i].lock);
		INIT_LIST_HEAD(&dev->queues[i].pending);
	}
	kref_init(&dev->ref);
	dev->vdev = vdev;
	dev->slots = slots;
	mutex_init(&dev->procs_lock);
	INIT_LIST_HEAD(&dev->procs);
	INIT_LIST_HEAD(&dev->regions);
	INIT_LIST_HEAD(&dev->procfs);
	INIT_LIST_HEAD(&dev->gates);
	xa_init_flags(&dev->files, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&dev->pins, XA_FLAGS_LOCK_IRQ | XA_FLAGS_ALLOC1);
	INIT_WORK(&dev->lost_work, nvg_lost_work);
	INIT_DELAYED_WORK(&dev->beat, nvg_beat);
	return dev;
}

static void nvg_find_window(struct nvg_device *dev, u64 size)
{
	struct virtio_shm_region region;

	if (!size)
		return;
	if (!virtio_get_shm_region(dev->vdev, &region, NVG_SHM_WINDOW)) {
		pr_warn("the VMM gives no window: nothing can be mapped, programs that render or compute will fail\n");
		return;
	}
	dev->window_base = region.addr;
	dev->window_len = min(region.len, size);
	nvg_check_caching(dev);
}

static int nvg_claim(struct nvg_device *dev)
{
	int ret = 0;

	mutex_lock(&nvg_device_lock);
	if (nvg_the_device)
		ret = -EBUSY;
	else
		nvg_the_device = dev;
	mutex_unlock(&nvg_device_lock);
	return ret;
}

static void nvg_unclaim(struct nvg_device *dev)
{
	mutex_lock(&nvg_device_lock);
	if (nvg_the_device == dev)
		nvg_the_device = NULL;
	mutex_unlock(&nvg_device_lock);
}

static int nvg_probe(struct virtio_device *vdev)
{
	struct nvg_config config;
	struct nvg_device *dev;
	int ret;

	ret = nvg_read_config(vdev, &config);
	if (ret)
		return ret;
	dev = nvg_device_new(vdev, min_t(u32, le16_to_cpu(config.slots),
					 NVG_MAX_SLOTS));
	if (!dev)
		return -ENOMEM;
	vdev->priv = dev;
	nvg_find_window(dev, le64_to_cpu(config.window_size));

	ret = nvg_start(dev);
	if (ret)
		goto put;
	ret = nvg_hello(dev);
	if (!ret)
		ret = nvg_load_schema(dev);
	if (!ret)
		ret = nvg_load_nodes(dev);
	if (ret) {
		pr_err("the host's answers at start: error %d\n", ret);
		goto stop;
	}
	ret = nvg_claim(dev);
	if (ret) {
		pr_err("a second device; a guest has one\n");
		goto stop;
	}
	ret = nvg_nodes_create(dev);
	if (ret) {
		pr_err("the device nodes cannot be created: error %d\n", ret);
		goto unclaim;
	}
	WRITE_ONCE(dev->polled, false);
	queue_delayed_work(nvg_wq, &dev->beat, HZ);
	pr_info("interrupts: %s; %u worker slots; window %llu MiB\n",
		dev->interrupts, dev->slots, dev->window_len >> 20);
	return 0;

unclaim:
	nvg_unclaim(dev);
	nvg_nodes_remove(dev);
stop:
	nvg_stop(dev);
put:
	vdev->priv = NULL;
	nvg_device_put(dev);
	return ret;
}

/*
 * What programs still hold goes back now: the host cannot tell a reset from a
 * pause, and would keep it until the next instance says hello. It may be the
 * host's death that ends us: no map outlives it for the sake of an answer. The
 * core has the configuration's interrupt off by now, which may be the only one.
 */
static void nvg_end(struct nvg_device *dev)
{
	WRITE_ONCE(dev->ending, true);
	WRITE_ONCE(dev->polled, true);
	nvg_pretouch_stop_all(dev);
	nvg_lost(dev, 0, U32_MAX);
	if (xa_empty(&dev->files) && xa_empty(&dev->pins))
		goto stop;
	WRITE_ONCE(dev->silent, nvg_hello(dev));
	if (dev->silent)
		pr_warn("what open files hold stays with the host for now, and registered memory pinned\n");
	else
		nvg_pins_released(dev, 0, U32_MAX);
stop:
	nvg_stop(dev);
}

static void nvg_remove(struct virtio_device *vdev)
{
	struct nvg_device *dev = vdev->priv;

	nvg_unclaim(dev);
	nvg_nodes_remove(dev);
	nvg_end(dev);
	vdev->priv = NULL;
	nvg_device_put(dev);
}

/* Open files are lost, new ones work. */
static int nvg_freeze(struct virtio_device *vdev)
{
	nvg_end(vdev->priv);
	return 0;
}

static int nvg_restore(struct virtio_device *vdev)
{
	struct nvg_device *dev = vdev->priv;
	u32 nodes_len = dev->nodes_len, schema_len = dev->schema_len;
	int ret;

	WRITE_ONCE(dev->ending, false);
	ret = nvg_start(dev);
	if (ret)
		return ret;
	WRITE_ONCE(dev->untouchable, false);
	ret = nvg_hello(dev);
	if (!ret && (dev->nodes_len != nodes_len ||
		     dev->schema_len != schema_len))
		ret = -EPROTO;
	WRITE_ONCE(dev->polled, false);
	if (ret) {
		pr_err("the host's answers after a suspend: error %d\n", ret);
		nvg_stop(dev);
		return ret;
	}
	WRITE_ONCE(dev->silent, false);
	nvg_pins_released(dev, 0, U32_MAX);
	queue_delayed_work(nvg_wq, &dev->beat, HZ);
	return 0;
}

static const unsigned int nvg_features[] = {};

static struct virtio_device_id nvg_ids[] = {
	{ NVG_VIRTIO_ID, VIRTIO_DEV_ANY_ID },
	{ 0 },
};

static struct virtio_driver nvg_driver = {
	.feature_table = nvg_features,
	.feature_table_size = ARRAY_SIZE(nvg_features),
	.driver.name = KBUILD_MODNAME,
	.driver.owner = THIS_MODULE,
	.id_table = nvg_ids,
	.probe = nvg_probe,
	.remove = nvg_remove,
	.config_changed = nvg_config_changed,
	.freeze = pm_sleep_ptr(nvg_freeze),
	.restore = pm_sleep_ptr(nvg_restore),
};

static int __init nvg_init(void)
{
	int ret;

	ret = nvg_requests_init();
	if (ret)
		return ret;
	ret = nvg_pretouch_init();
	if (ret)
		goto requests;
	nvg_wq = alloc_workqueue("nvguest", WQ_UNBOUND, 0);
	if (!nvg_wq) {
		ret = -ENOMEM;
		goto pretouch;
	}
	nvg_pci_wq = alloc_ordered_workqueue("nvguest-pci", 0);
	if (!nvg_pci_wq) {
		ret = -ENOMEM;
		goto wq;
	}
	nvg_ids[0].device = virtio_id;
	ret = register_virtio_driver(&nvg_driver);
	if (ret)
		goto pci_wq;
	flush_workqueue(nvg_pci_wq);	/* who loads us finds the card */
	return 0;

pci_wq:
	destroy_workqueue(nvg_pci_wq);
wq:
	destroy_workqueue(nvg_wq);
pretouch:
	nvg_pretouch_exit();
requests:
	nvg_requests_exit();
	return ret;
}

static void __exit nvg_exit(void)
{
	unregister_virtio_driver(&nvg_driver);
	destroy_workqueue(nvg_pci_wq);
	destroy_workqueue(nvg_wq);
	nvg_pretouch_exit();
	nvg_requests_exit();
}

module_init(nvg_init);
module_exit(nvg_exit);

MODULE_DEVICE_TABLE(virtio, nvg_ids);
MODULE_DESCRIPTION("NVIDIA user-mode drivers in a guest, over virtio");
MODULE_AUTHOR("The nvguest authors");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
