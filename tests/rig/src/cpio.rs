//! The format of a Linux initial RAM disk: a `newc` archive.

use std::io::{self, Write};

const FOLDER: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER: u32 = 0o020_000;

/// Writes an archive entry by entry.
pub struct Archive<W: Write> {
    to: W,
    inode: u32,
}

impl<W: Write> Archive<W> {
    /// An empty archive.
    pub fn new(to: W) -> Self {
        Archive { to, inode: 0 }
    }

    /// Adds a folder.
    pub fn folder(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, FOLDER | 0o755, (0, 0), &[])
    }

    /// Adds a file.
    pub fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        self.entry(path, FILE | mode, (0, 0), data)
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.entry(path, LINK | 0o777, (0, 0), target.as_bytes())
    }

    /// Adds a character device.
    pub fn device(&mut self, path: &str, mode: u32, number: (u32, u32)) -> io::Result<()> {
        self.entry(path, CHARACTER | mode, number, &[])
    }

    /// Ends the archive and gives the writer back.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.to.flush()?;
        Ok(self.to)
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), data: &[u8]) -> io::Result<()> {
        self.inode += 1;
        let size = u32::try_from(data.len()).map_err(io::Error::other)?;
        let name_size = u32::try_from(path.len() + 1).map_err(io::Error::other)?;
        // inode mode uid gid links mtime size device(2) its number(2) name check
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0];
        let mut head = b"070701".to_vec();
        for field in fields {
            write!(head, "{field:08x}")?;
        }
        head.extend_from_slice(path.as_bytes());
        head.push(0);
        pad(&mut head);
        self.to.write_all(&head)?;
        self.to.write_all(data)?;
        self.to.write_all(&[0; 3][..data.len().next_multiple_of(4) - data.len()])
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_padded_to_four_bytes_and_end_with_the_trailer() {
        let mut archive = Archive::new(Vec::new());
        archive.file("a", 0o644, b"12345").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[112..117], b"12345");
        assert!(bytes.windows(10).any(|part| part == b"TRAILER!!!"));
    }
}
