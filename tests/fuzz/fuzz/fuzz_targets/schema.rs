#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nvguest_fuzz::schema::run(data));
