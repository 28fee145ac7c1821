//! What is written to the admin socket: each line has one answer, and changes what it says or
//! nothing.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::OnceLock;
use std::time::Instant;

use serde_json::Value;
use vhost_user_nvguest::broker::admin::{self, PATIENCE, SCHEMA};

use crate::hostile::Setup;

/// A broker and its admin socket.
struct Admin {
    setup: Setup,
    address: SocketAddr,
}

impl Admin {
    fn start() -> Self {
        // In no folder: it goes with this process, however that ends.
        let name = format!("nvguest-fuzz-admin.{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).expect("a name");
        let setup = Setup::start("processes=0");
        let listener = UnixListener::bind_addr(&address).expect("a socket");
        admin::start(&setup.broker, listener).expect("a thread");
        Self { setup, address }
    }

    /// A line of answer to the bytes.
    fn ask(&self, data: &[u8]) -> io::Result<String> {
        let mut client = UnixStream::connect_addr(&self.address)?;
        client.write_all(data)?;
        client.shutdown(Shutdown::Write)?;
        let mut reply = String::new();
        BufReader::new(client.take(1 << 20)).read_line(&mut reply)?;
        Ok(reply)
    }
}

/// Sends the bytes as one connection, and reads a line.
pub fn run(data: &[u8]) {
    static ADMIN: OnceLock<Admin> = OnceLock::new();
    let admin = ADMIN.get_or_init(Admin::start);
    let before = admin.setup.broker.limits.now();
    let begun = Instant::now();
    let reply = admin.ask(data);
    // On a machine with too much to do, who asks can be slower than the backend is patient.
    if begun.elapsed() >= PATIENCE && reply.as_ref().map_or(true, String::is_empty) {
        return;
    }
    let reply = reply.expect("an answer");
    let line = data.split_inclusive(|&byte| byte == b'\n').next().unwrap_or_default();
    if std::str::from_utf8(line).is_err() {
        assert_eq!(reply, "", "what is no text has no answer");
        return;
    }
    let reply: Value = serde_json::from_str(&reply).expect("a line of JSON");
    assert_eq!(reply["schema"], SCHEMA);
    let (answer, error) = (reply.get("answer"), reply.get("error"));
    assert!(answer.is_some() != error.is_some(), "{reply}");
    if error.is_some() {
        assert_eq!(admin.setup.broker.limits.now(), before, "a refusal changes nothing");
    }
}
