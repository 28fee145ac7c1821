//! Asks the compiler: sizes and layouts of types, values of constants, macros.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{anyhow, bail, Context, Result};
use object::{Object, ObjectSection};

use crate::dwarf::{Debug, Layout};

/// What is asked in one compilation. Every question carries a label that says where it
/// comes from, and the compiler's complaint about it names that label.
#[derive(Default)]
pub struct Probe {
    /// Text before the questions: includes.
    pub prelude: String,
    /// Where includes are looked for.
    pub include_dirs: Vec<PathBuf>,
    values: Vec<(String, String)>,
    types: Vec<(String, String)>,
}

/// A constant that was asked for.
#[derive(Clone, Copy, Debug)]
pub struct Value(usize);
/// A type that was asked for.
#[derive(Clone, Copy, Debug)]
pub struct Type(usize);

/// The answers.
pub struct Answers {
    values: Vec<u64>,
    layouts: Vec<Layout>,
}

impl Answers {
    /// The constant's value.
    pub fn value(&self, value: Value) -> u64 {
        self.values[value.0]
    }

    /// The constant's value in 32 bits.
    pub fn value32(&self, value: Value) -> Result<u32> {
        let value = self.value(value);
        u32::try_from(value).with_context(|| format!("{value:#x} does not fit 32 bits"))
    }

    /// The type's layout.
    pub fn layout(&self, kind: Type) -> &Layout {
        &self.layouts[kind.0]
    }
}

impl Probe {
    /// A probe of these headers.
    pub fn new(include_dirs: Vec<PathBuf>, headers: &[String]) -> Self {
        let mut prelude = String::new();
        for header in headers {
            let _ = writeln!(prelude, "#include \"{header}\"");
        }
        Self { prelude, include_dirs, ..Self::default() }
    }

    /// Asks for the value of a constant expression.
    pub fn value(&mut self, label: &str, expression: &str) -> Value {
        self.values.push((label.to_owned(), expression.to_owned()));
        Value(self.values.len() - 1)
    }

    /// Asks for the layout of a type.
    pub fn layout(&mut self, label: &str, kind: &str) -> Type {
        if let Some(known) = self.types.iter().position(|(_, asked)| asked == kind) {
            return Type(known);
        }
        self.types.push((label.to_owned(), kind.to_owned()));
        Type(self.types.len() - 1)
    }

    fn source(&self) -> String {
        let mut text = self.prelude.clone();
        text.push_str(
            "\nconst unsigned long long nvg_values[] __attribute__((section(\".nvg\"))) = {\n",
        );
        for (label, expression) in &self.values {
            let _ = writeln!(
                text,
                "#line 1 \"{}\"\n(unsigned long long)({expression}),",
                quoted(label)
            );
        }
        text.push_str("0 };\n");
        for (index, (label, kind)) in self.types.iter().enumerate() {
            let _ = writeln!(
                text,
                "#line 1 \"{}\"\n__typeof__({kind}) *nvg_type_{index};",
                quoted(label)
            );
        }
        text
    }

    /// Compiles, and reads the answers.
    pub fn run(&self, scratch: &Path, name: &str) -> Result<Answers> {
        let object_path = scratch.join(format!("{name}.o"));
        let arguments = ["-c", "-g", "-gdwarf-5", "-fno-eliminate-unused-debug-types", "-o"];
        let mut command = self.compiler(scratch, name, &self.source())?;
        run(command.args(arguments).arg(&object_path))?;
        let bytes = std::fs::read(&object_path)?;
        let file = object::File::parse(&*bytes)?;
        let section =
            file.section_by_name(".nvg").ok_or_else(|| anyhow!("{name}: no .nvg section"))?;
        let mut values: Vec<u64> = section
            .data()?
            .chunks_exact(8)
            .map(|word| word.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
            .collect();
        values.pop();
        let debug = Debug::read(&file)?;
        let mut layouts = Vec::with_capacity(self.types.len());
        for (index, (label, kind)) in self.types.iter().enumerate() {
            let layout = debug.pointee(&format!("nvg_type_{index}"));
            layouts.push(layout.with_context(|| format!("{label}: type {kind}"))?);
        }
        Ok(Answers { values, layouts })
    }

    /// The macros that the headers define, comments and spare blanks removed.
    pub fn macros(&self, scratch: &Path, name: &str) -> Result<BTreeMap<String, String>> {
        let mut command = self.compiler(scratch, name, &self.prelude)?;
        let output = run(command.args(["-E", "-dM"]))?;
        let mut macros = BTreeMap::new();
        for line in output.lines() {
            let Some(rest) = line.strip_prefix("#define ") else { continue };
            let (name, body) = rest.split_once(' ').unwrap_or((rest, ""));
            macros.insert(name.to_owned(), body.trim().to_owned());
        }
        Ok(macros)
    }

    fn compiler(&self, scratch: &Path, name: &str, source: &str) -> Result<Command> {
        let path = scratch.join(format!("{name}.c"));
        std::fs::write(&path, source)?;
        let compiler = std::env::var_os("CC").unwrap_or_else(|| "gcc".into());
        let mut command = Command::new(compiler);
        command.args(["-std=gnu11", "-w", "-m64"]);
        for dir in &self.include_dirs {
            command.arg("-I").arg(dir);
        }
        command.arg(path);
        Ok(command)
    }
}

fn quoted(label: &str) -> String {
    label.replace(['"', '\\', '\n'], " ")
}

fn run(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| {
        format!("{program} did not start; install gcc or clang, or name one with CC")
    })?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        let first: Vec<&str> =
            complaint.lines().filter(|line| line.contains("error")).take(8).collect();
        bail!("{program} refused the headers:\n{}", first.join("\n"));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
