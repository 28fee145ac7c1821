//! The table of attacks in SECURITY.md, made from the names of the tests that make them.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::prepare::root;

/// Where every test is an attack, or shows what one finds.
const SOURCES: [&str; 20] = [
    "backend/tests/conformance/messages.rs",
    "backend/tests/conformance/chains.rs",
    "backend/tests/conformance/calls.rs",
    "backend/tests/conformance/clients.rs",
    "backend/tests/conformance/cards.rs",
    "backend/tests/conformance/mappings.rs",
    "backend/tests/conformance/arena.rs",
    "backend/tests/conformance/registered.rs",
    "backend/tests/conformance/limits.rs",
    "backend/tests/conformance/endurance.rs",
    "backend/tests/conformance/processes.rs",
    "backend/tests/conformance/sandbox.rs",
    "backend/src/marshal/tests/hostile.rs",
    "backend/src/marshal/tests/refusals.rs",
    "backend/src/marshal/tests/any.rs",
    "backend/src/policy/sharing.rs",
    "backend/src/broker/arena.rs",
    "backend/src/worker/registered.rs",
    "backend/src/sandbox/calls.rs",
    "abi-profiles/tests/controls.rs",
];
const BEGIN: &str = "<!-- attacks, from the names of tests: `cargo xtask security` -->\n";
const END: &str = "<!-- end of attacks -->\n";

/// Where a sentence turns from what is done to what happens.
const VERBS: [&str; 41] = [
    "is", "are", "was", "has", "have", "had", "can", "cannot", "does", "makes", "make", "must",
    "reaches", "reach", "keeps", "keep", "ends", "costs", "cost", "finds", "gets", "leaves",
    "leave", "outlives", "comes", "come", "gives", "takes", "names", "holds", "causes", "goes",
    "maps", "fail", "fails", "shares", "disturb", "closes", "build", "says", "reads",
];
/// A verb so near behind one of these is a clause's own.
const RELATIVES: [&str; 6] = ["that", "who", "whoever", "whose", "what", "which"];

/// A test as a row.
struct Attack {
    done: String,
    happens: String,
    test: String,
}

/// Writes the table anew.
pub fn write() -> Result<ExitCode> {
    let path = root().join("SECURITY.md");
    let text = fs::read_to_string(&path).context("read SECURITY.md")?;
    fs::write(&path, with_table(&text)?).context("write SECURITY.md")?;
    Ok(ExitCode::SUCCESS)
}

fn with_table(text: &str) -> Result<String> {
    let (before, rest) = text.split_once(BEGIN).context("SECURITY.md has no table to replace")?;
    let (_, after) = rest.split_once(END).context("the table in SECURITY.md has no end")?;
    Ok(format!("{before}{BEGIN}{}{END}{after}", table()?))
}

fn table() -> Result<String> {
    let mut text = String::from("\n| what is done | what happens | in |\n|---|---|---|\n");
    for source in SOURCES {
        let code =
            fs::read_to_string(root().join(source)).with_context(|| format!("read {source}"))?;
        for Attack { done, happens, test } in attacks(source, &code) {
            let _ = writeln!(text, "| {done} | {happens} | {test} |");
        }
    }
    text.push('\n');
    Ok(text)
}

fn attacks(source: &str, code: &str) -> Vec<Attack> {
    let place = Path::new(source);
    let file = place.file_stem().unwrap_or_default().to_string_lossy();
    let after = code.split("#[test]").skip(1);
    let names = after.filter_map(|rest| rest.split_once("fn ")?.1.split_once('('));
    names.map(|(name, _)| attack(&file, name)).filter(|row| !row.happens.is_empty()).collect()
}

fn attack(file: &str, name: &str) -> Attack {
    let sentence = sentence(name);
    let words: Vec<&str> = sentence.split(' ').collect();
    let clause = |&at: &usize| words[..at].iter().rev().take(3).any(|it| RELATIVES.contains(it));
    let verbs: Vec<usize> = (1..words.len()).filter(|&at| VERBS.contains(&words[at])).collect();
    let main = verbs.iter().find(|at| !clause(at)).or(verbs.last());
    let turn = main.copied().unwrap_or(words.len());
    Attack {
        done: words[..turn].join(" "),
        happens: words[turn..].join(" "),
        test: file.to_owned(),
    }
}

/// A name as it is read.
fn sentence(name: &str) -> String {
    const ACRONYMS: [(&str, &str); 5] = [
        (" rms ", " RM's "),
        (" rm ", " RM "),
        (" rm's ", " RM's "),
        (" vmm ", " VMM "),
        (" hello ", " HELLO "),
    ];
    let mut text = format!(" {} ", name.replace("_s_", "'s_").replace('_', " "));
    for (word, written) in ACRONYMS {
        text = text.replace(word, written);
    }
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_what_is_done_and_what_happens() {
        let row = attack("calls", "a_size_that_is_not_the_commands_is_refused");
        assert_eq!(row.done, "a size that is not the commands");
        assert_eq!(row.happens, "is refused");
        assert_eq!(row.test, "calls");
    }

    #[test]
    fn the_table_in_security_md_is_that_of_the_tests_and_has_sixty_rows() {
        let text = fs::read_to_string(root().join("SECURITY.md")).unwrap();
        assert_eq!(text, with_table(&text).unwrap(), "run `cargo xtask security`");
        let rows = table().unwrap().lines().filter(|line| line.starts_with("| ")).count();
        assert!(rows > 60, "{rows}");
    }
}
