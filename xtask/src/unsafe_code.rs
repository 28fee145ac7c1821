//! Where `unsafe` may be: what is shipped and runs beside a guest has it in these files alone.

use std::fs;
use std::path::{Path, PathBuf};

use crate::prepare::root;

/// Folders that are looked through.
const SHIPPED: [&str; 3] = ["abi-profiles", "backend/src", "tools"];
/// Files and folders that may have it. Each block says why it is sound; clippy sees to that.
const ALLOWED: [&str; 13] = [
    "backend/src/host/linux.rs",
    "backend/src/marshal/pages.rs",
    "backend/src/marshal/scratch.rs",
    "backend/src/sandbox/landlock.rs",
    "backend/src/sandbox/seccomp.rs",
    "backend/src/transport/link.rs",
    "backend/src/transport/listen.rs",
    "backend/src/transport/process.rs",
    // Vulkan and OpenGL are C.
    "tools/nesprobe/src/gl",
    "tools/nesprobe/src/sys.rs",
    "tools/nesprobe/src/vk",
    // Wrappers that the loader puts between a program and the C library, and raw calls.
    "tools/nvrecord/src/hooks.rs",
    "tools/rmclient/src/sys.rs",
];

#[test]
fn unsafe_code_is_in_the_named_files_alone() {
    let (mut strays, mut unused) = (Vec::new(), ALLOWED.to_vec());
    for folder in SHIPPED {
        for file in sources(&root().join(folder)) {
            let path = file.strip_prefix(root()).expect("INVARIANT: found below the root");
            let text = fs::read_to_string(&file).expect("a source file");
            if !text.lines().any(is_unsafe) {
                continue;
            }
            if !ALLOWED.iter().any(|allowed| path.starts_with(allowed)) {
                strays.push(path.to_owned());
            }
            unused.retain(|allowed| !path.starts_with(allowed));
        }
    }
    assert!(strays.is_empty(), "unsafe code in {strays:?}");
    assert!(unused.is_empty(), "no unsafe code in {unused:?}");
}

#[test]
fn a_comment_or_an_attribute_is_no_unsafe_code() {
    for line in ["#![forbid(unsafe_code)]", "/// All `unsafe` is here.", "    // SAFETY: unsafe {"]
    {
        assert!(!is_unsafe(line), "{line}");
    }
    for line in
        ["unsafe { f() }", "pub unsafe fn f() {}", "    let x = unsafe {", "unsafe impl Send"]
    {
        assert!(is_unsafe(line), "{line}");
    }
}

fn is_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or("");
    let mut words = code.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    words.any(|word| word == "unsafe") && !code.contains('"')
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder of the tree").flatten();
    let paths = entries.map(|entry| entry.path());
    paths
        .flat_map(|path| match path.is_dir() {
            true => sources(&path),
            false if path.extension().is_some_and(|end| end == "rs") => vec![path],
            false => Vec::new(),
        })
        .collect()
}
