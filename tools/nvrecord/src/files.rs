//! Which descriptor is which of NVIDIA's nodes.
//!
//! A table of numbers alone, so that a hook neither allocates nor waits: a descriptor's entry
//! is the place of its node's name in a short list, or nought.

use std::sync::atomic::{AtomicU8, Ordering};

/// Descriptors that are told apart; programs have fewer.
const DESCRIPTORS: usize = 65536;

/// Names below /dev; a card's own node is its first letters.
const NODES: [&str; 7] = [
    "nvidiactl",
    "nvidia-uvm-tools",
    "nvidia-uvm",
    "nvidia-modeset",
    "nvidia-caps",
    "dri",
    "nvidia",
];

static TABLE: [AtomicU8; DESCRIPTORS] = [const { AtomicU8::new(0) }; DESCRIPTORS];

fn slot(descriptor: i32) -> Option<&'static AtomicU8> {
    TABLE.get(usize::try_from(descriptor).ok()?)
}

/// The node that a path names.
pub fn node_of(path: &[u8]) -> Option<&'static str> {
    let name = path.strip_prefix(b"/dev/")?;
    NODES.into_iter().find(|node| name.starts_with(node.as_bytes()))
}

/// Notes what a new descriptor is; any descriptor that is none of NVIDIA's is forgotten.
pub fn opened(descriptor: i32, node: Option<&'static str>) {
    let place = node.and_then(|node| NODES.iter().position(|known| *known == node));
    if let Some(slot) = slot(descriptor) {
        let value = place.and_then(|place| u8::try_from(place + 1).ok()).unwrap_or(0);
        slot.store(value, Ordering::Relaxed);
    }
}

/// What a descriptor is, if it is one of NVIDIA's.
pub fn node(descriptor: i32) -> Option<&'static str> {
    let place = usize::from(slot(descriptor)?.load(Ordering::Relaxed));
    NODES.get(place.checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_the_longest_node_that_fits() {
        assert_eq!(node_of(b"/dev/nvidiactl"), Some("nvidiactl"));
        assert_eq!(node_of(b"/dev/nvidia-uvm-tools"), Some("nvidia-uvm-tools"));
        assert_eq!(node_of(b"/dev/nvidia3"), Some("nvidia"));
        assert_eq!(node_of(b"/dev/null"), None);
        assert_eq!(node_of(b"/home/nvidiactl"), None);
    }

    #[test]
    fn a_descriptor_is_known_until_it_is_something_else() {
        opened(60000, Some("nvidia-uvm"));
        assert_eq!(node(60000), Some("nvidia-uvm"));
        opened(60000, None);
        assert_eq!(node(60000), None);
        assert_eq!(node(-1), None);
    }
}
