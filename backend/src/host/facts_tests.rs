use super::*;

/// A tree like a host's with two cards and every module.
fn host() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let put = |name: &str, content: &[u8]| {
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    put(
        "proc/driver/nvidia/version",
        b"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n\
          GCC version:  gcc version 15.3.0 (GCC)\n",
    );
    put("proc/driver/nvidia/params", b"RmLogonRC: 1\nModifyDeviceFiles: 1\nDeviceFileMode: 438\n");
    put("proc/driver/nvidia/suspend", b"");
    put("proc/driver/nvidia/capabilities/mig/config", b"DeviceFileMinor: 1\nDeviceFileMode: 256\n");
    put("proc/driver/nvidia/capabilities/gpu1/mig/gi0/access", b"DeviceFileMinor: 12\n");
    put("proc/devices", b"Character devices:\n195 nvidia\n195 nvidiactl\n238 nvidia-uvm\n");
    for (minor, pci) in ["0000:00:06.0", "0000:41:00.0"].into_iter().enumerate() {
        let text = format!(
            "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-0000000{minor}-1111\nDevice Minor: \t {minor}\n"
        );
        put(&format!("proc/driver/nvidia/gpus/{pci}/information"), text.as_bytes());
        put(&format!("proc/driver/nvidia/gpus/{pci}/unbindLock"), b"0");
        let mut config = [0_u8; 64];
        config[..4].copy_from_slice(&[0xde, 0x10, 0x35, 0x23]);
        (config[6], config[0x34]) = (0x10, 0x60);
        put(&format!("sys/bus/pci/devices/{pci}/config"), &config);
        put(&format!("dev/nvidia{minor}"), b"");
    }
    for name in ["nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia-caps/nvidia-cap1"] {
        put(&format!("dev/{name}"), b"");
    }
    for module in MODULES {
        put(&format!("sys/module/{module}/version"), b"580.159.04\n");
    }
    root
}

fn of(root: &tempfile::TempDir) -> Facts {
    Facts::of_host(root.path()).unwrap()
}

fn node_names(facts: &Facts) -> Vec<&str> {
    facts.chardevs.iter().map(|node| node.name.as_str()).collect()
}

fn proc_names(facts: &Facts) -> Vec<&str> {
    facts.proc_files.iter().map(|(name, ..)| &name["driver/nvidia/".len()..]).collect()
}

const EVERYTHING: u32 = u32::MAX;

#[test]
fn a_hosts_tree_is_read_as_it_is() {
    let facts = of(&host());
    assert_eq!(facts.release, "580.159.04");
    assert_eq!(
        node_names(&facts),
        [
            "nvidiactl",
            "nvidia0",
            "nvidia1",
            "nvidia-uvm",
            "nvidia-modeset",
            "nvidia-caps/nvidia-cap1"
        ]
    );
    let majors: Vec<_> = facts
        .chardevs
        .iter()
        .map(|node| (node.major, node.minor, node.major_name.as_str()))
        .collect();
    assert_eq!(majors[..2], [(195, 255, "nvidiactl"), (195, 0, "nvidia")]);
    assert_eq!(
        majors[3..],
        [(0, 0, "nvidia-uvm"), (195, 254, "nvidia-modeset"), (0, 1, "nvidia-caps")]
    );
    assert_eq!(facts.modules.len(), 4);
    assert_eq!(facts.cards[1].uuid.as_deref(), Some("GPU-00000001-1111"));
}

#[test]
fn files_that_take_orders_are_not_passed_on() {
    let facts = of(&host());
    assert_eq!(
        proc_names(&facts),
        [
            "version",
            "params",
            "capabilities/gpu1/mig/gi0/access",
            "capabilities/mig/config",
            "gpus/0000:00:06.0/information",
            "gpus/0000:41:00.0/information",
        ]
    );
    assert!(facts.proc_files.iter().all(|(_, mode, _)| mode & 0o222 == 0));
}

#[test]
fn the_guests_user_mode_is_told_not_to_make_nodes() {
    let facts = of(&host());
    let (_, _, params) =
        facts.proc_files.iter().find(|(name, ..)| name.ends_with("params")).unwrap();
    let text = String::from_utf8(params.clone()).unwrap();
    assert_eq!(text, "RmLogonRC: 1\nModifyDeviceFiles: 0\nDeviceFileMode: 438\n");
}

#[test]
fn a_configuration_space_read_in_part_has_no_capability_list() {
    let config = &of(&host()).cards[0].config;
    assert_eq!(config.len(), 256);
    assert_eq!((&config[..4], config[6], config[0x34]), (&[0xde, 0x10, 0x35, 0x23][..], 0, 0));
    assert_eq!(config_of(&[0x10; 4096]), [0x10; 256]);
}

#[test]
fn a_card_is_selected_by_index_uuid_or_address() {
    let root = host();
    for wanted in ["1", "gpu-00000001-1111", "0000:41:00.0", "41:00.0", "00000000:41:00.0"] {
        let facts = of(&root).select(&[wanted.into()]).unwrap();
        assert_eq!(facts.cards.len(), 1, "{wanted}");
        assert_eq!(facts.cards[0].pci, "0000:41:00.0", "{wanted}");
        assert!(!node_names(&facts).contains(&"nvidia0"), "{wanted}");
        assert!(!proc_names(&facts).contains(&"gpus/0000:00:06.0/information"), "{wanted}");
        assert!(proc_names(&facts).contains(&"capabilities/gpu1/mig/gi0/access"), "{wanted}");
    }
    let other = of(&root).select(&["0".into()]).unwrap();
    assert!(!proc_names(&other).contains(&"capabilities/gpu1/mig/gi0/access"));
    assert_eq!(of(&root).select(&[]).unwrap(), of(&root));
}

#[test]
fn a_capability_of_a_card_has_its_node_with_that_card_alone() {
    let root = host();
    fs::write(root.path().join("dev/nvidia-caps/nvidia-cap12"), b"").unwrap();
    for (wanted, has_it) in [("all", true), ("0", false), ("1", true)] {
        let facts = of(&root).select(&[wanted.into()]).unwrap();
        let nodes = node_names(&facts);
        assert_eq!(nodes.contains(&"nvidia-caps/nvidia-cap12"), has_it, "{wanted}");
        assert!(nodes.contains(&"nvidia-caps/nvidia-cap1"), "{wanted}");
    }
}

#[test]
fn several_cards_are_selected_with_commas_and_all_of_them_by_that_word() {
    let root = host();
    let selected = |wanted: &[&str]| {
        let wanted: Vec<_> = wanted.iter().map(|&name| name.into()).collect();
        of(&root).select(&wanted).unwrap()
    };
    for wanted in [&["0", "1"][..], &["41:00.0", "gpu-00000000-1111"], &["1", "0", "1"], &["all"]] {
        assert_eq!(selected(wanted), of(&root), "{wanted:?}");
    }
    assert_eq!(selected(&["1", "41:00.0"]).cards.len(), 1);
    let error = of(&root).select(&["0".into(), "2".into()]).unwrap_err();
    assert!(matches!(error, FactsError::NoSuchCard { wanted, .. } if wanted == "2"));
}

#[test]
fn a_card_that_is_not_there_is_an_error_that_lists_what_is() {
    let error = of(&host()).select(&["7".into()]).unwrap_err().to_string();
    assert_eq!(
        error,
        "no card is 7; the host has 0: GPU-00000000-1111 at 0000:00:06.0, \
         1: GPU-00000001-1111 at 0000:41:00.0"
    );
}

#[test]
fn a_node_comes_only_with_its_capability() {
    let facts = of(&host());
    let few = facts.clone().allowed(Capability::Utility as u32 | Capability::Graphics as u32);
    assert_eq!(node_names(&few), ["nvidiactl", "nvidia0", "nvidia1", "nvidia-caps/nvidia-cap1"]);
    assert_eq!(few.modules, [("nvidia".to_owned(), "580.159.04".to_owned())]);
    let compute = facts.clone().allowed(Capability::Compute as u32);
    assert!(node_names(&compute).contains(&"nvidia-uvm"));
    assert!(!node_names(&compute).contains(&"nvidia-modeset"));
    assert_eq!(facts.clone().allowed(EVERYTHING), facts);
}

#[test]
fn a_host_without_the_driver_is_told_what_to_do() {
    let empty = tempfile::tempdir().unwrap();
    let error = Facts::of_host(empty.path()).unwrap_err().to_string();
    assert!(error.contains("proc/driver/nvidia/version cannot be read"), "{error}");
    assert!(error.ends_with("load the NVIDIA driver, or use --host sim"), "{error}");
}

#[test]
fn a_host_without_nodes_or_cards_is_told_so() {
    let root = host();
    fs::remove_file(root.path().join("dev/nvidia1")).unwrap();
    let error = Facts::of_host(root.path()).unwrap_err().to_string();
    assert!(error.starts_with("/dev/nvidia1 does not exist"), "{error}");
    fs::remove_dir_all(root.path().join("proc/driver/nvidia/gpus")).unwrap();
    assert!(matches!(Facts::of_host(root.path()), Err(FactsError::NoCard)));
}

#[test]
fn a_release_is_found_in_either_form_of_the_version_line() {
    let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\n";
    assert_eq!(release_of(closed).unwrap(), "535.129.03");
    let two = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.142  Release Build\n";
    assert_eq!(release_of(two).unwrap(), "580.142");
    assert!(release_of("GCC version:  gcc version 12.2.0\n").is_err());
}

#[test]
fn rms_number_of_a_card_is_made_of_its_address() {
    let id = |pci: &str| Card { pci: pci.into(), ..of(&host()).cards[0].clone() }.gpu_id();
    assert_eq!(id("0000:00:06.0"), 0x6);
    assert_eq!(id("0000:41:00.0"), 0x4100);
    assert_eq!(id("0002:e1:1f.0"), 0x2_e11f);
    // A volume manager's domains are beyond 16 bits, of which RM takes the low ones.
    assert_eq!(id("10000:01:00.0"), 0x100);
    assert_eq!(id("none"), 0);
    for card in (0..identity::MAX_CARDS).map(Identity::of) {
        assert_eq!(id(&card.pci()), card.gpu_id());
    }
}

#[test]
fn each_of_several_simulated_cards_has_its_own_node_and_file() {
    let facts = Facts::of_sim(2);
    assert_eq!(node_names(&facts), ["nvidiactl", "nvidia0", "nvidia1"]);
    for card in &facts.cards {
        let name = format!("driver/nvidia/gpus/{}/information", card.pci);
        let (_, _, text) = facts.proc_files.iter().find(|(known, ..)| *known == name).unwrap();
        let text = String::from_utf8_lossy(text);
        assert_eq!(field(&text, "GPU UUID"), card.uuid);
        assert_eq!(field(&text, "Device Minor"), Some(card.minor.to_string()));
    }
    let second = facts.clone().select(&["1".into()]).unwrap();
    assert_eq!(node_names(&second), ["nvidiactl", "nvidia1"]);
    assert_eq!(proc_names(&second), ["version", "params", "gpus/0000:41:00.0/information"]);
    assert_eq!(second.cards, facts.cards[1..]);
}

#[test]
fn the_simulated_card_has_the_facts_of_a_card() {
    let facts = Facts::of_sim(1).allowed(EVERYTHING);
    assert_eq!(node_names(&facts), ["nvidiactl", "nvidia0"]);
    let (_, _, version) = &facts.proc_files[0];
    assert_eq!(release_of(&String::from_utf8_lossy(version)).unwrap(), facts.release);
    let (_, _, information) = &facts.proc_files[2];
    let information = String::from_utf8_lossy(information);
    assert_eq!(field(&information, "GPU UUID"), facts.cards[0].uuid);
    assert_eq!(field(&information, "Device Minor").as_deref(), Some("0"));
    assert_eq!(facts.cards[0].config[..4], [0xde, 0x10, 0x35, 0x23]);
    assert_eq!(facts.clone().select(&["00:06.0".into()]).unwrap(), facts);
}
