//! What `deny.toml` says of dependencies, in every test run: cargo-deny itself is no part of it.

use std::collections::BTreeSet;

use serde::Deserialize;

use crate::prepare::{cargo, root};

const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";
/// Workspaces: ours, and that of the fuzz targets.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "tests/fuzz/fuzz/Cargo.toml"];

#[derive(Deserialize)]
struct Deny {
    licenses: Licenses,
}

#[derive(Deserialize)]
struct Licenses {
    allow: BTreeSet<String>,
    exceptions: Vec<Exception>,
}

#[derive(Deserialize)]
struct Exception {
    #[serde(rename = "crate")]
    name: String,
    allow: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    license: Option<String>,
    source: Option<String>,
}

fn packages() -> Vec<Package> {
    let of = |manifest: &str| {
        // A fresh machine fetches what it never builds: those of other systems are looked at too.
        let words = ["metadata", "--locked", "--format-version", "1"];
        let output = cargo(&words).args(["--manifest-path", manifest]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Metadata>(&output.stdout).unwrap().packages
    };
    MANIFESTS.into_iter().flat_map(of).collect()
}

/// Whether every part of an expression has an alternative that `may` be.
fn fits(expression: &str, may: impl Fn(&str) -> bool) -> bool {
    let expression = expression.replace('/', " OR ");
    expression.split(" AND ").all(|part| {
        part.split(" OR ").any(|one| may(one.trim_matches(|sign| " ()".contains(sign))))
    })
}

#[test]
fn every_dependency_has_a_licence_of_the_list() {
    let deny = std::fs::read_to_string(root().join("deny.toml")).unwrap();
    let Licenses { allow, exceptions } = toml::from_str::<Deny>(&deny).unwrap().licenses;
    for package in packages() {
        let own = exceptions.iter().find(|exception| exception.name == package.name);
        let own = own.map(|exception| &exception.allow);
        let may = |one: &str| allow.contains(one) || own.is_some_and(|own| own.contains(one));
        let license = package.license.unwrap_or_default();
        assert!(fits(&license, may), "{}: {license:?} is not in deny.toml", package.name);
    }
}

#[test]
fn every_dependency_is_of_the_registry() {
    for package in packages() {
        let source = package.source.unwrap_or_else(|| REGISTRY.into());
        assert_eq!(source, REGISTRY, "{}", package.name);
    }
}
