//! Calls as an admin watches them, through a real socket and real workers.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use nvguest_frontend::backend::wait_until;
use nvguest_frontend::rm::Client;
use serde_json::Value;

use crate::common::{pair, Pair, LONG};

/// `RM_CONTROL` of a command that no profile has.
const UNKNOWN: u32 = 0x7f_0001;

/// A stream of lines, the first of which is the answer.
struct Stream(BufReader<UnixStream>);

impl Stream {
    fn of(pair: &Pair, request: &str) -> Self {
        let mut socket = UnixStream::connect(pair.backend.admin()).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        writeln!(socket, "{request}").unwrap();
        Self(BufReader::new(socket))
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        let line: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(line["schema"], 1, "{line}");
        line
    }

    /// The next line of which this is so.
    fn find(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            let line = self.line();
            if wanted(&line) {
                return line;
            }
        }
    }
}

const TRACE: &str = r#"{"schema":1,"request":"trace"}"#;

#[test]
fn every_call_is_a_line_with_its_process_numbers_and_outcome() {
    let pair = pair();
    let mut stream = Stream::of(&pair, TRACE);
    assert!(stream.line()["answer"]["release"].is_string());
    let client = Client::new(&pair.guest.process(100)).unwrap();
    client.control(client.root, UNKNOWN, &mut [0; 4]).unwrap();
    let open = stream.line();
    assert_eq!((&open["kind"], &open["process"]), (&"open".into(), &100.into()), "{open}");
    assert_eq!((&open["errno"], &open["status"]), (&0.into(), &Value::Null), "{open}");
    assert!(open["at_ns"].as_u64() > Some(0) && open["took_ns"].as_u64() > Some(0), "{open}");
    let class = stream.find(|line| line["what"] == "class");
    assert_eq!((&class["file"], &class["status"]), (&"ctl".into(), &0.into()), "{class}");
    let control = stream.find(|line| line["what"] == "control");
    assert_eq!(control["number"], UNKNOWN, "{control}");
    assert_eq!(control["status"], 0x56, "as RM answers what it does not know: {control}");
}

#[test]
fn only_what_fails_or_is_slow_is_told_if_that_is_wanted() {
    let pair = pair();
    let asked = r#"{"schema":1,"request":"trace","slow_ns":60000000000,"errors":true}"#;
    let mut stream = Stream::of(&pair, asked);
    stream.line();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    client.attached_ids().unwrap();
    client.control(client.root, UNKNOWN, &mut [0; 4]).unwrap();
    assert_eq!(stream.line()["number"], UNKNOWN);
}

#[test]
fn one_admin_at_a_time_traces_and_others_may_ask_meanwhile() {
    let pair = pair();
    let mut stream = Stream::of(&pair, TRACE);
    stream.line();
    let error = pair.backend.ask(TRACE).unwrap();
    assert!(error["error"].as_str().unwrap().contains("one at a time"), "{error}");
    assert_eq!(pair.backend.status().unwrap()["placements"], 0);
    // Whoever has had enough goes away, and the next may look.
    drop(stream);
    assert!(wait_until(LONG, || Stream::of(&pair, TRACE).line()["error"].is_null()));
}
