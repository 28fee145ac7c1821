//! `--compare`: a program natively and as a guest without a VM, both traced by the same library.
//! What differs is told: calls that one run makes and the other does not, other answers, other
//! words in a buffer. Aside are addresses, handles, descriptors and times: a word is taken for
//! one of them by where it is (the call's own argument) or by its value in both runs.

use std::collections::BTreeMap;
use std::process::{ExitCode, Stdio};

use crate::names::{buffers, field, Names};
use crate::{Manner, Options, Result, Session};

/// Differing words that are listed of one call.
const LISTED: usize = 6;

/// A call, as far as both runs must agree.
struct Call {
    key: String,
    answer: String,
    buffers: Vec<Vec<u8>>,
}

/// Runs the program twice and tells what differs. The exit status is 0 if nothing does.
pub fn run(options: &Options) -> Result<ExitCode> {
    let session = Session::start(options)?;
    let names = Names::of(&session.release());
    let mut runs = Vec::new();
    for native in [true, false] {
        let path = session.folder.path().join(format!("trace-{native}"));
        let manner = Manner {
            trace: Some(&path),
            native: native && !options.twice,
            trusting: options.trusting,
            poll_us: options.poll_us,
        };
        let mut command = session.command(&options.program, &manner);
        let status = command.stdout(Stdio::null()).status()?;
        let how = if native { "natively" } else { "as a guest" };
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let calls = read(&text, &names);
        println!("{how}: {} calls, {status}", calls.len());
        runs.push(calls);
    }
    session.end();
    let differences = compare(&runs[0], &runs[1]);
    for (text, count) in &differences {
        println!("{count:>5} x {text}");
    }
    println!("differences: {}", differences.values().sum::<usize>());
    Ok(ExitCode::from(u8::from(!differences.is_empty())))
}

fn read(text: &str, names: &Names) -> Vec<Call> {
    let mut calls = Vec::new();
    for line in text.lines() {
        let word = line.split(' ').nth(2).unwrap_or("?");
        let get = |key| field(line, key).unwrap_or("");
        let name = names.call(line).unwrap_or("");
        let (key, answer) = match word {
            "control" => (
                format!("control {} {name} size {}", get("cmd"), get("size")),
                format!("status {} ret {} {}", get("status"), get("ret"), get("errno")),
            ),
            "class" => (
                format!("class {} {name}", get("class")),
                format!("status {} ret {} {}", get("status"), get("ret"), get("errno")),
            ),
            "escape" => (
                format!("escape {} {name} of {}", get("nr"), get("node")),
                format!("ret {} {}", get("ret"), get("errno")),
            ),
            "open" => (format!("open {}", get("path")), format!("errno {}", get("errno"))),
            "mmap" => (
                format!("mmap {} {} {}", get("node"), get("length"), get("protection")),
                format!("errno {}", get("errno")),
            ),
            // How often a program looks depends on when it is told.
            "poll" | "close" => continue,
            _ => (format!("{word} {} {}", get("nr"), get("request")), get("ret").to_owned()),
        };
        calls.push(Call { key, answer, buffers: buffers(line) });
    }
    calls
}

/// What differs, and how often.
fn compare(native: &[Call], guest: &[Call]) -> BTreeMap<String, usize> {
    let mut differences = BTreeMap::new();
    let mut tell = |text: String| *differences.entry(text).or_insert(0) += 1;
    for (left, right) in align(native, guest) {
        match (left.map(|at| &native[at]), right.map(|at| &guest[at])) {
            (Some(native), Some(guest)) => {
                if native.answer != guest.answer {
                    tell(format!("{}: {} / {}", native.key, native.answer, guest.answer));
                }
                if let Some(words) = differing(native, guest) {
                    tell(format!("{}: {words}", native.key));
                }
            }
            (Some(native), None) => tell(format!("{}: natively alone", native.key)),
            (None, Some(guest)) => tell(format!("{}: as a guest alone", guest.key)),
            (None, None) => {}
        }
    }
    differences
}

/// Pairs of the calls that both made, in order, and those that one made.
fn align(native: &[Call], guest: &[Call]) -> Vec<(Option<usize>, Option<usize>)> {
    /// How far one run may be ahead of the other.
    const AHEAD: usize = 64;
    let (mut left, mut right) = (0, 0);
    let mut pairs = Vec::new();
    while left < native.len() || right < guest.len() {
        let same = |l: usize, r: usize| {
            native.get(l).zip(guest.get(r)).is_some_and(|(l, r)| l.key == r.key)
        };
        // The nearest place where both go on alike.
        let next = (0..2 * AHEAD).find_map(|sum| {
            (0..=sum).map(|ahead| (ahead, sum - ahead)).find(|&(l, r)| same(left + l, right + r))
        });
        let (skip_left, skip_right) = next.unwrap_or((native.len() - left, guest.len() - right));
        pairs.extend((left..left + skip_left).map(|at| (Some(at), None)));
        pairs.extend((right..right + skip_right).map(|at| (None, Some(at))));
        left += skip_left;
        right += skip_right;
        if next.is_some() {
            pairs.push((Some(left), Some(right)));
            left += 1;
            right += 1;
        }
    }
    pairs
}

/// The words of buffers that differ, without those that name something.
fn differing(native: &Call, guest: &Call) -> Option<String> {
    let lengths = |call: &Call| call.buffers.iter().map(Vec::len).collect::<Vec<_>>();
    if lengths(native) != lengths(guest) {
        return Some(format!("buffers of {:?} / {:?} bytes", lengths(native), lengths(guest)));
    }
    let mut found = Vec::new();
    // The argument itself holds handles, pointers and descriptors; its status is compared apart.
    for (number, (left, right)) in native.buffers.iter().zip(&guest.buffers).enumerate().skip(1) {
        for (at, (l, r)) in left.chunks(4).zip(right.chunks(4)).enumerate() {
            let word = |bytes: &[u8]| {
                bytes.iter().rev().fold(0_u32, |word, &byte| word << 8 | u32::from(byte))
            };
            let (l, r) = (word(l), word(r));
            if l != r && !(names_something(l) && names_something(r)) {
                found.push(format!("[{number}]+{:#x}: {l:#x} / {r:#x}", 4 * at));
            }
        }
    }
    let more = found.len().saturating_sub(LISTED);
    let listed = found.iter().take(LISTED).cloned().collect::<Vec<_>>().join(", ");
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!found.is_empty()).then_some(listed + &rest)
}

/// RM's own handles of clients and objects, and halves of a program's addresses.
fn names_something(word: u32) -> bool {
    matches!(word >> 20, 0xc1d | 0xcaf | 0xbee | 0x5c0)
        || matches!(word, 0x5500..=0x56ff | 0x7e00..=0x7fff)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(key: &str, answer: &str, words: &[u32]) -> Call {
        let bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Call { key: key.into(), answer: answer.into(), buffers: vec![Vec::new(), bytes] }
    }

    #[test]
    fn runs_that_name_things_differently_do_not_differ() {
        let native = [call("a", "0", &[5, 0xc1d0_0001]), call("b", "0", &[0x7f12])];
        let guest = [call("a", "0", &[5, 0xc1d0_00ff]), call("b", "0", &[0x7e99])];
        assert!(compare(&native, &guest).is_empty());
    }

    #[test]
    fn a_call_of_one_run_alone_another_answer_and_another_word_are_told() {
        let native = [call("a", "0", &[1]), call("b", "0", &[]), call("c", "0", &[])];
        let guest = [call("a", "0", &[2]), call("c", "1", &[])];
        let told: Vec<String> = compare(&native, &guest).into_keys().collect();
        assert_eq!(told, ["a: [1]+0x0: 0x1 / 0x2", "b: natively alone", "c: 0 / 1"]);
    }
}
