// SPDX-License-Identifier: GPL-2.0-only
/* Whether the guest's own memory types leave the window as fast as it is. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include "nvguest.h"

#ifdef CONFIG_X86

#include <asm/cpufeature.h>
#include <asm/msr.h>
#include <asm/processor.h>
#include <linux/slab.h>

#include "mtrr.h"

/* IA32_MTRRCAP, IA32_MTRR_DEF_TYPE, IA32_MTRR_PHYSBASEn; PHYSMASKn follows. */
#define NVG_MSR_CAP		0xfe
#define NVG_MSR_DEF_TYPE	0x2ff
#define NVG_MSR_PHYSBASE(n)	(0x200 + 2 * (n))
#define NVG_CAP_COUNT		0xff

static int nvg_rdmsr(u32 msr, u64 *value)
{
	u32 low, high;
	int ret = rdmsr_safe(msr, &low, &high);

	*value = (u64)high << 32 | low;
	return ret;
}

static int nvg_read_mtrrs(struct nvg_mtrrs *m)
{
	u64 cap, def_type, base, mask;
	u32 i;

	if (nvg_rdmsr(NVG_MSR_CAP, &cap) ||
	    nvg_rdmsr(NVG_MSR_DEF_TYPE, &def_type))
		return -EIO;
	nvg_mtrrs_init(m, def_type, boot_cpu_data.x86_phys_bits);
	for (i = 0; i < (cap & NVG_CAP_COUNT); i++) {
		if (nvg_rdmsr(NVG_MSR_PHYSBASE(i), &base) ||
		    nvg_rdmsr(NVG_MSR_PHYSBASE(i) + 1, &mask))
			return -EIO;
		nvg_mtrrs_add(m, base, mask);
	}
	return 0;
}

/**
 * nvg_check_caching() - say so if the window is not write-back by the MTRRs
 * @dev: the device
 *
 * The kernel then maps uncached what should be write-back, which the arena is.
 * What is write-combined or uncached by its page tables stays so.
 */
void nvg_check_caching(const struct nvg_device *dev)
{
	u64 from = dev->window_base;
	u64 to = from + dev->window_len - 1;
	struct nvg_mtrrs *m;
	u8 type;

	if (!dev->window_len || !boot_cpu_has(X86_FEATURE_MTRR))
		return;
	m = kmalloc(sizeof(*m), GFP_KERNEL);
	if (!m)
		return;
	if (!nvg_read_mtrrs(m) && nvg_mtrrs_not_wb(m, &from, &to, &type))
		pr_warn_once("the MTRRs make %#llx-%#llx of the window %s, not write-back: system memory that is mapped there (the arena) is slow, and no page table can make it faster. Have the VMM's firmware make it write-back\n",
			     from, to, nvg_mtrr_name(type));
	kfree(m);
}

#else

void nvg_check_caching(const struct nvg_device *dev)
{
}

#endif
