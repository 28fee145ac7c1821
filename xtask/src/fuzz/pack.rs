//! What fuzzing takes, in a folder that runs on another machine: no compiler, no network, a C
//! library as old as that of Ubuntu 24.04.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{bail, Context, Result};
use nvguest_rig::process::capture;
use nvguest_rig::provision::step;

use super::{corpus, place, program};
use crate::prepare::{note_commit, root, run, TARGET};

/// The newest minor version of glibc 2 that may be asked for: Ubuntu 24.04 has it.
const GLIBC: u32 = 39;
/// Bytes that the folder may take.
const LIMIT: u64 = 40 << 20;
/// Libraries that the other machine may lack.
const LIBRARIES: [&str; 2] = ["libstdc++.so.6", "libgcc_s.so.1"];

/// Packs what was built, into a folder that is made anew.
pub fn pack(targets: &[String], folder: &Path) -> Result<ExitCode> {
    let folder = root().join(folder);
    step("pack the fuzz targets", || {
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
        }
        for target in targets {
            let into = folder.join("corpus").join(target);
            fs::create_dir_all(&into).with_context(|| format!("make {}", into.display()))?;
            run(Command::new("cp").arg("-rT").arg(corpus(target)).arg(&into))?;
        }
        fs::create_dir_all(folder.join("lib")).context("make the folder of libraries")?;
        for (from, to) in [(program(), "fuzz"), (gather()?, "gather")] {
            // Names of functions stay: what fails says where.
            run(Command::new("strip").arg("-g").arg("-o").arg(folder.join(to)).arg(from))?;
        }
        for (name, path) in libraries(&program())? {
            run(Command::new("cp").arg("-L").arg(path).arg(folder.join("lib").join(name)))?;
        }
        run(Command::new("cp").arg(root().join("tests/fuzz/run.sh")).arg(&folder))?;
        note_commit(&folder)
    })?;
    check(&folder)?;
    println!("On the other machine: OUT=folder {}/run.sh SECONDS PROCESSES", folder.display());
    Ok(ExitCode::SUCCESS)
}

/// The guest module's interpreter, as the build script of `tests/fuzz` made it last.
fn gather() -> Result<PathBuf> {
    let builds = place(TARGET).join("release/build");
    let entries = builds.read_dir().with_context(|| format!("read {}", builds.display()))?;
    let made = entries.flatten().map(|entry| entry.path().join("out/gather"));
    let dated = made.filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)));
    dated.max().map(|(_, path)| path).context("the guest module's interpreter was not built")
}

/// Where the program's libraries are that the other machine may lack.
fn libraries(program: &Path) -> Result<Vec<(&'static str, PathBuf)>> {
    let said = capture(Command::new("ldd").arg(program))?;
    let said = String::from_utf8_lossy(&said).into_owned();
    let path = |name: &str| {
        let line = said.lines().find(|line| line.trim().starts_with(name))?;
        Some(PathBuf::from(line.split_whitespace().nth(2)?))
    };
    Ok(LIBRARIES.into_iter().filter_map(|name| Some((name, path(name)?))).collect())
}

/// Refuses what the other machine could not run, or would not take.
fn check(folder: &Path) -> Result<()> {
    let size = capture(Command::new("du").args(["-sb", "--"]).arg(folder))?;
    let size = String::from_utf8_lossy(&size).into_owned();
    let bytes: u64 = size.split_whitespace().next().unwrap_or_default().parse()?;
    if bytes > LIMIT {
        bail!("{} has {bytes} bytes, and may have {LIMIT}", folder.display());
    }
    for name in ["fuzz", "gather", "lib/libstdc++.so.6", "lib/libgcc_s.so.1"] {
        let Ok(file) = fs::read(folder.join(name)) else { continue };
        let newest = newest_glibc(&file);
        if newest > GLIBC {
            bail!("{name} needs glibc 2.{newest}; Ubuntu 24.04 has 2.{GLIBC}");
        }
    }
    println!("  {:.1} MiB, of at most {}", crate::bundle::mib(bytes), LIMIT >> 20);
    Ok(())
}

/// The newest minor version of glibc 2 that a file names.
fn newest_glibc(file: &[u8]) -> u32 {
    const NAME: &[u8] = b"GLIBC_2.";
    let after = file.windows(NAME.len()).enumerate().filter(|(_, text)| *text == NAME);
    let minors = after.filter_map(|(at, _)| {
        let digits = file[at + NAME.len()..].iter().take_while(|byte| byte.is_ascii_digit());
        String::from_utf8(digits.copied().collect()).ok()?.parse().ok()
    });
    minors.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_glibc_is_told_from_the_names_of_versions() {
        assert_eq!(newest_glibc(b"\0GLIBC_2.2.5\0GLIBC_2.38\0GLIBC_2.4\0GLIBC_"), 38);
        assert_eq!(newest_glibc(b"static"), 0);
    }
}
