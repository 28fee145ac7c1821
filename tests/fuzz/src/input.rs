//! Bytes as a script: small decisions first, whatever is left as data.

/// What is left of the bytes. Past their end everything is zero, so that a short input is
/// a whole script.
#[derive(Clone, Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let part = self.bytes(N);
        array[..part.len()].copy_from_slice(part);
        array
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// The next two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// The next four.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// The next eight.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number below `bound`, which is at most 256.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::from(self.u8()) % bound.max(1)
    }

    /// Yes or no.
    pub fn flag(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// The next `count` bytes, or as many as there are.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (part, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        part
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

/// The other way round: a script as bytes, to make seeds of.
#[derive(Clone, Debug, Default)]
pub struct Script(Vec<u8>);

impl Script {
    /// One more byte.
    #[must_use]
    pub fn u8(self, value: u8) -> Self {
        self.bytes(&[value])
    }

    /// Two more.
    #[must_use]
    pub fn u16(self, value: u16) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Four more.
    #[must_use]
    pub fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Eight more.
    #[must_use]
    pub fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// More.
    #[must_use]
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// The script.
    pub fn done(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_reads_back_and_zeroes_follow_it() {
        let script = Script::default().u8(1).u16(2).u32(3).u64(4).bytes(&[5; 3]).done();
        let mut input = Input::new(&script);
        assert_eq!((input.u8(), input.u16(), input.u32(), input.u64()), (1, 2, 3, 4));
        assert_eq!((input.bytes(2), input.u16(), input.u64()), (&[5, 5][..], 5, 0));
        assert!(input.is_empty());
    }
}
