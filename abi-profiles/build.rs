//! Embeds the checked-in profiles. They are TOML for people; the build turns each into JSON,
//! which the library reads several times faster.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

#[allow(dead_code)]
#[path = "src/profile.rs"]
mod profile;

#[derive(serde::Deserialize)]
struct Index {
    #[serde(default)]
    equal: BTreeMap<String, String>,
}

fn main() {
    println!("cargo::rerun-if-changed=releases");
    println!("cargo::rerun-if-changed=src/profile.rs");
    let variable = |name| std::env::var(name).expect("cargo sets it");
    let folder = Path::new(&variable("CARGO_MANIFEST_DIR")).join("releases");
    let out = variable("OUT_DIR");
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .expect("the crate has a folder of releases")
        .map(|entry| entry.expect("the folder can be read").file_name())
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".toml"))
        .collect();
    names.sort();
    let mut files = String::new();
    let mut equal = String::new();
    for name in names {
        let path = folder.join(&name);
        println!("cargo::rerun-if-changed={}", path.display());
        let text = std::fs::read_to_string(&path).expect("a profile can be read");
        if name == "index.toml" {
            let index: Index = toml::from_str(&text).expect("index.toml is TOML");
            for (one, other) in index.equal {
                let _ = writeln!(equal, "({one:?}, {other:?}),");
            }
            continue;
        }
        let form: profile::FileForm =
            toml::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let json = Path::new(&out).join(format!("{}.json", form.release));
        std::fs::write(&json, serde_json::to_string(&form).expect("a profile is plain data"))
            .expect("OUT_DIR is writable");
        let json = json.display().to_string();
        let _ = writeln!(files, "({:?}, include_str!({json:?})),", form.release);
    }
    std::fs::write(Path::new(&out).join("releases.rs"), format!("(&[\n{files}], &[\n{equal}])\n"))
        .expect("OUT_DIR is writable");
}
