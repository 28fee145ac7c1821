//! What it costs that admins can see: the tally of a request, its trace, and a scrape of the
//! metrics of each of 64 guests over their sockets.
//!
//! `cargo bench -p vhost-user-nvguest --bench admin`

use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use criterion::Criterion;
use nvguest_frontend::backend::Backend;
use nvguest_frontend::rm::Client;
use nvguest_frontend::{Guest, Options};
use vhost_user_nvguest::transport::counts::{Class, Word};
use vhost_user_nvguest::transport::page::SlotPage;
use vhost_user_nvguest::transport::trace::{Record, Trace, Wanted};
use vhost_user_nvguest::wire::Kind;

const GUESTS: usize = 64;

/// All that a worker counts of one request beyond the clock, which it reads anyway.
fn tally(c: &mut Criterion) {
    let page = SlotPage::create().expect("a page");
    let mut nanos = 0;
    c.bench_function("tally/request", |b| {
        b.iter(|| {
            nanos = (nanos + 997) % 100_000;
            page.count(Word::Request(black_box(Kind::Ioctl)));
            page.count_call(black_box(Class::Control), Duration::from_nanos(nanos));
        });
    });
}

/// All that a call costs a worker while nobody looks, and what writing it down adds.
fn note(c: &mut Criterion) {
    let trace = Trace::create().expect("a ring");
    let record = Record { took_ns: 1000, what: Some((0, 0x2080_0102)), ..Record::default() };
    c.bench_function("trace/nobody_looks", |b| b.iter(|| black_box(&trace).is_on()));
    for (name, slow_ns) in [("trace/written", None), ("trace/not_slow", Some(1_000_000))] {
        trace.set(Some(Wanted { slow_ns, errors: false }));
        c.bench_function(name, |b| {
            b.iter(|| {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let at_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
                black_box(&trace).note(&Record { at_ns, ..black_box(record) });
            });
        });
    }
}

/// The same from a guest's side: calls that are served while an admin reads each of them.
fn traced(c: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a folder");
    let served = Served::start(folder.path(), 0);
    let ids = || served.client.attached_ids().expect("ids");
    c.bench_function("call/nobody_looks", |b| b.iter(ids));
    let mut admin = UnixStream::connect(served.backend.admin()).expect("a socket");
    admin.write_all(b"{\"schema\":1,\"request\":\"trace\"}\n").expect("asking");
    let mut lines = BufReader::new(admin.try_clone().expect("a copy")).lines();
    let first = lines.next().expect("an answer").expect("an answer");
    let reader = std::thread::spawn(move || lines.map_while(Result::ok).count());
    c.bench_function("call/traced", |b| b.iter(ids));
    admin.shutdown(Shutdown::Both).expect("hanging up");
    println!("{first}\n{} more lines were read", reader.join().expect("a count"));
}

/// A guest with a process that has the card open, and the socket of its metrics.
struct Served {
    socket: PathBuf,
    backend: Backend,
    _guest: Arc<Guest>,
    client: Client,
}

impl Served {
    fn start(folder: &Path, number: usize) -> Self {
        let socket = folder.join(number.to_string());
        let args = ["--metrics-socket", socket.to_str().expect("a path"), "--log-level=error"];
        let binary = env!("CARGO_BIN_EXE_vhost-user-nvguest");
        let backend = Backend::with(binary, &args, &[]).expect("a backend");
        let guest = Guest::connect(&backend.socket(), Options::default()).expect("a device");
        guest.probe().expect("probing");
        let client = Client::new(&guest.process(100)).expect("a client");
        Self { socket, backend, _guest: guest, client }
    }

    fn scrape(&self, text: &mut String) {
        text.clear();
        let mut stream = UnixStream::connect(&self.socket).expect("a socket");
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("asking");
        stream.read_to_string(text).expect("an answer");
        assert!(text.ends_with("# EOF\n"));
    }
}

fn scrape(c: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a folder");
    let guests: Vec<_> = (0..GUESTS).map(|n| Served::start(folder.path(), n)).collect();
    let mut text = String::new();
    c.bench_function("scrape/one_guest", |b| b.iter(|| guests[0].scrape(&mut text)));
    c.bench_function("scrape/64_guests_in_turn", |b| {
        b.iter(|| guests.iter().for_each(|guest| guest.scrape(&mut text)));
    });
    println!("a scrape is {} bytes", text.len());
}

fn main() {
    let criterion = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(3));
    let mut criterion = criterion.configure_from_args();
    tally(&mut criterion);
    note(&mut criterion);
    traced(&mut criterion);
    scrape(&mut criterion);
    criterion.final_summary();
}
