//! What a guest is shown of the card's memory where its budget is its card.
//!
//! RM's answers are lowered to what the budget has, never raised: a card that has less, or
//! less that is free, is shown as it is.

use nvguest_abi::FileKind;

use super::calls::{escape, u32_at, u64_at};
use super::session::Session;
use super::video::{usage, Usage};
use crate::budgets::{VramMode, NO_BUDGET};
use crate::marshal::Prepared;

/// Which of our values stands in for one of RM's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    /// All of the budget.
    Card,
    /// What is for programs: without the reserve, which shows as the driver's own.
    Heap,
    /// What is left of that.
    Free,
}

/// `NV2080_CTRL_FB_INFO_INDEX_*` (`ctrl2080fb.h`), in KiB, that say how much memory there is.
const FB_INFO: [(u32, Value); 7] = [
    (0x07, Value::Card), // RAM_SIZE
    (0x08, Value::Card), // TOTAL_RAM_SIZE
    (0x20, Value::Card), // USABLE_RAM_SIZE
    (0x09, Value::Heap), // HEAP_SIZE
    (0x0a, Value::Heap), // MAPPABLE_HEAP_SIZE
    (0x12, Value::Free), // LARGEST_FREE_REGION_SIZE_KB
    (0x16, Value::Free), // HEAP_FREE
];

/// `NV2080_CTRL_CMD_FB_GET_INFO`: a number of entries, and at 8 where they are; `_V2`: a number
/// of entries, and at 4 the entries. Each is an index and a value.
const FB_GET_INFO: u32 = 0x2080_1301;
const FB_GET_INFO_V2: u32 = 0x2080_1303;
const LIST_POINTER: u16 = 8;
const LIST: usize = 4;
const ENTRY: usize = 8;

/// `total` and `free` of `NVOS32_PARAMETERS`, in bytes; `data.Info.size` of its function 5.
const HEAP: [(u16, Value); 2] = [(0x18, Value::Heap), (0x20, Value::Free)];
const HEAP_INFO: u32 = 5;
const HEAP_INFO_SIZE: (u16, Value) = (0x38, Value::Free);

impl Value {
    fn of(self, usage: &Usage) -> u64 {
        let heap = usage.budget.saturating_sub(usage.reserve);
        match self {
            Self::Card => usage.budget,
            Self::Heap => heap,
            Self::Free => heap.saturating_sub(usage.used),
        }
    }
}

/// Lowers the values of a list of entries.
fn lower_entries(list: &mut [u8], count: u32, usage: &Usage) {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    for entry in list.chunks_exact_mut(ENTRY).take(count) {
        let index = u32_at(entry, 0);
        let Some((_, value)) = FB_INFO.iter().find(|(known, _)| *known == index) else { continue };
        let ours = u32::try_from(value.of(usage) >> 10).unwrap_or(u32::MAX);
        let shown = u32_at(entry, 4).min(ours);
        entry[4..].copy_from_slice(&shown.to_le_bytes());
    }
}

/// Lowers a number of bytes.
fn lower(block: &mut [u8], (at, value): (u16, Value), usage: &Usage) {
    let shown = u64_at(block, at).min(value.of(usage));
    let at = usize::from(at);
    if let Some(field) = block.get_mut(at..at + 8) {
        field.copy_from_slice(&shown.to_le_bytes());
    }
}

impl Session {
    /// Lowers what RM answered to what the guest's budget has.
    pub(super) fn show_budget(&self, prepared: &mut Prepared<'_>) {
        let is_rm = matches!(prepared.kind(), FileKind::Ctl | FileKind::Gpu);
        if self.start.vram_mode != VramMode::Profile || !is_rm {
            return;
        }
        let what = u32_at(prepared.argument(), 8);
        let tells = match prepared.nr() {
            escape::CONTROL => matches!(what, FB_GET_INFO | FB_GET_INFO_V2),
            nr => nr == escape::VID_HEAP_CONTROL,
        };
        if !tells {
            return;
        }
        let Ok(usage) = usage(&self.upstream, 0) else { return };
        if usage.budget != NO_BUDGET {
            show(prepared, what, &usage);
        }
    }
}

fn show(prepared: &mut Prepared<'_>, what: u32, usage: &Usage) {
    if prepared.nr() == escape::VID_HEAP_CONTROL {
        let info = (what == HEAP_INFO).then_some(HEAP_INFO_SIZE);
        for field in HEAP.into_iter().chain(info) {
            lower(prepared.argument_mut(), field, usage);
        }
        return;
    }
    let count = prepared.params().map_or(0, |params| u32_at(params, 0));
    let list = match what {
        FB_GET_INFO => prepared.behind_params_mut(LIST_POINTER),
        _ => prepared.params_mut().and_then(|params| params.get_mut(LIST..)),
    };
    if let Some(list) = list {
        lower_entries(list, count, usage);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const USAGE: Usage = Usage { used: GIB, budget: 8 * GIB, reserve: GIB / 16 };

    fn shown(index: u32, kib: u32) -> u32 {
        let mut list = [index.to_le_bytes(), kib.to_le_bytes()].concat();
        lower_entries(&mut list, 1, &USAGE);
        u32_at(&list, 4)
    }

    #[test]
    fn a_card_is_shown_as_large_as_the_budget() {
        for index in [7, 8, 0x20] {
            assert_eq!(shown(index, 140 << 20), 8 << 20);
        }
        assert_eq!(shown(9, 140 << 20), (8 << 20) - (64 << 10));
        assert_eq!(shown(0x16, 140 << 20), (7 << 20) - (64 << 10));
    }

    #[test]
    fn what_is_less_than_the_budget_is_shown_as_it_is() {
        for (index, _) in FB_INFO {
            assert_eq!(shown(index, 5), 5);
        }
    }

    #[test]
    fn what_is_no_size_of_memory_stays() {
        for index in (0..0x3c).filter(|index| FB_INFO.iter().all(|(known, _)| known != index)) {
            assert_eq!(shown(index, u32::MAX), u32::MAX);
        }
    }

    #[test]
    fn a_list_is_lowered_only_as_far_as_it_goes() {
        let entry = [7_u32.to_le_bytes(), u32::MAX.to_le_bytes()].concat();
        let mut list = [&entry[..], &entry[..], &[1, 2, 3]].concat();
        lower_entries(&mut list, 1, &USAGE);
        assert_eq!((u32_at(&list, 4), u32_at(&list, 12)), (8 << 20, u32::MAX));
        lower_entries(&mut list, u32::MAX, &USAGE);
        assert_eq!(u32_at(&list, 12), 8 << 20);
    }

    #[test]
    fn more_in_use_than_the_budget_is_nothing_free() {
        let usage = Usage { used: 9 * GIB, ..USAGE };
        assert_eq!(Value::Free.of(&usage), 0);
        let mut block = [0xff; 16];
        lower(&mut block, (8, Value::Free), &usage);
        lower(&mut block, (12, Value::Free), &usage);
        assert_eq!(u64_at(&block, 8), 0);
    }
}
