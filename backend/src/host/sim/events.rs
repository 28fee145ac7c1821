//! OS events: which file an RM event makes readable, and when.
//!
//! As in the driver (`allocate_os_event`, `registerEventNotification`,
//! `gpuNotifySubDeviceEvent`): a program makes a key of (client, file number) on the file that
//! shall become readable, makes an event object that names the key, and turns the notification on
//! at the event's source.

use std::collections::HashMap;
use std::sync::Arc;

use super::file::SimFile;
use super::layout::UnixEvent;
use super::status;

/// `NV2080_NOTIFIERS_SW`
pub const SOFTWARE: u32 = 0;
/// `NV2080_NOTIFIERS_TIMER`
const TIMER: u32 = 19;
/// `NV2080_NOTIFIERS_FIFO_EVENT_MTHD`: work of a channel is done.
pub const FIFO: u32 = 35;
/// `NV2080_NOTIFIERS_MAXCOUNT`
const NOTIFIERS: u32 = 198;
/// `NV01_EVENT_WITHOUT_EVENT_DATA`
const WITHOUT_DATA: u32 = 0x1000_0000;
/// `NV01_EVENT_NONSTALL_INTR`: of a channel's work, not of the source's notifications.
const NON_STALL: u32 = 0x0800_0000;
/// `NV2080_CTRL_EVENT_SET_NOTIFICATION_ACTION_*`
const ACTIONS: [u32; 3] = [DISABLE, SINGLE, 2];
const DISABLE: u32 = 0;
const SINGLE: u32 = 1;

/// A key made by ALLOC_OS_EVENT.
#[derive(Debug)]
struct Key {
    client: u32,
    fd: u32,
    file: Arc<SimFile>,
}

/// An event object.
#[derive(Debug)]
struct Event {
    client: u32,
    handle: u32,
    source: u32,
    /// The card whose events it is told of.
    card: Option<u32>,
    notify: u32,
    file: Arc<SimFile>,
}

/// What an event is to tell of, and to whom.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// The object whose events they are.
    pub source: u32,
    /// The card that this is of.
    pub card: Option<u32>,
    /// Index and flags.
    pub notify: u32,
    /// The number of a key's file.
    pub fd: u32,
}

impl Event {
    fn index(&self) -> u32 {
        self.notify & 0xffff
    }

    fn post(&self) {
        if self.notify & WITHOUT_DATA != 0 {
            return self.file.post();
        }
        let notify = self.index();
        self.file.post_data(UnixEvent {
            object: self.handle,
            notify,
            info32: 0,
            info16: 0,
            pad: 0,
        });
    }
}

/// Every event of one worker.
#[derive(Debug, Default)]
pub struct Events {
    keys: Vec<Key>,
    events: Vec<Event>,
    /// What EVENT_SET_NOTIFICATION set, by client, subdevice and index; off where missing.
    actions: HashMap<(u32, u32, u32), u32>,
}

impl Events {
    /// ALLOC_OS_EVENT on `file`.
    pub fn add_key(&mut self, client: u32, fd: u32, file: Arc<SimFile>) -> u32 {
        if self.keys.iter().any(|key| (key.client, key.fd) == (client, fd)) {
            return status::INSUFFICIENT_RESOURCES;
        }
        self.keys.push(Key { client, fd, file });
        status::OK
    }

    /// FREE_OS_EVENT.
    pub fn remove_key(&mut self, client: u32, fd: u32) -> u32 {
        let before = self.keys.len();
        self.keys.retain(|key| (key.client, key.fd) != (client, fd));
        if self.keys.len() == before {
            return status::INVALID_EVENT;
        }
        status::OK
    }

    /// An event object.
    pub fn add(&mut self, names: (u32, u32), wanted: Wanted) -> u32 {
        let (client, handle) = names;
        let Wanted { source, card, notify, fd } = wanted;
        let Some(key) = self.keys.iter().find(|key| (key.client, key.fd) == (client, fd)) else {
            return status::OBJECT_NOT_FOUND;
        };
        let file = Arc::clone(&key.file);
        self.events.push(Event { client, handle, source, card, notify, file });
        status::OK
    }

    /// An object is gone: an event, or the source of some.
    pub fn object_freed(&mut self, client: u32, object: u32) {
        self.events.retain(|event| {
            event.client != client || (event.handle != object && event.source != object)
        });
        self.actions.retain(|&(owner, source, _), _| (owner, source) != (client, object));
    }

    /// A client is gone (`rm_client_free_os_events`).
    pub fn client_freed(&mut self, client: u32) {
        self.keys.retain(|key| key.client != client);
        self.events.retain(|event| event.client != client);
        self.actions.retain(|&(owner, _, _), _| owner != client);
    }

    /// A file is closed.
    pub fn file_closed(&mut self, number: u64) {
        self.keys.retain(|key| key.file.number != number);
        self.events.retain(|event| event.file.number != number);
    }

    /// EVENT_SET_NOTIFICATION.
    pub fn set_action(&mut self, source: (u32, u32), index: u32, action: u32) -> u32 {
        let (client, object) = source;
        if !self.events.iter().any(|event| (event.client, event.source) == source) {
            return status::INVALID_STATE;
        }
        if index >= NOTIFIERS || index == TIMER || !ACTIONS.contains(&action) {
            return status::INVALID_ARGUMENT;
        }
        let current = self.actions.entry((client, object, index)).or_insert(DISABLE);
        if action != DISABLE && *current != DISABLE {
            return status::INVALID_STATE;
        }
        *current = action;
        status::OK
    }

    /// A card's own events of `index` (`gpuNotifySubDeviceEvent`): every source on it that has the
    /// notification on, of every client.
    pub fn notify(&mut self, card: u32, index: u32) {
        for (&(client, source, of), action) in &mut self.actions {
            let here = |event: &&Event| {
                (event.client, event.source, event.card) == (client, source, Some(card))
            };
            let mut here = self.events.iter().filter(here).peekable();
            if of != index || *action == DISABLE || here.peek().is_none() {
                continue;
            }
            here.filter(|event| event.index() == index).for_each(Event::post);
            if *action == SINGLE {
                *action = DISABLE;
            }
        }
    }

    /// The events of a card's finished work (`engineNonStallIntrNotifyEvent`): the one with this
    /// handle, or all where it is zero.
    pub fn notify_work(&self, card: u32, handle: u32) {
        let wanted = |event: &&Event| {
            event.card == Some(card)
                && event.notify & NON_STALL != 0
                && event.index() == FIFO
                && (handle == 0 || event.handle == handle)
        };
        self.events.iter().filter(wanted).for_each(Event::post);
    }
}
