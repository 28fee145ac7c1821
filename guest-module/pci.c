// SPDX-License-Identifier: GPL-2.0-only
/*
 * The card as /sys/bus/pci shows it: one device on a root bus of its own, whose
 * configuration space is the host's, read-only. No driver ever binds to it,
 * and no resource belongs to it.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/numa.h>
#include <linux/pci.h>
#include <linux/slab.h>

#include "nvguest.h"

#ifdef CONFIG_X86

/* Where the domains begin that no firmware uses. */
#define NVG_FIRST_DOMAIN	0x10000
#define NVG_LAST_DOMAIN		0x100ff

struct nvg_pci {
	struct pci_sysdata sysdata;	/* first: what bus->sysdata points to */
	struct nvg_pci *next;
	struct pci_bus *bus;
	struct resource busn;
	const struct nvg_record *rec;
	unsigned int devfn;
	/*
	 * While the kernel looks at it the device is bare: no registers to
	 * size, no capability to set up.
	 */
	bool bare;
};

static u8 nvg_config_byte(const struct nvg_pci *pci, int where)
{
	/* Beyond the first 256 bytes there is nothing, not even zeros. */
	if (where >= PCI_CFG_SPACE_SIZE)
		return 0xff;
	if (where >= pci->rec->data_len)
		return 0;
	/* One function, of the plain kind: nothing else is there. */
	if (where == PCI_HEADER_TYPE)
		return PCI_HEADER_TYPE_NORMAL;
	if (pci->bare && where >= PCI_COMMAND && where < PCI_CLASS_REVISION)
		return 0;
	if (pci->bare && where >= PCI_BASE_ADDRESS_0 &&
	    where < PCI_SUBSYSTEM_VENDOR_ID)
		return 0;
	if (pci->bare && where >= PCI_ROM_ADDRESS)
		return 0;
	return pci->rec->data[where];
}

static int nvg_config_read(struct pci_bus *bus, unsigned int devfn, int where,
			   int size, u32 *value)
{
	const struct nvg_pci *pci = container_of(to_pci_sysdata(bus),
						 struct nvg_pci, sysdata);
	int i;

	*value = ~0U;
	if (bus->number != pci->busn.start || devfn != pci->devfn)
		return PCIBIOS_DEVICE_NOT_FOUND;
	*value = 0;
	for (i = 0; i < size; i++)
		*value |= (u32)nvg_config_byte(pci, where + i) << (8 * i);
	return PCIBIOS_SUCCESSFUL;
}

static int nvg_config_write(struct pci_bus *bus, unsigned int devfn, int where,
			    int size, u32 value)
{
	return PCIBIOS_SET_FAILED;
}

static struct pci_ops nvg_pci_ops = {
	.read = nvg_config_read,
	.write = nvg_config_write,
};

/* The host's own domain where that bus is free, else one nobody has. */
static int nvg_free_domain(int domain, unsigned int bus)
{
	if (!pci_find_bus(domain, bus))
		return domain;
	for (domain = NVG_FIRST_DOMAIN; domain <= NVG_LAST_DOMAIN; domain++)
		if (!pci_find_bus(domain, bus))
			return domain;
	return -EBUSY;
}

static int nvg_pci_scan(struct nvg_pci *pci)
{
	struct pci_host_bridge *bridge = pci_alloc_host_bridge(0);
	int ret;

	if (!bridge)
		return -ENOMEM;
	bridge->sysdata = &pci->sysdata;
	bridge->ops = &nvg_pci_ops;
	bridge->busnr = pci->busn.start;
	pci_add_resource(&bridge->windows, &pci->busn);

	pci_lock_rescan_remove();
	pci->bare = true;
	ret = pci_scan_root_bus_bridge(bridge);
	pci->bare = false;
	/* Never pci_bus_add_devices(): that would let drivers have it. */
	pci_unlock_rescan_remove();
	if (ret) {
		pci_free_resource_list(&bridge->windows);
		pci_free_host_bridge(bridge);
		return ret;
	}
	pci->bus = bridge->bus;
	return 0;
}

/**
 * nvg_pci_add() - show a card
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
	int ret;

	if (sscanf(rec->name, "%x:%x:%x.%x%c", &domain, &bus, &slot, &function,
		   &end) != 4 ||
	    domain > 0xffff || bus > 0xff || slot > 0x1f || function > 7)
		return -EINVAL;
	if (rec->data_len < PCI_STD_HEADER_SIZEOF)
		return -EINVAL;

	pci = kzalloc(sizeof(*pci), GFP_KERNEL);
	if (!pci)
		return -ENOMEM;
	ret = nvg_free_domain(domain, bus);
	if (ret < 0)
		goto fail;
	pci->sysdata.domain = ret;
	pci->sysdata.node = NUMA_NO_NODE;
	pci->rec = rec;
	pci->devfn = PCI_DEVFN(slot, function);
	pci->busn.name = "nvguest";
	pci->busn.start = bus;
	pci->busn.end = bus;
	pci->busn.flags = IORESOURCE_BUS;
	ret = nvg_pci_scan(pci);
	if (ret)
		goto fail;

	pci->next = dev->pci;
	dev->pci = pci;
	return 0;

fail:
	kfree(pci);
	return ret;
}

void nvg_pci_remove(struct nvg_device *dev)
{
	struct nvg_pci *pci;

	while ((pci = dev->pci)) {
		dev->pci = pci->next;
		pci_lock_rescan_remove();
		pci_stop_root_bus(pci->bus);
		pci_remove_root_bus(pci->bus);
		pci_unlock_rescan_remove();
		kfree(pci);
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
