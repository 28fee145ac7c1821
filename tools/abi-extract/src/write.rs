//! Profiles as text: the form that is checked in. The same facts always give the same bytes.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use nvguest_abi::profile::{
    Class, Command, Control, Escape, File, Params, Pointer, Profile, Struct,
};

/// The file of `profile`: the differences from `parent`, or all of it.
pub fn file(profile: &Profile, parent: Option<&Profile>) -> String {
    let empty = Profile::default();
    let base = parent.unwrap_or(&empty);
    let mut text = format!("release = \"{}\"\n", profile.release);
    if let Some(parent) = parent {
        let _ = writeln!(text, "parent = \"{}\"", parent.release);
    }
    let mut removed = String::new();
    let mut body = String::new();
    let mut sections = Sections { removed: &mut removed, body: &mut body };
    sections.add("escapes", &profile.escapes, &base.escapes, |key| quoted_key(key), escape);
    sections.add("controls", &profile.controls, &base.controls, number, control);
    sections.add("classes", &profile.classes, &base.classes, number, class);
    sections.add("uvm", &profile.uvm, &base.uvm, number, command);
    sections.add("nvkms", &profile.nvkms, &base.nvkms, number, command);
    sections.add("drm", &profile.drm, &base.drm, number, command);
    sections.add("structs", &profile.structs, &base.structs, |key| quoted_key(key), layout);
    if !removed.is_empty() {
        text += "\n[removed]\n";
        text += &removed;
    }
    text + &body
}

struct Sections<'a> {
    removed: &'a mut String,
    body: &'a mut String,
}

impl Sections<'_> {
    fn add<K: Ord, V: PartialEq>(
        &mut self,
        name: &str,
        now: &BTreeMap<K, V>,
        before: &BTreeMap<K, V>,
        key: impl Fn(&K) -> String,
        value: impl Fn(&V) -> String,
    ) {
        let gone: Vec<String> = before
            .keys()
            .filter(|k| !now.contains_key(k))
            .map(|k| format!("\"{}\"", key(k).trim_matches('"')))
            .collect();
        if !gone.is_empty() {
            let _ = writeln!(self.removed, "{name} = [{}]", gone.join(", "));
        }
        let changed: Vec<_> = now.iter().filter(|(k, v)| before.get(k) != Some(v)).collect();
        if !changed.is_empty() {
            let _ = writeln!(self.body, "\n[{name}]");
        }
        for (k, v) in changed {
            let _ = writeln!(self.body, "{} = {{ {} }}", key(k), value(v));
        }
    }
}

fn number(key: &u32) -> String {
    format!("0x{key:08x}")
}

fn quoted_key(key: &str) -> String {
    let bare = key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    if bare {
        key.to_owned()
    } else {
        format!("\"{key}\"")
    }
}

/// `key = value` pairs of an inline table, those that say nothing left out.
#[derive(Default)]
struct Row(Vec<String>);

impl Row {
    fn text(mut self, key: &str, value: &str) -> Self {
        if !value.is_empty() {
            self.0.push(format!("{key} = \"{value}\""));
        }
        self
    }

    fn number(mut self, key: &str, value: impl Into<u64>) -> Self {
        self.0.push(format!("{key} = {}", value.into()));
        self
    }

    fn maybe(self, key: &str, value: Option<impl Into<u64>>) -> Self {
        match value {
            Some(value) => self.number(key, value),
            None => self,
        }
    }

    fn flag(mut self, key: &str, value: bool) -> Self {
        if value {
            self.0.push(format!("{key} = true"));
        }
        self
    }

    fn list<T>(mut self, key: &str, values: &[T], spell: impl Fn(&T) -> String) -> Self {
        if !values.is_empty() {
            let rows: Vec<String> = values.iter().map(|v| format!("{{ {} }}", spell(v))).collect();
            self.0.push(format!("{key} = [{}]", rows.join(", ")));
        }
        self
    }

    fn end(self) -> String {
        self.0.join(", ")
    }
}

fn escape(e: &Escape) -> String {
    Row::default()
        .number("nr", e.nr)
        .text("struct", &e.layout)
        .number("size", e.size)
        .maybe("status", e.status)
        .flag("array", e.array)
        .flag("indirect", e.indirect)
        .maybe("select", e.select)
        .list("pointers", &e.pointers, pointer)
        .list("files", &e.files, fd)
        .end()
}

fn control(c: &Control) -> String {
    let rights = (c.rights != 0).then_some(c.rights);
    Row::default()
        .text("name", &c.name)
        .number("size", c.size)
        .text("access", c.access.name())
        .text("flags", &c.flags)
        .maybe("rights", rights)
        .text("layout", &c.layout)
        .text("converted_to", c.converted_to.as_deref().unwrap_or_default())
        .list("pointers", &c.pointers, pointer)
        .list("files", &c.files, fd)
        .text("wild", &c.wild)
        .end()
}

fn class(c: &Class) -> String {
    let size = (c.params != Params::None).then_some(c.size);
    Row::default()
        .text("name", &c.name)
        .text("access", c.access.name())
        .text("params", c.params.name())
        .text("struct", &c.layout)
        .maybe("size", size)
        .text("parents", &c.parents)
        .text("flags", &c.flags)
        .list("files", &c.files, fd)
        .end()
}

fn command(c: &Command) -> String {
    Row::default()
        .text("name", &c.name)
        .text("struct", &c.layout)
        .number("size", c.size)
        .maybe("status", c.status)
        .list("pointers", &c.pointers, pointer)
        .list("files", &c.files, fd)
        .end()
}

fn layout(l: &Struct) -> String {
    Row::default().number("size", l.size).text("fields", &l.fields).end()
}

fn pointer(p: &Pointer) -> String {
    Row::default()
        .text("field", &p.field)
        .number("at", p.at)
        .text("dir", p.dir.name())
        .number("elem", p.elem)
        .text("count", p.count.as_deref().unwrap_or_default())
        .maybe("count_at", p.count_at)
        .maybe("count_width", p.count_width)
        .flag("squared", p.squared)
        .flag("unbounded", p.unbounded)
        .end()
}

fn fd(f: &File) -> String {
    Row::default()
        .text("field", &f.field)
        .number("at", f.at)
        .number("width", f.width)
        .text("kinds", &f.kinds)
        .text("none", &f.none)
        .end()
}
