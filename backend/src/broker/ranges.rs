//! Where in a range of numbers there is room: first fit, lowest first.

use std::ops::Range;

/// Bytes of a page, of guest and host.
pub const PAGE: u64 = 4096;
/// From this length on a range is aligned to it, so that large pages can be used.
pub const LARGE: u64 = 2 << 20;

/// The lowest range of `length` bytes within `room` that touches none of `taken`, which
/// are ranges (start, length) in their order. It begins at a multiple of `alignment`, or
/// of [`LARGE`] if it is that long.
pub fn first_fit(
    taken: impl IntoIterator<Item = (u64, u64)>,
    room: Range<u64>,
    length: u64,
    alignment: u64,
) -> Option<u64> {
    let alignment = if length >= LARGE { LARGE.max(alignment) } else { alignment };
    let mut at = room.start.checked_next_multiple_of(alignment)?;
    for (start, size) in taken {
        if at.checked_add(length)? <= start {
            break;
        }
        let end = start.checked_add(size)?;
        if end > at {
            at = end.checked_next_multiple_of(alignment)?;
        }
    }
    (at.checked_add(length)? <= room.end).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_hole_that_is_large_enough_is_taken() {
        let taken = [(0, 0x1000), (0x2000, 0x1000), (0x5000, 0x1000)];
        let fit = |length| first_fit(taken, 0..1 << 30, length, PAGE);
        assert_eq!(fit(0x1000), Some(0x1000));
        assert_eq!(fit(0x2000), Some(0x3000));
        assert_eq!(fit(0x3000), Some(0x6000));
        assert_eq!(fit(LARGE), Some(LARGE));
    }

    #[test]
    fn what_lies_before_the_room_is_left_aside() {
        let taken = [(0, 0x1000), (0x8000, 0x1000)];
        assert_eq!(first_fit(taken, 0x4000..0x10000, 0x4000, PAGE), Some(0x4000));
        assert_eq!(first_fit(taken, 0x6000..0x10000, 0x4000, PAGE), Some(0x9000));
    }

    #[test]
    fn a_room_that_is_full_has_no_range() {
        assert_eq!(first_fit([(0, 0x4000)], 0..0x4000, 0x1000, PAGE), None);
        assert_eq!(first_fit([(0, 0x4000)], 0..0x4000, u64::MAX, PAGE), None);
    }
}
