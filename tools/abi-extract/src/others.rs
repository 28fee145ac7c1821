//! The other modules: nvidia-uvm, nvidia-modeset, nvidia-drm.

use std::collections::BTreeMap;

use anyhow::{bail, Context, Result};
use nvguest_abi::profile::{Command, File};

use crate::ctext;
use crate::dwarf::Layout;
use crate::embedded::{pointer, Reach};
use crate::measure::{file, Structs};
use crate::named;
use crate::probe::Probe;
use crate::tree::Tree;

type Commands = BTreeMap<u32, Command>;

/// Commands that `nvidia-uvm.ko` routes.
pub fn uvm(tree: &Tree, structs: &mut Structs) -> Result<Commands> {
    let folder = "kernel-open/nvidia-uvm";
    let dirs = ["kernel-open/common/inc", folder, "src/common/inc", "src/common/sdk/nvidia/inc"];
    let headers = ["nvtypes.h", "uvm_ioctl.h", "uvm_linux_ioctl.h"].map(str::to_owned);
    let mut probe = Probe::new(dirs.iter().map(|dir| tree.path(dir)).collect(), &headers);
    let mut asked = Vec::new();
    for source in ["uvm.c", "uvm_tools.c"] {
        for (line, name) in
            uvm_routes(&ctext::without_comments(&tree.text(&format!("{folder}/{source}"))?))
        {
            let label = format!("{folder}/{source}:{line}");
            let number = probe.value(&label, &name);
            let kind = probe.layout(&label, &format!("{name}_PARAMS"));
            asked.push((label, name, number, kind));
        }
    }
    if asked.is_empty() {
        bail!("{folder}: no routed command understood");
    }
    let finish = probe.value("UVM_DEINITIALIZE", "UVM_DEINITIALIZE");
    let answers = probe.run(tree.scratch(), "uvm")?;
    let mut commands = BTreeMap::new();
    let none = Command {
        name: "UVM_DEINITIALIZE".to_owned(),
        layout: String::new(),
        size: 0,
        status: None,
        pointers: Vec::new(),
        files: Vec::new(),
    };
    commands.insert(answers.value32(finish)?, none);
    for (label, name, number, kind) in asked {
        let layout = answers.layout(kind);
        let command = uvm_command(&name, layout).with_context(|| format!("{label}: {name}"))?;
        structs.add(&command.layout, layout, usize::MAX)?;
        if commands.insert(answers.value32(number)?, command).is_some() {
            bail!("{label}: {name} is routed twice");
        }
    }
    Ok(commands)
}

fn uvm_routes(text: &str) -> Vec<(usize, String)> {
    let mut routes = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if !line.starts_with("UVM_ROUTE_CMD_") {
            continue;
        }
        let Some((_, rest)) = line.split_once('(') else { continue };
        let Some((name, _)) = rest.split_once(',') else { continue };
        routes.push((number + 1, name.trim().to_owned()));
    }
    routes
}

fn uvm_command(name: &str, layout: &Layout) -> Result<Command> {
    let mut files: Vec<File> = Vec::new();
    for field in &layout.fields {
        let known = named::UVM_FDS.iter().find(|fd| fd.0 == field.path);
        match known {
            Some(fd) => files.push(file(layout, fd)?),
            None if field.path.to_lowercase().ends_with("fd") => {
                bail!("field {} looks like a descriptor and is in no list", field.path)
            }
            None => {}
        }
    }
    let mut pointers = Vec::new();
    for (_, (field, count, elem, dir)) in
        named::UVM_POINTERS.iter().filter(|(command, _)| *command == name)
    {
        let reach = Reach {
            field: (*field).to_owned(),
            count: count.map(str::to_owned),
            elem: (*elem).to_owned(),
            dir: *dir,
            squared: false,
            unbounded: true,
        };
        pointers.push(pointer(layout, &reach, elem.parse()?)?);
    }
    let status = layout.field("rmStatus").map(|field| u16::try_from(field.offset)).transpose()?;
    Ok(Command {
        name: name.to_owned(),
        layout: format!("{name}_PARAMS"),
        size: layout.size,
        status,
        pointers,
        files,
    })
}

/// Commands of `nvidia-modeset.ko`.
pub fn nvkms(tree: &Tree, structs: &mut Structs) -> Result<Commands> {
    let folder = "src/nvidia-modeset/interface";
    let dirs = [
        folder,
        "src/common/inc",
        "src/common/sdk/nvidia/inc",
        "src/common/unix/common/inc",
        "src/common/modeset",
        "kernel-open/common/inc",
    ];
    let headers = ["nvtypes.h", "nvkms-api.h", "nvkms-ioctl.h"].map(str::to_owned);
    let mut probe = Probe::new(dirs.iter().map(|dir| tree.path(dir)).collect(), &headers);
    let source = "src/nvidia-modeset/src/nvkms.c";
    let text = ctext::without_comments(&tree.text(source)?);
    let mut asked = Vec::new();
    for call in ["ENTRY", "ENTRY_CUSTOM_USER", "_ENTRY_WITH_USER"] {
        for (line, arguments) in ctext::calls(&text, call) {
            let [name, function, ..] = &arguments[..] else { continue };
            if !name.starts_with("NVKMS_IOCTL_") {
                continue;
            }
            let label = format!("{source}:{line}");
            let layout = format!("struct NvKms{function}Params");
            let number = probe.value(&label, name);
            let kind = probe.layout(&label, &layout);
            asked.push((name.clone(), layout, number, kind));
        }
    }
    if asked.is_empty() {
        bail!("{source}: no command understood");
    }
    let answers = probe.run(tree.scratch(), "nvkms")?;
    let mut commands = BTreeMap::new();
    for (name, layout_name, number, kind) in asked {
        let layout = answers.layout(kind);
        structs.add(&layout_name, layout, 2)?;
        let command = Command {
            name: name.clone(),
            layout: layout_name,
            size: layout.size,
            status: None,
            pointers: Vec::new(),
            files: Vec::new(),
        };
        if commands.insert(answers.value32(number)?, command).is_some() {
            bail!("{source}: {name} is dispatched twice");
        }
    }
    Ok(commands)
}

/// The piece of `drm/drm.h` that NVIDIA's header uses, from the kernel's ioctl numbering.
const DRM_STUB: &str = "typedef unsigned int drm_magic_t;\n#include <stdint.h>\n\
     #include <linux/ioctl.h>\n#define DRM_COMMAND_BASE 0x40\n\
     #define DRM_IO(nr) _IO('d', nr)\n#define DRM_IOR(nr, type) _IOR('d', nr, type)\n\
     #define DRM_IOW(nr, type) _IOW('d', nr, type)\n\
     #define DRM_IOWR(nr, type) _IOWR('d', nr, type)\n";

/// Commands of `nvidia-drm.ko`.
pub fn drm(tree: &Tree, structs: &mut Structs) -> Result<Commands> {
    let folder = "kernel-open/nvidia-drm";
    // The header's name until 580, and since 590.
    let header = ["nvidia-drm-ioctl.h", "nv_drm_common_ioctl.h"]
        .into_iter()
        .find(|header| tree.path(folder).join(header).is_file())
        .with_context(|| format!("{folder}: no header of ioctls"))?;
    let stub = tree.scratch().join("stub/drm");
    std::fs::create_dir_all(&stub)?;
    std::fs::write(stub.join("drm.h"), DRM_STUB)?;
    let mut dirs = vec![tree.scratch().join("stub")];
    dirs.extend(
        [
            "kernel-open/nvidia-drm",
            "kernel-open/common/inc",
            "src/common/inc",
            "src/common/sdk/nvidia/inc",
        ]
        .map(|dir| tree.path(dir)),
    );
    let mut probe = Probe::new(dirs, &["nvtypes.h".to_owned(), header.to_owned()]);
    probe.prelude.insert_str(0, "#define NV_LINUX 1\n");
    let macros = probe.macros(tree.scratch(), "drm-macros")?;
    let mut asked = Vec::new();
    for name in macros.keys().filter(|name| name.starts_with("DRM_IOCTL_NVIDIA_")) {
        let number = probe.value(header, &format!("({name}) & 0xff"));
        let size = probe.value(header, &format!("(({name}) >> 16) & 0x3fff"));
        let body = &macros[name];
        let layout = ["DRM_IOWR", "DRM_IOW", "DRM_IOR"]
            .iter()
            .find_map(|call| ctext::calls(body, call).first()?.1.get(1).cloned());
        let kind = layout.as_ref().map(|layout| probe.layout(header, layout));
        asked.push((name.clone(), number, size, layout, kind));
    }
    if asked.is_empty() {
        bail!("{header}: no command understood");
    }
    let answers = probe.run(tree.scratch(), "drm")?;
    let mut commands = BTreeMap::new();
    for (name, number, size, layout_name, kind) in asked {
        let size = answers.value32(size)?;
        if let (Some(layout_name), Some(kind)) = (&layout_name, kind) {
            let layout = answers.layout(kind);
            if layout.size != size {
                bail!("{header}: {name} says {size} bytes, its struct has {}", layout.size);
            }
            structs.add(layout_name, layout, usize::MAX)?;
        }
        let command = Command {
            name: name.clone(),
            layout: layout_name.unwrap_or_default(),
            size,
            status: None,
            pointers: Vec::new(),
            files: Vec::new(),
        };
        if commands.insert(answers.value32(number)?, command).is_some() {
            bail!("{header}: {name} has another's number");
        }
    }
    Ok(commands)
}
