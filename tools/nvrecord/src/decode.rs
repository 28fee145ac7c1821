//! What the argument of an ioctl says, as the words of a line.

use crate::line::Line;

/// Bytes of an argument that are looked at.
pub const HEAD: usize = 64;

/// An ioctl on one of NVIDIA's files: its head before and after the call.
pub struct Call<'a> {
    /// The file's name below /dev.
    pub node: &'a str,
    /// The ioctl's number.
    pub request: u64,
    /// The argument before; empty if it was not read.
    pub before: &'a [u8],
    /// The argument after.
    pub after: &'a [u8],
    /// What the ioctl returned.
    pub ret: i32,
}

const RM_CONTROL: u64 = 0x2a;
const RM_ALLOC: u64 = 0x2b;

/// Whether the argument is as long as the ioctl's number says: `nvidia.ko`'s are.
pub fn is_rm(request: u64) -> bool {
    request >> 8 & 0xff == u64::from(b'F')
}

/// Bytes of the argument by the ioctl's number.
pub fn size(request: u64) -> usize {
    usize::try_from(request >> 16 & 0x3fff).unwrap_or(0)
}

impl Call<'_> {
    /// Adds the words for this call.
    pub fn describe(&self, line: &mut Line) {
        let before = |offset| word(self.before, offset);
        let after = |offset| word(self.after, offset);
        let (nr, size) = (self.request & 0xff, size(self.request));
        match (is_rm(self.request), nr) {
            (true, RM_CONTROL) => line.put(format_args!(
                "control node={} cmd={:#010x} size={} flags={:#x} client={:#x} object={:#x} status={:#x}",
                self.node, before(8), before(24), before(12), before(0), before(4), after(28),
            )),
            (true, RM_ALLOC) => line.put(format_args!(
                "class node={} class={:#06x} size={} argument={size} root={:#x} parent={:#x} object={:#x} status={:#x}",
                self.node,
                before(12),
                before(if size >= 48 { 32 } else { 24 }),
                before(0),
                before(4),
                after(8),
                after(if size >= 48 { 40 } else { 28 }),
            )),
            (true, _) => {
                line.put(format_args!("escape node={} nr={nr:#04x} size={size} words=", self.node));
                for offset in (0..self.before.len().min(size)).step_by(4) {
                    line.put(format_args!("{}{:x}", if offset == 0 { "" } else { "," }, before(offset)));
                }
            }
            (false, _) if self.node == "nvidia-uvm" => {
                line.put(format_args!("uvm nr={:#x}", self.request));
            }
            (false, _) => {
                line.put(format_args!("ioctl node={} request={:#x}", self.node, self.request));
            }
        }
        line.put(format_args!(" ret={}", self.ret));
    }
}

fn word(bytes: &[u8], offset: usize) -> u32 {
    let bytes = bytes.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(call: &Call<'_>) -> String {
        let mut line = Line::begin(0, 0, 1);
        call.describe(&mut line);
        String::from_utf8(line.end().to_vec()).unwrap().trim_start_matches("0.000000 1 ").to_owned()
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn a_control_shows_its_command_size_and_status() {
        let before = words(&[0xc1d0_0001, 0xc1d0_0002, 0x2080_0102, 0, 0, 0, 564, 0]);
        let mut after = before.clone();
        after[28] = 0x56;
        let call = Call {
            node: "nvidiactl",
            request: 0xc020_462a,
            before: &before,
            after: &after,
            ret: 0,
        };
        assert_eq!(
            described(&call),
            "control node=nvidiactl cmd=0x20800102 size=564 flags=0x0 client=0xc1d00001 \
             object=0xc1d00002 status=0x56 ret=0\n"
        );
    }

    #[test]
    fn an_allocation_of_either_form_shows_its_class_and_the_new_object() {
        let before = words(&[1, 2, 0, 0x90f1, 0, 0, 0, 0, 56, 0, 0, 0]);
        let mut after = before.clone();
        after[8] = 7;
        let call = Call {
            node: "nvidiactl",
            request: 0xc030_462b,
            before: &before,
            after: &after,
            ret: 0,
        };
        assert_eq!(
            described(&call),
            "class node=nvidiactl class=0x90f1 size=56 argument=48 root=0x1 parent=0x2 object=0x7 \
             status=0x0 ret=0\n"
        );
    }

    #[test]
    fn another_escape_shows_its_words_and_a_uvm_command_its_number() {
        let before = words(&[5]);
        let call =
            Call { node: "nvidia0", request: 0xc004_46c9, before: &before, after: &before, ret: 0 };
        assert_eq!(described(&call), "escape node=nvidia0 nr=0xc9 size=4 words=5 ret=0\n");
        let call =
            Call { node: "nvidia-uvm", request: 0x3000_0001, before: &[], after: &[], ret: 0 };
        assert_eq!(described(&call), "uvm nr=0x30000001 ret=0\n");
    }
}
