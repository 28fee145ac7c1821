// SPDX-License-Identifier: GPL-2.0-only
/*
 * The card as /sys/bus/pci shows it: one device whose configuration space is
 * the host's, read-only. No driver ever binds to it, and no resource belongs
 * to it.
 *
 * It is where the host has it, for that is where NVML looks for it: on a root
 * bus of its own or, where the guest has that bus too, on the guest's, whose
 * config accesses to that one address then end here. Only if a device of the
 * guest's is there already does it move to a domain of its own.
 *
 * It comes and goes by works: whoever plugs or unplugs our own device has
 * locked rescans out, and calls probe and remove like that.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/numa.h>
#include <linux/pci.h>
#include <linux/rculist.h>
#include <linux/slab.h>

#include "nvguest.h"

#ifdef CONFIG_X86

/* Where the domains begin that no firmware uses. */
#define NVG_FIRST_DOMAIN	0x10000
#define NVG_LAST_DOMAIN		0x100ff

struct nvg_pci {
	struct pci_sysdata sysdata;	/* first: what bus->sysdata points to */
	struct nvg_pci *next;
	struct nvg_device *dev;		/* a reference, for rec */
	const struct nvg_record *rec;
	struct work_struct add;
	struct work_struct remove;
	unsigned int devfn;
	struct pci_bus *bus;
	/* NULL while the kernel looks for it. Holds the bus, too. */
	struct pci_dev *pdev;

	struct resource busn;		/* of its own root bus */

	/* On a bus of the guest's: */
	struct list_head node;		/* on nvg_guest_cards */
	struct pci_ops *below;		/* the bus's own; else NULL */
	struct pci_ops *ops;		/* NULL: an earlier card's serve it */
};

/*
 * The cards on buses of the guest's. Changes with rescans locked out, is read
 * under RCU.
 */
static LIST_HEAD(nvg_guest_cards);

static u8 nvg_config_byte(const struct nvg_pci *pci, int where, bool bare)
{
	/* Beyond the first 256 bytes there is nothing, not even zeros. */
	if (where >= PCI_CFG_SPACE_SIZE)
		return 0xff;
	if (where >= pci->rec->data_len)
		return 0;
	/* One function, of the plain kind: nothing else is there. */
	if (where == PCI_HEADER_TYPE)
		return PCI_HEADER_TYPE_NORMAL;
	if (bare && where >= PCI_COMMAND && where < PCI_CLASS_REVISION)
		return 0;
	if (bare && where >= PCI_BASE_ADDRESS_0 &&
	    where < PCI_SUBSYSTEM_VENDOR_ID)
		return 0;
	if (bare && where >= PCI_ROM_ADDRESS)
		return 0;
	return pci->rec->data[where];
}

static int nvg_card_read(const struct nvg_pci *pci, int where, int size,
			 u32 *value)
{
	/* Pairs with nvg_found(). */
	struct pci_dev *pdev = smp_load_acquire(&pci->pdev);
	int i;

	*value = ~0U;
	/* Once removed by hand it is gone: no rescan finds it again. */
	if (pdev && !device_is_registered(&pdev->dev))
		return PCIBIOS_DEVICE_NOT_FOUND;
	*value = 0;
	/*
	 * While the kernel looks at it the device is bare: no registers to
	 * size, no capability to set up.
	 */
	for (i = 0; i < size; i++)
		*value |= (u32)nvg_config_byte(pci, where + i, !pdev) <<
			  (8 * i);
	return PCIBIOS_SUCCESSFUL;
}

/* Takes over the reference. */
static void nvg_found(struct nvg_pci *pci, struct pci_dev *pdev)
{
	/*
	 * Never pci_bus_add_device(): that would let drivers have it. But a
	 * rescan, or a hotplug beside it, calls that for whatever is on the
	 * bus: a dead device is not probed even then.
	 */
	device_lock(&pdev->dev);
	kill_device(&pdev->dev);
	device_unlock(&pdev->dev);
	/* Pairs with nvg_card_read(): registered before it is looked at. */
	smp_store_release(&pci->pdev, pdev);
}

/* A root bus of its own. */

static int nvg_own_read(struct pci_bus *bus, unsigned int devfn, int where,
			int size, u32 *value)
{
	const struct nvg_pci *pci = container_of(to_pci_sysdata(bus),
						 struct nvg_pci, sysdata);

	*value = ~0U;
	if (bus->number != pci->busn.start || devfn != pci->devfn)
		return PCIBIOS_DEVICE_NOT_FOUND;
	return nvg_card_read(pci, where, size, value);
}

static int nvg_own_write(struct pci_bus *bus, unsigned int devfn, int where,
			 int size, u32 value)
{
	return PCIBIOS_SET_FAILED;
}

static struct pci_ops nvg_own_ops = {
	.read = nvg_own_read,
	.write = nvg_own_write,
};

static void nvg_own_remove(struct nvg_pci *pci)
{
	pci_stop_root_bus(pci->bus);
	pci_remove_root_bus(pci->bus);
	pci_dev_put(pci->pdev);
}

static int nvg_own_add(struct nvg_pci *pci, int domain, unsigned int busnr)
{
	struct pci_host_bridge *bridge = pci_alloc_host_bridge(0);
	struct pci_dev *pdev;
	int ret;

	if (!bridge)
		return -ENOMEM;
	pci->sysdata.domain = domain;
	pci->sysdata.node = NUMA_NO_NODE;
	pci->busn.name = "nvguest";
	pci->busn.start = busnr;
	pci->busn.end = busnr;
	pci->busn.flags = IORESOURCE_BUS;
	bridge->sysdata = &pci->sysdata;
	bridge->ops = &nvg_own_ops;
	bridge->busnr = busnr;
	pci_add_resource(&bridge->windows, &pci->busn);

	ret = pci_scan_root_bus_bridge(bridge);
	if (ret) {
		pci_free_resource_list(&bridge->windows);
		pci_free_host_bridge(bridge);
		return ret;
	}
	pci->bus = bridge->bus;
	pdev = pci_get_slot(pci->bus, pci->devfn);
	if (!pdev) {
		nvg_own_remove(pci);
		return -ENODEV;
	}
	nvg_found(pci, pdev);
	return 0;
}

/* A bus of the guest's. */

/*
 * The card at that address, or NULL and what to ask instead. A bus that was
 * found later, behind a bridge, has inherited the ops but has no card.
 */
static const struct nvg_pci *nvg_guest_find(struct pci_bus *bus,
					    unsigned int devfn,
					    struct pci_ops **below)
{
	const struct nvg_pci *pci;
	struct pci_bus *up;

	*below = NULL;
	for (up = bus; up && !*below; up = up->parent) {
		list_for_each_entry_rcu(pci, &nvg_guest_cards, node) {
			if (pci->bus != up)
				continue;
			if (up == bus && pci->devfn == devfn)
				return pci;
			*below = pci->below;
		}
	}
	return NULL;
}

static int nvg_guest_read(struct pci_bus *bus, unsigned int devfn, int where,
			  int size, u32 *value)
{
	int ret = PCIBIOS_DEVICE_NOT_FOUND;
	const struct nvg_pci *pci;
	struct pci_ops *below;

	rcu_read_lock();
	pci = nvg_guest_find(bus, devfn, &below);
	if (pci)
		ret = nvg_card_read(pci, where, size, value);
	else if (below)
		ret = below->read(bus, devfn, where, size, value);
	rcu_read_unlock();
	return ret;
}

static int nvg_guest_write(struct pci_bus *bus, unsigned int devfn, int where,
			   int size, u32 value)
{
	int ret = PCIBIOS_DEVICE_NOT_FOUND;
	struct pci_ops *below;

	rcu_read_lock();
	if (nvg_guest_find(bus, devfn, &below))
		ret = PCIBIOS_SET_FAILED;
	else if (below)
		ret = below->write(bus, devfn, where, size, value);
	rcu_read_unlock();
	return ret;
}

/*
 * A copy of the bus's ops, for what is below may use the rest of them by way
 * of the bus: pci_generic_config_read() calls its map_bus.
 */
static int nvg_guest_wrap(struct nvg_pci *pci)
{
	if (pci->bus->ops->read == nvg_guest_read) {
		rcu_read_lock();
		nvg_guest_find(pci->bus, pci->devfn, &pci->below);
		rcu_read_unlock();
		list_add_rcu(&pci->node, &nvg_guest_cards);
		return 0;
	}
	pci->below = pci->bus->ops;
	pci->ops = kmemdup(pci->below, sizeof(*pci->ops), GFP_KERNEL);
	if (!pci->ops)
		return -ENOMEM;
	pci->ops->read = nvg_guest_read;
	pci->ops->write = nvg_guest_write;
	list_add_rcu(&pci->node, &nvg_guest_cards);
	pci_bus_set_ops(pci->bus, pci->ops);
	return 0;
}

static void nvg_guest_restore(struct pci_bus *bus, const struct nvg_pci *pci)
{
	struct pci_bus *child;

	list_for_each_entry(child, &bus->children, node)
		nvg_guest_restore(child, pci);
	if (bus->ops == pci->ops)
		pci_bus_set_ops(bus, pci->below);
}

/* The card whose ops serve the bus leaves last, having come first. */
static void nvg_guest_remove(struct nvg_pci *pci)
{
	if (pci->pdev)
		pci_stop_and_remove_bus_device(pci->pdev);
	if (pci->ops) {
		nvg_guest_restore(pci->bus, pci);
		pci->ops->read = pci->below->read;
		pci->ops->write = pci->below->write;
		/* No lock keeps an access out of the functions above. */
		synchronize_rcu_tasks();
		/* Else someone has wrapped ours, and goes on calling them. */
		if (pci->bus->ops == pci->below)
			kfree(pci->ops);
	}
	list_del_rcu(&pci->node);
	synchronize_rcu();
	pci_dev_put(pci->pdev);
}

static int nvg_guest_add(struct nvg_pci *pci, struct pci_bus *bus)
{
	struct pci_dev *pdev = pci_get_slot(bus, pci->devfn);
	u16 vendor;
	int ret;

	if (pdev) {
		pci_dev_put(pdev);
		return -EBUSY;
	}
	pci_bus_read_config_word(bus, pci->devfn, PCI_VENDOR_ID, &vendor);
	if (!PCI_POSSIBLE_ERROR(vendor))
		return -EBUSY;

	pci->bus = bus;
	ret = nvg_guest_wrap(pci);
	if (ret)
		return ret;
	pdev = pci_scan_single_device(bus, pci->devfn);
	if (!pdev) {
		nvg_guest_remove(pci);
		return -ENODEV;
	}
	nvg_found(pci, pci_dev_get(pdev));
	return 0;
}

/* Where the host has it, if that can be, else in a domain nobody has. */
static int nvg_pci_place(struct nvg_pci *pci, int domain, unsigned int busnr)
{
	struct pci_bus *bus = pci_find_bus(domain, busnr);

	if (!bus)
		return nvg_own_add(pci, domain, busnr);
	if (!nvg_guest_add(pci, bus))
		return 0;
	pci->below = NULL;
	for (domain = NVG_FIRST_DOMAIN; domain <= NVG_LAST_DOMAIN; domain++)
		if (!pci_find_bus(domain, busnr))
			return nvg_own_add(pci, domain, busnr);
	return -EBUSY;
}

static void nvg_pci_add_work(struct work_struct *work)
{
	struct nvg_pci *pci = container_of(work, struct nvg_pci, add);
	unsigned int domain, bus;
	int ret = -EINVAL;

	if (sscanf(pci->rec->name, "%x:%x", &domain, &bus) == 2) {
		pci_lock_rescan_remove();
		ret = nvg_pci_place(pci, domain, bus);
		pci_unlock_rescan_remove();
	}
	if (!ret)
		return;
	pr_warn("%s: not created: error %d\n", pci->rec->name, ret);
	pci->bus = NULL;
}

static void nvg_pci_remove_work(struct work_struct *work)
{
	struct nvg_pci *pci = container_of(work, struct nvg_pci, remove);

	if (pci->bus) {
		pci_lock_rescan_remove();
		if (pci->below)
			nvg_guest_remove(pci);
		else
			nvg_own_remove(pci);
		pci_unlock_rescan_remove();
	}
	nvg_device_put(pci->dev);
	kfree(pci);
}

/**
 * nvg_pci_add() - show a card, soon
 * @dev: the device
 * @rec: its PCI record: the host's address and configuration space
 *
 * Return: 0 or why not.
 */
int nvg_pci_add(struct nvg_device *dev, const struct nvg_record *rec)
{
	unsigned int domain, bus, slot, function;
	struct nvg_pci *pci;
	char end;

	if (sscanf(rec->name, "%x:%x:%x.%x%c", &domain, &bus, &slot, &function,
		   &end) != 4 ||
	    domain > 0xffff || bus > 0xff || slot > 0x1f || function > 7)
		return -EINVAL;
	if (rec->data_len < PCI_STD_HEADER_SIZEOF)
		return -EINVAL;

	pci = kzalloc(sizeof(*pci), GFP_KERNEL);
	if (!pci)
		return -ENOMEM;
	kref_get(&dev->ref);
	pci->dev = dev;
	pci->rec = rec;
	pci->devfn = PCI_DEVFN(slot, function);
	INIT_WORK(&pci->add, nvg_pci_add_work);
	INIT_WORK(&pci->remove, nvg_pci_remove_work);
	pci->next = dev->pci;
	dev->pci = pci;
	queue_work(nvg_pci_wq, &pci->add);
	return 0;
}

void nvg_pci_remove(struct nvg_device *dev)
{
	struct nvg_pci *pci;

	while ((pci = dev->pci)) {
		dev->pci = pci->next;
		queue_work(nvg_pci_wq, &pci->remove);
	}
}

#else

int nvg_pci_add(struct nvg_device *dev, const struct nvg_record *rec)
{
	return -EOPNOTSUPP;
}

void nvg_pci_remove(struct nvg_device *dev)
{
}

#endif
