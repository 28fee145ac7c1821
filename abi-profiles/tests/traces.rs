//! What NVIDIA's own libraries were seen to issue on an H200 with 580.159.04 (2026, natively,
//! recorded by an LD_PRELOAD library of this project), held against the profile that serves it.

use nvguest_abi::compiled::{Compiled, Verdict, ANY_SIZE};
use nvguest_abi::store::Store;
use nvguest_abi::{Capability, FileKind};

fn compiled(capabilities: u32) -> Compiled {
    let store = Store::embedded().unwrap();
    store.resolve(&"580.159.04".parse().unwrap(), false).unwrap().compile(capabilities)
}

fn hex(text: &str) -> u32 {
    u32::from_str_radix(text.trim_start_matches("0x"), 16).unwrap()
}

/// What of a recording the profile refuses or sizes otherwise.
fn refusals(recording: &str, profile: &Compiled) -> Vec<String> {
    let mut refused = Vec::new();
    for line in recording.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let allowed = match words[..] {
            ["control", command, size] => profile.control(hex(command)).is_some_and(|entry| {
                let fits = [ANY_SIZE, size.parse().unwrap()].contains(&entry.size.get());
                fits && entry.verdict == Verdict::Allow as u8
            }),
            ["class", class] => {
                profile.class(hex(class)).is_some_and(|entry| entry.verdict == Verdict::Allow as u8)
            }
            ["escape", node, nr, size] => {
                let kind = if node == "ctl" { FileKind::Ctl } else { FileKind::Gpu };
                let size = size.parse().unwrap();
                let entry = profile.escape(kind, hex(nr), size);
                entry.is_some_and(|entry| entry.verdict == Verdict::Allow as u8)
                    && profile.rules.ioctl(kind, 0xc000_4600 | size << 16 | hex(nr), size).is_some()
            }
            // A guest without compute has no such node.
            ["uvm", _] if profile.capabilities & Capability::Compute as u32 == 0 => true,
            ["uvm", number] => profile.escapes.iter().any(|entry| {
                entry.kind == FileKind::Uvm as u8
                    && entry.nr.get() == hex(number)
                    && entry.verdict == Verdict::Allow as u8
            }),
            _ => panic!("a line of the recording is not understood: {line}"),
        };
        if !allowed {
            refused.push(line.to_owned());
        }
    }
    refused
}

#[test]
fn all_that_nvidia_smi_issues_is_allowed_to_a_graphics_guest() {
    let profile = compiled(Capability::Utility as u32 | Capability::Graphics as u32);
    assert_eq!(refusals(include_str!("fixtures/smi.txt"), &profile), [""; 0]);
}

#[test]
fn all_that_nvidia_smi_issues_is_allowed_to_a_guest_with_utility_alone() {
    let profile = compiled(Capability::Utility as u32);
    assert_eq!(refusals(include_str!("fixtures/smi.txt"), &profile), [""; 0]);
}

#[test]
fn all_that_nvidia_smi_with_q_issues_is_allowed_to_a_guest_with_utility_alone() {
    let profile = compiled(Capability::Utility as u32);
    assert_eq!(refusals(include_str!("fixtures/smi-q.txt"), &profile), [""; 0]);
}

#[test]
fn all_that_a_vulkan_program_issues_is_allowed_to_a_graphics_guest() {
    let profile = compiled(Capability::Utility as u32 | Capability::Graphics as u32);
    assert_eq!(refusals(include_str!("fixtures/vk.txt"), &profile), [""; 0]);
}

#[test]
fn all_that_a_cuda_program_issues_is_allowed_to_a_compute_guest() {
    let profile = compiled(Capability::Utility as u32 | Capability::Compute as u32);
    assert_eq!(refusals(include_str!("fixtures/cuda.txt"), &profile), [""; 0]);
}
