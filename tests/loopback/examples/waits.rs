//! Waiting for an event in every way that programs do: poll, ppoll, select, epoll by level and by
//! edge, one waiter and two, before the event and after. Says `ok` a line for each.

#[path = "../src/measure/event.rs"]
mod event;

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::{poll, ppoll, PollFd, PollFlags, PollTimeout};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::select::{select, FdSet};
use nix::sys::time::{TimeSpec, TimeVal, TimeValLike};

use event::Event;
use rmclient::Session;

/// Longer than any wake takes.
const LONG: u16 = 5000;
/// So long that a wake that is wrong would have come.
const SHORT: u16 = 50;

/// A way to wait: how many descriptors were ready.
type Way = fn(&File, u16) -> i32;

fn by_poll(file: &File, ms: u16) -> i32 {
    let mut fds = [PollFd::new(file.as_fd(), PollFlags::POLLIN | PollFlags::POLLPRI)];
    poll(&mut fds, PollTimeout::from(ms)).unwrap_or(-1)
}

fn by_ppoll(file: &File, ms: u16) -> i32 {
    let mut fds = [PollFd::new(file.as_fd(), PollFlags::POLLIN)];
    let time = TimeSpec::from_duration(Duration::from_millis(ms.into()));
    ppoll(&mut fds, Some(time), None).unwrap_or(-1)
}

fn by_select(file: &File, ms: u16) -> i32 {
    let mut set = FdSet::new();
    set.insert(file.as_fd());
    let mut time = TimeVal::milliseconds(ms.into());
    select(None, &mut set, None, None, &mut time).unwrap_or(-1)
}

fn by_epoll_of(file: &File, ms: u16, more: EpollFlags) -> i32 {
    let Ok(epoll) = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC) else { return -1 };
    let event = EpollEvent::new(EpollFlags::EPOLLIN | more, 7);
    if epoll.add(file, event).is_err() {
        return -1;
    }
    let mut events = [EpollEvent::empty(); 4];
    let count = epoll.wait(&mut events, EpollTimeout::from(ms));
    count.map_or(-1, |count| i32::try_from(count).unwrap_or(-1))
}

fn by_epoll(file: &File, ms: u16) -> i32 {
    by_epoll_of(file, ms, EpollFlags::empty())
}

fn by_edge(file: &File, ms: u16) -> i32 {
    by_epoll_of(file, ms, EpollFlags::EPOLLET)
}

/// Nothing is ready; an event wakes a sleeper, once; one that came before is found, once.
fn waits(session: &Session, way: Way) -> rmclient::Result<bool> {
    let event = Event::new(session)?;
    let none = way(&event.file, SHORT) == 0;
    let woken = std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| way(&event.file, LONG));
        std::thread::sleep(Duration::from_millis(SHORT.into()));
        event.fire(session)?;
        Ok(sleeper.join().unwrap_or(-1) == 1)
    })?;
    let once = way(&event.file, SHORT) == 0;
    event.fire(session)?;
    let found = way(&event.file, LONG) == 1;
    Ok(none && woken && once && found && way(&event.file, SHORT) == 0)
}

/// Of two files, the one whose event fired is ready, beside a pipe that is none of ours.
fn tells_apart(session: &Session) -> rmclient::Result<bool> {
    let (one, other) = (Event::new(session)?, Event::new(session)?);
    let (pipe, _end) = nix::unistd::pipe().map_err(|errno| rmclient::io("a pipe")(errno.into()))?;
    other.fire(session)?;
    let mut fds = [one.file.as_fd(), other.file.as_fd(), pipe.as_fd()]
        .map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    let count = poll(&mut fds, PollTimeout::from(LONG)).unwrap_or(-1);
    let ready = fds.map(|fd| fd.any().unwrap_or(false));
    Ok(count == 1 && ready == [false, true, false])
}

fn run(session: &Session) -> bool {
    let ways: [(&str, Way); 5] = [
        ("poll", by_poll),
        ("ppoll", by_ppoll),
        ("select", by_select),
        ("epoll", by_epoll),
        ("epoll-edge", by_edge),
    ];
    let mut outcomes: Vec<(&str, rmclient::Result<bool>)> =
        ways.into_iter().map(|(name, way)| (name, waits(session, way))).collect();
    outcomes.push(("two-files", tells_apart(session)));
    for (name, outcome) in &outcomes {
        match outcome {
            Ok(true) => println!("ok {name}"),
            Ok(false) => println!("FAIL {name}"),
            Err(failure) => println!("FAIL {name}: {failure}"),
        }
    }
    outcomes.iter().all(|(_, outcome)| matches!(outcome, Ok(true)))
}

fn main() {
    let session = rmclient::find_card(None).and_then(|card| Session::open(&card));
    match session {
        Ok(session) => std::process::exit(i32::from(!run(&session))),
        Err(failure) => {
            println!("FAIL session: {failure}");
            std::process::exit(1);
        }
    }
}
