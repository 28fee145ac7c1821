//! A million messages of hostile workers: their broker lives, serves, and keeps nothing.

use std::time::Duration;

use nvguest_frontend::backend::{held, wait_until};
use nvguest_fuzz::hostile::Setup;
use nvguest_fuzz::input::Input;
use nvguest_fuzz::worker::{say, Hostile};
use vhost_user_nvguest::transport::link::{Kind, Outgoing, Sender};

const PATIENCE: Duration = Duration::from_secs(20);
/// What allocators keep. Of a million messages, nine bytes each would show.
const SLACK_KIB: u64 = 8192;
/// What a worker may say however often, with whatever numbers.
const HARMLESS: [Kind; 9] = [
    Kind::Ready,
    Kind::Reply,
    Kind::Event,
    Kind::Files,
    Kind::Stopped,
    Kind::Refused,
    Kind::Take,
    Kind::Hold,
    Kind::Exported,
];

/// A small generator of numbers, so that a failure repeats.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        [(); N].map(|()| self.next() as u8)
    }
}

/// Messages until the broker has had enough of this worker, or there were `most`; how many.
fn pester(sender: &Sender, number: u16, random: &mut Random, most: usize) -> usize {
    for count in 0..most {
        let sent = if random.next() % 512 == 0 {
            let bytes: [u8; 64] = random.bytes();
            say(sender, &mut Input::new(&bytes), number)
        } else {
            harmless(sender, random)
        };
        if sent.is_err() {
            return count;
        }
    }
    most
}

fn harmless(sender: &Sender, random: &mut Random) -> std::io::Result<()> {
    let kind = HARMLESS[random.next() as usize % HARMLESS.len()];
    let small = random.next() & 0xff;
    let words = match kind {
        Kind::Take => [small << 12, 0, 0, 0],
        Kind::Hold => [small % 10, random.next() & 0xff, 0, 0],
        Kind::Exported => [small, random.next(), 0, 0],
        _ => [random.next() & 0xff, random.next(), random.next(), random.next()],
    };
    let payload: [u8; 32] = random.bytes();
    let payload = &payload[..random.next() as usize % 33];
    sender.send(kind, Outgoing { tag: random.next() & 7, words, payload, fds: &[] })
}

/// Workers that come, pester and go, until there were `count` messages.
fn flood(setup: &Setup, random: &mut Random, count: usize) {
    let mut left = count;
    while left > 0 {
        let (opening, number, link) = setup.worker(100);
        let worker = Hostile::on(link);
        left -= pester(&worker.sender, number, random, left.min(20_000));
        worker.leave();
        setup.begin_anew();
        setup.opened(opening);
    }
}

#[test]
fn a_million_messages_of_hostile_workers_leave_nothing() {
    let setup = Setup::start("files=100");
    let mut random = Random(0x5eed);
    flood(&setup, &mut random, 50_000);
    let me = std::process::id() as i32;
    let before = held(me).expect("we are there");
    flood(&setup, &mut random, 1_000_000);
    setup.begin_anew();
    let fds = || held(me).expect("we are there").fds;
    assert!(wait_until(PATIENCE, || fds() <= before.fds), "{} and now {}", before.fds, fds());
    let after = held(me).expect("we are there").own_kib;
    assert!(after <= before.own_kib + SLACK_KIB, "{} KiB and now {after} KiB", before.own_kib);
}

#[test]
fn a_worker_that_asks_and_does_not_wait_for_answers_is_ended() {
    let setup = Setup::start("files=100");
    for kind in [Kind::Fetch, Kind::Place] {
        let (opening, number, link) = setup.worker(100);
        let worker = Hostile::on(link);
        // A file of its own, so that it is itself that the broker waits for.
        let file = u64::from(nvguest_frontend::wire::file_handle(number, 1));
        let words = [if kind == Kind::Fetch { file } else { 4096 }, 4096, 0, 0];
        let ask = |_| worker.sender.send(kind, Outgoing { words, ..Outgoing::default() }).is_err();
        // Of the placements the VMM refuses each at once, so that those may be answered.
        assert!((0..100_000).any(ask) || kind == Kind::Place, "{kind:?}");
        worker.leave();
        setup.begin_anew();
        setup.opened(opening);
    }
}
