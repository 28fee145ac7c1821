//! The trace with names from the profile.

use std::fmt::Write;

use nvguest_abi::names::Names;

/// Bytes of a buffer that a line of the trace shows.
const SHOWN: usize = 32;

/// The name of the call that a line is of.
pub fn call<'a>(names: &'a Names, line: &str) -> Option<&'a str> {
    let what = line.split(' ').nth(2)?;
    let key = match what {
        "control" => "cmd",
        "class" => "class",
        _ => "nr",
    };
    names.call(what, hexadecimal(field(line, key)?)?)
}

/// The value of a key in a line.
pub fn field<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

fn hexadecimal(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// The buffers behind a line: the argument, then what it reaches.
pub fn buffers(line: &str) -> Vec<Vec<u8>> {
    line.split(' ').filter_map(|word| word.strip_prefix("data=")).map(bytes).collect()
}

fn bytes(text: &str) -> Vec<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16).unwrap_or(0);
    // CAST: two digits of four bits.
    text.as_bytes()
        .chunks_exact(2)
        .map(|pair| (digit(pair[0]) << 4 | digit(pair[1])) as u8)
        .collect()
}

/// The whole trace, each call with its name, buffers cut to what fits on a line.
pub fn named(text: &str, names: &Names) -> String {
    let mut out = String::with_capacity(text.len() / 2);
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').filter(|word| !word.starts_with("data=")).collect();
        out.push_str(&words.join(" "));
        if let Some(name) = call(names, line) {
            let _ = write!(out, " name={name}");
        }
        // The argument's own words are there already.
        for buffer in buffers(line).iter().skip(1) {
            let _ = write!(out, " data[{}]=", buffer.len());
            for byte in buffer.iter().take(SHOWN) {
                let _ = write!(out, "{byte:02x}");
            }
            if buffer.len() > SHOWN {
                out.push_str("..");
            }
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "1.000000 7 control node=nvidiactl cmd=0x00000201 size=128 flags=0x0 \
                        client=0x1 object=0x1 status=0x0 ret=0 data=01000000 data=0600000000ff";

    #[test]
    fn a_call_has_the_name_that_its_release_gives_it() {
        let names = Names::of("580.159.04");
        assert_eq!(call(&names, LINE), Some("NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS"));
    }

    #[test]
    fn what_a_call_reached_is_shown_without_its_argument() {
        let text = named(LINE, &Names::of("no release"));
        assert!(text.ends_with("status=0x0 ret=0 data[6]=0600000000ff\n"), "{text}");
    }
}
