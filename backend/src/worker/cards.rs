//! The guest's cards among the host's: of the others it is told nothing, and it can name none.
//!
//! RM makes devices only on cards that the calling process has open (`osIsGpuAccessible`), and a
//! worker can open its guest's alone. But every caller is told of all cards, and may keep any of
//! them up (`nvidia_read_card_info`, `gpumgrGetProbedGpuIds`, `nvidia_dev_get`).

use nvguest_abi::compiled::Verdict;
use nvguest_abi::{status, FileKind};

use super::calls::{escape, u32_at};
use super::places::Places;
use super::session::Session;
use crate::marshal::Prepared;

/// `nv_ioctl_card_info_t`: `gpu_id`; a place that is empty is zero.
const CARD_INFO: List = List { at: 0, stride: 72, places: 32, empty: 0 };
const CARD_INFO_ID: usize = 16;

/// Cards that the parameters of a control name (`ctrl/ctrl0000/*.h`).
struct Named {
    command: u32,
    places: Places,
}

const fn one(command: u32) -> Named {
    many(command, Places::all(0, 1))
}

const fn many(command: u32, places: Places) -> Named {
    Named { command, places }
}

const NAMED: [Named; 15] = [
    // SYSTEM_GET_P2P_CAPS, SYSTEM_GET_P2P_CAPS_V2
    many(0x127, Places::counted(0, 32, 128)),
    many(0x12b, Places::counted(0, 32, 128)),
    // SYSTEM_GET_P2P_CAPS_MATRIX: two groups
    many(0x13a, Places::counted(8, 8, 0)),
    many(0x13a, Places::counted(40, 8, 4)),
    // GPU_GET_ID_INFO, GPU_GET_INIT_STATUS, GPU_GET_ID_INFO_V2
    one(0x202),
    one(0x203),
    one(0x205),
    // GPU_ATTACH_IDS, GPU_DETACH_IDS
    many(0x215, Places::all(0, 32)),
    many(0x216, Places::all(0, 32)),
    // GPU_GET_PCI_INFO, GPU_GET_UUID_FROM_GPU_ID, GPU_QUERY_DRAIN_STATE
    one(0x21b),
    one(UUID_FROM_ID),
    one(0x279),
    // GPU_ASYNC_ATTACH_ID, GPU_WAIT_ATTACH_ID, GPUACCT_GET_ACCOUNTING_STATE
    one(0x289),
    one(0x290),
    one(0xb02),
];
/// What ends a list without a count: no card, or all that were probed or are attached. What is
/// behind it is nobody's to read.
const END: [u32; 2] = [u32::MAX, 0xffff];

/// `NV0000_CTRL_CMD_GPU_GET_UUID_FROM_GPU_ID`
const UUID_FROM_ID: u32 = 0x275;
/// `NV0000_CTRL_CMD_GPU_GET_UUID_INFO`: the card with a UUID; `gpuId` and what follows.
const UUID_INFO: u32 = 0x274;
const UUID_INFO_ID: u16 = 260;

/// Records of cards in an argument or in parameters.
#[derive(Clone, Copy)]
struct List {
    at: usize,
    stride: usize,
    places: usize,
    /// The bytes of a place that is empty.
    empty: u8,
}

const fn ids(at: usize) -> List {
    List { at, stride: 4, places: 32, empty: 0xff }
}

/// Cards that RM's answer to a control tells of: their ids are first in the records of the first
/// list, and the places of the second belong to them.
const TOLD: [(u32, List, Option<List>); 4] = [
    // GPU_GET_ATTACHED_IDS
    (0x201, ids(0), None),
    // GPU_GET_PROBED_IDS: the cards and their flags, and the excluded ones
    (0x214, ids(0), Some(List { empty: 0, ..ids(256) })),
    (0x214, ids(128), None),
    // GPU_GET_VIDEO_LINKS
    (0x219, List { stride: 36, ..ids(0) }, None),
];
/// `NV0000_CTRL_CMD_GPU_GET_ACTIVE_DEVICE_IDS`: a number of devices at 0, and the devices.
const ACTIVE_DEVICES: u32 = 0x288;
const DEVICES: List = List { at: 4, stride: 12, places: 256, empty: 0 };

impl List {
    fn of(self, block: &mut [u8]) -> &mut [u8] {
        let end = self.at.saturating_add(self.stride * self.places).min(block.len());
        block.get_mut(self.at..end).unwrap_or_default()
    }

    /// The places whose id, so far into a record, is `own`.
    fn owned(self, block: &mut [u8], id_at: usize, own: impl Fn(u32) -> bool) -> Vec<usize> {
        let records = self.of(block).chunks_exact(self.stride).enumerate();
        let id = |record: &[u8]| record.get(id_at..).map_or(0, |rest| u32_at(rest, 0));
        records.filter(|(_, record)| own(id(record))).map(|(place, _)| place).collect()
    }

    /// Leaves only the records at these places, which are in order, without a gap.
    fn keep(self, block: &mut [u8], places: &[usize]) {
        let list = self.of(block);
        let kept: Vec<u8> = places
            .iter()
            .filter_map(|place| list.chunks_exact(self.stride).nth(*place))
            .flatten()
            .copied()
            .collect();
        list.fill(self.empty);
        if let Some(start) = list.get_mut(..kept.len()) {
            start.copy_from_slice(&kept);
        }
    }
}

impl Named {
    fn names(&self, params: &[u8], foreign: impl Fn(u32) -> bool) -> bool {
        let counted = self.places.count_at.is_some();
        let ids = self.places.of(params);
        ids.take_while(|id| counted || !END.contains(id)).any(foreign)
    }
}

impl Session {
    fn is_own_card(&self, id: u32) -> bool {
        let mut nodes = self.start.nodes.iter().flatten();
        nodes.any(|node| node.kind == FileKind::Gpu && node.gpu_id == id)
    }

    /// Why a call that names a card of somebody else's must not be made, as RM would refuse one
    /// that is not there.
    pub(super) fn names_foreign_card(&self, prepared: &Prepared<'_>) -> Option<(Verdict, u32)> {
        // RM skips zeroes, or refuses them itself.
        let foreign = |id: u32| id != 0 && !self.is_own_card(id);
        let argument = prepared.argument();
        let command = u32_at(argument, 8);
        let named = match prepared.nr() {
            escape::ATTACH_GPUS_TO_FD => argument.chunks_exact(4).any(|id| foreign(u32_at(id, 0))),
            escape::CONTROL => prepared.params().is_some_and(|params| {
                let mut named = NAMED.iter().filter(|named| named.command == command);
                named.any(|named| named.names(params, foreign))
            }),
            _ => false,
        };
        let status = match command {
            UUID_FROM_ID => status::OBJECT_NOT_FOUND,
            _ => status::INVALID_ARGUMENT,
        };
        named.then_some((Verdict::Overlay, status))
    }

    /// Takes cards of somebody else's out of RM's answer. `status_at` is where its status is.
    pub(super) fn hide_cards(&self, prepared: &mut Prepared<'_>, status_at: u16) {
        if !matches!(prepared.kind(), FileKind::Ctl | FileKind::Gpu) {
            return;
        }
        let own = |id: u32| self.is_own_card(id);
        match (prepared.nr(), u32_at(prepared.argument(), 8)) {
            (escape::CARD_INFO, _) => {
                let block = prepared.argument_mut();
                let places = CARD_INFO.owned(block, CARD_INFO_ID, own);
                CARD_INFO.keep(block, &places);
            }
            (escape::CONTROL, UUID_INFO) => self.hide_uuid(prepared, status_at),
            (escape::CONTROL, ACTIVE_DEVICES) => {
                let Some(block) = prepared.params_mut() else { return };
                // What is behind them was the guest's own, and still is.
                let told = usize::try_from(u32_at(block, 0)).unwrap_or(usize::MAX);
                let list = List { places: DEVICES.places.min(told), ..DEVICES };
                let places = list.owned(block, 0, own);
                list.keep(block, &places);
                put(block, 0, u32::try_from(places.len()).unwrap_or(0));
            }
            (escape::CONTROL, command) => {
                let Some(block) = prepared.params_mut() else { return };
                for (_, list, beside) in TOLD.iter().filter(|(told, ..)| *told == command) {
                    let places = list.owned(block, 0, own);
                    list.keep(block, &places);
                    if let Some(beside) = beside {
                        beside.keep(block, &places);
                    }
                }
            }
            _ => {}
        }
    }

    /// A UUID of somebody else's card is nobody's.
    fn hide_uuid(&self, prepared: &mut Prepared<'_>, status_at: u16) {
        let Some(block) = prepared.params_mut() else { return };
        if self.is_own_card(u32_at(block, UUID_INFO_ID)) {
            return;
        }
        if let Some(told) = block.get_mut(usize::from(UUID_INFO_ID)..) {
            told.fill(0);
        }
        put(prepared.argument_mut(), status_at, status::OBJECT_NOT_FOUND);
    }
}

fn put(block: &mut [u8], at: u16, value: u32) {
    let at = usize::from(at);
    if let Some(field) = block.get_mut(at..at + 4) {
        field.copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn shown(list: List, block: &mut [u8]) -> Vec<u32> {
        let places = list.owned(block, 0, |id| id % 2 == 1);
        list.keep(block, &places);
        block.chunks_exact(4).map(|word| u32_at(word, 0)).collect()
    }

    #[test]
    fn a_list_keeps_what_is_the_guests_without_a_gap() {
        let list = List { places: 4, ..ids(4) };
        let mut block = words(&[2, 2, 3, 5, u32::MAX, 7]);
        block[16..20].fill(0xfe);
        assert_eq!(shown(list, &mut block), [2, 3, 5, u32::MAX, u32::MAX, 7]);
    }

    #[test]
    fn records_stay_whole() {
        let list = List { at: 0, stride: 8, places: 3, empty: 0 };
        let mut block = words(&[2, 20, 3, 30, 5, 50]);
        assert_eq!(shown(list, &mut block), [3, 30, 5, 50, 0, 0]);
    }

    #[test]
    fn a_block_that_is_shorter_than_its_list_is_changed_as_far_as_it_goes() {
        for length in 0..=9 {
            let mut block = [1, 0, 0, 0, 2, 0, 0, 0, 3][..length].to_vec();
            let list = ids(0);
            let places = list.owned(&mut block, 0, |_| true);
            assert_eq!(places.len(), length / 4);
            list.keep(&mut block, &places);
            ids(256).keep(&mut block, &[7]);
            assert_eq!(block.len(), length);
        }
    }

    #[test]
    fn cards_are_named_as_far_as_rm_reads_a_list() {
        let named = many(0, Places::counted(4, 2, 0));
        let names = |count: u32| {
            let params = words(&[count, 7, 8, 9]);
            [7, 8, 9].map(|id| named.names(&params, |named| named == id))
        };
        assert_eq!(names(0), [false, false, false]);
        assert_eq!(names(1), [true, false, false]);
        assert_eq!(names(u32::MAX), [true, true, false]);
        assert!(!named.names(&[], |_| true));
        for end in END {
            let list = words(&[7, 0, end, 8]);
            assert!(!many(0, Places::all(0, 32)).names(&list, |id| id == 8), "{end:#x}");
            assert!(many(0, Places::all(0, 32)).names(&list, |id| id == 7), "{end:#x}");
        }
        assert!(one(0).names(&words(&[7]), |id| id == 7));
    }
}
