//! A backend with the simulated card and a guest of it, for every test its own.

use std::sync::Arc;
use std::time::Duration;

use nvguest_frontend::backend::Backend;
use nvguest_frontend::guest::{header, message};
use nvguest_frontend::wire::{Caller, Kind, ReqHeader, RespHeader, NO_SLOT};
use nvguest_frontend::{Guest, Options};
use zerocopy::FromBytes;

/// Long enough for a slow machine, never reached when all is well.
pub const LONG: Duration = Duration::from_secs(20);
/// Long enough to see what must not come.
pub const SHORT: Duration = Duration::from_millis(100);

pub use nix::libc::{EBADF, EINVAL, EMFILE, EMSGSIZE, ENODEV, ENXIO, EPROTO};

/// A backend and its guest.
pub struct Pair {
    pub guest: Arc<Guest>,
    pub backend: Backend,
}

pub fn start() -> Backend {
    Backend::start(env!("CARGO_BIN_EXE_vhost-user-nvguest")).expect("a backend")
}

pub fn start_with(args: &[&str], environment: &[(&str, &str)]) -> Backend {
    let binary = env!("CARGO_BIN_EXE_vhost-user-nvguest");
    Backend::with(binary, args, environment).expect("a backend")
}

/// A guest that has not said HELLO.
pub fn silent_pair(options: Options) -> Pair {
    let backend = start();
    let guest = Guest::connect(&backend.socket(), options).expect("a device");
    Pair { guest, backend }
}

/// A guest that has probed.
pub fn pair() -> Pair {
    pair_with(Options::default())
}

pub fn pair_with(options: Options) -> Pair {
    let pair = silent_pair(options);
    pair.guest.probe().expect("probing");
    pair
}

/// The same with more arguments and environment for the backend.
pub fn pair_in(args: &[&str], environment: &[(&str, &str)], options: Options) -> Pair {
    let backend = start_with(args, environment);
    let guest = Guest::connect(&backend.socket(), options).expect("a device");
    guest.probe().expect("probing");
    Pair { guest, backend }
}

/// The caller that most tests are.
pub fn caller() -> Caller {
    Caller { tgid: 100.into(), euid: 1000.into(), start_ns: 1_000_000_007.into() }
}

/// A whole request of that caller's.
pub fn ask(kind: Kind, file: u32, body: &[u8]) -> Vec<u8> {
    message(header(kind, file, caller()), body)
}

/// A whole request of any type.
pub fn ask_number(kind: u32, file: u32, body: &[u8]) -> Vec<u8> {
    let header = ReqHeader { kind: kind.into(), file: file.into(), ..ReqHeader::default() };
    message(ReqHeader { caller: caller(), ..header }, body)
}

/// Sends bytes on a slot's queue; the errno that comes back, 0 for none.
pub fn errno_on(guest: &Guest, slot: u32, request: &[u8]) -> i32 {
    let reply = guest.request(slot, request, 4096).expect("an answer");
    let (header, _) = RespHeader::read_from_prefix(&reply).expect("a whole reply");
    assert_eq!(header.len.get() as usize, reply.len(), "a reply says how long it is");
    i32::try_from(header.status.get()).expect("an errno")
}

/// The same on the broker's queue.
pub fn errno(guest: &Guest, request: &[u8]) -> i32 {
    errno_on(guest, NO_SLOT, request)
}

/// The errno of something that must fail.
pub fn refused<T>(outcome: nvguest_frontend::Result<T>) -> i32 {
    match outcome {
        Ok(_) => panic!("that should have been refused"),
        Err(nvguest_frontend::Error::Errno(errno)) => errno,
        Err(error) => panic!("{error}"),
    }
}
