//! Events: an RM event that makes a file readable.
//!
//! Two ways to fire one are open to every user. `EVENT_SET_TRIGGER_FIFO` fires one event by its
//! handle (user mode signals timeline semaphores with it); `EVENT_SET_TRIGGER` fires the card's
//! software event. The driver's poll reports an event without data once, to one poller; an event
//! with data stays until it is taken.
//!
//! RM fires the first kind for everybody when anybody's work on the card ends.

use std::fs::File;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use zerocopy::IntoBytes;

use super::identity::number;
use super::{check, Check};
use rmclient::abi::{self, class, control, escape, notify};
use rmclient::{call, io, wrong, Card, Failure, Outcome, Result, Session};

pub const CHECKS: &[Check] = &[
    check("event", "an event without data makes a file readable once", |card| {
        undisturbed(card, without_data)
    }),
    check("event-wakes", "an event wakes a sleeping poll", |card| undisturbed(card, wakes)),
    check("event-remembered", "an event that came before the poll is not lost", |card| {
        undisturbed(card, remembered)
    }),
    check("event-two-files", "an event reaches its own file alone", |card| {
        undisturbed(card, two_files)
    }),
    check("event-data", "an event with data stays until it is taken", with_data),
    check("event-single", "a single-shot notification fires once", single),
    check("event-key", "a file's key is taken once and freed once", key),
];

/// A file that receives an event of a session's subdevice.
struct Receiver<'a> {
    session: &'a Session,
    file: File,
    event: u32,
}

impl<'a> Receiver<'a> {
    fn new(session: &'a Session, index: u32) -> Result<Self> {
        let file = rmclient::open(&session.card.node)?;
        rmclient::register(&file, &session.client.ctl).ok("REGISTER_FD")?;
        os_event(session, &file, escape::ALLOC_OS_EVENT).ok("ALLOC_OS_EVENT")?;
        let event = session.client.fresh();
        let mut params = abi::Event {
            source: session.subdevice,
            class: class::OS_EVENT,
            notify: index,
            data: number(&file).into(),
            ..Default::default()
        };
        let names = (session.subdevice, event);
        let params = Some(params.as_mut_bytes());
        session.client.alloc_on(&file, names, class::OS_EVENT, params).ok("making an event")?;
        Ok(Self { session, file, event })
    }

    /// One that [`Receiver::fire`] fires.
    fn fifo(session: &'a Session) -> Result<Self> {
        Self::new(session, notify::FIFO | notify::NON_STALL | notify::WITHOUT_DATA)
    }

    fn fire(&self) -> Result<()> {
        let mut event = self.event;
        self.session
            .client
            .control(self.session.subdevice, control::SET_TRIGGER_FIFO, event.as_mut_bytes())
            .ok("EVENT_SET_TRIGGER_FIFO")
    }

    /// Whether a poll of at most `ms` reports the file.
    fn readable(&self, ms: u16) -> Result<bool> {
        let mut fds = [PollFd::new(self.file.as_fd(), PollFlags::POLLIN | PollFlags::POLLPRI)];
        let count =
            poll(&mut fds, PollTimeout::from(ms)).map_err(|errno| io("poll")(errno.into()))?;
        let events = fds[0].revents().unwrap_or(PollFlags::empty());
        match count == 0 || events.contains(PollFlags::POLLIN) {
            true => Ok(count != 0),
            false => wrong(format!("poll reports {events:?}")),
        }
    }

    fn expect(&self, ms: u16, readable: bool, when: &str) -> Result<()> {
        match self.readable(ms)? {
            found if found == readable => Ok(()),
            true => wrong(format!("the file is readable {when}")),
            false => wrong(format!("the file is not readable {when}")),
        }
    }
}

fn os_event(session: &Session, file: &File, nr: u32) -> Outcome {
    let mut argument = abi::OsEvent {
        client: session.client.handle,
        device: session.device,
        fd: number(file),
        status: 0,
    };
    call(file, nr, &mut argument, None, |argument| argument.status)
}

fn set_notification(session: &Session, index: u32, action: u32) -> Outcome {
    let mut params = [index, action, 0, 0, 0];
    session.client.control(session.subdevice, control::SET_NOTIFICATION, params.as_mut_bytes())
}

fn trigger(session: &Session) -> Result<()> {
    session.client.control(session.subdevice, control::SET_TRIGGER, &mut []).ok("EVENT_SET_TRIGGER")
}

/// Long enough for a slow guest, never reached when all is well.
const LONG: u16 = 5000;
/// Long enough to see what should not come.
const SHORT: u16 = 50;

/// What a check says of a card on which nobody else's work ended meanwhile: a receiver that nobody
/// fires would have told.
fn undisturbed(card: &Card, check: fn(&Session) -> Result<String>) -> Result<String> {
    const ATTEMPTS: u32 = 20;
    let session = Session::open(card)?;
    for _ in 0..ATTEMPTS {
        let witness = Receiver::fifo(&session)?;
        let verdict = check(&session);
        if !witness.readable(SHORT)? {
            return verdict;
        }
    }
    Err(Failure::Disturbed(format!(
        "an event that nobody fired came in each of {ATTEMPTS} attempts: others work on this card"
    )))
}

fn without_data(session: &Session) -> Result<String> {
    let receiver = Receiver::fifo(session)?;
    receiver.expect(0, false, "before the event")?;
    receiver.fire()?;
    receiver.expect(LONG, true, "after the event")?;
    receiver.expect(SHORT, false, "a second time")?;
    receiver.fire()?;
    receiver.expect(LONG, true, "after a second event")?;
    Ok("once each".into())
}

fn wakes(session: &Session) -> Result<String> {
    let receiver = Receiver::fifo(session)?;
    receiver.expect(0, false, "before the event")?;
    let started = Instant::now();
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| receiver.readable(LONG));
        thread::sleep(Duration::from_millis(100));
        receiver.fire()?;
        match sleeper.join().expect("the poll does not panic")? {
            true => Ok(()),
            false => {
                wrong(format!("poll slept {} ms through the event", started.elapsed().as_millis()))
            }
        }
    })?;
    Ok("woken".into())
}

fn remembered(session: &Session) -> Result<String> {
    let receiver = Receiver::fifo(session)?;
    for _ in 0..3 {
        receiver.fire()?;
    }
    thread::sleep(Duration::from_millis(20));
    receiver.expect(LONG, true, "after three events")?;
    receiver.expect(SHORT, false, "a second time, after three events at once")?;
    Ok("reported once".into())
}

fn two_files(session: &Session) -> Result<String> {
    let (one, other) = (Receiver::fifo(session)?, Receiver::fifo(session)?);
    one.fire()?;
    one.expect(LONG, true, "after its event")?;
    other.expect(SHORT, false, "after the event of another file")?;
    Ok("its own".into())
}

fn with_data(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let receiver = Receiver::new(&session, notify::SOFTWARE)?;
    set_notification(&session, notify::SOFTWARE, 2).ok("EVENT_SET_NOTIFICATION (repeat)")?;
    trigger(&session)?;
    trigger(&session)?;
    receiver.expect(LONG, true, "after the events")?;
    receiver.expect(LONG, true, "while an event waits")?;
    let first = take(&receiver)?;
    receiver.expect(LONG, true, "while one more event waits")?;
    let second = take(&receiver)?;
    receiver.expect(SHORT, false, "after the last event was taken")?;
    let right = [(receiver.event, 1), (receiver.event, 0)];
    match [(first.0.object, first.1), (second.0.object, second.1)] == right {
        true => Ok("two taken".into()),
        false => wrong(format!("took {first:x?} and {second:x?}")),
    }
}

/// Takes an event; gives it and whether more wait.
fn take(receiver: &Receiver<'_>) -> Result<(abi::UnixEvent, u32)> {
    let (mut argument, mut event) = (abi::GetEvent::default(), abi::UnixEvent::default());
    let params = Some(event.as_mut_bytes());
    call(&receiver.file, escape::RM_GET_EVENT_DATA, &mut argument, params, |argument| {
        argument.status
    })
    .ok("RM_GET_EVENT_DATA")?;
    Ok((event, argument.more))
}

fn single(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    set_notification(&session, notify::SOFTWARE, 1)
        .expect(super::errors::BAD_STATE, "EVENT_SET_NOTIFICATION without an event")?;
    let receiver = Receiver::new(&session, notify::SOFTWARE | notify::WITHOUT_DATA)?;
    set_notification(&session, notify::SOFTWARE, 1).ok("EVENT_SET_NOTIFICATION (single)")?;
    set_notification(&session, notify::SOFTWARE, 1)
        .expect(super::errors::BAD_STATE, "a second EVENT_SET_NOTIFICATION")?;
    trigger(&session)?;
    receiver.expect(LONG, true, "after the event")?;
    trigger(&session)?;
    receiver.expect(SHORT, false, "after a second event")?;
    Ok("once".into())
}

fn key(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let file = rmclient::open(&session.card.node)?;
    os_event(&session, &file, escape::ALLOC_OS_EVENT).ok("ALLOC_OS_EVENT")?;
    os_event(&session, &file, escape::ALLOC_OS_EVENT)
        .expect(super::errors::NO_RESOURCES, "a second ALLOC_OS_EVENT with the same key")?;
    os_event(&session, &file, escape::FREE_OS_EVENT).ok("FREE_OS_EVENT")?;
    os_event(&session, &file, escape::FREE_OS_EVENT)
        .expect(super::errors::NO_EVENT, "a second FREE_OS_EVENT")?;
    Ok("once".into())
}
