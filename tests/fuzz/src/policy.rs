//! Verdicts and answers: what no profile lists is refused, and a refusal is one that the
//! driver could have made.

use nvguest_abi::compiled::{Verdict, ANY_SIZE};
use nvguest_abi::rules::NO_OFFSET;
use nvguest_abi::{status, FileKind};
use vhost_user_nvguest::policy::{self, Answer, What, MAX_OPAQUE};

use crate::input::Input;
use crate::profiles::measured;

/// Asks one profile about many calls.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let compiled = measured(input.u8());
    while !input.is_empty() {
        let kind = FileKind::ALL[input.below(FileKind::ALL.len())];
        let (number, size) = (number(&mut input, compiled), input.u32());
        let given = input.flag();
        control(compiled, number, size, given);
        if let Ok(entry) = policy::class(compiled, number) {
            assert_eq!((entry.class.get(), entry.verdict), (number, 0), "it is allowed by name");
        }
        if let Ok(entry) = policy::escape(compiled, kind, number, size) {
            assert_eq!((entry.kind, entry.nr.get(), entry.verdict), (kind as u8, number, 0));
        }
        answer(&mut input, kind, number);
    }
}

/// A number of the profile's own, or any.
fn number(input: &mut Input<'_>, compiled: &nvguest_abi::compiled::Compiled) -> u32 {
    let how = input.u8();
    let number = input.u32();
    let index = number as usize;
    let found = match how % 4 {
        0 => compiled.controls.get(index % compiled.controls.len().max(1)).map(|e| e.command),
        1 => compiled.classes.get(index % compiled.classes.len().max(1)).map(|e| e.class),
        2 => compiled.escapes.get(index % compiled.escapes.len().max(1)).map(|e| e.nr),
        _ => None,
    };
    found.map_or(number, |found| found.get() ^ u32::from(how >> 7))
}

fn control(compiled: &nvguest_abi::compiled::Compiled, command: u32, size: u32, given: bool) {
    let entry = compiled.control(command);
    let Ok(()) = policy::control(compiled, command, size, given) else { return };
    let nothing = size == 0 && !given;
    let Some(entry) = entry else {
        assert!(command == 0 && nothing, "{command:#x} is of no profile");
        return;
    };
    assert!(command == 0 && nothing || entry.verdict == Verdict::Allow as u8);
    let fits = match entry.size.get() {
        ANY_SIZE => size <= MAX_OPAQUE,
        exact => size == exact,
    };
    assert!(fits || nothing, "{command:#x} has not {size} bytes");
}

fn answer(input: &mut Input<'_>, kind: FileKind, number: u32) {
    let verdict = Verdict::from_number(input.u8() % 11);
    let offset = if input.flag() { input.u16() } else { NO_OFFSET };
    let what = match input.below(5) {
        0 => What::Control(number),
        1 => What::Class(number),
        2 => What::VidHeap(number),
        3 => What::Uvm(number),
        _ => What::ioctl(kind, number),
    };
    let (part, parts) = what.to_parts();
    assert_eq!(What::from_parts(part, parts), Some(what), "a name travels");
    let _ = What::from_parts(input.u8().into(), input.u64());
    assert!(!what.to_string().is_empty());
    match policy::answer(what, verdict, offset) {
        Answer::Status { offset: at, status } => {
            assert!(at == offset && at != NO_OFFSET && status != status::OK);
        }
        Answer::Errno(errno) => assert!(errno.status() != 0),
    }
}
