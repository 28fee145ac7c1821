//! Reading profiles, and finding the one that serves a host.

use nvguest_abi::compiled::Verdict;
use nvguest_abi::policy::{Pattern, Policy};
use nvguest_abi::release::{from_proc_version, Release};
use nvguest_abi::resolve::How;
use nvguest_abi::store::Store;
use nvguest_abi::Capability;

fn release(text: &str) -> Release {
    text.parse().unwrap()
}

fn file(name: &str, text: &str) -> (String, String) {
    (format!("{name}.toml"), text.to_owned())
}

/// A small folder: a root, a child in its branch, a profile of the next branch.
fn store() -> Store {
    let root = "release = \"535.129.03\"\n[controls]\n\
        0x00000201 = { name = \"A\", size = 128, access = \"user\" }\n\
        0x00000202 = { name = \"B\", size = 40, access = \"admin\" }\n";
    let child = "release = \"535.247.01\"\nparent = \"535.129.03\"\n[removed]\n\
        controls = [\"0x00000202\"]\n[controls]\n\
        0x00000201 = { name = \"A\", size = 132, access = \"user\" }\n";
    let next = "release = \"580.65.06\"\nparent = \"535.247.01\"\n";
    let index = "[equal]\n\"535.261.03\" = \"535.247.01\"\n";
    Store::new([
        file("535.129.03", root),
        file("535.247.01", child),
        file("580.65.06", next),
        file("index", index),
    ])
    .unwrap()
}

#[test]
fn a_child_has_what_its_parent_has_but_for_the_differences() {
    let profile = store().load(&release("535.247.01")).unwrap();
    assert_eq!(profile.controls[&0x201].size, 132);
    assert!(!profile.controls.contains_key(&0x202));
    assert_eq!(profile.release, "535.247.01");
}

#[test]
fn a_measured_release_gets_its_own_profile_or_the_equal_one() {
    let store = store();
    let own = store.resolve(&release("535.247.01"), false).unwrap();
    assert_eq!((own.how, own.notice()), (How::Measured, None));
    let equal = store.resolve(&release("535.261.03"), false).unwrap();
    assert_eq!((equal.how, equal.profile.release.as_str()), (How::Measured, "535.247.01"));
}

#[test]
fn an_unmeasured_release_of_a_measured_branch_gets_the_nearest_older_one_and_says_so() {
    let found = store().resolve(&release("580.159.04"), false).unwrap();
    assert_eq!(found.notice().unwrap(), "580.159.04: profile 580.65.06, same branch");
    let compiled = found.compile(Capability::Compute as u32);
    assert_eq!((compiled.release.as_str(), compiled.profile.as_str()), ("580.159.04", "580.65.06"));
    assert_eq!(compiled.capabilities, Capability::Compute as u32);
    let between = store().resolve(&release("535.183.01"), false).unwrap();
    assert_eq!(between.profile.release, "535.129.03");
}

#[test]
fn a_release_older_than_the_root_is_refused_whatever_the_admin_insists_on() {
    let error = store().resolve(&release("530.41.03"), true).unwrap_err();
    assert_eq!(
        error.to_string(),
        "driver 530.41.03 is older than the first profile (535.129.03); install 535.129.03 or newer"
    );
}

#[test]
fn a_newer_branch_is_refused_with_the_two_ways_out() {
    let text = store().resolve(&release("610.57.04"), false).unwrap_err().to_string();
    for part in ["610.57.04", "535.129.03 to 580.65.06", "abi-extract --from", "--allow-unmeasured"]
    {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    assert!(text.contains("23, 24, 31 and 53"), "public facts are told: {text}");
    let insisted = store().resolve(&release("610.57.04"), true).unwrap();
    let capabilities = Capability::Compute as u32 | Capability::Graphics as u32;
    assert_eq!(insisted.how, How::Unmeasured);
    assert_eq!(insisted.compile(capabilities).capabilities, Capability::Graphics as u32);
}

#[test]
fn a_release_before_its_branch_begins_is_refused_by_its_own_sentence() {
    let error = store().resolve(&release("580.10.01"), false).unwrap_err().to_string();
    assert!(error.contains("first measured release of its branch (580.65.06)"), "{error}");
}

#[test]
fn proc_text_of_either_module_gives_the_release() {
    for (text, wanted) in [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n\
             GCC version:  gcc version 11.4.0\n",
            "535.129.03",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x@)\n",
            "580.159.04",
        ),
    ] {
        assert_eq!(from_proc_version(text).unwrap(), release(wanted));
    }
}

#[test]
fn garbled_proc_text_is_one_clear_error() {
    for text in ["", "hello", "NVRM version: NVIDIA UNIX Kernel Module", "GCC version: 580.142"] {
        let error = from_proc_version(text).unwrap_err().to_string();
        assert!(error.starts_with("/proc/driver/nvidia/version does not name"), "{error}");
    }
    assert!("580".parse::<Release>().is_err());
    assert!("580.x".parse::<Release>().is_err());
}

#[test]
fn releases_order_by_number_not_by_text() {
    assert!(release("580.95.05") < release("580.105.08"));
    assert!(release("535.98") < release("535.104.05"));
}

fn load_error(files: Vec<(String, String)>, of: &str) -> String {
    let loaded = Store::new(files).and_then(|store| store.load(&release(of)));
    loaded.unwrap_err().to_string()
}

#[test]
fn a_missing_parent_is_named() {
    let child = file("580.142", "release = \"580.142\"\nparent = \"580.65.06\"\n");
    assert_eq!(
        load_error(vec![child], "580.142"),
        "profile 580.142 names parent 580.65.06, and there is no 580.65.06.toml"
    );
    let index = file("index", "[equal]\n\"580.95.05\" = \"580.65.06\"\n");
    assert!(load_error(vec![index], "580.95.05").contains("no 580.65.06.toml"));
}

#[test]
fn a_cycle_of_parents_is_an_error() {
    let one = file("580.65.06", "release = \"580.65.06\"\nparent = \"580.142\"\n");
    let other = file("580.142", "release = \"580.142\"\nparent = \"580.65.06\"\n");
    assert_eq!(load_error(vec![one, other], "580.142"), "profile 580.142 is its own ancestor");
}

#[test]
fn overlapping_or_outlying_rules_are_errors() {
    let control = |pointers: &str| {
        let text = format!(
            "release = \"580.142\"\n[controls]\n0x00000001 = {{ name = \"N\", size = 16, \
             access = \"user\", pointers = [{pointers}] }}\n"
        );
        load_error(vec![file("580.142", &text)], "580.142")
    };
    let pointer = |field: &str, at: u32| {
        format!("{{ field = \"{field}\", at = {at}, dir = \"in\", elem = 4 }}")
    };
    let overlap = control(&format!("{}, {}", pointer("a", 0), pointer("b", 4)));
    assert!(overlap.contains("N: a and b overlap"), "{overlap}");
    let outside = control(&pointer("a", 12));
    assert!(outside.contains("N: a lies outside its 16 bytes"), "{outside}");
    let count = control(
        "{ field = \"a\", at = 0, dir = \"in\", elem = 4, count = \"n\", count_at = 14, count_width = 4 }",
    );
    assert!(count.contains("the count of a is not a field"), "{count}");
}

#[test]
fn a_file_that_is_not_what_its_name_says_or_removes_what_is_not_there_is_an_error() {
    let wrong = file("580.142", "release = \"580.65.06\"\n");
    assert!(load_error(vec![wrong], "580.142").contains("says that it is release 580.65.06"));
    let removes = file("580.142", "release = \"580.142\"\n[removed]\ncontrols = [\"0x1\"]\n");
    assert!(load_error(vec![removes], "580.142").contains("removes 0x1 of controls"));
    let unknown = file("580.142", "release = \"580.142\"\nsurprise = 1\n");
    assert!(load_error(vec![unknown], "580.142").contains("surprise"));
}

#[test]
fn stars_in_the_overlay_stand_for_any_letters() {
    let glob = |pattern: &str, name: &str| Pattern::from(pattern.to_owned()).matches(name);
    assert!(glob("NV*_CTRL_CMD_*", "NV2080_CTRL_CMD_X"));
    assert!(glob("A*B", "AB") && !glob("A*B", "A") && !glob("AB*BA", "ABA"));
    assert!(glob("ABC", "ABC") && !glob("ABC", "ABCD"));
}

#[test]
fn every_line_of_the_overlay_names_something_that_some_release_has() {
    let store = Store::embedded().unwrap();
    let mut unmatched = Policy::built_in().patterns();
    for release in store.profiles() {
        let profile = store.load(release).unwrap();
        let name = |key: &str| key.split('/').next().unwrap_or(key).to_owned();
        let controls: Vec<String> = profile.controls.values().map(|c| c.name.clone()).collect();
        let classes: Vec<String> = profile.classes.values().map(|c| c.name.clone()).collect();
        let escapes: Vec<String> = profile.escapes.keys().map(|key| name(key)).collect();
        let uvm: Vec<String> = profile.uvm.values().map(|c| c.name.clone()).collect();
        unmatched.retain(|(kind, pattern)| {
            let names = match *kind {
                "controls" => &controls,
                "classes" => &classes,
                "escapes" => &escapes,
                _ => &uvm,
            };
            !names.iter().any(|name| pattern.matches(name))
        });
    }
    let unmatched: Vec<&str> = unmatched.iter().map(|(_, pattern)| pattern.as_str()).collect();
    assert_eq!(unmatched, [""; 0]);
}

#[test]
fn what_rm_keeps_from_users_is_refused_to_every_guest_in_every_release() {
    let store = Store::embedded().unwrap();
    for release in store.profiles() {
        let profile = store.load(release).unwrap();
        let compiled = profile.compile(u32::MAX);
        for (command, control) in &profile.controls {
            let verdict = compiled.control(*command).unwrap().verdict;
            let user = control.access == nvguest_abi::profile::Access::User;
            assert!(user || verdict != Verdict::Allow as u8, "{release}: {}", control.name);
            assert!(control.wild.is_empty() || verdict != Verdict::Allow as u8, "{release}");
        }
    }
}

#[test]
fn every_release_has_the_fields_that_rules_are_made_from() {
    let store = Store::embedded().unwrap();
    for release in store.profiles() {
        let profile = store.load(release).unwrap();
        for (layout, path) in [
            ("NVOS54_PARAMETERS", "params"),
            ("NVOS54_PARAMETERS", "paramsSize"),
            ("NVOS21_PARAMETERS", "pAllocParms"),
            ("NVOS64_PARAMETERS", "pAllocParms"),
            ("NVOS32_PARAMETERS", "function"),
            ("NVOS32_PARAMETERS", "data.AllocOsDesc.descriptor"),
            ("NVOS32_PARAMETERS", "data.AllocOsDesc.limit"),
            ("nv_ioctl_nvos02_parameters_with_fd", "params.hClass"),
            ("nv_ioctl_nvos02_parameters_with_fd", "params.pMemory"),
            ("nv_ioctl_nvos02_parameters_with_fd", "params.limit"),
        ] {
            assert!(profile.structs[layout].field(path).is_some(), "{release}: {layout}.{path}");
        }
        let compiled = profile.compile(u32::MAX);
        assert_eq!(
            nvguest_abi::compiled::Compiled::from_bytes(&compiled.to_bytes()).as_ref(),
            Some(&compiled)
        );
    }
}
