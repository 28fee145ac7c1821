// SPDX-License-Identifier: GPL-2.0-only
/*
 * What NVIDIA's user mode finds: device nodes under the majors' own names, the
 * /proc files, the /sys/module gates. NODES says what there is; a node is
 * essential, the rest is not and may fail with a warning.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/ctype.h>
#include <linux/device.h>
#include <linux/kdev_t.h>
#include <linux/kobject.h>
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/slab.h>
#include <linux/sysfs.h>

#include "nvguest.h"

#define NVG_MAX_NAME	255
#define NVG_PROC_TOP	"driver/"	/* the kernel's own; ours is below */

/* Character device numbers held under one name. */
struct nvg_region {
	struct list_head node;
	const char *name;
	unsigned int major;
	unsigned int first;
	unsigned int count;
};

/* A directory or file under /proc. */
struct nvg_proc_entry {
	struct list_head node;
	char name[];
};

/* A directory under /sys/module that looks like a live module's. */
struct nvg_gate {
	struct list_head node;
	/* A real one, because the kernel takes its siblings for such. */
	struct module_kobject mkobj;
	const struct nvg_record *rec;
};

/* Nothing but plain relative names reaches the kernel's name spaces. */
static bool nvg_name_sound(const char *name, u32 len)
{
	u32 i;

	if (!len || len > NVG_MAX_NAME)
		return false;
	for (i = 0; i < len; i++) {
		bool start = !i || name[i - 1] == '/';

		if (!isalnum(name[i]) && !strchr("-_.:/", name[i]))
			return false;
		if (start && (name[i] == '/' || name[i] == '.'))
			return false;
	}
	return name[len - 1] != '/' && !memchr(name, 0, len);
}

/* One record at @at. Returns the place of the next, or -EPROTO. */
static int nvg_record_parse(struct nvg_record *rec, const u8 *blob, u32 len,
			    u32 at)
{
	u32 name_len, data_len;

	if (len - at < sizeof(rec->node))
		return -EPROTO;
	memcpy(&rec->node, blob + at, sizeof(rec->node));
	at += sizeof(rec->node);

	name_len = le32_to_cpu(rec->node.name_len);
	data_len = le32_to_cpu(rec->node.data_len);
	if (name_len > NVG_MAX_NAME || ALIGN(name_len, 8) > len - at ||
	    !nvg_name_sound(blob + at, name_len))
		return -EPROTO;
	rec->name = kmemdup_nul(blob + at, name_len, GFP_KERNEL);
	if (!rec->name)
		return -ENOMEM;
	at += ALIGN(name_len, 8);

	if (data_len > len - at || ALIGN(data_len, 8) > len - at)
		return -EPROTO;
	rec->data = blob + at;
	rec->data_len = data_len;
	at += ALIGN(data_len, 8);

	if (rec->node.reserved[0] || rec->node.reserved[1] ||
	    rec->node.reserved[2])
		return -EPROTO;
	switch (le16_to_cpu(rec->node.kind)) {
	case NVG_NODE_CDEV:
		if (rec->node.file_kind >= NVG_FILE_KINDS ||
		    le32_to_cpu(rec->node.major) > MINORMASK ||
		    le32_to_cpu(rec->node.minor) > MINORMASK ||
		    !nvg_name_sound(rec->data, data_len))
			return -EPROTO;
		return at;
	case NVG_NODE_PROC:
	case NVG_NODE_MODULE:
	case NVG_NODE_PCI:
		return at;
	default:
		return -EPROTO;
	}
}

/**
 * nvg_nodes_parse() - check NODES and find its records
 * @dev: with the blob in nodes; it must stay there
 *
 * Return: 0, -EPROTO or -ENOMEM. The device keeps the records in either case.
 */
int nvg_nodes_parse(struct nvg_device *dev)
{
	u32 max = dev->nodes_len / sizeof(struct nvg_node);
	int at = 0;

	dev->records = kvcalloc(max ?: 1, sizeof(*dev->records), GFP_KERNEL);
	if (!dev->records)
		return -ENOMEM;
	while (at < dev->nodes_len) {
		at = nvg_record_parse(&dev->records[dev->nrecords++],
				      dev->nodes, dev->nodes_len, at);
		if (at < 0)
			return at;
	}
	return 0;
}

static bool nvg_is(const struct nvg_record *rec, enum nvg_node_kind kind)
{
	return le16_to_cpu(rec->node.kind) == kind;
}

/* The CDEV record of a device number. */
const struct nvg_record *nvg_nodes_find(const struct nvg_device *dev,
					unsigned int major, unsigned int minor)
{
	const struct nvg_record *rec;
	u32 i;

	for (i = 0; i < dev->nrecords; i++) {
		rec = &dev->records[i];
		if (nvg_is(rec, NVG_NODE_CDEV) && rec->major == major &&
		    le32_to_cpu(rec->node.minor) == minor)
			return rec;
	}
	return NULL;
}

static bool nvg_same_major(const struct nvg_record *a,
			   const struct nvg_record *b)
{
	return nvg_is(b, NVG_NODE_CDEV) && a->node.major == b->node.major &&
	       a->data_len == b->data_len &&
	       !memcmp(a->data, b->data, a->data_len);
}

/* Registers the numbers of all nodes that share @rec's major and its name. */
static int nvg_region_add(struct nvg_device *dev, struct nvg_record *rec)
{
	u32 first = le32_to_cpu(rec->node.minor), last = first, i, minor;
	struct nvg_region *region;
	int major;

	for (i = 0; i < dev->nrecords; i++) {
		if (!nvg_same_major(rec, &dev->records[i]))
			continue;
		minor = le32_to_cpu(dev->records[i].node.minor);
		first = min(first, minor);
		last = max(last, minor);
	}

	region = kzalloc(sizeof(*region), GFP_KERNEL);
	if (!region)
		return -ENOMEM;
	region->name = kmemdup_nul(rec->data, rec->data_len, GFP_KERNEL);
	if (!region->name) {
		kfree(region);
		return -ENOMEM;
	}
	region->first = first;
	region->count = last - first + 1;
	region->major = le32_to_cpu(rec->node.major);
	major = __register_chrdev(region->major, region->first, region->count,
				  region->name, &nvg_fops);
	if (major < 0) {
		pr_err("major %u (%s) is taken: error %d; unload the driver that has it\n",
		       region->major, region->name, major);
		kfree(region->name);
		kfree(region);
		return major;
	}
	if (!region->major)
		region->major = major;
	list_add(&region->node, &dev->regions);

	for (i = 0; i < dev->nrecords; i++)
		if (nvg_same_major(rec, &dev->records[i]))
			dev->records[i].major = region->major;
	return 0;
}

static int nvg_cdev_add(struct nvg_device *dev, struct nvg_record *rec)
{
	struct device *node;
	int ret;

	if (!rec->major) {
		ret = nvg_region_add(dev, rec);
		if (ret)
			return ret;
	}
	/* A '/' in the name becomes a directory again in /dev. */
	node = device_create(dev->class, NULL,
			     MKDEV(rec->major, le32_to_cpu(rec->node.minor)),
			     rec, "%s", rec->name);
	return PTR_ERR_OR_ZERO(node);
}

static char *nvg_devnode(nvg_devnode_device *node, umode_t *mode)
{
	const struct nvg_record *rec = dev_get_drvdata(node);

	if (mode && rec)
		*mode = le16_to_cpu(rec->node.mode) & 0666;
	return NULL;
}

static ssize_t nvg_proc_read(struct file *filp, char __user *to, size_t n,
			     loff_t *pos)
{
	const struct nvg_record *rec = pde_data(file_inode(filp));

	return simple_read_from_buffer(to, n, pos, rec->data, rec->data_len);
}

static const struct proc_ops nvg_proc_ops = {
	.proc_read = nvg_proc_read,
	.proc_lseek = default_llseek,
};

/* Remembers an entry, the newest first; NULL if it is known or there is no memory. */
static struct nvg_proc_entry *nvg_proc_remember(struct nvg_device *dev,
						const char *name, size_t len)
{
	struct nvg_proc_entry *entry;

	list_for_each_entry(entry, &dev->procfs, node)
		if (strlen(entry->name) == len && !memcmp(entry->name, name, len))
			return NULL;

	entry = kzalloc(sizeof(*entry) + len + 1, GFP_KERNEL);
	if (entry) {
		memcpy(entry->name, name, len);
		list_add(&entry->node, &dev->procfs);
	}
	return entry;
}

static int nvg_procfile_add(struct nvg_device *dev,
			    const struct nvg_record *rec)
{
	const char *next = rec->name + strlen(NVG_PROC_TOP);
	struct nvg_proc_entry *entry;

	if (strncmp(rec->name, NVG_PROC_TOP, strlen(NVG_PROC_TOP)))
		return -EINVAL;

	while ((next = strchr(next, '/'))) {
		entry = nvg_proc_remember(dev, rec->name, next - rec->name);
		next++;
		if (entry && !proc_mkdir(entry->name, NULL))
			goto fail;
	}
	entry = nvg_proc_remember(dev, rec->name, strlen(rec->name));
	if (!entry)
		return -EEXIST;
	if (!proc_create_data(entry->name,
			      S_IFREG | (le16_to_cpu(rec->node.mode) & 0444),
			      NULL, &nvg_proc_ops, (void *)rec))
		goto fail;
	return 0;

fail:
	list_del(&entry->node);
	kfree(entry);
	return -ENOMEM;
}

static struct nvg_gate *nvg_to_gate(struct kobject *kobj)
{
	return container_of(kobj, struct nvg_gate, mkobj.kobj);
}

static ssize_t nvg_initstate_show(struct kobject *kobj,
				  struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "live\n");
}

static ssize_t nvg_version_show(struct kobject *kobj,
				struct kobj_attribute *attr, char *buf)
{
	const struct nvg_record *rec = nvg_to_gate(kobj)->rec;

	return sysfs_emit(buf, "%.*s\n", (int)rec->data_len, rec->data);
}

static struct kobj_attribute nvg_initstate =
	__ATTR(initstate, 0444, nvg_initstate_show, NULL);
static struct kobj_attribute nvg_version =
	__ATTR(version, 0444, nvg_version_show, NULL);

static struct attribute *nvg_gate_attrs[] = {
	&nvg_initstate.attr,
	&nvg_version.attr,
	NULL
};

static umode_t nvg_gate_visible(struct kobject *kobj, struct attribute *attr,
				int i)
{
	if (attr == &nvg_version.attr && !nvg_to_gate(kobj)->rec->data_len)
		return 0;
	return attr->mode;
}

static const struct attribute_group nvg_gate_group = {
	.attrs = nvg_gate_attrs,
	.is_visible = nvg_gate_visible,
};

static const struct attribute_group *nvg_gate_groups[] = {
	&nvg_gate_group,
	NULL
};

static void nvg_gate_release(struct kobject *kobj)
{
	kfree(nvg_to_gate(kobj));
}

static const struct kobj_type nvg_gate_type = {
	.release = nvg_gate_release,
	.sysfs_ops = &kobj_sysfs_ops,
	.default_groups = nvg_gate_groups,
};

static int nvg_gate_add(struct nvg_device *dev, const struct nvg_record *rec)
{
	struct kset *modules = THIS_MODULE->mkobj.kobj.kset;
	struct kobject *there;
	struct nvg_gate *gate;
	int ret;

	if (strchr(rec->name, '/') || rec->data_len > 64)
		return -EINVAL;
	there = kset_find_obj(modules, rec->name);
	if (there) {
		kobject_put(there);
		return 0;
	}
	gate = kzalloc(sizeof(*gate), GFP_KERNEL);
	if (!gate)
		return -ENOMEM;
	gate->rec = rec;
	gate->mkobj.kobj.kset = modules;
	ret = kobject_init_and_add(&gate->mkobj.kobj, &nvg_gate_type, NULL,
				   "%s", rec->name);
	if (ret) {
		kobject_put(&gate->mkobj.kobj);
		return ret;
	}
	list_add(&gate->node, &dev->gates);
	return 0;
}

/**
 * nvg_nodes_create() - create what NODES names
 * @dev: parsed
 *
 * Return: 0, or why a device node could not be created; what was created is
 * then still to be removed.
 */
int nvg_nodes_create(struct nvg_device *dev)
{
	struct nvg_record *rec;
	int ret;
	u32 i;

	dev->class = nvg_class_create("nvidia");
	if (IS_ERR(dev->class)) {
		ret = PTR_ERR(dev->class);
		dev->class = NULL;
		return ret;
	}
	dev->class->devnode = nvg_devnode;

	for (i = 0; i < dev->nrecords; i++) {
		rec = &dev->records[i];
		ret = 0;
		switch (le16_to_cpu(rec->node.kind)) {
		case NVG_NODE_CDEV:
			ret = nvg_cdev_add(dev, rec);
			if (ret)
				return ret;
			break;
		case NVG_NODE_PROC:
			ret = nvg_procfile_add(dev, rec);
			break;
		case NVG_NODE_MODULE:
			ret = nvg_gate_add(dev, rec);
			break;
		case NVG_NODE_PCI:
			ret = nvg_pci_add(dev, rec);
			break;
		}
		if (ret)
			pr_warn("%s: not created: error %d\n", rec->name, ret);
	}
	return 0;
}

static void nvg_cdevs_remove(struct nvg_device *dev)
{
	struct nvg_region *region, *next;
	u32 i;

	for (i = 0; dev->class && i < dev->nrecords; i++)
		if (dev->records[i].major)
			device_destroy(dev->class,
				       MKDEV(dev->records[i].major,
					     le32_to_cpu(dev->records[i].node.minor)));
	class_destroy(dev->class);
	dev->class = NULL;
	list_for_each_entry_safe(region, next, &dev->regions, node) {
		__unregister_chrdev(region->major, region->first,
				    region->count, region->name);
		kfree(region->name);
		kfree(region);
	}
	INIT_LIST_HEAD(&dev->regions);
}

/* Removes what nvg_nodes_create() created. The records stay. */
void nvg_nodes_remove(struct nvg_device *dev)
{
	struct nvg_proc_entry *entry, *next_entry;
	struct nvg_gate *gate, *next_gate;

	nvg_cdevs_remove(dev);
	list_for_each_entry_safe(entry, next_entry, &dev->procfs, node) {
		remove_proc_entry(entry->name, NULL);
		kfree(entry);
	}
	INIT_LIST_HEAD(&dev->procfs);
	list_for_each_entry_safe(gate, next_gate, &dev->gates, node) {
		kobject_del(&gate->mkobj.kobj);
		kobject_put(&gate->mkobj.kobj);
	}
	INIT_LIST_HEAD(&dev->gates);
	nvg_pci_remove(dev);
}
