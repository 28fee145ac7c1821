//! The Rust half of the wire against the C half: sizes and offsets, as a C compiler sees them.

use std::fmt::Write as _;
use std::io::Write as _;
use std::mem::{offset_of, size_of};
use std::process::Command;

use vhost_user_nvguest::wire::{
    Caller, ClockResp, Config, Event, FdRecord, HelloReq, HelloResp, IoctlReq, IoctlResp, MapReq,
    MapResp, NodeHeader, OpenReq, OpenResp, Pages, ReadReq, ReqHeader, RespHeader, Run, UnmapReq,
};

/// One number of the C header and what the Rust side has for it.
struct Claim {
    c: String,
    rust: usize,
}

/// Claims of a struct: its size, and the offset of each field. In C a message begins
/// with its header, whose size is `$before` here.
macro_rules! claims {
    ($claims:ident, $($c:literal, $rust:ty, $before:expr, [$($field:ident $(= $name:literal)?),*];)*) => { $(
        let before: usize = $before;
        $claims.push(Claim {
            c: format!("sizeof(struct {})", $c),
            rust: before + size_of::<$rust>(),
        });
        $(
            let name = [$($name,)? stringify!($field)][0];
            $claims.push(Claim {
                c: format!("offsetof(struct {}, {name})", $c),
                rust: before + offset_of!($rust, $field),
            });
        )*
    )* };
}

fn claims() -> Vec<Claim> {
    let (ask, answer) = (size_of::<ReqHeader>(), size_of::<RespHeader>());
    let mut claims = Vec::new();
    claims! { claims,
        "nvg_config", Config, 0, [magic, version, slots, window_size, reserved];
        "nvg_caller", Caller, 0, [tgid, euid, start_ns];
        "nvg_req", ReqHeader, 0, [kind = "type", file, len, reserved, caller];
        "nvg_resp", RespHeader, 0, [status, len];
        "nvg_hello", HelloReq, ask, [version, flags];
        "nvg_hello_resp", HelloResp, answer, [version, caps, driver, profile, window_size,
            max_request, max_response, max_segments, max_files, max_placements, nodes_len,
            schema_len, epoch];
        "nvg_read", ReadReq, ask, [offset, size];
        "nvg_open", OpenReq, ask, [node, flags];
        "nvg_open_resp", OpenResp, answer, [file, slot];
        "nvg_ioctl", IoctlReq, ask, [cmd, arg_len, nsegs, nfds, reserved];
        "nvg_fd", FdRecord, 0, [segment, offset, file];
        "nvg_ioctl_resp", IoctlResp, answer, [ret, arg_len];
        "nvg_pages", Pages, 0, [registration, error, held, reserved];
        "nvg_run", Run, 0, [address, length];
        "nvg_map", MapReq, ask, [offset, length, prot, reserved];
        "nvg_map_resp", MapResp, answer, [window_offset, length, placement, cache, flags, reserved];
        "nvg_unmap", UnmapReq, ask, [placement, reserved];
        "nvg_clock_resp", ClockResp, answer, [monotonic_ns, realtime_ns, raw_ns];
        "nvg_event", Event, 0, [kind, file, mask, more];
        "nvg_node", NodeHeader, 0, [kind, mode, file_kind, reserved, major, minor, name_len,
            data_len];
        "nvg_schema", nvguest_abi::rules::SchemaHeader, 0, [magic, version, nioctls, ncases,
            nrules, reserved];
        "nvg_schema_ioctl", nvguest_abi::rules::Ioctl, 0, [kind, flags, select, nr, size,
            first_case, ncases, first_rule, nrules];
        "nvg_schema_case", nvguest_abi::rules::Case, 0, [key, first_rule, nrules];
        "nvg_schema_rule", nvguest_abi::rules::Rule, 0, [op, flags, offset, count_off,
            count_width, fd_width, elem, add, max, first_sub, nsubs, fd_kinds];
    }
    claims
}

#[test]
fn every_size_and_offset_of_the_header_is_the_rust_side_s_too() {
    let claims = claims();
    let mut source = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include \"virtio_nvguest.h\"\nint main(void) {\n",
    );
    for claim in &claims {
        writeln!(source, "printf(\"%zu\\n\", {});", claim.c).unwrap();
    }
    source.push_str("return 0; }\n");

    let folder = tempfile::tempdir().unwrap();
    let (file, program) = (folder.path().join("sizes.c"), folder.path().join("sizes"));
    std::fs::File::create(&file).unwrap().write_all(source.as_bytes()).unwrap();
    let header = concat!(env!("CARGO_MANIFEST_DIR"), "/../guest-module");
    let built =
        Command::new("cc").arg("-I").arg(header).arg("-o").arg(&program).arg(&file).status();
    assert!(built.expect("a C compiler (cc) is needed").success(), "{source}");
    let output = Command::new(&program).output().unwrap();
    let numbers = String::from_utf8(output.stdout).unwrap();
    let numbers: Vec<usize> = numbers.lines().map(|line| line.parse().unwrap()).collect();

    assert_eq!(numbers.len(), claims.len());
    let differ: Vec<String> = claims
        .iter()
        .zip(numbers)
        .filter(|(claim, c)| claim.rust != *c)
        .map(|(claim, c)| format!("{} is {c} in C and {} in Rust", claim.c, claim.rust))
        .collect();
    assert!(differ.is_empty(), "{differ:#?}");
}
