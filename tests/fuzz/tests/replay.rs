//! Every input that the fuzzers kept, once, without a fuzzer.

use std::path::Path;

use nvguest_fuzz::TARGETS;

#[test]
fn no_input_of_any_corpus_makes_its_target_fail() {
    for target in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
        let mut count = 0;
        for entry in folder.read_dir().expect("each target has a corpus") {
            let path = entry.expect("a file").path();
            let bytes = std::fs::read(&path).expect("a file");
            // Said first: whoever reads of a panic wants to know of which input.
            println!("{}", path.display());
            (target.run)(&bytes);
            count += 1;
        }
        assert!(count > 0, "{} has seeds", target.name);
    }
}
