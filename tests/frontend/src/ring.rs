//! The driver's side of a split virtqueue (virtio 1.2, section 2.7).

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{fence, Ordering};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use vmm_sys_util::eventfd::EventFd;

use crate::memory::{Memory, GPA};
use crate::{Error, Result};

/// Another descriptor follows.
pub const NEXT: u16 = 1;
/// The device writes it.
pub const WRITE: u16 = 2;
/// It holds a table of descriptors.
pub const INDIRECT: u16 = 4;

/// Where a queue's parts lie in guest memory, as offsets.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The descriptor table; what follows lies behind it.
    pub base: usize,
    /// Entries.
    pub size: u16,
}

impl Layout {
    /// The descriptor table.
    pub fn descriptors(&self) -> usize {
        self.base
    }

    /// The available ring.
    pub fn available(&self) -> usize {
        self.base + 16 * usize::from(self.size)
    }

    /// The used ring.
    pub fn used(&self) -> usize {
        (self.available() + 6 + 2 * usize::from(self.size)).next_multiple_of(4)
    }

    /// Bytes of all three, in whole pages.
    pub fn bytes(&self) -> usize {
        (self.used() + 6 + 8 * usize::from(self.size) - self.base).next_multiple_of(4096)
    }
}

/// A descriptor as the device reads it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Descriptor {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// [`NEXT`], [`WRITE`], [`INDIRECT`].
    pub flags: u16,
    /// The descriptor that follows.
    pub next: u16,
}

impl Descriptor {
    /// The bytes that the device reads.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// A doorbell and an interrupt.
#[derive(Debug)]
pub struct Bells {
    /// Rung for the device.
    pub kick: EventFd,
    /// Rung by the device.
    pub call: EventFd,
}

/// Waits for an interrupt. Edge-triggered, so that the eventfd is never read: to sleep and to
/// be woken is one system call.
#[derive(Debug)]
pub struct Interrupt(Epoll);

impl Interrupt {
    /// Of a queue.
    pub fn of(ring: &Ring) -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, 0);
        // SAFETY: the eventfd is open as long as `ring` is borrowed; epoll keeps no descriptor.
        epoll.add(unsafe { BorrowedFd::borrow_raw(ring.call.as_raw_fd()) }, event)?;
        Ok(Self(epoll))
    }

    /// Waits so long; `false` if none came.
    pub fn wait(&self, patience: Duration) -> Result<bool> {
        let timeout = EpollTimeout::try_from(patience).unwrap_or(EpollTimeout::MAX);
        match self.0.wait(&mut [EpollEvent::empty()], timeout) {
            Ok(count) => Ok(count > 0),
            Err(nix::Error::EINTR) => Ok(true),
            Err(error) => Err(Error::from(error)),
        }
    }
}

/// A queue, its doorbell and its interrupt. Whoever calls keeps the two positions,
/// each behind a lock of its own.
#[derive(Debug)]
pub struct Ring {
    /// Where it lies.
    pub layout: Layout,
    /// The memory it lies in.
    pub memory: Arc<Memory>,
    /// Rung for the device.
    pub kick: EventFd,
    /// Rung by the device.
    pub call: EventFd,
    event_idx: bool,
}

impl Ring {
    /// A queue at `layout` with fresh eventfds.
    pub fn new(memory: Arc<Memory>, layout: Layout, event_idx: bool) -> Result<Self> {
        let eventfd = || EventFd::new(nix::libc::EFD_NONBLOCK | nix::libc::EFD_CLOEXEC);
        Ok(Self { layout, memory, kick: eventfd()?, call: eventfd()?, event_idx })
    }

    /// A queue that another process set up, by copies of its eventfds.
    pub fn attach(memory: Arc<Memory>, layout: Layout, event_idx: bool, bells: Bells) -> Self {
        Self { layout, memory, kick: bells.kick, call: bells.call, event_idx }
    }

    /// How far the driver has come, if the device has returned everything: the next
    /// position of the available ring and of the used one.
    pub fn at_rest(&self) -> Option<(u16, u16)> {
        let available = self.memory.u16(self.layout.available() + 2).load(Ordering::Acquire);
        let used = self.memory.u16(self.layout.used() + 2).load(Ordering::Acquire);
        (available == used).then_some((available, used))
    }

    /// The guest-physical address of an offset.
    pub fn address(offset: usize) -> u64 {
        GPA + offset as u64
    }

    /// Fills in descriptor `index`.
    pub fn describe(&self, index: u16, descriptor: Descriptor) {
        let at = self.layout.descriptors() + 16 * usize::from(index);
        self.memory.write(at, &descriptor.to_bytes());
    }

    /// Makes the chain at `head` available; `position` is the next of the available ring.
    pub fn publish(&self, position: &mut u16, head: u16) {
        let available = self.layout.available();
        let entry = usize::from(*position % self.layout.size);
        self.memory.u16(available + 4 + 2 * entry).store(head, Ordering::Relaxed);
        let before = *position;
        *position = before.wrapping_add(1);
        self.announce(before, *position);
    }

    /// Tells the device of a new position, right or wrong.
    pub fn announce(&self, before: u16, position: u16) {
        self.memory.u16(self.layout.available() + 2).store(position, Ordering::Release);
        // The device's wish must be read after the position is out.
        fence(Ordering::SeqCst);
        if self.wants_kick(before, position) {
            self.ring();
        }
    }

    fn wants_kick(&self, before: u16, position: u16) -> bool {
        let used = self.layout.used();
        if !self.event_idx {
            return self.memory.u16(used).load(Ordering::Relaxed) & 1 == 0;
        }
        let event = used + 4 + 8 * usize::from(self.layout.size);
        let event = self.memory.u16(event).load(Ordering::Relaxed);
        position.wrapping_sub(event).wrapping_sub(1) < position.wrapping_sub(before)
    }

    /// Rings the doorbell.
    pub fn ring(&self) {
        // Full means that it is rung already.
        let _ = self.kick.write(1);
    }

    /// The next chain that the device returned: its head, and the bytes it wrote.
    pub fn reap(&self, position: &mut u16) -> Option<(u16, u32)> {
        if !self.has_used(*position) {
            return None;
        }
        let entry = usize::from(*position % self.layout.size);
        let at = self.layout.used() + 4 + 8 * entry;
        *position = position.wrapping_add(1);
        let head = self.memory.u32(at).load(Ordering::Relaxed);
        let written = self.memory.u32(at + 4).load(Ordering::Relaxed);
        // CAST: whoever checks the head sees that it is none of its own.
        Some((u16::try_from(head).unwrap_or(u16::MAX), written))
    }

    /// Whether the device has returned more.
    pub fn has_used(&self, position: u16) -> bool {
        self.memory.u16(self.layout.used() + 2).load(Ordering::Acquire) != position
    }

    /// Asks for an interrupt with the next return after `position`; `true` if it is there.
    pub fn want_call(&self, position: u16) -> bool {
        if self.event_idx {
            let event = self.layout.available() + 4 + 2 * usize::from(self.layout.size);
            self.memory.u16(event).store(position, Ordering::Relaxed);
        } else {
            self.memory.u16(self.layout.available()).store(0, Ordering::Relaxed);
        }
        // The device's position must be read after the wish is out.
        fence(Ordering::SeqCst);
        self.has_used(position)
    }

    /// Wants no interrupt. With event indices the last wish simply grows old.
    pub fn spare_call(&self) {
        if !self.event_idx {
            self.memory.u16(self.layout.available()).store(1, Ordering::Relaxed);
        }
    }

    /// Zeroes the rings, as a driver does before it starts over.
    pub fn clear(&self) {
        let zeroes = vec![0; self.layout.bytes()];
        self.memory.write(self.layout.base, &zeroes);
    }
}
