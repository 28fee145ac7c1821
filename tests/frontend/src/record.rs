//! Requests kept in a folder, for the fuzzers' corpora: `NVGUEST_RECORD=FOLDER`.
//!
//! Each thread, and so each test, has a file of its own: request after request, before each
//! the room for its reply and its length, two bytes each.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Bytes that a request is kept with at most; what is longer is left out.
const MAX_REQUEST: usize = 2048;
/// Bytes of one file.
const MAX_FILE: u64 = 8192;

fn folder() -> Option<&'static PathBuf> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOLDER.get_or_init(|| std::env::var_os("NVGUEST_RECORD").map(PathBuf::from)).as_ref()
}

/// Keeps a request, if somebody asked for that. What cannot be written is not kept.
pub fn keep(request: &[u8], room: usize) {
    let Some(folder) = folder() else { return };
    let Some(length) = u16::try_from(request.len()).ok().filter(|_| request.len() <= MAX_REQUEST)
    else {
        return;
    };
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("thread").replace("::", "-");
    let path = folder.join(format!("{}-{name}", std::process::id()));
    let Ok(mut file) = OpenOptions::new().append(true).create(true).open(path) else { return };
    if file.metadata().is_ok_and(|data| data.len() < MAX_FILE) {
        let room = u16::try_from(room).unwrap_or(u16::MAX);
        let _ = file.write_all(&[&room.to_le_bytes()[..], &length.to_le_bytes(), request].concat());
    }
}
