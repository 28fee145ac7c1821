//! What `nvguest run` leaves beside a guest's sockets, as long as the guest runs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{json, Value};

/// QEMU's monitor.
pub fn monitor(folder: &Path) -> PathBuf {
    folder.join("qmp.sock")
}

/// The command of a guest's backend, if `nvguest run` started it.
pub fn backend(folder: &Path) -> Option<Vec<String>> {
    let text = std::fs::read(file(folder)).ok()?;
    let value: Value = serde_json::from_slice(&text).ok()?;
    serde_json::from_value(value["backend"].clone()).ok()
}

fn file(folder: &Path) -> PathBuf {
    folder.join("run.json")
}

/// A guest's file, which goes when this does.
pub struct Noted(PathBuf);

impl Noted {
    /// Writes down how the guest's backend was started.
    pub fn write(folder: &Path, backend: &[String]) -> Result<Self> {
        let file = file(folder);
        let text = json!({"schema": 1, "backend": backend}).to_string();
        std::fs::write(&file, text + "\n")
            .with_context(|| format!("{} cannot be written", file.display()))?;
        Ok(Self(file))
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_found_until_the_guest_ends() {
        let folder = tempfile::tempdir().unwrap();
        let words = ["vhost-user-nvguest".to_owned(), "--name".to_owned()];
        let noted = Noted::write(folder.path(), &words).unwrap();
        assert_eq!(backend(folder.path()).as_deref(), Some(&words[..]));
        drop(noted);
        assert_eq!(backend(folder.path()), None);
    }
}
