//! A line of the recording, built in place: a hook may run inside an allocator's own mmap.

use std::fmt;

/// Bytes of the longest line; what does not fit is cut.
const LONGEST: usize = 512;

/// A line being built.
pub struct Line {
    bytes: [u8; LONGEST],
    length: usize,
}

impl Line {
    /// A line that begins with the time in seconds since boot and the calling thread.
    pub fn begin(seconds: i64, nanoseconds: i64, thread: i32) -> Self {
        let mut line = Self { bytes: [0; LONGEST], length: 0 };
        line.put(format_args!("{seconds}.{:06} {thread} ", nanoseconds / 1000));
        line
    }

    /// Adds text.
    pub fn put(&mut self, text: fmt::Arguments<'_>) {
        let _ = fmt::Write::write_fmt(self, text);
    }

    /// The whole line, its end included.
    pub fn end(&mut self) -> &[u8] {
        let at = self.length.min(LONGEST - 1);
        self.bytes[at] = b'\n';
        &self.bytes[..=at]
    }
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = LONGEST - 1 - self.length;
        let kept = text.len().min(room);
        self.bytes[self.length..self.length + kept].copy_from_slice(&text.as_bytes()[..kept]);
        self.length += kept;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_when_and_who() {
        let mut line = Line::begin(12, 3_412_999, 4711);
        line.put(format_args!("open node={}", "nvidiactl"));
        assert_eq!(line.end(), b"12.003412 4711 open node=nvidiactl\n");
    }

    #[test]
    fn a_line_that_is_too_long_is_cut_and_still_ends() {
        let mut line = Line::begin(1, 0, 1);
        for _ in 0..200 {
            line.put(format_args!("abcdefgh"));
        }
        let bytes = line.end();
        assert_eq!((bytes.len(), bytes.last()), (LONGEST, Some(&b'\n')));
    }
}
