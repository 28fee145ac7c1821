//! Who the driver and the card are.

use std::os::fd::AsRawFd;

use nix::libc;
use zerocopy::IntoBytes;

use super::{check, Check};
use rmclient::abi::{self, control, escape, status};
use rmclient::{call, wrong, Card, Client, Outcome, Result, Session, CONTROL_NODE};

pub const CHECKS: &[Check] = &[
    check("version", "the driver tells its release", version),
    check("version-match", "the same release is accepted", version_match),
    check(
        "version-mismatch",
        "another release is refused, and told the right one",
        version_mismatch,
    ),
    check("cards", "the driver tells its cards", cards),
    check("card-node", "a card's node opens and the card is up", card_node),
    check("attach-cards", "a file keeps a card in use, once", attach),
    check("register-file", "a card's file joins a control file's clients, once", register),
    check("ids", "a client sees the card attached and probed", ids),
    check("name", "the card tells its name", name),
    check("uuid", "the card tells its UUID as text and as bytes", uuid),
    check("memory-size", "the card tells how much memory it has", memory_size),
];

/// `NV_RM_API_VERSION_CMD_STRICT` and `NV_RM_API_VERSION_CMD_QUERY`.
const STRICT: u32 = 0;
const QUERY: u32 = b'2' as u32;

fn ask_version(command: u32, release: [u8; 64]) -> Result<(Outcome, abi::Version)> {
    let ctl = rmclient::open(CONTROL_NODE)?;
    let mut version = abi::Version { command, reply: 0, release };
    let outcome = call(&ctl, escape::CHECK_VERSION_STR, &mut version, None, |_| status::OK);
    Ok((outcome, version))
}

fn release() -> Result<[u8; 64]> {
    let (outcome, version) = ask_version(QUERY, [0; 64])?;
    outcome.ok("CHECK_VERSION_STR (query)")?;
    Ok(version.release)
}

fn version(_: &Card) -> Result<String> {
    let release = text(&release()?);
    match release
        .split('.')
        .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    {
        true => Ok(release),
        false => wrong(format!("the driver calls itself {release:?}, which is no release")),
    }
}

fn version_match(_: &Card) -> Result<String> {
    let (outcome, version) = ask_version(STRICT, release()?)?;
    outcome.ok("CHECK_VERSION_STR (strict, equal)")?;
    match version.reply {
        1 => Ok("recognized".into()),
        reply => wrong(format!("the driver accepted its own release with reply {reply}, not 1")),
    }
}

fn version_mismatch(_: &Card) -> Result<String> {
    let right = release()?;
    let mut other = [0; 64];
    other[..5].copy_from_slice(b"1.2.3");
    let (outcome, version) = ask_version(STRICT, other)?;
    outcome.expect(Outcome::Errno(libc::EINVAL), "CHECK_VERSION_STR (strict, 1.2.3)")?;
    match text(&version.release) == text(&right) {
        true => Ok("refused, and told the right one".into()),
        false => wrong(format!("told {:?}", text(&version.release))),
    }
}

fn cards(_: &Card) -> Result<String> {
    let cards = rmclient::cards(&rmclient::open(CONTROL_NODE)?)?;
    let list: Vec<_> = cards
        .iter()
        .map(|card| format!("{} at {} is {:#x}", card.node.display(), card.pci, card.gpu_id))
        .collect();
    Ok(list.join(", "))
}

fn card_node(card: &Card) -> Result<String> {
    let file = rmclient::open(&card.node)?;
    let mut answer = [0_u32; 2];
    call(&file, escape::WAIT_OPEN_COMPLETE, &mut answer, None, |_| status::OK)
        .ok("WAIT_OPEN_COMPLETE")?;
    match answer {
        [0, 0] => Ok("open".into()),
        [rc, adapter] => wrong(format!("the card did not come up: {rc}, status {adapter:#x}")),
    }
}

fn attach(card: &Card) -> Result<String> {
    let ctl = rmclient::open(CONTROL_NODE)?;
    let mut ids = [card.gpu_id];
    call(&ctl, escape::ATTACH_GPUS_TO_FD, &mut ids, None, |_| status::OK)
        .ok("ATTACH_GPUS_TO_FD")?;
    call(&ctl, escape::ATTACH_GPUS_TO_FD, &mut ids, None, |_| status::OK)
        .expect(Outcome::Errno(libc::EINVAL), "a second ATTACH_GPUS_TO_FD")?;
    Ok("once".into())
}

fn register(card: &Card) -> Result<String> {
    let refused = Outcome::Errno(libc::EINVAL);
    let (ctl, file) = (rmclient::open(CONTROL_NODE)?, rmclient::open(&card.node)?);
    rmclient::register(&file, &file).expect(refused, "REGISTER_FD of a card's file to itself")?;
    rmclient::register(&file, &ctl).ok("REGISTER_FD")?;
    rmclient::register(&file, &ctl).expect(refused, "a second REGISTER_FD")?;
    Ok("once".into())
}

fn ids(card: &Card) -> Result<String> {
    let client = Client::new()?;
    let _in_use = rmclient::open(&card.node)?;
    let mut attached = [0_u32; 32];
    client
        .control(client.handle, control::ATTACHED_IDS, attached.as_mut_bytes())
        .ok("GPU_GET_ATTACHED_IDS")?;
    let probed = client.control_of_size(client.handle, control::PROBED_IDS, &[384, 256], |_| ())?;
    let mut probed = probed
        .chunks_exact(4)
        .take(32)
        .map(|id| u32::from_le_bytes(id.try_into().expect("four bytes")));
    match attached.contains(&card.gpu_id) && probed.any(|id| id == card.gpu_id) {
        true => Ok(format!("{:#x}", card.gpu_id)),
        false => wrong(format!("{:#x} is not both attached and probed", card.gpu_id)),
    }
}

fn name(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let params = session.client.control_of_size(
        session.subdevice,
        control::NAME_STRING,
        &[132, 68],
        |_| (),
    )?;
    let name = text(&params[4..68]);
    match name.is_empty() {
        true => wrong("the card has no name"),
        false => Ok(name),
    }
}

fn uuid(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let ask = |flags: u32| -> Result<Vec<u8>> {
        let mut params = [0_u8; 268];
        params[4..8].copy_from_slice(&flags.to_le_bytes());
        session
            .client
            .control(session.subdevice, control::GID_INFO, &mut params)
            .ok("GPU_GET_GID_INFO")?;
        let length = u32::from_le_bytes(params[8..12].try_into().expect("four bytes")) as usize;
        Ok(params[12..12 + length.min(256)].to_vec())
    };
    let (ascii, binary) = (text(&ask(0)?), ask(2)?);
    let digits: String = ascii.trim_start_matches("GPU-").chars().filter(|c| *c != '-').collect();
    let expected: String = binary.iter().map(|byte| format!("{byte:02x}")).collect();
    match binary.len() == 16 && digits == expected {
        true => Ok(ascii),
        false => wrong(format!("the card calls itself {ascii} in text and {expected} in bytes")),
    }
}

fn memory_size(card: &Card) -> Result<String> {
    // NV2080_CTRL_FB_GET_INFO_V2_INDEX_TOTAL_RAM_SIZE, in KiB
    const TOTAL_RAM_SIZE: u8 = 8;
    match Session::open(card)?.fb_info(TOTAL_RAM_SIZE)? {
        0 => wrong("the card has no memory"),
        kib => Ok(format!("{} MiB", kib / 1024)),
    }
}

/// The text before the first NUL.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Keeps the number of a file in a form that a parameter takes.
pub fn number(file: &std::fs::File) -> u32 {
    file.as_raw_fd().unsigned_abs()
}
