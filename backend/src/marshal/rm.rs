//! What RM itself reads from an argument before it looks at parameters: who is
//! asked for what. Offsets are those of `nvos.h`, the same in every release since
//! 535, on 64-bit machines.

use nvguest_abi::compiled::{Compiled, Verdict};
use nvguest_abi::rules::read_uint;
use nvguest_abi::FileKind;

use super::plan::Plan;
use crate::policy::{self, What};

/// `NV_ESC_RM_ALLOC_MEMORY`, `NVOS02_PARAMETERS`.
const ALLOC_MEMORY: u32 = 0x27;
/// `NV_ESC_RM_ALLOC_OBJECT`, `NVOS05_PARAMETERS`.
const ALLOC_OBJECT: u32 = 0x28;
/// `NV_ESC_RM_CONTROL`, `NVOS54_PARAMETERS`.
pub const CONTROL: u32 = 0x2a;
/// `NV_ESC_RM_ALLOC`, `NVOS21_PARAMETERS` or `NVOS64_PARAMETERS`.
pub const ALLOC: u32 = 0x2b;
/// `NV_ESC_RM_VID_HEAP_CONTROL`, `NVOS32_PARAMETERS`.
const VID_HEAP_CONTROL: u32 = 0x4a;
/// `NV_ESC_RM_ALLOC_CONTEXT_DMA2`, `NVOS39_PARAMETERS`.
const ALLOC_CONTEXT_DMA2: u32 = 0x54;

/// `cmd` of a control, `function` of the heap.
const COMMAND: u16 = 0x08;
/// `flags` of a control.
const CONTROL_FLAGS: u16 = 0x0c;
/// `hClass` of every allocation.
const CLASS: u16 = 0x0c;
/// `params` of a control, `pAllocParms` of an allocation.
pub const PARAMS: u16 = 0x10;
/// `paramsSize` of a control.
const PARAMS_SIZE: u16 = 0x18;
/// `pRightsRequested` of an `NVOS64` allocation.
const RIGHTS: u16 = 0x18;
/// `pMemory` of `NVOS02`.
const MEMORY: u16 = 0x18;
/// `data.AllocSize.address`, `data.AllocSizeRange.address` and
/// `data.AllocOsDesc.descriptor` of `NVOS32`.
const HEAP_ADDRESS: u16 = 0x78;
const HEAP_RANGE_ADDRESS: u16 = 0x80;
const HEAP_DESCRIPTOR: u16 = 0x40;
/// Bytes of `NVOS64_PARAMETERS`.
const NVOS64_SIZE: usize = 48;

/// `NV01_EVENT`: its parameters name the class that is really meant, at offset 8.
const CLASS_EVENT: u32 = 0x05;
const EVENT_CLASS: u16 = 0x08;
/// `NV01_MEMORY_SYSTEM_OS_DESCRIPTOR`: memory that the caller registers.
const CLASS_OS_DESCRIPTOR: u32 = 0x71;

/// `NVOS32_FUNCTION_*` whose part of the union has no pointer that RM follows:
/// ALLOC_SIZE, FREE, INFO, ALLOC_SIZE_RANGE, REACQUIRE_ and RELEASE_COMPR,
/// GET_MEM_ALIGNMENT, and ALLOC_OS_DESCRIPTOR, whose one is [`registered`]. The
/// addresses of the others are returned.
const HEAP_FUNCTIONS: [u32; 8] = [2, 3, 5, 14, 15, 16, 18, HEAP_OS_DESCRIPTOR];
const HEAP_OS_DESCRIPTOR: u32 = 27;

/// Why a call is refused.
pub type Refusal = (Verdict, What);

/// Whether RM may be asked, and at least how many bytes the block of the
/// parameters must have: for a class RM copies what *it* takes for their size.
pub fn judge(
    compiled: &Compiled,
    kind: FileKind,
    nr: u32,
    plan: &Plan<'_>,
) -> Result<u32, Refusal> {
    if !is_rm(kind) {
        return Ok(0);
    }
    let shape = (Verdict::Shape, What::ioctl(kind, nr));
    let word = |offset| word(plan.argument, offset).ok_or(shape);
    match nr {
        CONTROL => control(compiled, word(COMMAND)?, word(CONTROL_FLAGS)?, plan),
        ALLOC => allocation(compiled, word(CLASS)?, plan),
        ALLOC_OBJECT | ALLOC_MEMORY | ALLOC_CONTEXT_DMA2 => {
            let class = word(CLASS)?;
            policy::class(compiled, class).map_err(|verdict| (verdict, What::Class(class)))?;
            Ok(0)
        }
        VID_HEAP_CONTROL => {
            let function = word(COMMAND)?;
            let known = HEAP_FUNCTIONS.contains(&function);
            known.then_some(0).ok_or((Verdict::Unknown, What::VidHeap(function)))
        }
        _ => Ok(0),
    }
}

fn control(compiled: &Compiled, command: u32, flags: u32, plan: &Plan<'_>) -> Result<u32, Refusal> {
    let refuse = |verdict| (verdict, What::Control(command));
    let size = word(plan.argument, PARAMS_SIZE).ok_or(refuse(Verdict::Shape))?;
    let given = pointer(plan.argument, PARAMS) != 0;
    policy::control(compiled, command, size, given).map_err(refuse)?;
    if flags != 0 {
        // Serialized parameters, or a kernel's way to call: no user-mode driver
        // sets a flag, and with one RM reads the block by another layout.
        return Err(refuse(Verdict::Unsized));
    }
    match plan.at(PARAMS) {
        // RM copies as many bytes as the caller says; that many must have been sent.
        Some(params) if params.length == size => Ok(size),
        Some(_) => Err(refuse(Verdict::Shape)),
        None if given => Err(refuse(Verdict::Unsized)),
        None => Ok(0),
    }
}

fn allocation(compiled: &Compiled, class: u32, plan: &Plan<'_>) -> Result<u32, Refusal> {
    let refuse = |verdict| (verdict, What::Class(class));
    let entry = policy::class(compiled, class).map_err(refuse)?;
    if class == CLASS_OS_DESCRIPTOR {
        // By this way RM takes descriptors for kernel arrays too: an address of ours.
        return Err(refuse(Verdict::Overlay));
    }
    if class == CLASS_EVENT {
        if let Some(params) = plan.at(PARAMS) {
            let real = word(params.bytes, EVENT_CLASS).ok_or(refuse(Verdict::Shape))?;
            policy::class(compiled, real).map_err(|verdict| (verdict, What::Class(real)))?;
        }
    }
    Ok(entry.size.get())
}

/// Addresses in the argument that RM would use, or return, whatever the profile
/// says of them. Where no buffer was gathered for one, RM must not see the caller's.
pub fn addresses(kind: FileKind, nr: u32, argument: &[u8]) -> &'static [u16] {
    match nr {
        _ if !is_rm(kind) => &[],
        CONTROL => &[PARAMS],
        ALLOC if argument.len() >= NVOS64_SIZE => &[PARAMS, RIGHTS],
        ALLOC => &[PARAMS],
        ALLOC_MEMORY => &[MEMORY],
        VID_HEAP_CONTROL => match word(argument, COMMAND) {
            Some(2) => &[HEAP_ADDRESS],
            Some(14) => &[HEAP_RANGE_ADDRESS],
            Some(HEAP_OS_DESCRIPTOR) => &[HEAP_DESCRIPTOR],
            _ => &[],
        },
        _ => &[],
    }
}

/// Which of [`addresses`] is of memory that the caller registers. RM pins what is
/// there, so only the session may put one in.
pub fn registered(kind: FileKind, nr: u32, argument: &[u8]) -> Option<u16> {
    match nr {
        _ if !is_rm(kind) => None,
        ALLOC_MEMORY if word(argument, CLASS) == Some(CLASS_OS_DESCRIPTOR) => Some(MEMORY),
        VID_HEAP_CONTROL if word(argument, COMMAND) == Some(HEAP_OS_DESCRIPTOR) => {
            Some(HEAP_DESCRIPTOR)
        }
        _ => None,
    }
}

/// Whether RM only returns the address of [`addresses`] that is at `offset`.
pub fn is_returned(kind: FileKind, nr: u32, argument: &[u8], offset: u16) -> bool {
    is_rm(kind)
        && matches!(
            (nr, offset),
            (ALLOC_MEMORY, MEMORY) | (VID_HEAP_CONTROL, HEAP_ADDRESS | HEAP_RANGE_ADDRESS)
        )
        && registered(kind, nr, argument).is_none()
}

/// The control's command or the allocation's class, for who wants to know.
pub fn subject(kind: FileKind, nr: u32, argument: &[u8]) -> Option<What> {
    match nr {
        _ if !is_rm(kind) => None,
        CONTROL => word(argument, COMMAND).map(What::Control),
        ALLOC | ALLOC_OBJECT | ALLOC_MEMORY | ALLOC_CONTEXT_DMA2 => {
            word(argument, CLASS).map(What::Class)
        }
        VID_HEAP_CONTROL => word(argument, COMMAND).map(What::VidHeap),
        _ => None,
    }
}

fn is_rm(kind: FileKind) -> bool {
    matches!(kind, FileKind::Ctl | FileKind::Gpu)
}

fn pointer(block: &[u8], offset: u16) -> u64 {
    read_uint(block, offset, 8).unwrap_or(0)
}

fn word(block: &[u8], offset: u16) -> Option<u32> {
    read_uint(block, offset, 4).and_then(|value| u32::try_from(value).ok())
}
