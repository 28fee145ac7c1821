//! The log, with as many lines a second as the guest may cause.
#![forbid(unsafe_code)]

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::EnvFilter;

use crate::args::LogFormat;
use crate::rate::{Rates, What};

/// Lines at once, in seconds of the rate.
const BURST: u64 = 10;

static LIMIT: OnceLock<(Arc<Rates>, u64)> = OnceLock::new();
static LEFT_OUT: AtomicU64 = AtomicU64::new(0);

/// Logs to standard error from now on.
pub fn start(level: &str, format: LogFormat) {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(level))
        .with_ansi(io::stderr().is_terminal())
        .with_writer(Limited);
    match format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
}

/// Lets no more than `rate` lines a second be written, by all processes that share the page.
pub fn limit(rates: &Arc<Rates>, rate: u64) {
    let _ = LIMIT.set((Arc::clone(rates), rate));
}

/// Lines of this process that were too many.
pub fn left_out() -> u64 {
    LEFT_OUT.load(Ordering::Relaxed)
}

struct Limited;

/// Where one line goes.
enum Line {
    Written(io::Stderr),
    LeftOut,
}

impl<'a> MakeWriter<'a> for Limited {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        let too_many = |(rates, rate): &(Arc<Rates>, u64)| {
            rates.take(What::Lines, *rate, rate.saturating_mul(BURST)).is_err()
        };
        if LIMIT.get().is_some_and(too_many) {
            LEFT_OUT.fetch_add(1, Ordering::Relaxed);
            return Line::LeftOut;
        }
        Line::Written(io::stderr())
    }
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Written(stderr) => stderr.write(bytes),
            Self::LeftOut => Ok(bytes.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Written(stderr) => stderr.flush(),
            Self::LeftOut => Ok(()),
        }
    }
}
