//! Measures the kernel interface of NVIDIA's driver releases from their own open sources.
//!
//! - `args`: the command line
//! - `tree`: a release's sources, from git or a folder
//! - `ctext`, `probe`, `dwarf`, `relocate`: NVIDIA's text, and what the compiler makes of it
//! - `controls`, `classes`, `embedded`, `others`: the tables, each asked of the compiler
//! - `named`, `strays`: what no table says, and what is found to be in no list
//! - `measure`: all of it, for one release
//! - `write`, `folder`: profiles as text, and many of them as a folder
//! - `show`, `history`: for people

pub mod args;
pub mod classes;
pub mod controls;
pub mod ctext;
pub mod dwarf;
pub mod embedded;
pub mod folder;
pub mod history;
pub mod measure;
pub mod named;
pub mod others;
pub mod probe;
pub mod relocate;
pub mod show;
pub mod strays;
pub mod tree;
pub mod write;
