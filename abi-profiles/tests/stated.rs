//! Sizes and offsets that this project's study of the ABI states, taken by other means (by
//! hand and with gcc alone), held against the profiles. What differs is explained here.

use nvguest_abi::profile::Profile;
use nvguest_abi::store::Store;

/// The releases that the study means by its three columns.
const RELEASES: [(&str, &str); 3] =
    [("535", "535.129.03"), ("580", "580.142"), ("595", "595.45.04")];

/// Differences, each with its reason.
const EXPLAINED: &[(&str, &str)] = &[
    ("535 class 0x50 16", "in builds for debugging alone"),
    ("580 class 0x50 24", "in builds for debugging alone"),
    ("595 class 0x50 24", "in builds for debugging alone"),
    ("580 escape 0x56 56", "a number that no code routes"),
    ("535 pointer 0x127 160 out 4 -", "the study leaves out where gpuCount is: it counts squared"),
    ("580 pointer 0x127 160 out 4 -", "the study leaves out where gpuCount is: it counts squared"),
    ("580 pointer 0x127 168 out 4 -", "the study leaves out where gpuCount is: it counts squared"),
    ("595 pointer 0x127 160 out 4 -", "the study leaves out where gpuCount is: it counts squared"),
    ("595 pointer 0x127 168 out 4 -", "the study leaves out where gpuCount is: it counts squared"),
    (
        "535 pointer 0x730120 8 in 1 16",
        "the method is 0x730168 in 535; 0x730120 is another command there",
    ),
    (
        "535 pointer 0x730120 24 out 1 32",
        "the method is 0x730168 in 535; 0x730120 is another command there",
    ),
];

fn number(text: &str) -> u32 {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).unwrap(),
        None => text.parse().unwrap(),
    }
}

/// What the profile says in place of a stated fact, if that is something else.
fn difference(profile: &Profile, words: &[&str]) -> Option<String> {
    let size = |found: Option<u32>, stated: &str| {
        let found = found.map_or("nothing".to_owned(), |size| size.to_string());
        (found != stated).then_some(found)
    };
    match words {
        ["control", nr, stated] => {
            size(profile.controls.get(&number(nr)).map(|control| control.size), stated)
        }
        ["class", nr, stated] => {
            size(profile.classes.get(&number(nr)).map(|class| class.size), stated)
        }
        ["uvm", nr, stated] => {
            size(profile.uvm.get(&number(nr)).map(|command| command.size), stated)
        }
        ["escape", nr, stated] => {
            let mut sizes = profile.escapes.values().filter(|e| e.nr == number(nr)).map(|e| e.size);
            match sizes.clone().any(|size| size == number(stated)) {
                true => None,
                false => size(sizes.next(), stated),
            }
        }
        ["pointer", nr, at, dir, elem, count] => {
            let control = profile.controls.get(&number(nr));
            let pointers = control.map_or(&[][..], |control| &control.pointers);
            let Some(found) = pointers.iter().find(|p| u32::from(p.at) == number(at)) else {
                return Some("no pointer there".to_owned());
            };
            let found_count = found.count_at.map_or("-".to_owned(), |at| at.to_string());
            let found = format!("{} {} {found_count}", found.dir.name(), found.elem);
            (found != format!("{dir} {elem} {count}")).then_some(found)
        }
        _ => panic!("a stated fact is not understood: {words:?}"),
    }
}

#[test]
fn every_stated_size_and_offset_is_the_measured_one_or_explained() {
    let store = Store::embedded().unwrap();
    let profiles =
        RELEASES.map(|(short, release)| (short, store.load(&release.parse().unwrap()).unwrap()));
    let mut unexplained = Vec::new();
    let mut compared = 0;
    for line in include_str!("fixtures/stated.txt").lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (_, profile) = profiles.iter().find(|(short, _)| *short == words[0]).unwrap();
        compared += 1;
        if let Some(found) = difference(profile, &words[1..]) {
            if !EXPLAINED.iter().any(|(fact, _)| *fact == line) {
                unexplained.push(format!("{line}: measured {found}"));
            }
        }
    }
    assert!(compared > 500, "{compared} facts");
    assert_eq!(unexplained, [""; 0], "{} of {compared}", unexplained.len());
}
