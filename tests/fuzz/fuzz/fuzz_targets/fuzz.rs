//! Every target in one program: a dozen would each be linked, and instrumented code is large.
#![no_main]

use std::sync::OnceLock;

use nvguest_fuzz::{Target, TARGETS};

/// Names the target. No argument, because libFuzzer hands arguments on to its children in
/// ways of its own, and everything that it starts inherits this.
const TARGET: &str = "FUZZ_TARGET";

static CHOSEN: OnceLock<Target> = OnceLock::new();

fn choose() -> Target {
    let name = std::env::var(TARGET).unwrap_or_default();
    *TARGETS.iter().find(|target| target.name == name).unwrap_or_else(|| {
        let names = TARGETS.map(|target| target.name).join(", ");
        eprintln!("{TARGET} must be one of: {names}");
        std::process::exit(1)
    })
}

libfuzzer_sys::fuzz_target!(
    init: { CHOSEN.get_or_init(choose); },
    |data: &[u8]| (CHOSEN.get_or_init(choose).run)(data)
);
