//! An event of the driver's that its own user fires.

use std::fs::File;
use std::os::fd::AsRawFd;

use zerocopy::IntoBytes;

use rmclient::abi::{self, class, control, escape, notify};
use rmclient::{Result, Session};

/// A file, and an event that makes it readable.
pub struct Event {
    /// What is waited for.
    pub file: File,
    handle: u32,
}

impl Event {
    /// One of a session's card.
    pub fn new(session: &Session) -> Result<Self> {
        let file = rmclient::open(&session.card.node)?;
        rmclient::register(&file, &session.client.ctl).ok("REGISTER_FD")?;
        // CAST: a descriptor is positive.
        let number = file.as_raw_fd() as u32;
        let mut key = abi::OsEvent {
            client: session.client.handle,
            device: session.device,
            fd: number,
            status: 0,
        };
        rmclient::call(&file, escape::ALLOC_OS_EVENT, &mut key, None, |key| key.status)
            .ok("ALLOC_OS_EVENT")?;
        let handle = session.client.fresh();
        let mut params = abi::Event {
            source: session.subdevice,
            class: class::OS_EVENT,
            notify: notify::FIFO | notify::NON_STALL | notify::WITHOUT_DATA,
            data: number.into(),
            ..Default::default()
        };
        let names = (session.subdevice, handle);
        let params = Some(params.as_mut_bytes());
        session.client.alloc_on(&file, names, class::OS_EVENT, params).ok("making an event")?;
        Ok(Self { file, handle })
    }

    /// Fires it.
    pub fn fire(&self, session: &Session) -> Result<()> {
        let mut handle = self.handle;
        let params = handle.as_mut_bytes();
        session
            .client
            .control(session.subdevice, control::SET_TRIGGER_FIFO, params)
            .ok("EVENT_SET_TRIGGER_FIFO")
    }
}
