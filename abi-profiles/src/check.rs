//! What must hold of a profile before anything is compiled from it.

use crate::profile::{File, Params, Pointer, Profile};
use crate::store::StoreError;

/// Checks that every pointer, count and descriptor lies in its block and that none overlap.
pub fn check(profile: &Profile) -> Result<(), StoreError> {
    let wrong = |what: &str, message: String| StoreError::Form {
        file: profile.release.clone(),
        message: format!("{what}: {message}"),
    };
    let check = |what: &str, size: u32, pointers: &[Pointer], files: &[File]| {
        block(size, pointers, files).map_err(|message| wrong(what, message))
    };
    for (name, e) in &profile.escapes {
        check(name, e.size, &e.pointers, &e.files)?;
        let ends = [e.status, e.select].into_iter().flatten().map(|at| u32::from(at) + 4);
        if ends.into_iter().any(|end| end > e.size) {
            return Err(wrong(name, format!("a field lies outside its {} bytes", e.size)));
        }
    }
    for c in profile.controls.values() {
        check(&c.name, c.size, &c.pointers, &c.files)?;
    }
    for c in profile.classes.values() {
        check(&c.name, c.size, &[], &c.files)?;
        if (c.params == Params::None) != (c.size == 0) {
            return Err(wrong(
                &c.name,
                format!("{} parameters of {} bytes", c.params.name(), c.size),
            ));
        }
    }
    for c in profile.uvm.values().chain(profile.nvkms.values()).chain(profile.drm.values()) {
        check(&c.name, c.size, &c.pointers, &c.files)?;
    }
    Ok(())
}

fn block(size: u32, pointers: &[Pointer], files: &[File]) -> Result<(), String> {
    let mut spans: Vec<(u32, u32, &str)> = Vec::new();
    for p in pointers {
        spans.push((p.at.into(), 8, &p.field));
        match (p.count_at, p.count_width) {
            (None, None) => {}
            (Some(at), Some(width @ (1 | 2 | 4 | 8)))
                if u32::from(at) + u32::from(width) <= size => {}
            _ => return Err(format!("the count of {} is not a field of the struct", p.field)),
        }
    }
    for f in files {
        if !matches!(f.width, 4 | 8) {
            return Err(format!("descriptor {} is {} bytes wide", f.field, f.width));
        }
        spans.push((f.at.into(), f.width.into(), &f.field));
    }
    spans.sort_unstable();
    for pair in spans.windows(2) {
        if pair[0].0 + pair[0].1 > pair[1].0 {
            return Err(format!("{} and {} overlap", pair[0].2, pair[1].2));
        }
    }
    match spans.iter().find(|(at, width, _)| at + width > size) {
        Some((_, _, field)) => Err(format!("{field} lies outside its {size} bytes")),
        None => Ok(()),
    }
}
