//! A list that never allocates: what one call reaches is bounded by HELLO.

use std::ops::{Deref, DerefMut};

/// At most `N` values.
#[derive(Clone, Copy, Debug)]
pub struct Bounded<T, const N: usize> {
    values: [T; N],
    len: usize,
}

impl<T: Copy + Default, const N: usize> Bounded<T, N> {
    /// Adds a value; `None` if there is no room.
    pub fn push(&mut self, value: T) -> Option<()> {
        *self.values.get_mut(self.len)? = value;
        self.len += 1;
        Some(())
    }
}

impl<T, const N: usize> DerefMut for Bounded<T, N> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.values.get_mut(..self.len).unwrap_or(&mut [])
    }
}

impl<T: Copy + Default, const N: usize> Default for Bounded<T, N> {
    fn default() -> Self {
        Self { values: [T::default(); N], len: 0 }
    }
}

impl<T, const N: usize> Deref for Bounded<T, N> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.values.get(..self.len).unwrap_or(&[])
    }
}
