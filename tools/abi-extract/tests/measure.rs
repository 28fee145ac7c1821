//! A small release written for these tests, measured as the real ones are.

use std::path::{Path, PathBuf};

use abi_extract::dwarf::Kind;
use abi_extract::measure::measure;
use abi_extract::probe::Probe;
use abi_extract::tree::Tree;
use abi_extract::{folder, show};
use nvguest_abi::profile::{Access, Direction, Params, Profile};

fn mini() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mini")
}

/// A copy of the small release in which `old` is `new` in one file.
fn changed(edits: &[(&str, &str, &str)]) -> (tempfile::TempDir, anyhow::Result<Profile>) {
    let copy = tempfile::tempdir().unwrap();
    let status = std::process::Command::new("cp")
        .args(["-r", "--no-preserve=mode"])
        .arg(mini().join("."))
        .arg(copy.path())
        .status();
    assert!(status.unwrap().success());
    for (file, old, new) in edits {
        let path = copy.path().join(file);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(old), "{file} holds no {old}");
        std::fs::write(&path, text.replace(old, new)).unwrap();
    }
    let profile = Tree::from_dir(copy.path()).and_then(|tree| measure(&tree));
    (copy, profile)
}

fn error(edits: &[(&str, &str, &str)]) -> String {
    format!("{:#}", changed(edits).1.unwrap_err())
}

fn measured() -> Profile {
    measure(&Tree::from_dir(&mini()).unwrap()).unwrap()
}

const TABLE: &str = "src/nvidia/generated/g_toy_nvoc.c";
const CONTROL_H: &str = "src/nvidia/inc/kernel/rmapi/control.h";
const CTRL: &str = "src/common/sdk/nvidia/inc/ctrl/ctrl0000.h";
const CLASSES: &str = "src/nvidia/src/kernel/rmapi/resource_list.h";

#[test]
fn every_construct_of_a_struct_has_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut probe = Probe::new(vec![here], &["layouts.h".to_owned()]);
    let kind = probe.layout("test", "Everything");
    let answers = probe.run(folder.path(), "layouts").unwrap();
    let layout = answers.layout(kind);
    let place = |path: &str| {
        let field = layout.field(path).unwrap_or_else(|| panic!("no field {path}"));
        (field.offset, field.size, field.count)
    };
    assert_eq!(place("first"), (0, 1, None));
    assert_eq!(place("aligned"), (8, 8, None));
    assert_eq!(place("nested.y"), (20, 1, None));
    assert_eq!(place("choice.bytes"), (24, 1, Some(4)));
    assert_eq!(place("anonymous_word"), (28, 4, None));
    assert_eq!(place("high"), (29, 1, None));
    assert_eq!(place("matrix"), (32, 4, Some(6)));
    assert_eq!(place("many"), (56, 8, Some(4)));
    assert_eq!(place("many[].y"), (60, 1, None));
    assert_eq!(layout.field("number").unwrap().bits, Some((1, 5)));
    assert_eq!(place("p64"), (96, 8, None));
    assert_eq!(layout.field("p64").unwrap().kind, Kind::Pointer);
    assert_eq!(layout.field("pointer").unwrap().kind, Kind::Pointer);
    assert_eq!(place("qualified"), (112, 4, None));
    assert_eq!(layout.size, 120);
}

#[test]
fn a_small_release_is_measured_whole() {
    let profile = measured();
    assert_eq!(profile.release, "600.10");
    let get = &profile.controls[&0x201];
    assert_eq!((get.name.as_str(), get.size), ("NV0000_CTRL_CMD_TOY_GET", 24));
    assert_eq!((get.access, get.flags.as_str()), (Access::User, "CACHEABLE"));
    assert_eq!(profile.controls[&0x204].access, Access::Admin);
    let bare = &profile.controls[&0x206];
    assert_eq!((bare.name.as_str(), bare.size, bare.access), ("toyBare", 0, Access::Internal));
    let list = &profile.controls[&0x202].pointers[0];
    assert_eq!((list.at, list.count_at, list.elem, list.dir), (8, Some(0), 8, Direction::Out));
    let export = &profile.controls[&0x3d05].files[0];
    assert_eq!((export.at, export.kinds.as_str()), (16, "ctl"));
    assert_eq!(profile.controls[&0x205].wild, "each[].pWhere");
}

#[test]
fn a_converted_control_has_an_entry_of_its_own_with_the_newer_ones_access() {
    let profile = measured();
    let old = &profile.controls[&0x203];
    assert_eq!((old.size, old.access), (16, Access::Admin));
    assert_eq!(old.converted_to.as_deref(), Some("NV0000_CTRL_CMD_TOY_OLD_V2"));
    assert_eq!((old.pointers[0].elem, old.pointers[0].dir), (8, Direction::Inout));
}

#[test]
fn classes_have_their_params_access_and_parents() {
    let profile = measured();
    let event = &profile.classes[&5];
    assert_eq!((event.params, event.size, event.access), (Params::Required, 24, Access::User));
    assert_eq!((event.files[0].at, event.files[0].width), (16, 8));
    let toy = &profile.classes[&0x42];
    assert_eq!((toy.params, toy.size, toy.access), (Params::Optional, 16, Access::Admin));
    assert_eq!(toy.parents, "Device Subdevice");
    assert_eq!(profile.classes[&0x43].access, Access::User, "a root class");
    assert_eq!(profile.classes[&0x44].access, Access::Kernel);
    assert!(!profile.classes.contains_key(&0x45), "only in debug builds");
}

#[test]
fn escapes_and_the_other_modules_are_measured_too() {
    let profile = measured();
    let wide = &profile.escapes["NV_ESC_RM_ALLOC/NVOS64_PARAMETERS"];
    assert_eq!((wide.size, wide.status, wide.select), (48, Some(40), Some(12)));
    assert_eq!((wide.pointers[0].at, wide.pointers[0].elem), (24, 4));
    assert!(profile.escapes["NV_ESC_IOCTL_XFER_CMD"].indirect);
    assert!(profile.escapes["NV_ESC_CARD_INFO"].array);
    assert!(!profile.escapes.contains_key("NV_ESC_RM_CONFIG_GET"), "no code routes it");
    let uvm = &profile.uvm[&25];
    assert_eq!((uvm.size, uvm.status, uvm.files[0].at), (24, Some(20), 16));
    assert_eq!(profile.nvkms[&1].name, "NVKMS_IOCTL_FREE_DEVICE");
    assert_eq!(profile.drm[&0x4a].size, 16);
    assert_eq!(profile.drm[&0x44].size, 0);
}

#[test]
fn flags_are_decoded_by_the_values_of_their_own_release() {
    let swapped = changed(&[
        (CONTROL_H, "RMCTRL_FLAGS_PRIVILEGED      0x000000004", "RMCTRL_FLAGS_PRIVILEGED 0x10"),
        (
            CONTROL_H,
            "RMCTRL_FLAGS_CACHEABLE       0x000000400",
            "RMCTRL_FLAGS_CACHEABLE 0x000001000",
        ),
        (TABLE, "0x4u", "0x10u"),
        (TABLE, "0x408u", "0x1008u"),
    ]);
    assert!(folder::same(&swapped.1.unwrap(), &measured()));
}

#[test]
fn a_flag_without_a_name_is_an_error_that_names_the_row() {
    let text = error(&[(TABLE, "0x408u", "0x40000408u")]);
    assert!(text.contains("g_toy_nvoc.c row 0") && text.contains("0x40000000"), "{text}");
}

#[test]
fn a_row_that_is_not_understood_or_missing_is_an_error() {
    let text = error(&[(TABLE, "sizeof(NV0000_CTRL_TOY_GET_PARAMS)", "TOY_SIZE + 4")]);
    assert!(text.contains("row 0") && text.contains("TOY_SIZE + 4"), "{text}");
    let text = error(&[(TABLE, "/*numEntries=*/     6", "/*numEntries=*/     7")]);
    assert!(text.contains("declares 7") && text.contains("6 rows"), "{text}");
    let text = error(&[(CLASSES, "RS_OPTIONAL(TOY_ALLOC)", "RS_SOMETIMES(TOY_ALLOC)")]);
    assert!(text.contains("resource_list.h:") && text.contains("RS_SOMETIMES"), "{text}");
}

#[test]
fn a_struct_that_is_not_defined_is_an_error_that_names_the_row() {
    let text = error(&[(CTRL, "NV0000_CTRL_TOY_GET_PARAMS", "NV0000_CTRL_TOY_GOT_PARAMS")]);
    assert!(text.contains("NV0000_CTRL_TOY_GET_PARAMS"), "{text}");
}

#[test]
fn an_escape_that_is_routed_and_in_no_list_is_an_error() {
    let text = error(&[
        ("kernel-open/nvidia/nv.c", "case NV_ESC_CARD_INFO:", "case NV_ESC_NEWLY_MADE:"),
        (
            "kernel-open/common/inc/nv-ioctl-numbers.h",
            "#define NV_ESC_CARD_INFO",
            "#define NV_ESC_NEWLY_MADE",
        ),
    ]);
    assert!(text.contains("NV_ESC_NEWLY_MADE is routed and in no list"), "{text}");
}

#[test]
fn a_descriptor_that_moved_is_found_and_one_that_is_gone_is_an_error() {
    let (_, moved) =
        changed(&[(CTRL, "NvU32 rest[3]; int fd;", "NvU32 rest[2]; int fd; NvU32 more;")]);
    assert_eq!(moved.unwrap().controls[&0x3d05].files[0].at, 12);
    let text = error(&[(CTRL, "int fd; NvU32 flags;", "int handle; NvU32 flags;")]);
    assert!(text.contains("no field fd any more"), "{text}");
    let text = error(&[("kernel-open/nvidia-uvm/uvm_ioctl.h", "int rmCtrlFd", "int newFd")]);
    assert!(text.contains("newFd looks like a descriptor"), "{text}");
}

#[test]
fn measuring_again_gives_the_same_bytes_and_a_renamed_field_the_same_fingerprint() {
    let first = folder::build(&[measured()]).unwrap();
    let second = folder::build(&[measured()]).unwrap();
    assert_eq!(first, second);
    let (_, renamed) = changed(&[(CTRL, "NvU32 a; NvU64 b", "NvU32 alpha; NvU64 beta")]);
    assert_eq!(renamed.unwrap().controls[&0x201], measured().controls[&0x201]);
}

#[test]
fn a_folder_holds_a_root_the_differences_and_an_index_and_reads_back() {
    let root = measured();
    let (_, newer) = changed(&[
        ("version.mk", "600.10", "600.20"),
        (CTRL, "NvU8 c[3]", "NvU8 c[12]"),
        (CLASSES, "RS_OPTIONAL(TOY_ALLOC)", "RS_REQUIRED(TOY_ALLOC)"),
    ]);
    let newer = newer.unwrap();
    let equal = Profile { release: "600.30".to_owned(), ..newer.clone() };
    let files = folder::build(&[root.clone(), newer.clone(), equal]).unwrap();
    assert_eq!(files.keys().collect::<Vec<_>>(), ["600.10.toml", "600.20.toml", "index.toml"]);
    assert!(files["600.20.toml"].contains("parent = \"600.10\""));
    assert!(files["600.20.toml"].lines().count() < 10, "{}", files["600.20.toml"]);
    assert!(files["index.toml"].contains("\"600.30\" = \"600.20\""));
    let place = tempfile::tempdir().unwrap();
    folder::write(place.path(), &files).unwrap();
    assert_eq!(folder::differences(place.path(), &files).unwrap(), [""; 0]);
    let store = nvguest_abi::store::Store::from_dir(place.path()).unwrap();
    assert_eq!(store.load(&"600.20".parse().unwrap()).unwrap(), newer);
    let text = show::difference(&root, &newer);
    assert!(text.contains("~ NV0000_CTRL_CMD_TOY_GET: 24 → 32 bytes"), "{text}");
    assert!(text.contains("~ NV01_TOY: parameters optional → required"), "{text}");
    std::fs::write(place.path().join("600.20.toml"), "release = \"600.20\"\n").unwrap();
    let differences = folder::differences(place.path(), &files).unwrap();
    assert_eq!(differences, ["600.20.toml: not what is measured"]);
}

#[test]
fn one_more_release_is_added_to_a_folder() {
    let place = tempfile::tempdir().unwrap();
    let root = measured();
    folder::write(place.path(), &folder::build(std::slice::from_ref(&root)).unwrap()).unwrap();
    let equal = Profile { release: "600.15".to_owned(), ..root.clone() };
    assert!(folder::add(place.path(), &equal).unwrap().contains("equal to 600.10"));
    let (_, newer) =
        changed(&[("version.mk", "600.10", "600.20"), (CTRL, "NvU8 c[3]", "NvU8 c[12]")]);
    assert!(folder::add(place.path(), &newer.unwrap()).unwrap().contains("600.20.toml"));
    let store = nvguest_abi::store::Store::from_dir(place.path()).unwrap();
    assert_eq!(store.measured().len(), 3);
    assert_eq!(store.load(&"600.20".parse().unwrap()).unwrap().controls[&0x201].size, 32);
}
