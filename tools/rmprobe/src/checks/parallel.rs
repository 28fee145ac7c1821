//! Many threads at once, each with its own client and memory.

use std::thread;

use super::{check, Check};
use rmclient::{wrong, Card, Place, Result, Session};

pub const CHECKS: &[Check] =
    &[check("threads", "32 threads at once each find their own memory", threads)];

const THREADS: u64 = 32;
const ROUNDS: u64 = 4;

fn threads(card: &Card) -> Result<String> {
    let results: Vec<Result<()>> = thread::scope(|scope| {
        let workers: Vec<_> =
            (0..THREADS).map(|seed| scope.spawn(move || one(card, seed))).collect();
        workers.into_iter().map(|worker| worker.join().expect("a worker does not panic")).collect()
    });
    results.into_iter().collect::<Result<Vec<()>>>()?;
    Ok(format!("{THREADS} threads, {ROUNDS} rounds each"))
}

fn one(card: &Card, thread: u64) -> Result<()> {
    let session = Session::open(card)?;
    for round in 0..ROUNDS {
        let seed = thread * ROUNDS + round;
        let place = if seed.is_multiple_of(2) { Place::Video } else { Place::System };
        let memory = session.memory(place, 65536)?;
        let mapped = session.map(place, memory, 65536)?;
        mapped.mapping.fill(seed, 16384);
        thread::yield_now();
        match mapped.mapping.wrong(seed, 16384) {
            0 => session.unmap(memory, mapped)?,
            words => return wrong(format!("{words} words of thread {thread} are another's")),
        }
        session.client.free(session.device, memory).ok("freeing memory")?;
    }
    Ok(())
}
