//! A line of the trace, where nvrecord's decoder puts its words.

use std::fmt::{self, Write};

/// A line being built.
pub struct Line(pub String);

impl Line {
    /// A line that begins with the time in seconds since boot and the calling thread.
    pub fn begin(seconds: i64, nanoseconds: i64, thread: i32) -> Self {
        Self(format!("{seconds}.{:06} {thread} ", nanoseconds / 1000))
    }

    /// Adds text.
    pub fn put(&mut self, text: fmt::Arguments<'_>) {
        let _ = self.0.write_fmt(text);
    }

    /// The whole line, its end included.
    pub fn end(&mut self) -> &[u8] {
        self.0.push('\n');
        self.0.as_bytes()
    }
}
