//! One release, measured.

use std::collections::BTreeMap;

use anyhow::{anyhow, bail, Context, Result};
use nvguest_abi::profile::{Control, Escape, File, Profile, Struct};

use crate::ctext;
use crate::dwarf::{Field, Kind, Layout};
use crate::embedded::{self, pointer, Reach};
use crate::probe::{Answers, Probe, Type, Value};
use crate::tree::Tree;
use crate::{classes, controls, named, others, strays};

/// Layouts under their C names; one name never means two layouts.
#[derive(Default)]
pub struct Structs(pub BTreeMap<String, Struct>);

impl Structs {
    /// Adds a layout, with fields down to `depth` names.
    pub fn add(&mut self, name: &str, layout: &Layout, depth: usize) -> Result<()> {
        let fields: Vec<String> = layout
            .fields
            .iter()
            .filter(|field| field.path.matches('.').count() < depth)
            .filter(|field| field.kind != Kind::Compound || shown_whole(field, depth))
            .map(spell)
            .collect();
        let layout = Struct { size: layout.size, fields: fields.join(" ") };
        let name = name.trim_start_matches("struct ").to_owned();
        match self.0.insert(name.clone(), layout.clone()) {
            Some(other) if other != layout => bail!("two structs are called {name}"),
            _ => Ok(()),
        }
    }
}

/// A compound field stands for itself where its own fields are not shown.
fn shown_whole(field: &Field, depth: usize) -> bool {
    field.count.is_some() || field.path.matches('.').count() + 1 >= depth
}

fn spell(field: &Field) -> String {
    let count = field.count.map_or(String::new(), |count| format!("[{count}]"));
    let bits = field.bits.map_or(String::new(), |(bit, bits)| format!("/{bit}+{bits}"));
    let star = if field.kind == Kind::Pointer { "*" } else { "" };
    format!("{}{count}@{}:{}{star}{bits}", field.path, field.offset, field.size)
}

/// A descriptor of a measured struct.
pub fn file(layout: &Layout, (field, kinds, none): &named::Fd) -> Result<File> {
    let found =
        layout.field(field).ok_or_else(|| anyhow!("the struct has no field {field} any more"))?;
    if !matches!(found.size, 4 | 8) || found.count.is_some() {
        bail!("field {field} is not a number of 4 or 8 bytes any more");
    }
    Ok(File {
        field: (*field).to_owned(),
        at: u16::try_from(found.offset)?,
        width: u8::try_from(found.size)?,
        kinds: (*kinds).to_owned(),
        none: (*none).to_owned(),
    })
}

const RM_HEADERS: &str = "src/common/sdk/nvidia/inc";
const ESCAPE_HEADERS: &[&str] = &[
    "nv-unix-nvos-params-wrappers.h",
    "nv_escape.h",
    "nv-ioctl.h",
    "nv-ioctl-numbers.h",
    "nv-ioctl-numa.h",
    "nv-ioctl-nvlog.h",
    "nv-ioctl-lockless-diag.h",
];

fn rm_probe(tree: &Tree) -> Result<Probe> {
    let dirs = [
        RM_HEADERS,
        "src/common/inc",
        "src/nvidia/interface",
        "src/nvidia/arch/nvalloc/unix/include",
        "kernel-open/common/inc",
    ];
    let mut headers = vec!["nvtypes.h".to_owned(), "nvos.h".to_owned(), "rs_access.h".to_owned()];
    let is_header = |name: &str| name.ends_with(".h");
    let mut folders = vec!["alloc".to_owned(), "class".to_owned(), "ctrl".to_owned()];
    for path in tree.files(&format!("{RM_HEADERS}/ctrl"), |name| !name.contains('.'))? {
        folders.push(path[RM_HEADERS.len() + 1..].to_owned());
    }
    for folder in folders {
        for path in tree.files(&format!("{RM_HEADERS}/{folder}"), is_header)? {
            headers.push(path[RM_HEADERS.len() + 1..].to_owned());
        }
    }
    for header in ESCAPE_HEADERS {
        if dirs.iter().any(|dir| tree.path(dir).join(header).is_file()) {
            headers.push((*header).to_owned());
        }
    }
    Ok(Probe::new(dirs.iter().map(|dir| tree.path(dir)).collect(), &headers))
}

/// Escapes, asked of the compiler.
struct AskedEscapes(Vec<(named::Escape, String, Value, Type, Vec<Value>)>);

impl AskedEscapes {
    /// Asks for every escape that this release routes; one that is in no list is an error.
    fn ask(tree: &Tree, macros: &BTreeMap<String, String>, probe: &mut Probe) -> Result<Self> {
        let mut routing = String::new();
        for source in ["escape.c", "osapi.c"] {
            routing += &tree.text(&format!("src/nvidia/arch/nvalloc/unix/src/{source}"))?;
        }
        routing += &tree.text("kernel-open/nvidia/nv.c")?;
        let routing = ctext::without_comments(&routing);
        let mut headers = String::new();
        for header in ESCAPE_HEADERS.iter().chain(&["nvos.h"]) {
            for dir in &probe.include_dirs {
                headers += &std::fs::read_to_string(dir.join(header)).unwrap_or_default();
            }
        }
        let routed = |name: &str| {
            routing.contains(&format!("case {name}:")) || routing.contains(&format!("== {name})"))
        };
        let mut asked = Vec::new();
        for name in macros.keys().filter(|name| name.starts_with("NV_ESC_") && routed(name)) {
            let known: Vec<_> = named::ESCAPES.iter().filter(|e| e.name == name).collect();
            if known.is_empty() {
                bail!("escape {name} is routed and in no list; add it to named.rs");
            }
            for escape in known {
                let layout = escape
                    .layout
                    .split('|')
                    .find(|layout| *layout == "NvU32" || ctext::has_word(&headers, layout))
                    .with_context(|| format!("{name}: no struct {}", escape.layout))?;
                let number = probe.value(name, name);
                let kind = probe.layout(name, layout);
                let elems = escape.pointers.iter().map(|p| probe.value(name, p.2)).collect();
                asked.push((*escape, layout.to_owned(), number, kind, elems));
            }
        }
        Ok(Self(asked))
    }

    fn finish(self, answers: &Answers, structs: &mut Structs) -> Result<BTreeMap<String, Escape>> {
        let mut escapes = BTreeMap::new();
        for (named, layout_name, number, kind, elems) in self.0 {
            let layout = answers.layout(kind);
            let escape = escape(&named, &layout_name, layout, (answers, number, &elems))
                .with_context(|| format!("{}: {layout_name}", named.name))?;
            structs.add(&layout_name, layout, usize::MAX)?;
            let second = escapes.contains_key(named.name);
            let key = if second {
                format!("{}/{layout_name}", named.name)
            } else {
                named.name.to_owned()
            };
            escapes.insert(key, escape);
        }
        Ok(escapes)
    }
}

fn escape(
    named: &named::Escape,
    layout_name: &str,
    layout: &Layout,
    (answers, number, elems): (&Answers, Value, &[Value]),
) -> Result<Escape> {
    let offset = |path: &str| -> Result<u16> {
        let field = layout.field(path).ok_or_else(|| anyhow!("no field {path} any more"))?;
        Ok(u16::try_from(field.offset)?)
    };
    let indirect = named.name == named::INDIRECT.0;
    if indirect && named::INDIRECT.1.iter().any(|(f, at)| offset(f).ok() != u16::try_from(*at).ok())
    {
        bail!("not the {{cmd, size, ptr}} that every part of nvguest follows");
    }
    let mut pointers = Vec::new();
    for ((field, count, _, dir), elem) in named.pointers.iter().zip(elems) {
        let reach = Reach {
            field: (*field).to_owned(),
            count: count.map(str::to_owned),
            elem: String::new(),
            dir: *dir,
            squared: false,
            unbounded: false,
        };
        pointers.push(pointer(layout, &reach, answers.value32(*elem)?)?);
    }
    Ok(Escape {
        nr: answers.value32(number)?,
        layout: layout_name.to_owned(),
        size: layout.size,
        status: named.status.map(offset).transpose()?,
        array: named.array,
        indirect,
        select: named.select.map(offset).transpose()?,
        pointers,
        files: named.files.iter().map(|fd| file(layout, fd)).collect::<Result<_>>()?,
    })
}

/// Measures a release.
pub fn measure(tree: &Tree) -> Result<Profile> {
    let mut probe = rm_probe(tree)?;
    let macros = probe.macros(tree.scratch(), "rm-macros")?;
    let mut by_value: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for (name, body) in
        macros.iter().filter(|(name, _)| name.starts_with("NV") && name.contains("_CTRL_"))
    {
        if let Some(value) = ctext::literal(body) {
            by_value.entry(value).or_default().push(name.clone());
        }
    }
    let mut rows = Vec::new();
    let generated = "src/nvidia/generated";
    for path in tree.files(generated, |name| name.starts_with("g_") && name.ends_with("_nvoc.c"))? {
        rows.extend(controls::parse(&path[generated.len() + 1..], &tree.text(&path)?)?);
    }
    let params: BTreeMap<u32, String> =
        rows.iter().filter_map(|row| Some((row.command, row.params.clone()?))).collect();
    let flags = controls::Flags::parse(&tree.text("src/nvidia/inc/kernel/rmapi/control.h")?)?;
    let rmapi = "src/nvidia/src/kernel/rmapi";
    let entries = classes::parse(
        "resource_list.h",
        &tree.text(&format!("{rmapi}/resource_list.h"))?,
        &macros,
    )?;
    let mut cases = embedded::parse_copies(
        "embedded_param_copy.c",
        &tree.text(&format!("{rmapi}/embedded_param_copy.c"))?,
        &macros,
    )?;
    cases.extend(embedded::parse_converters(
        "rmapi_deprecated_control.c",
        &tree.text("src/nvidia/interface/deprecated/rmapi_deprecated_control.c")?,
    )?);
    let asked_kinds: BTreeMap<u32, Type> = params
        .iter()
        .map(|(&command, name)| (command, probe.layout("exported methods", name)))
        .collect();
    let asked_controls = controls::Asked::ask(rows, &mut probe);
    let asked_classes = classes::Asked::ask(entries, &mut probe);
    let asked_cases = embedded::Asked::ask(cases, &mut probe);
    let asked_escapes = AskedEscapes::ask(tree, &macros, &mut probe)?;
    let answers = probe.run(tree.scratch(), "rm")?;

    let mut structs = Structs::default();
    let mut profile = Profile { release: tree.release()?, ..Profile::default() };
    profile.controls = asked_controls.finish(&answers, &flags, &by_value)?;
    add_pointers(&mut profile.controls, asked_cases.finish(&answers)?)?;
    add_descriptors(&mut profile.controls, &params, &asked_kinds, &answers)?;
    for (number, (mut class, kind)) in asked_classes.finish(&answers)? {
        if let Some(kind) = kind {
            let layout = answers.layout(kind);
            structs.add(&class.layout, layout, usize::MAX)?;
            let fds = named::CLASS_FDS.iter().filter(|(name, _)| *name == class.layout);
            for (_, fd) in fds {
                class.files.push(file(layout, fd).with_context(|| class.layout.clone())?);
            }
        }
        profile.classes.insert(number, class);
    }
    profile.escapes = asked_escapes.finish(&answers, &mut structs)?;
    profile.uvm = others::uvm(tree, &mut structs).context("nvidia-uvm")?;
    profile.nvkms = others::nvkms(tree, &mut structs).context("nvidia-modeset")?;
    profile.drm = others::drm(tree, &mut structs).context("nvidia-drm")?;
    profile.structs = structs.0;
    Ok(profile)
}

/// Puts measured pointers into the controls; a converted control gets an entry of its own.
fn add_pointers(
    controls: &mut BTreeMap<u32, Control>,
    cases: Vec<embedded::Measured>,
) -> Result<()> {
    for measured in cases {
        let target = measured
            .case
            .converted_to
            .as_ref()
            .and_then(|name| controls.values().find(|control| control.name == *name).cloned());
        match (controls.get_mut(&measured.command), target) {
            (Some(control), _) if control.pointers.is_empty() => {
                if control.size != measured.layout.0 {
                    bail!("{}: exported with {} bytes", measured.case.label, control.size);
                }
                control.pointers = measured.pointers;
                control.converted_to = measured.case.converted_to;
            }
            (Some(_), _) => {}
            (None, Some(target)) => {
                let control = Control {
                    name: measured.case.command,
                    size: measured.layout.0,
                    layout: measured.layout.1,
                    converted_to: measured.case.converted_to,
                    pointers: measured.pointers,
                    ..target
                };
                controls.insert(measured.command, control);
            }
            // RM copies for it, and exports no handler: the answer is always "not supported".
            (None, None) => {}
        }
    }
    Ok(())
}

/// Puts descriptors and stray pointers into the controls, and notes what looks like one
/// and is in no list.
fn add_descriptors(
    controls: &mut BTreeMap<u32, Control>,
    params: &BTreeMap<u32, String>,
    kinds: &BTreeMap<u32, Type>,
    answers: &Answers,
) -> Result<()> {
    for (command, control) in controls {
        let (Some(name), Some(kind)) = (params.get(command), kinds.get(command)) else { continue };
        let layout = answers.layout(*kind);
        for (_, fd) in named::CONTROL_FDS.iter().filter(|(params, _)| params == name) {
            control.files.push(file(layout, fd).with_context(|| name.clone())?);
        }
        for (_, (field, count, elem, dir)) in
            named::STRAY_POINTERS.iter().filter(|(params, _)| params == name)
        {
            let reach = Reach {
                field: (*field).to_owned(),
                count: count.map(str::to_owned),
                elem: String::new(),
                dir: *dir,
                squared: false,
                unbounded: false,
            };
            let found = pointer(layout, &reach, elem.parse()?).with_context(|| name.clone())?;
            control.pointers.push(found);
        }
        control.wild = strays::wild(control, layout);
    }
    Ok(())
}
