//! Numbers of 32 bits in a block, of cards or of clients: where they are, and how many count.

use super::calls::u32_at;

/// So many numbers, so far apart, from an offset on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    pub at: u16,
    pub count: u16,
    pub stride: u16,
    /// Where the block says how many of them count; all, where it does not.
    pub count_at: Option<u16>,
}

impl Places {
    /// Numbers side by side that all count.
    pub const fn all(at: u16, count: u16) -> Self {
        Self { at, count, stride: 4, count_at: None }
    }

    /// Numbers side by side, of which those count that a field says.
    pub const fn counted(at: u16, count: u16, count_at: u16) -> Self {
        Self { count_at: Some(count_at), ..Self::all(at, count) }
    }

    /// The numbers of those that count. What is behind the block is none.
    pub fn of(self, block: &[u8]) -> impl Iterator<Item = u32> + '_ {
        let most = self.count_at.map_or(u32::MAX, |at| u32_at(block, at));
        let count = usize::from(self.count).min(usize::try_from(most).unwrap_or(usize::MAX));
        let list = block.get(usize::from(self.at)..).unwrap_or_default();
        list.chunks(usize::from(self.stride)).take(count).map(|place| u32_at(place, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_places_that_count_are_looked_at_and_none_behind_the_block() {
        let places = Places::counted(24, 64, 4);
        let mut block = vec![0; 536];
        for (at, number) in [(24, 1_u32), (28, 2), (32, 3)] {
            block[at..at + 4].copy_from_slice(&number.to_le_bytes());
        }
        block[4] = 2;
        assert_eq!(places.of(&block).collect::<Vec<_>>(), [1, 2]);
        block[4..8].fill(0xff);
        assert_eq!(places.of(&block).count(), 64);
        assert_eq!(places.of(&block[..30]).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(places.of(&[]).count(), 0);
        assert_eq!(
            Places { stride: 8, ..Places::all(24, 2) }.of(&block).collect::<Vec<_>>(),
            [1, 3]
        );
    }
}
