//! `--compare`: a program natively and as a guest without a VM, both traced by the same library.
//! What differs is told: calls that one run makes and the other does not, other answers, other
//! words in a buffer. Aside are the call's own argument but for RM's status (it has pointers,
//! handles and descriptors), words that are RM's handles or a program's addresses by their value
//! in both runs, and what differs between two native runs too: times, counters, sensors.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{ExitCode, Stdio};

use nvguest_abi::names::Names;

use crate::names::{self, buffers, field};
use crate::{Manner, Options, Result, Session};

/// Differing words that are listed of one call.
const LISTED: usize = 6;

/// A call, as far as both runs must agree.
struct Call {
    key: String,
    answer: String,
    buffers: Vec<Vec<u8>>,
}

/// Runs the program natively, natively again, and as a guest, and tells what differs. The exit
/// status is 0 if nothing does.
pub fn run(options: &Options) -> Result<ExitCode> {
    let session = Session::start(options)?;
    let names = Names::of(&session.release());
    let mut runs = Vec::new();
    for (number, how) in ["natively", "natively again", "as a guest"].into_iter().enumerate() {
        let path = session.folder.path().join(format!("trace-{number}"));
        let manner = Manner {
            trace: Some(&path),
            native: number < 2 && !options.twice,
            trusting: options.trusting,
            poll_us: options.poll_us,
        };
        let mut command = session.command(&options.program, &manner);
        let status = command.stdout(Stdio::null()).status()?;
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let calls = read(&text, &names);
        let how = if options.twice { "as a guest" } else { how };
        println!("{how}: {} calls, {status}", calls.len());
        runs.push(calls);
    }
    session.end();
    let restless = restless(&runs[0], &runs[1]);
    let differences = compare(&runs[0], &runs[2], &restless);
    for (text, count) in &differences {
        println!("{count:>5} x {text}");
    }
    println!("words that differ between two such runs too: {}", restless.len());
    println!("differences: {}", differences.values().sum::<usize>());
    Ok(ExitCode::from(u8::from(!differences.is_empty())))
}

/// Words, by their call, buffer and offset.
type Words<'a> = BTreeSet<(&'a str, usize, usize)>;

/// The words that differ between two runs of one kind.
fn restless<'a>(first: &'a [Call], second: &'a [Call]) -> Words<'a> {
    let pairs = align(first, second);
    let both = pairs.iter().filter_map(|&(left, right)| Some((&first[left?], &second[right?])));
    both.flat_map(|(first, second)| {
        let places = differing(first, second).into_iter();
        places.map(|(number, at, ..)| (first.key.as_str(), number, at))
    })
    .collect()
}

/// The calls of a trace, thread after thread: how threads interleave is nobody's difference.
fn read(text: &str, names: &Names) -> Vec<Call> {
    let mut threads: Vec<(&str, Vec<Call>)> = Vec::new();
    for line in text.lines() {
        let thread = line.split(' ').nth(1).unwrap_or("?");
        let at = threads.iter().position(|known| known.0 == thread).unwrap_or_else(|| {
            threads.push((thread, Vec::new()));
            threads.len() - 1
        });
        let word = line.split(' ').nth(2).unwrap_or("?");
        let get = |key| field(line, key).unwrap_or("");
        let name = names::call(names, line).unwrap_or("");
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
        threads[at].1.push(Call { key, answer, buffers: buffers(line) });
    }
    threads.into_iter().flat_map(|thread| thread.1).collect()
}

/// What differs, and how often.
fn compare(native: &[Call], guest: &[Call], restless: &Words<'_>) -> BTreeMap<String, usize> {
    let mut differences = BTreeMap::new();
    let mut tell = |text: String| *differences.entry(text).or_insert(0) += 1;
    for (left, right) in align(native, guest) {
        match (left.map(|at| &native[at]), right.map(|at| &guest[at])) {
            (Some(native), Some(guest)) => {
                if native.answer != guest.answer {
                    tell(format!("{}: {} / {}", native.key, native.answer, guest.answer));
                }
                if let Some(words) = listed(native, guest, restless) {
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

/// The words that differ, for people; `None` if there are none but restless ones.
fn listed(native: &Call, guest: &Call, restless: &Words<'_>) -> Option<String> {
    let lengths = |call: &Call| call.buffers.iter().map(Vec::len).collect::<Vec<_>>();
    if lengths(native) != lengths(guest) {
        return Some(format!("buffers of {:?} / {:?} bytes", lengths(native), lengths(guest)));
    }
    let found: Vec<String> = differing(native, guest)
        .into_iter()
        .filter(|&(number, at, ..)| !restless.contains(&(native.key.as_str(), number, at)))
        .map(|(number, at, left, right)| format!("[{number}]+{at:#x}: {left:#x} / {right:#x}"))
        .collect();
    let more = found.len().saturating_sub(LISTED);
    let text = found.iter().take(LISTED).cloned().collect::<Vec<_>>().join(", ");
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!found.is_empty()).then_some(text + &rest)
}

/// The words of buffers that differ, without those that name something: the buffer's number,
/// the offset, and both words. The argument itself is left out.
fn differing(native: &Call, guest: &Call) -> Vec<(usize, usize, u32, u32)> {
    let mut found = Vec::new();
    for (number, (left, right)) in native.buffers.iter().zip(&guest.buffers).enumerate().skip(1) {
        for (at, (l, r)) in left.chunks(4).zip(right.chunks(4)).enumerate() {
            let (l, r) = (word(l), word(r));
            // A pointer is two words, of which the upper one shows what it is.
            let upper = 4 * (at | 1);
            let upper = |bytes: &[u8]| bytes.get(upper..upper + 4).map_or(0, word);
            let pointers = is_high_half(upper(left)) && is_high_half(upper(right));
            if l != r && !pointers && !(is_handle(l) && is_handle(r)) {
                found.push((number, 4 * at, l, r));
            }
        }
    }
    found
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte))
}

/// RM's own handles of clients and objects.
fn is_handle(word: u32) -> bool {
    matches!(word >> 20, 0xc1d | 0xcaf | 0xbee | 0x5c0)
}

/// The upper half of an address of a program's.
fn is_high_half(word: u32) -> bool {
    matches!(word, 0x5500..=0x56ff | 0x7e00..=0x7fff)
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
        let native = [call("a", "0", &[5, 0xc1d0_0001]), call("b", "0", &[0x1000, 0x7f12])];
        let guest = [call("a", "0", &[5, 0xc1d0_00ff]), call("b", "0", &[0x2000, 0x7e99])];
        assert!(compare(&native, &guest, &Words::new()).is_empty());
    }

    #[test]
    fn a_call_of_one_run_alone_another_answer_and_another_word_are_told() {
        let native = [call("a", "0", &[1]), call("b", "0", &[]), call("c", "0", &[])];
        let guest = [call("a", "0", &[2]), call("c", "1", &[])];
        let told: Vec<String> = compare(&native, &guest, &Words::new()).into_keys().collect();
        assert_eq!(told, ["a: [1]+0x0: 0x1 / 0x2", "b: natively alone", "c: 0 / 1"]);
    }

    #[test]
    fn what_differs_from_run_to_run_is_no_difference() {
        let native = [call("clock", "0", &[1, 7])];
        let again = [call("clock", "0", &[2, 7])];
        let guest = [call("clock", "0", &[3, 8])];
        let restless = restless(&native, &again);
        let told: Vec<String> = compare(&native, &guest, &restless).into_keys().collect();
        assert_eq!(told, ["clock: [1]+0x4: 0x7 / 0x8"]);
    }
}
