//! The measured profiles, each compiled once.

use std::sync::OnceLock;

use nvguest_abi::compiled::Compiled;
use nvguest_abi::release::Release;
use nvguest_abi::store::Store;

/// Every capability there is.
const CAPABILITIES: u32 = 0x1f;

struct Lazy {
    release: Release,
    compiled: OnceLock<Compiled>,
}

fn all() -> &'static (Store, Vec<Lazy>) {
    static ALL: OnceLock<(Store, Vec<Lazy>)> = OnceLock::new();
    ALL.get_or_init(|| {
        let store = Store::embedded().expect("the profiles are in order");
        let lazy = |release: &Release| Lazy { release: release.clone(), compiled: OnceLock::new() };
        let profiles = store.profiles().map(lazy).collect();
        (store, profiles)
    })
}

/// How many there are.
pub fn count() -> usize {
    all().1.len()
}

/// The one with this number, counted around; the newest is 0.
pub fn measured(number: u8) -> &'static Compiled {
    let (store, profiles) = all();
    let lazy = &profiles[profiles.len() - 1 - usize::from(number) % profiles.len()];
    lazy.compiled
        .get_or_init(|| store.load(&lazy.release).expect("it is a profile").compile(CAPABILITIES))
}
