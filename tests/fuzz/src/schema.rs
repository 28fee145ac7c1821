//! Gather rules and the blob they come in: any bytes are refused or can be walked, and what
//! is read back is what was written.

use nvguest_abi::compiled::Compiled;
use nvguest_abi::rules::Rules;
use nvguest_abi::FileKind;

use crate::input::Input;

/// Look-ups of one script.
const LOOKUPS: usize = 8;

/// Reads a blob, and asks it of numbers that it begins with.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut asked = Input::new(input.bytes(64));
    let blob = input.rest();
    let Some(compiled) = Compiled::from_bytes(blob) else {
        if let Some((rules, _)) = Rules::from_schema(blob) {
            walk(&rules, &mut asked, blob);
        }
        return;
    };
    walk(&compiled.rules, &mut asked.clone(), blob);
    let written = compiled.to_bytes();
    assert_eq!(Compiled::from_bytes(&written).as_ref(), Some(&compiled), "it reads back");
    for _ in 0..LOOKUPS {
        let (kind, nr, size) = (kind(&mut asked), asked.u32(), asked.u32());
        let entry = compiled.escape(kind, nr, size);
        assert!(entry.is_none_or(|entry| (entry.kind, entry.nr.get()) == (kind as u8, nr)));
        let _ = (compiled.knows_escape(kind, nr), compiled.control(nr), compiled.class(nr));
    }
}

fn kind(input: &mut Input<'_>) -> FileKind {
    FileKind::ALL[input.below(FileKind::ALL.len())]
}

/// Every entry over one argument, and some by their numbers.
fn walk(rules: &Rules, asked: &mut Input<'_>, argument: &[u8]) {
    let argument = &argument[argument.len().saturating_sub(256)..];
    let inside = |at: u16, width: u8| usize::from(at) + usize::from(width) <= argument.len();
    for entry in rules.ioctls.iter().take(64) {
        for rule in rules.of(entry, argument) {
            let length = rule.length(argument);
            assert!(length.is_none_or(|length| length <= rule.max.get()), "RM takes no more");
            assert!(rule.value(argument).is_none() || inside(rule.offset.get(), 1));
            for sub in rules.subs(rule).iter().take(64) {
                let _ = (sub.length(argument), sub.value(argument), rules.subs(sub).len());
            }
        }
    }
    for _ in 0..LOOKUPS {
        let found = rules.ioctl(kind(asked), asked.u32(), asked.u32());
        let _ = found.map(|entry| rules.of(entry, argument).len());
    }
}
