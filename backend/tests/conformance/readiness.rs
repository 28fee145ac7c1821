//! ARM and events.

use std::time::Duration;

use nvguest_frontend::rm::Client;
use nvguest_frontend::{wire, File, Options};

use crate::common::*;

/// On the process's own event queue, and on the broker's.
fn on_both(test: impl Fn(&Pair, &Client)) {
    for slots in [16, 0] {
        let pair = pair_with(Options { slots, ..Options::default() });
        let client = Client::new(&pair.guest.process(100)).unwrap();
        test(&pair, &client);
        assert_eq!(pair.guest.mailbox.count(), 0, "no record that nobody asked for");
    }
}

#[test]
fn an_event_that_comes_after_arm_is_reported_once() {
    on_both(|pair, client| {
        let (file, event) = client.event().unwrap();
        let (mut rounds, mut more) = (0, 0);
        // What is promised meanwhile, on a machine that is slow, is taken to its end.
        while rounds < 20 || more > 0 {
            if more == 0 {
                file.arm().unwrap();
            }
            client.fire(event).unwrap();
            let record = pair.guest.mailbox.wait(file.handle, LONG).expect("a record");
            assert_eq!(record.kind.get(), wire::EVENT_READY);
            assert_ne!(record.mask.get() & 1, 0, "POLLIN");
            more = record.more.get();
            assert!(rounds > 0 || more == 0, "nothing is promised at first");
            rounds += 1;
        }
        client.fire(event).unwrap();
        assert!(pair.guest.mailbox.wait(file.handle, SHORT).is_none(), "one report for one arm");
    });
}

/// Fires an event later than a worker looks for it; how many more are promised.
fn told_late(pair: &Pair, client: &Client, file: &File, event: u32) -> u32 {
    std::thread::sleep(Duration::from_millis(2));
    client.fire(event).unwrap();
    pair.guest.mailbox.wait(file.handle, LONG).expect("a record").more.get()
}

/// Waits long, again and again, until more is promised.
fn promised(pair: &Pair, client: &Client, file: &File, event: u32) -> u32 {
    let promised = (0..20).find_map(|_| {
        file.arm().unwrap();
        Some(told_late(pair, client, file, event)).filter(|&more| more > 0)
    });
    promised.expect("a promise")
}

#[test]
fn who_waits_long_again_and_again_is_told_unasked_as_often_as_was_promised() {
    on_both(|pair, client| {
        let (file, event) = client.event().unwrap();
        for left in (0..promised(pair, client, &file, event)).rev() {
            assert_eq!(told_late(pair, client, &file, event), left);
        }
        client.fire(event).unwrap();
        assert!(pair.guest.mailbox.wait(file.handle, SHORT).is_none(), "nothing more");
    });
}

#[test]
fn who_takes_events_with_data_is_promised_nothing_any_more() {
    on_both(|pair, client| {
        let (file, event) = client.event().unwrap();
        promised(pair, client, &file, event);
        client.take_data(&file).unwrap_err();
        let record = pair.guest.mailbox.wait(file.handle, LONG).expect("word of it");
        assert_eq!((record.mask.get(), record.more.get()), (0, 0));
        for _ in 0..10 {
            file.arm().unwrap();
            assert_eq!(told_late(pair, client, &file, event), 0);
        }
    });
}

#[test]
fn an_event_with_data_that_nobody_takes_is_told_to_whoever_asks_again() {
    on_both(|pair, client| {
        let (file, event) = client.event().unwrap();
        promised(pair, client, &file, event);
        let file = client.event_with_data().unwrap();
        for _ in 0..3 {
            file.arm().unwrap();
            let record = pair.guest.mailbox.wait(file.handle, LONG).expect("it is still there");
            assert_eq!((record.mask.get() & 1, record.more.get()), (1, 0));
        }
    });
}

#[test]
fn an_event_that_comes_before_arm_is_remembered() {
    on_both(|pair, client| {
        let (file, event) = client.event().unwrap();
        // Once watched: edges from before the first ARM are the driver's own level.
        file.arm().unwrap();
        client.fire(event).unwrap();
        pair.guest.mailbox.wait(file.handle, LONG).expect("a record");
        client.fire(event).unwrap();
        assert!(pair.guest.mailbox.wait(file.handle, SHORT).is_none());
        file.arm().unwrap();
        pair.guest.mailbox.wait(file.handle, LONG).expect("the edge from before");
    });
}

#[test]
fn an_event_before_the_first_arm_is_reported_by_it() {
    on_both(|pair, client| {
        let (file, event) = client.event().unwrap();
        client.fire(event).unwrap();
        file.arm().unwrap();
        pair.guest.mailbox.wait(file.handle, LONG).expect("the edge from before");
    });
}

#[test]
fn nothing_is_reported_that_was_not_asked_for() {
    on_both(|pair, client| {
        let (file, event) = client.event().unwrap();
        for _ in 0..10 {
            client.fire(event).unwrap();
        }
        assert!(pair.guest.mailbox.wait(file.handle, SHORT).is_none());
        let (armed, _) = client.event().unwrap();
        armed.arm().unwrap();
        assert!(pair.guest.mailbox.wait(armed.handle, SHORT).is_none(), "nor what did not happen");
    });
}

#[test]
fn arming_twice_is_arming_once() {
    on_both(|pair, client| {
        let (file, event) = client.event().unwrap();
        for _ in 0..5 {
            file.arm().unwrap();
        }
        client.fire(event).unwrap();
        pair.guest.mailbox.wait(file.handle, LONG).expect("a record");
        client.fire(event).unwrap();
        assert!(pair.guest.mailbox.wait(file.handle, SHORT).is_none());
    });
}

#[test]
fn a_closed_file_reports_nothing() {
    on_both(|pair, client| {
        let (file, event) = client.event().unwrap();
        file.arm().unwrap();
        file.close().unwrap();
        client.fire(event).unwrap();
        assert!(pair.guest.mailbox.wait(file.handle, SHORT).is_none());
    });
}

#[test]
fn more_ready_files_than_buffers_are_all_reported() {
    for slots in [16, 0] {
        let pair = pair_with(Options { slots, event_buffers: 2, ..Options::default() });
        let client = Client::new(&pair.guest.process(100)).unwrap();
        let events: Vec<_> = (0..40).map(|_| client.event().unwrap()).collect();
        for (file, _) in &events {
            file.arm().unwrap();
        }
        for (_, event) in &events {
            client.fire(*event).unwrap();
        }
        for (file, _) in &events {
            pair.guest.mailbox.wait(file.handle, LONG).expect("a record for each");
        }
        assert_eq!(pair.guest.mailbox.count(), 0);
    }
}

#[test]
fn a_thread_that_waits_and_one_that_fires_never_miss_each_other() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let (file, event) = client.event().unwrap();
    std::thread::scope(|scope| {
        let (sender, taken) = std::sync::mpsc::sync_channel(0);
        let (guest, file) = (&pair.guest, &file);
        scope.spawn(move || {
            for _ in 0..500 {
                file.arm().unwrap();
                guest.mailbox.wait(file.handle, LONG).expect("a record");
                sender.send(()).unwrap();
            }
        });
        for _ in 0..500 {
            client.fire(event).unwrap();
            taken.recv_timeout(LONG).expect("the waiter heard of it");
        }
    });
}
