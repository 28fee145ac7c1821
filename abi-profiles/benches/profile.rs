//! What a guest's start and each of its calls pay: `cargo bench -p nvguest-abi`.

use std::hint::black_box;

use criterion::Criterion;
use nvguest_abi::release::Release;
use nvguest_abi::store::Store;
use nvguest_abi::{Capability, FileKind};

/// The last release of the longest line of differences, as a host may have it.
fn host() -> Release {
    "580.159.04".parse().unwrap()
}

fn start(criterion: &mut Criterion) {
    let capabilities = Capability::Utility as u32 | Capability::Graphics as u32;
    criterion.bench_function("resolve and compile", |bench| {
        bench.iter(|| {
            let store = Store::embedded().unwrap();
            store.resolve(black_box(&host()), false).unwrap().compile(capabilities)
        });
    });
    let resolved = Store::embedded().unwrap().resolve(&host(), false).unwrap();
    criterion.bench_function("compile alone", |bench| {
        bench.iter(|| resolved.compile(black_box(capabilities)));
    });
}

fn calls(criterion: &mut Criterion) {
    let resolved = Store::embedded().unwrap().resolve(&host(), false).unwrap();
    let compiled = resolved.compile(Capability::Graphics as u32);
    criterion.bench_function("verdict of a control", |bench| {
        bench.iter(|| compiled.control(black_box(0x9096_0107)).map(|entry| entry.verdict));
    });
    let mut argument = [0u8; 32];
    argument[8..12].copy_from_slice(&0x0080_1102u32.to_le_bytes());
    criterion.bench_function("layout of a control", |bench| {
        bench.iter(|| {
            let ioctl = compiled.rules.ioctl(FileKind::Ctl, black_box(0xc020_462a), 32).unwrap();
            compiled.rules.of(ioctl, black_box(&argument)).len()
        });
    });
    criterion.bench_function("class", |bench| {
        bench.iter(|| compiled.class(black_box(0xc56f)).map(|entry| entry.size));
    });
}

/// What criterion runs.
mod group {
    #![allow(missing_docs)]
    criterion::criterion_group!(benches, super::start, super::calls);
}
criterion::criterion_main!(group::benches);
