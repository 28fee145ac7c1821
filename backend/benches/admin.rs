//! What it costs that admins can see: the tally of a request, and a scrape of the metrics of
//! each of 64 guests over their sockets.
//!
//! `cargo bench -p vhost-user-nvguest --bench admin`

use std::hint::black_box;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use criterion::Criterion;
use nvguest_frontend::backend::Backend;
use nvguest_frontend::rm::Client;
use nvguest_frontend::{Guest, Options};
use vhost_user_nvguest::transport::counts::{Class, Word};
use vhost_user_nvguest::transport::page::SlotPage;
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

/// A guest with a process that has the card open, and the socket of its metrics.
struct Served {
    socket: PathBuf,
    _backend: Backend,
    _guest: Arc<Guest>,
    _client: Client,
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
        Self { socket, _backend: backend, _guest: guest, _client: client }
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
    scrape(&mut criterion);
    criterion.final_summary();
}
