//! What the guest must create: the NODES blob, from the facts of the host.

use nvguest_abi::FileKind;
use zerocopy::IntoBytes;

use crate::host::facts::{Card, Facts};
use crate::host::Node;
use crate::wire::{self, NodeHeader};

/// The blob, and which of its records are devices that a worker can open.
pub struct Nodes {
    /// Record after record, as the guest downloads it.
    pub blob: Vec<u8>,
    /// At each record's position: the device, or `None`.
    pub devices: Vec<Option<Node>>,
}

impl Nodes {
    /// Exactly what the host has and the capabilities allow. Devices come first:
    /// they are all that NVIDIA's user mode needs, and what follows may fail.
    pub fn new(facts: &Facts) -> Self {
        let mut nodes = Self { blob: Vec::new(), devices: Vec::new() };
        for device in &facts.chardevs {
            let header = NodeHeader {
                kind: wire::NODE_CDEV.into(),
                mode: device.mode.into(),
                file_kind: device.kind as u8,
                major: device.major.into(),
                minor: device.minor.into(),
                ..NodeHeader::default()
            };
            nodes.push(header, &device.name, device.major_name.as_bytes());
            let (path, kind, minor) = (device.path.clone(), device.kind, device.minor);
            let card = facts.cards.iter().find(|card| kind == FileKind::Gpu && card.minor == minor);
            let gpu_id = card.map_or(0, Card::gpu_id);
            nodes.devices.push(Some(Node { path, kind, minor, gpu_id }));
        }
        for (name, mode, content) in &facts.proc_files {
            nodes.push_plain(wire::NODE_PROC, *mode, name, content);
        }
        for (name, version) in &facts.modules {
            nodes.push_plain(wire::NODE_MODULE, 0o444, name, version.as_bytes());
        }
        for card in &facts.cards {
            nodes.push_plain(wire::NODE_PCI, 0o444, &card.pci, &card.config);
        }
        nodes
    }

    fn push_plain(&mut self, kind: u16, mode: u16, name: &str, data: &[u8]) {
        let header = NodeHeader { kind: kind.into(), mode: mode.into(), ..NodeHeader::default() };
        self.push(header, name, data);
        self.devices.push(None);
    }

    fn push(&mut self, mut header: NodeHeader, name: &str, data: &[u8]) {
        let length = |n: usize| u32::try_from(n).expect("INVARIANT: facts are small");
        header.name_len = length(name.len()).into();
        header.data_len = length(data.len()).into();
        self.blob.extend_from_slice(header.as_bytes());
        for part in [name.as_bytes(), data] {
            self.blob.extend_from_slice(part);
            self.blob.resize(wire::padded(self.blob.len()), 0);
        }
    }
}
