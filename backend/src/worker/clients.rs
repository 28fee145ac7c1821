//! Clients that a call names beside the one that it is made as: all must be of this process.
//!
//! RM makes sure that who calls owns the client that he calls as. Of others it asks less: whoever
//! knows two numbers may share another's memory with himself (`_serverShareResourceAccessClient`,
//! seen on an H200 with 580.159.04), make a device in another's address space
//! (`deviceInitClientShare`), or stop another's channels (`subdeviceCtrlCmdFifoDisableChannels`,
//! which leaves the question to the firmware). Handles of clients count up, so they are no secret.

use nvguest_abi::compiled::Verdict;
use nvguest_abi::status;

use super::calls::{escape, u32_at};
use super::places::Places;
use super::session::Session;
use crate::marshal::Prepared;
use crate::sync::lock;

/// Handles of clients in the parameters of a control or a class.
#[derive(Clone, Copy, Debug)]
struct Handles {
    /// The control or the class.
    of: u32,
    /// Bytes of its parameters: releases differ.
    size: u32,
    places: Places,
}

const fn one(of: u32, size: u32, at: u16) -> Handles {
    row(of, size, Places::all(at, 1))
}

const fn row(of: u32, size: u32, places: Places) -> Handles {
    Handles { of, size, places }
}

/// `ctrl/ctrl*/*.h`: every field of a control that a guest may ask for and that is called a client,
/// from 535.129.03 to 595.45.04.
const CONTROLS: [Handles; 13] = [
    // CLIENT_GET_ACCESS_RIGHTS
    one(0xd03, 12, 4),
    // SEMAPHORE_SURFACE_BIND_CHANNEL, until 560
    one(0x00da_0002, 24, 0),
    // FIFO_BIND_ENGINES, FIFO_DISABLE_CHANNELS
    row(0x2080_1103, 132, Places { stride: 8, ..Places::counted(4, 16, 0) }),
    row(0x2080_110b, 536, Places::counted(24, 64, 4)),
    // FIFO_GET_CHANNEL_GROUP_UNIQUE_ID_INFO, FIFO_QUERY_CHANNEL_UNIQUE_ID
    one(0x2080_1123, 1552, 0),
    row(0x2080_1124, 1540, Places::counted(0, 128, 1024)),
    // GR_CTXSW_ZCULL_MODE, GR_CTXSW_ZCULL_BIND
    one(0x2080_1205, 16, 4),
    one(0x2080_1208, 24, 0),
    // GR_CTXSW_PREEMPTION_BIND, GR_CTXSW_SETUP_BIND
    one(0x2080_1211, 104, 4),
    one(0x2080_1211, 112, 4),
    one(0x2080_123a, 16, 0),
    // DMA_INVALIDATE_TLB
    one(0x2080_2502, 16, 0),
    // REGISTER_PID of third-party P2P
    one(0x503c_0106, 4, 0),
];

/// `class/cl*.h`, likewise.
const CLASSES: [Handles; 7] = [
    // NV01_EVENT and its kinds
    one(0x05, 24, 0),
    one(0x78, 24, 0),
    one(0x79, 24, 0),
    one(0x7e, 24, 0),
    // NV01_DEVICE_0: whose address space it shares, and whose device it follows
    row(0x80, 56, Places::all(4, 2)),
    // GT200_DEBUGGER, NV_CONFIDENTIAL_COMPUTE
    row(0x83de, 12, Places::all(0, 2)),
    one(0xcb33, 4, 0),
];

/// `phClients` of `NVOS30_PARAMETERS`, and of the control that RM makes of that.
const IDLE_LIST: u16 = 16;
/// `NV0000_CTRL_CMD_IDLE_CHANNELS`
const IDLE_CHANNELS: u32 = 0x283;

impl Handles {
    fn any_in(table: &[Self], of: u32, params: &[u8], foreign: impl Fn(u32) -> bool) -> bool {
        let rows = table.iter().filter(|row| row.of == of && row.size as usize == params.len());
        rows.flat_map(|row| row.places.of(params)).any(foreign)
    }
}

impl Session {
    /// Why a call that names a client of another process must not be made, as RM refuses to be
    /// called as one.
    pub(super) fn names_foreign_client(&self, prepared: &Prepared<'_>) -> Option<(Verdict, u32)> {
        let objects = lock(&self.objects);
        // None is the one that the call is made as.
        let foreign = |client: u32| client != 0 && objects.owner(client).is_none();
        let in_list = |list: Option<&[u8]>| {
            let list = list.unwrap_or_default();
            list.chunks_exact(4).any(|client| foreign(u32_at(client, 0)))
        };
        let argument = prepared.argument();
        let params = prepared.params().unwrap_or_default();
        let named = match prepared.nr() {
            escape::SHARE => foreign(u32_at(argument, 0)),
            escape::IDLE_CHANNELS => in_list(prepared.behind(0, IDLE_LIST)),
            escape::CONTROL => match u32_at(argument, 8) {
                IDLE_CHANNELS => in_list(prepared.behind(1, IDLE_LIST)),
                command => Handles::any_in(&CONTROLS, command, params, foreign),
            },
            escape::ALLOC => Handles::any_in(&CLASSES, u32_at(argument, 12), params, foreign),
            _ => false,
        };
        named.then_some((Verdict::Overlay, status::INVALID_CLIENT))
    }
}

#[cfg(test)]
mod tests {
    use nvguest_abi::compiled::Verdict;
    use nvguest_abi::policy::Policy;
    use nvguest_abi::profile::Profile;
    use nvguest_abi::store::Store;

    use super::*;

    const EVERY_CAPABILITY: u32 = 0x1f;

    fn measured() -> Vec<Profile> {
        let store = Store::embedded().unwrap();
        store.profiles().map(|release| store.load(release).unwrap()).collect()
    }

    /// Offsets of the fields of a struct that are handles and called clients.
    fn clients(profile: &Profile, layout: &str) -> Vec<u16> {
        let Some(layout) = profile.structs.get(layout) else { return Vec::new() };
        let fields = layout.fields.split(' ');
        let named = fields.filter_map(|field| {
            let (name, place) = field.split_once('@')?;
            let (at, size) = place.split_once(':')?;
            let is_client = name.to_lowercase().contains("client") && size == "4";
            is_client.then(|| at.parse().unwrap())
        });
        named.collect()
    }

    #[test]
    fn every_client_that_a_class_names_is_asked_for_on_every_measured_release() {
        for profile in measured() {
            for (&number, class) in &profile.classes {
                let (verdict, _) = Policy::built_in().class(class, EVERY_CAPABILITY);
                // A client names itself.
                let makes_client = ["NV01_ROOT", "NV01_ROOT_NON_PRIV", "NV01_ROOT_CLIENT"];
                if verdict != Verdict::Allow || makes_client.contains(&class.name.as_str()) {
                    continue;
                }
                let rows = CLASSES.iter().filter(|row| row.of == number && row.size == class.size);
                let offsets = |row: &Handles| {
                    let places = row.places;
                    (0..places.count).map(move |place| places.at + place * places.stride)
                };
                let asked: Vec<u16> = rows.flat_map(offsets).collect();
                let named = clients(&profile, &class.layout);
                assert_eq!(asked, named, "{} of {}", class.name, profile.release);
            }
        }
    }

    #[test]
    fn no_measured_release_has_another_layout_of_a_control_that_names_clients() {
        /// Since 560 it names none.
        const NONE: (u32, u32) = (0x00da_0002, 40);
        for profile in measured() {
            for row in CONTROLS {
                let Some(control) = profile.controls.get(&row.of) else { continue };
                let known = CONTROLS.iter().map(|row| (row.of, row.size)).chain([NONE]);
                let (name, size) = (&control.name, control.size);
                assert!(known.into_iter().any(|it| it == (row.of, size)), "{name} has {size}");
            }
        }
    }
}
