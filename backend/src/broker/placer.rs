//! The thread that asks the VMM to map and unmap.
//!
//! The VMM answers when it comes to it: not while it takes a queue back, which waits
//! for a worker, whose listener must not wait for the VMM. So nobody else waits here.

use std::sync::mpsc::{channel, sync_channel, Receiver, Sender, SyncSender};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result};

use super::window::Placing;
use super::worker::Worker;
use super::Broker;
use crate::errno::Errno;
use crate::sync::lock;
use crate::transport::link::{Kind, Message};

enum Job {
    Place(Arc<Worker>, Message),
    Unplace(Arc<Worker>, Message),
    Clear(u16, SyncSender<()>),
}

/// What is to be done, in the order in which it came.
pub struct Placer {
    jobs: Sender<Job>,
    waiting: Mutex<Option<Receiver<Job>>>,
}

impl Default for Placer {
    fn default() -> Self {
        let (jobs, waiting) = channel();
        Self { jobs, waiting: Mutex::new(Some(waiting)) }
    }
}

impl Placer {
    /// Starts the thread.
    pub fn start(&self, broker: &Arc<Broker>) -> Result<()> {
        let waiting = lock(&self.waiting).take();
        let waiting = waiting.context("The placing thread is started once")?;
        let broker = Arc::clone(broker);
        std::thread::Builder::new()
            .name("placer".into())
            .stack_size(128 << 10)
            .spawn(move || waiting.iter().for_each(|job| run(&broker, job)))
            .context("Starting the placing thread failed")?;
        Ok(())
    }

    /// A worker's question of [`Kind::Place`]: answered to it.
    pub fn place(&self, worker: &Arc<Worker>, message: Message) {
        // The thread lives as long as the broker.
        let _ = self.jobs.send(Job::Place(Arc::clone(worker), message));
    }

    /// A worker's question of [`Kind::Unplace`]: answered to it.
    pub fn unplace(&self, worker: &Arc<Worker>, message: Message) {
        let _ = self.jobs.send(Job::Unplace(Arc::clone(worker), message));
    }

    /// Takes out all that a dead worker had, and returns when that is done.
    pub fn clear(&self, worker: u16) {
        let (done, heard) = sync_channel(1);
        if self.jobs.send(Job::Clear(worker, done)).is_ok() {
            let _ = heard.recv();
        }
    }
}

fn run(broker: &Broker, job: Job) {
    match job {
        Job::Place(worker, message) => place(broker, &worker, message),
        Job::Unplace(worker, message) => {
            let keep = message.words[1] != 0;
            let id = u32::try_from(message.words[0]).unwrap_or(0);
            let outcome = broker.window.unplace(worker.number, id, keep);
            broker.workers.placements_changed(broker);
            worker.answer_later(Kind::Unplaced, message.tag, outcome, [0; 2]);
        }
        Job::Clear(worker, done) => {
            broker.window.clear(Some(worker));
            broker.workers.placements_changed(broker);
            let _ = done.send(());
        }
    }
}

fn place(broker: &Broker, worker: &Worker, message: Message) {
    let [offset, length, writable, _] = message.words;
    let fds: Result<[std::os::fd::OwnedFd; 2], _> = message.fds.try_into();
    let placed = match fds {
        Ok([fd, owner]) => {
            let placing = Placing { fd, owner, offset, length, writable: writable != 0 };
            broker.window.place(worker.number, placing)
        }
        Err(_) => Err(Errno::EINVAL),
    };
    broker.workers.placements_changed(broker);
    let (outcome, more) = match placed {
        Ok((id, at)) => (Ok(()), [u64::from(id), at]),
        Err(errno) => (Err(errno), [0; 2]),
    };
    worker.answer_later(Kind::Placed, message.tag, outcome, more);
}
