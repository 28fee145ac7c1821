//! The worker's side of the link: questions to the broker, and what it is told unasked.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{sync_channel, SyncSender};
use std::sync::Mutex;
use std::time::Duration;

use crate::errno::Errno;
use crate::sync::lock;
use crate::transport::link::{Kind, Message, Outgoing, Sender};

/// The broker answers within this, or the call fails with EIO.
const PATIENCE: Duration = Duration::from_secs(10);

/// The broker, as a worker sees it.
pub struct Upstream {
    sender: Sender,
    next: AtomicU64,
    waiting: Mutex<HashMap<u64, SyncSender<Message>>>,
}

impl Upstream {
    /// The broker behind `sender`.
    pub fn new(sender: Sender) -> Self {
        Self { sender, next: AtomicU64::new(1), waiting: Mutex::default() }
    }

    /// Says something that has no answer.
    pub fn tell(&self, kind: Kind, message: Outgoing<'_>) -> io::Result<()> {
        self.sender.send(kind, message)
    }

    /// Asks, and waits for the answer; an errno in it is the error.
    pub fn ask(&self, kind: Kind, mut message: Outgoing<'_>) -> Result<Message, Errno> {
        let tag = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, heard) = sync_channel(1);
        self.lock().insert(tag, answer);
        message.tag = tag;
        let answer = self
            .sender
            .send(kind, message)
            .map_err(Errno::from)
            .and_then(|()| heard.recv_timeout(PATIENCE).map_err(|_| Errno::EIO));
        self.lock().remove(&tag);
        let answer = answer?;
        answer.outcome()?;
        Ok(answer)
    }

    /// Hands an answer to the thread that waits for it.
    pub fn hear(&self, message: Message) {
        if let Some(waiting) = self.lock().remove(&message.tag) {
            // The asker may have lost its patience just now.
            let _ = waiting.try_send(message);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, SyncSender<Message>>> {
        lock(&self.waiting)
    }
}
