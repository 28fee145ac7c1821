//! `busy PROGRAM [ARGUMENT…]`: a program on a card where somebody else's work ends all the time.
//! RM tells everybody of it, so that events come which the program did not fire.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use nix::unistd::getppid;
use rmclient::abi::control;
use rmclient::{find_card, sys, Session};
use zerocopy::IntoBytes;

/// `SET_TRIGGER_FIFO` fires the event of this handle; of all if it is none.
const EVERYBODY: u32 = 0;

fn main() {
    let session = find_card(None).and_then(|card| Session::open(&card)).expect("a card");
    let parent = std::process::id();
    // The files stay the parent's, whose worker's card this is.
    let work = || {
        while getppid().as_raw().unsigned_abs() == parent {
            let mut event = EVERYBODY;
            let answer = session.client.control(
                session.subdevice,
                control::SET_TRIGGER_FIFO,
                event.as_mut_bytes(),
            );
            if answer.ok("EVENT_SET_TRIGGER_FIFO").is_err() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    };
    let _working = sys::in_child(work).expect("a child");
    let mut words = std::env::args_os().skip(1);
    let program = words.next().expect("a program to run");
    panic!("{program:?}: {}", Command::new(&program).args(words).exec());
}
