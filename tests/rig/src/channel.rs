//! The host's end of the agent's port.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{bail, Context, Result};

use crate::proto::{read_frame, write_frame, FromGuest, Ready, Setup, ToGuest};

/// A message of the guest with its bytes.
pub type Event = (FromGuest, Vec<u8>);

type Listeners = Mutex<BTreeMap<u32, Sender<Event>>>;

/// Stands for the answer to a setup, which names no request.
const SET_UP: u32 = 0;

/// A connection to a guest that is set up.
#[derive(Debug)]
pub struct Channel {
    port: Mutex<UnixStream>,
    listeners: Arc<Listeners>,
    next: AtomicU32,
}

impl Channel {
    /// Sets the guest up and waits for its answer.
    pub fn open(stream: UnixStream, setup: Setup, patience: Duration) -> Result<(Self, Ready)> {
        let mut reading = stream.try_clone().context("duplicate the agent's socket")?;
        let mut port = stream;
        reading.set_read_timeout(Some(patience)).context("set a time limit on the socket")?;
        write_frame(&mut port, &ToGuest::Setup(setup), &[]).context("send the guest's setup")?;
        let first = read_frame(&mut reading).context("wait for the guest's agent")?;
        let ready = match first {
            Some((FromGuest::Ready(ready), _)) => ready,
            Some((other, _)) => bail!("the agent's first message was {other:?}"),
            None => bail!("the guest ended before its agent answered"),
        };
        reading.set_read_timeout(None).context("lift the socket's time limit")?;
        let listeners = Arc::new(Listeners::default());
        let theirs = Arc::clone(&listeners);
        std::thread::spawn(move || {
            while let Ok(Some((message, data))) = read_frame::<FromGuest>(&mut reading) {
                let id = message.id().unwrap_or(SET_UP);
                if let Some(listener) = lock(&theirs).get(&id) {
                    let _nobody_waits = listener.send((message, data));
                }
            }
            // The guest is gone: every waiting command hears it at once.
            lock(&theirs).clear();
        });
        let channel = Channel { port: Mutex::new(port), listeners, next: AtomicU32::new(1) };
        Ok((channel, ready))
    }

    /// Sets the guest up that runs after a reboot, and waits for its answer.
    pub fn set_up(&self, setup: Setup, patience: Duration) -> Result<Ready> {
        let (sender, inbox) = channel();
        lock(&self.listeners).insert(SET_UP, sender);
        self.send(&ToGuest::Setup(setup), &[])?;
        let answer = inbox.recv_timeout(patience);
        self.forget(SET_UP);
        match answer.context("the guest's agent did not answer after a reboot")? {
            (FromGuest::Ready(ready), _) => Ok(ready),
            (other, _) => bail!("the agent's first message was {other:?}"),
        }
    }

    /// Sends a message.
    pub fn send(&self, message: &ToGuest, data: &[u8]) -> Result<()> {
        let mut port = self.port.lock().unwrap_or_else(PoisonError::into_inner);
        write_frame(&mut *port, message, data).context("send to the guest's agent: is it gone?")
    }

    /// A new id, and where its answers arrive.
    pub fn listen(&self) -> (u32, Receiver<Event>) {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, inbox) = channel();
        lock(&self.listeners).insert(id, sender);
        (id, inbox)
    }

    /// Stops listening.
    pub fn forget(&self, id: u32) {
        lock(&self.listeners).remove(&id);
    }

    /// One request, one answer.
    pub fn ask(&self, request: impl FnOnce(u32) -> ToGuest, data: &[u8]) -> Result<Vec<u8>> {
        let (id, inbox) = self.listen();
        self.send(&request(id), data)?;
        let answer = inbox.recv_timeout(Duration::from_secs(60));
        self.forget(id);
        match answer.context("the guest's agent did not answer within 60 s")? {
            (FromGuest::Done { .. }, data) => Ok(data),
            (FromGuest::Failed { error, .. }, _) => bail!("in the guest: {error}"),
            (other, _) => bail!("the agent answered {other:?}"),
        }
    }
}

fn lock(listeners: &Listeners) -> MutexGuard<'_, BTreeMap<u32, Sender<Event>>> {
    listeners.lock().unwrap_or_else(PoisonError::into_inner)
}
