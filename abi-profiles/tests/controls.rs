//! What a guest must not do to a card that it shares, by name, in releases of every branch.

use nvguest_abi::policy::Policy;
use nvguest_abi::profile::Profile;
use nvguest_abi::store::Store;
use nvguest_abi::Capability;

const RELEASES: [&str; 6] =
    ["535.129.03", "550.54.14", "560.35.03", "570.148.08", "580.142", "595.45.04"];
/// All that a guest can be given.
const EVERYTHING: u32 = Capability::Utility as u32
    | Capability::Graphics as u32
    | Capability::Video as u32
    | Capability::Compute as u32
    | Capability::Display as u32;

/// Parts of names; every control whose name holds one, in any release, is refused.
const CONTROLS: &[(&str, &[&str])] = &[
    ("zero-bandwidth clears", &["SET_ZBC_CLEAR_TABLE"]),
    (
        "clocks and power",
        &[
            "SET_POWERSTATE",
            "SET_AUX_POWER_STATE",
            "RATED_TDP_SET",
            "GPU_SET_POWER",
            "SET_EC_THROTTLE",
        ],
    ),
    ("the watchdog", &["RC_DISABLE_WATCHDOG", "RC_ENABLE_WATCHDOG"]),
    (
        "profilers",
        &[
            "GPU_EXEC_REG_OPS",
            "GPU_MIGRATABLE_OPS",
            "DEBUG_EXEC_REG_OPS",
            "CTXSW_PM_",
            "SMPC_MODE",
            "PC_SAMPLING_MODE",
            "NV90CC_CTRL",
            "NVB0CC_CTRL",
            "RESERVE_PERFMON_HW",
        ],
    ),
    (
        "partitions of the card (MIG)",
        &["GPU_SET_PARTITIONS", "EXEC_PARTITIONS_CREATE", "EXEC_PARTITIONS_DELETE"],
    ),
    ("persistence", &["MODIFY_SW_STATE_PERSISTENCE"]),
    ("reset", &["MARK_DEVICE_FOR_RESET", "MARK_DEVICE_FOR_DRAIN", "GPU_RESET"]),
    ("error counters", &["SET_ECC_CONFIGURATION", "ECC_INJECT", "RESET_ECC"]),
    ("the division of processors", &["SET_TPC_PARTITION_MODE"]),
    ("compute mode", &["SET_COMPUTE_MODE_RULES"]),
    ("the scheduler's order", &["SET_INTERLEAVE_LEVEL", "RUNLIST_SET_SCHED_POLICY"]),
];
/// The same of classes.
const CLASSES: &[&str] =
    &["SYNC_GPU_BOOST", "PROFILER", "NV_EVENT_BUFFER", "GPU_MANAGEMENT", "NV40_I2C"];

fn profile(release: &str) -> Profile {
    Store::embedded().unwrap().load(&release.parse().unwrap()).unwrap()
}

#[test]
fn what_changes_a_shared_card_is_refused_in_every_release() {
    let policy = Policy::built_in();
    let mut found = vec![0; CONTROLS.iter().map(|(_, parts)| parts.len()).sum()];
    for release in RELEASES {
        let profile = profile(release);
        let parts =
            CONTROLS.iter().flat_map(|(group, parts)| parts.iter().map(move |p| (group, p)));
        for (index, (group, part)) in parts.enumerate() {
            for (&number, control) in profile.controls.iter().filter(|(_, c)| c.name.contains(part))
            {
                found[index] += 1;
                let (verdict, why) = policy.control(number, control, EVERYTHING);
                assert_ne!(verdict as u8, 0, "{release}: {} ({group}) is allowed", control.name);
                assert!(!why.is_empty(), "{}", control.name);
            }
        }
    }
    let none: Vec<usize> = (0..found.len()).filter(|&index| found[index] == 0).collect();
    let parts: Vec<&&str> = CONTROLS.iter().flat_map(|(_, parts)| parts.iter()).collect();
    let unknown: Vec<&&&str> = none.iter().map(|&index| &parts[index]).collect();
    assert!(unknown.is_empty(), "no release has a control called {unknown:?}");
}

#[test]
fn classes_that_reach_a_whole_card_are_refused_in_every_release() {
    let policy = Policy::built_in();
    for release in RELEASES {
        let profile = profile(release);
        for part in CLASSES {
            for class in profile.classes.values().filter(|class| class.name.contains(part)) {
                let (verdict, why) = policy.class(class, EVERYTHING);
                assert_ne!(verdict as u8, 0, "{release}: class {} is allowed: {why}", class.name);
            }
        }
    }
}

/// On Linux it does nothing (`cliresCtrlCmdGpuDetachIds`), and `nvidia-smi` sends it.
#[test]
fn a_client_may_say_that_it_detaches_from_its_cards() {
    let profile = profile("580.142");
    let (verdict, _) =
        Policy::built_in().control(0x216, &profile.controls[&0x216], Capability::Utility as u32);
    assert_eq!(verdict as u8, 0);
}
