//! What the broker tells a worker first, and how guest memory reaches it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use nvguest_abi::compiled::Compiled;
use nvguest_abi::FileKind;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::budgets::VramMode;
use crate::host::Node;
use crate::transport::link::Message;
use crate::transport::ring::Memory;

/// Which driver a worker asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HostKind {
    /// The host's own.
    Nvidia = 0,
    /// The simulated card.
    Sim = 1,
}

/// The guest process that a worker serves: its thread group and when that started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Process {
    /// Thread-group id in the guest.
    pub tgid: u32,
    /// Start time of its leader, in ns of the guest's clock.
    pub start_ns: u64,
}

/// All that a worker knows from the start.
#[derive(Clone, Debug)]
pub struct Start {
    /// The upper half of its files' handles.
    pub worker: u16,
    /// Which driver it asks.
    pub host: HostKind,
    /// The process that it serves.
    pub process: Process,
    /// How long it looks at its queue before it sleeps, in µs.
    pub poll_us: u32,
    /// Placements that the whole guest may have.
    pub max_placements: u32,
    /// Bytes of the arena, which begins where the window does; 0 if there is none.
    pub arena_size: u64,
    /// Placements that this process may have.
    pub max_own_placements: u32,
    /// Lines of log a second that the whole guest may cause.
    pub lines: u64,
    /// `FIFO_DISABLE_CHANNELS` a second of the whole guest, and of this process.
    pub disables: u64,
    /// See [`Start::disables`].
    pub own_disables: u64,
    /// No other guest's backend runs as this user.
    pub own_user: bool,
    /// What the guest is shown of its budget of video memory.
    pub vram_mode: VramMode,
    /// The guest's share of the card's time.
    pub weight: u32,
    /// The host's profile.
    pub compiled: Arc<Compiled>,
    /// The nodes at their positions among the guest's; `None` for what is no device.
    pub nodes: Arc<Vec<Option<Node>>>,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C, packed)]
struct Head {
    start_ns: u64,
    arena_size: u64,
    tgid: u32,
    poll_us: u32,
    max_placements: u32,
    max_own_placements: u32,
    lines: u64,
    disables: u64,
    own_disables: u64,
    worker: u16,
    host: u8,
    own_user: u8,
    weight: u32,
    vram_mode: u8,
    compiled_len: u32,
}

impl Start {
    /// How long it looks at its queue before it sleeps.
    pub fn poll(&self) -> Duration {
        Duration::from_micros(self.poll_us.into())
    }

    /// The payload of the start message.
    pub fn encode(&self, compiled: &[u8]) -> Vec<u8> {
        let head = Head {
            start_ns: self.process.start_ns,
            tgid: self.process.tgid,
            poll_us: self.poll_us,
            max_placements: self.max_placements,
            arena_size: self.arena_size,
            max_own_placements: self.max_own_placements,
            lines: self.lines,
            disables: self.disables,
            own_disables: self.own_disables,
            worker: self.worker,
            host: self.host as u8,
            own_user: self.own_user.into(),
            weight: self.weight,
            vram_mode: self.vram_mode as u8,
            compiled_len: u32::try_from(compiled.len()).expect("INVARIANT: a profile is small"),
        };
        let mut payload = head.as_bytes().to_vec();
        payload.extend_from_slice(compiled);
        for node in self.nodes.iter() {
            let line = match node {
                Some(Node { path, kind, minor, gpu_id }) => {
                    format!("{} {minor} {gpu_id} {path}\n", *kind as u8)
                }
                None => "-\n".to_owned(),
            };
            payload.extend_from_slice(line.as_bytes());
        }
        payload
    }

    /// Reads the start message.
    pub fn decode(message: &Message) -> Option<Self> {
        let (head, rest) = Head::read_from_prefix(&message.payload).ok()?;
        let (compiled, nodes) = rest.split_at_checked(head.compiled_len as usize)?;
        let nodes = std::str::from_utf8(nodes).ok()?.lines().map(node).collect::<Option<_>>()?;
        Some(Self {
            worker: head.worker,
            host: if head.host == HostKind::Sim as u8 { HostKind::Sim } else { HostKind::Nvidia },
            process: Process { tgid: head.tgid, start_ns: head.start_ns },
            poll_us: head.poll_us,
            max_placements: head.max_placements,
            arena_size: head.arena_size,
            max_own_placements: head.max_own_placements,
            lines: head.lines,
            disables: head.disables,
            own_disables: head.own_disables,
            own_user: head.own_user != 0,
            vram_mode: match head.vram_mode {
                1 => VramMode::Profile,
                _ => VramMode::Limit,
            },
            weight: head.weight,
            compiled: Arc::new(Compiled::from_bytes(compiled)?),
            nodes: Arc::new(nodes),
        })
    }
}

fn node(line: &str) -> Option<Option<Node>> {
    if line == "-" {
        return Some(None);
    }
    let mut words = line.splitn(4, ' ');
    let kind = FileKind::from_number(words.next()?.parse().ok()?)?;
    let minor = words.next()?.parse().ok()?;
    let gpu_id = words.next()?.parse().ok()?;
    Some(Some(Node { path: words.next()?.to_owned(), kind, minor, gpu_id }))
}

/// A range of guest memory and where it lies in its file.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C, packed)]
pub struct Region {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Offset in the file.
    pub offset: u64,
}

impl Region {
    /// Reads a table of regions.
    pub fn parse(bytes: &[u8]) -> Result<&[Self]> {
        <[Self]>::ref_from_bytes(bytes)
            .map_err(|_| anyhow::anyhow!("A table of {} bytes holds no whole regions", bytes.len()))
    }
}

/// Maps guest memory: a region of each file.
pub fn map_memory(regions: &[Region], files: Vec<OwnedFd>) -> Result<Arc<Memory>> {
    anyhow::ensure!(
        regions.len() == files.len(),
        "{} regions came with {} files",
        regions.len(),
        files.len()
    );
    let ranges = regions
        .iter()
        .zip(files)
        .map(|(region, file)| {
            let size = usize::try_from(region.size).context("A region is too large")?;
            let offset = FileOffset::new(File::from(file), region.offset);
            Ok((GuestAddress(region.address), size, Some(offset)))
        })
        .collect::<Result<Vec<_>>>()?;
    let memory = GuestMemoryMmap::from_ranges_with_files(ranges)
        .context("Mapping the guest's memory failed")?;
    Ok(Arc::new(memory))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::link::Kind;

    #[test]
    fn a_start_message_reads_back() {
        let start = Start {
            worker: 7,
            host: HostKind::Sim,
            process: Process { tgid: 1234, start_ns: 5_000_000_000 },
            poll_us: 30,
            max_placements: 256,
            arena_size: 4 << 30,
            max_own_placements: 128,
            lines: 10,
            disables: 200,
            own_disables: 50,
            own_user: true,
            vram_mode: VramMode::Profile,
            weight: 20,
            compiled: Arc::default(),
            nodes: Arc::new(vec![
                None,
                Some(Node {
                    path: "/dev/nvidia1".into(),
                    kind: FileKind::Gpu,
                    minor: 1,
                    gpu_id: 0x4100,
                }),
            ]),
        };
        let payload = start.encode(&start.compiled.to_bytes());
        let message = Message { kind: Kind::Start, tag: 0, words: [0; 4], payload, fds: vec![] };
        let read = Start::decode(&message).unwrap();
        assert_eq!((read.worker, read.process), (start.worker, start.process));
        assert_eq!(read.arena_size, start.arena_size);
        assert_eq!((read.vram_mode, read.weight), (start.vram_mode, start.weight));
        assert_eq!((read.nodes, read.compiled), (start.nodes, start.compiled));
    }
}
