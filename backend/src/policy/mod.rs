//! May a guest make this call, and what does the driver say to one that may not?
//!
//! Verdicts are data: the profile has them, made from NVIDIA's own flags and the
//! overlay. This room only looks them up. What has no verdict is refused.
//!
//! - [`sharing`]: whom a guest may let have its objects
//! - [`tally`]: refusals, counted by name
#![forbid(unsafe_code)]

pub mod sharing;
pub mod tally;

use std::fmt;

use nvguest_abi::compiled::{ClassEntry, Compiled, EscapeEntry, Verdict, ANY_SIZE};
use nvguest_abi::rules::NO_OFFSET;
use nvguest_abi::{status, FileKind};

use crate::errno::Errno;

/// Bytes of an opaque control's parameters at most. The largest that NVIDIA's libraries were
/// seen to send is 67,396 (0x2080a0a4 of nvidia-smi -q, driver 580.159.04).
pub const MAX_OPAQUE: u32 = 128 << 10;

/// What a verdict is about: the name of a call in tallies and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum What {
    /// An ioctl of a file other than nvidia-uvm, by its number.
    Escape(FileKind, u32),
    /// An `RM_CONTROL`, by its command.
    Control(u32),
    /// An allocation, by its class.
    Class(u32),
    /// A function of `RM_VID_HEAP_CONTROL`.
    VidHeap(u32),
    /// An ioctl of nvidia-uvm, by its number.
    Uvm(u32),
}

impl What {
    /// The ioctl `nr` of a file of this kind.
    pub fn ioctl(kind: FileKind, nr: u32) -> Self {
        match kind {
            FileKind::Uvm => Self::Uvm(nr),
            _ => Self::Escape(kind, nr),
        }
    }

    /// Two numbers that say the same, for a worker to tell its broker.
    pub fn to_parts(self) -> (u64, u64) {
        let (part, number) = match self {
            Self::Escape(kind, nr) => (kind as u64, nr),
            Self::Control(command) => (16, command),
            Self::Class(class) => (17, class),
            Self::VidHeap(function) => (18, function),
            Self::Uvm(nr) => (19, nr),
        };
        (part, number.into())
    }

    /// The reverse of [`What::to_parts`].
    pub fn from_parts(part: u64, number: u64) -> Option<Self> {
        let number = u32::try_from(number).ok()?;
        Some(match part {
            16 => Self::Control(number),
            17 => Self::Class(number),
            18 => Self::VidHeap(number),
            19 => Self::Uvm(number),
            kind => Self::Escape(FileKind::from_number(u8::try_from(kind).ok()?)?, number),
        })
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Escape(FileKind::Ctl, nr) => write!(f, "nvidiactl ioctl {nr:#x}"),
            Self::Escape(FileKind::Gpu, nr) => write!(f, "nvidia ioctl {nr:#x}"),
            Self::Escape(FileKind::Uvm, nr) | Self::Uvm(nr) => write!(f, "uvm ioctl {nr}"),
            Self::Escape(FileKind::Modeset, nr) => write!(f, "modeset ioctl {nr}"),
            Self::Escape(FileKind::Cap, nr) => write!(f, "caps ioctl {nr:#x}"),
            Self::Control(command) => write!(f, "control {command:#x}"),
            Self::Class(class) => write!(f, "class {class:#x}"),
            Self::VidHeap(function) => write!(f, "vidheap function {function}"),
        }
    }
}

/// How the driver would answer a call that is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The ioctl succeeds; RM's status is in the argument at this offset.
    Status {
        /// Where.
        offset: u16,
        /// One of [`nvguest_abi::status`].
        status: u32,
    },
    /// The ioctl fails, nothing is copied back.
    Errno(Errno),
}

/// The escape with this number and argument size.
pub fn escape(
    compiled: &Compiled,
    kind: FileKind,
    nr: u32,
    size: u32,
) -> Result<&EscapeEntry, Verdict> {
    let Some(entry) = compiled.escape(kind, nr, size) else {
        let known = compiled.knows_escape(kind, nr);
        return Err(if known { Verdict::Size } else { Verdict::Unknown });
    };
    allowed(entry.verdict).map(|()| entry)
}

/// A control whose caller says that its parameters have `size` bytes; `given` is
/// whether it gave any.
///
/// RM compares the size with its own table before it looks at anything else.
pub fn control(compiled: &Compiled, command: u32, size: u32, given: bool) -> Result<(), Verdict> {
    let none = size == 0 && !given;
    if command == 0 && none {
        // The null command: RM answers OK without a look at the object.
        return Ok(());
    }
    let entry = compiled.control(command).ok_or(Verdict::Unknown)?;
    allowed(entry.verdict)?;
    let fits = match entry.size.get() {
        ANY_SIZE => size <= MAX_OPAQUE,
        exact => size == exact || none,
    };
    fits.then_some(()).ok_or(Verdict::Size)
}

/// A class.
pub fn class(compiled: &Compiled, class: u32) -> Result<&ClassEntry, Verdict> {
    let entry = compiled.class(class).ok_or(Verdict::Unknown)?;
    allowed(entry.verdict).map(|()| entry)
}

fn allowed(verdict: u8) -> Result<(), Verdict> {
    match Verdict::from_number(verdict) {
        Verdict::Allow => Ok(()),
        refusal => Err(refusal),
    }
}

/// The driver's answer to a call that is refused; `offset` is where its argument
/// has RM's status, [`NO_OFFSET`] where it has none.
pub fn answer(what: What, verdict: Verdict, offset: u16) -> Answer {
    match refusal_status(what, verdict) {
        Some(status) if offset != NO_OFFSET => Answer::Status { offset, status },
        _ => Answer::Errno(match (what, verdict) {
            (What::Escape(FileKind::Modeset | FileKind::Cap, _), Verdict::Unknown) => Errno::ENOTTY,
            (_, Verdict::Limit) => Errno::ENOMEM,
            _ => Errno::EINVAL,
        }),
    }
}

/// What RM would say, where RM would be the one to refuse.
fn refusal_status(what: What, verdict: Verdict) -> Option<u32> {
    use Verdict::{KernelOnly, Limit, Privileged, Shape, Size, Unknown};
    match (what, verdict) {
        (_, Shape) | (What::Uvm(_) | What::Escape(..), Unknown | Size) => None,
        (What::Uvm(_), _) => None,
        (_, Limit) => Some(status::NO_MEMORY),
        (_, Privileged | KernelOnly) => Some(status::INSUFFICIENT_PERMISSIONS),
        (What::Control(_), Size) => Some(status::INVALID_ARGUMENT),
        (What::Class(_), _) => Some(status::INVALID_CLASS),
        (What::Control(_) | What::VidHeap(_), _) => Some(status::NOT_SUPPORTED),
        (What::Escape(..), _) => None,
    }
}

#[cfg(test)]
mod tests {
    use nvguest_abi::compiled::ControlEntry;

    use super::*;

    const FLAT: u32 = 0x2080_0101;
    const OPAQUE: u32 = 0x2080_8159;
    const ADMIN: u32 = 0x2080_0102;

    fn compiled() -> Compiled {
        let control = |command: u32, size: u32, verdict: Verdict| ControlEntry {
            command: command.into(),
            size: size.into(),
            verdict: verdict as u8,
            reserved: [0; 3],
        };
        let escape = |kind: FileKind, nr: u32, size: u32, array: u8| EscapeEntry {
            kind: kind as u8,
            verdict: Verdict::Allow as u8,
            status: NO_OFFSET.into(),
            nr: nr.into(),
            size: size.into(),
            array,
            reserved: [0; 3],
        };
        Compiled {
            controls: vec![
                control(FLAT, 128, Verdict::Allow),
                control(ADMIN, 128, Verdict::Privileged),
                control(OPAQUE, ANY_SIZE, Verdict::Allow),
            ],
            classes: vec![ClassEntry {
                class: 0x79.into(),
                size: 24.into(),
                verdict: Verdict::Allow as u8,
                params: 2,
                reserved: [0; 2],
            }],
            escapes: vec![
                escape(FileKind::Ctl, 0x2a, 32, 0),
                escape(FileKind::Ctl, 200, 72, 1),
                escape(FileKind::Uvm, 25, 32, 0),
            ],
            ..Compiled::default()
        }
    }

    #[test]
    fn a_control_whose_size_differs_from_the_profile_is_refused() {
        let compiled = compiled();
        assert_eq!(control(&compiled, FLAT, 128, true), Ok(()));
        for size in [0, 1, 127, 129, u32::MAX] {
            assert_eq!(control(&compiled, FLAT, size, true), Err(Verdict::Size), "{size}");
        }
    }

    #[test]
    fn a_control_without_parameters_says_so_in_pointer_and_size() {
        let compiled = compiled();
        assert_eq!(control(&compiled, FLAT, 0, false), Ok(()));
        assert_eq!(control(&compiled, FLAT, 4, false), Err(Verdict::Size));
    }

    #[test]
    fn an_opaque_control_takes_any_size_up_to_its_bound() {
        let compiled = compiled();
        for size in [0, 1, 992, MAX_OPAQUE] {
            assert_eq!(control(&compiled, OPAQUE, size, true), Ok(()), "{size}");
        }
        assert_eq!(control(&compiled, OPAQUE, MAX_OPAQUE + 1, true), Err(Verdict::Size));
    }

    #[test]
    fn what_the_profile_does_not_list_is_unknown() {
        let compiled = compiled();
        assert_eq!(control(&compiled, 0x1234, 4, true), Err(Verdict::Unknown));
        assert_eq!(class(&compiled, 0x78).map(|_| ()), Err(Verdict::Unknown));
        assert_eq!(escape(&compiled, FileKind::Ctl, 0x4d, 72).map(|_| ()), Err(Verdict::Unknown));
        let everything = Compiled::default();
        assert_eq!(escape(&everything, FileKind::Cap, 0, 0).map(|_| ()), Err(Verdict::Unknown));
    }

    #[test]
    fn the_null_command_is_rm_s_to_answer() {
        assert_eq!(control(&compiled(), 0, 0, false), Ok(()));
        assert_eq!(control(&compiled(), 0, 8, true), Err(Verdict::Unknown));
    }

    #[test]
    fn an_array_argument_has_a_positive_whole_number_of_elements() {
        let compiled = compiled();
        let cards = |size| escape(&compiled, FileKind::Ctl, 200, size).map(|_| ());
        assert_eq!(cards(72), Ok(()));
        assert_eq!(cards(32 * 72), Ok(()));
        assert_eq!(cards(0), Err(Verdict::Size));
        assert_eq!(cards(73), Err(Verdict::Size));
    }

    #[test]
    fn an_escape_is_of_one_kind_of_file() {
        let compiled = compiled();
        assert!(escape(&compiled, FileKind::Ctl, 0x2a, 32).is_ok());
        let on_card = escape(&compiled, FileKind::Gpu, 0x2a, 32);
        assert_eq!(on_card.map(|_| ()), Err(Verdict::Unknown));
    }

    #[test]
    fn refusals_are_the_driver_s_own() {
        let status = |status| Answer::Status { offset: 28, status };
        let control = What::Control(FLAT);
        let cases = [
            (control, Verdict::Unknown, status(0x56)),
            (control, Verdict::Overlay, status(0x56)),
            (control, Verdict::Size, status(0x1f)),
            (control, Verdict::Privileged, status(0x1b)),
            (control, Verdict::Limit, status(0x51)),
            (control, Verdict::Shape, Answer::Errno(Errno::EINVAL)),
            (What::Class(0x78), Verdict::Unknown, status(0x22)),
            (What::Class(0x78), Verdict::KernelOnly, status(0x1b)),
            (What::VidHeap(19), Verdict::Unknown, status(0x56)),
            (What::Escape(FileKind::Ctl, 0x99), Verdict::Unknown, Answer::Errno(Errno::EINVAL)),
            (What::Escape(FileKind::Ctl, 0x2a), Verdict::Size, Answer::Errno(Errno::EINVAL)),
            (What::Escape(FileKind::Modeset, 3), Verdict::Unknown, Answer::Errno(Errno::ENOTTY)),
            (What::Escape(FileKind::Cap, 0), Verdict::Unknown, Answer::Errno(Errno::ENOTTY)),
            (What::Uvm(62), Verdict::Overlay, Answer::Errno(Errno::EINVAL)),
            (What::Uvm(33), Verdict::Limit, Answer::Errno(Errno::ENOMEM)),
        ];
        for (what, verdict, expected) in cases {
            assert_eq!(answer(what, verdict, 28), expected, "{what} {verdict:?}");
        }
        let nowhere = answer(What::Control(FLAT), Verdict::Unknown, NO_OFFSET);
        assert_eq!(nowhere, Answer::Errno(Errno::EINVAL));
    }
}
