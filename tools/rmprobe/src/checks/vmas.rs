//! What a program may do with a mapping once it has it: fork, cut it up, move it, protect it.

use nix::sys::mman::ProtFlags;
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;

use super::{check, Check};
use rmclient::sys::{in_child, PAGE};
use rmclient::{io, wrong, Card, Mapped, Place, Result, Session};

pub const CHECKS: &[Check] = &[
    check("vma-fork", "a child has its parent's mappings, and keeps them longer", forked),
    check("vma-part", "a part of a mapping is unmapped, and the rest stays right", cut),
    check("vma-move", "a mapping is moved, and does not grow", moved),
    check("vma-protect", "a part of a mapping is made read-only and writable again", protected),
];

const PAGES: usize = 16;
const SIZE: usize = PAGES * PAGE;

/// Runs `body` on a mapping of each kind of memory.
fn on_each(
    card: &Card,
    body: impl Fn(&Session, u32, Mapped) -> Result<Option<Mapped>>,
) -> Result<String> {
    let session = Session::open(card)?;
    for place in [Place::Video, Place::System] {
        let memory = session.memory(place, SIZE as u64)?;
        let mapped = session.map(place, memory, SIZE as u64)?;
        mapped.mapping.fill(7, SIZE);
        if let Some(mapped) = body(&session, memory, mapped)? {
            session.unmap(memory, mapped)?;
        }
        session.client.free(session.device, memory).ok("freeing memory")?;
    }
    Ok("video and system memory".into())
}

fn forked(card: &Card) -> Result<String> {
    on_each(card, |session, memory, mapped| {
        let (wait, go) = nix::unistd::pipe().map_err(|errno| io("a pipe")(errno.into()))?;
        let mapping = &mapped.mapping;
        let child = in_child(|| {
            let before = mapping.wrong(7, SIZE) == 0;
            mapping.fill(8, SIZE / 2);
            // The parent has unmapped its own by now.
            let told = nix::unistd::read(&wait, &mut [0]) == Ok(1);
            before && told && mapping.wrong(8, SIZE / 2) == 0
        })
        .map_err(io("fork"))?;
        while mapped.mapping.read(SIZE / 16 - 1) == rmclient::sys::pattern(7, SIZE / 16 - 1) {
            if child.has_ended() {
                return wrong("the child did not find what its parent wrote");
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let Mapped { mapping, armed, file } = mapped;
        drop(mapping);
        nix::unistd::write(&go, &[1]).map_err(|errno| io("the pipe")(errno.into()))?;
        match child.wait().map_err(io("waiting for the child"))? {
            WaitStatus::Exited(_, 0) => {
                drop(file);
                let linear = armed.linear;
                session.client.unmap(session.subdevice, memory, linear).ok("RM_UNMAP_MEMORY")?;
                Ok(None)
            }
            status => wrong(format!("the child's mapping failed it: {status:?}")),
        }
    })
}

fn cut(card: &Card) -> Result<String> {
    on_each(card, |_, _, mut mapped| {
        let tail = mapped.mapping.split_off(10 * PAGE);
        let middle = mapped.mapping.split_off(6 * PAGE);
        drop(middle);
        if mapped.mapping.wrong(7, 6 * PAGE) > 0 {
            return wrong("the part in front of what was unmapped is wrong");
        }
        let at = 10 * PAGE / 8;
        let word = |index| rmclient::sys::pattern(7, at + index);
        if (0..6 * PAGE / 8).any(|index| tail.read(index) != word(index)) {
            return wrong("the part behind what was unmapped is wrong");
        }
        tail.write(0, 1);
        Ok(Some(mapped))
    })
}

fn moved(card: &Card) -> Result<String> {
    on_each(card, |_, _, mut mapped| {
        if mapped.mapping.resize(2 * SIZE).is_ok() {
            return wrong("a mapping grew beyond what was armed");
        }
        let place = mapped.mapping.address();
        mapped.mapping.relocate().map_err(io("mremap"))?;
        if mapped.mapping.address() == place {
            return wrong("mremap did not move the mapping");
        }
        match mapped.mapping.wrong(7, SIZE) {
            0 => Ok(Some(mapped)),
            words => wrong(format!("{words} words are wrong where it was moved to")),
        }
    })
}

fn protected(card: &Card) -> Result<String> {
    on_each(card, |_, _, mapped| {
        let mapping = &mapped.mapping;
        let part = 4 * PAGE..8 * PAGE;
        mapping.protect(part.clone(), ProtFlags::PROT_READ).map_err(io("mprotect (read)"))?;
        if mapping.wrong(7, SIZE) > 0 {
            return wrong("a protected mapping is read wrongly");
        }
        let child = in_child(|| {
            mapping.write(5 * PAGE / 8, 1);
            true
        });
        match child.and_then(|child| child.wait()).map_err(io("a child"))? {
            WaitStatus::Signaled(_, Signal::SIGSEGV, _) => {}
            status => return wrong(format!("a write to a read-only part: {status:?}")),
        }
        let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        mapping.protect(part, both).map_err(io("mprotect (write)"))?;
        mapping.fill(9, SIZE);
        match mapping.wrong(9, SIZE) {
            0 => Ok(Some(mapped)),
            words => wrong(format!("{words} words are wrong after it was writable again")),
        }
    })
}
