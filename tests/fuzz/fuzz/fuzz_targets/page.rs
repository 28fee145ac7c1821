#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nvguest_fuzz::page::run(data));
