//! A call of our own: RM_CONTROL of an object of the guest's, whose parameters are one number
//! of 64 bits. `NVOS54_PARAMETERS` (`nvos.h`).

use super::scratch::Scratch;
use crate::host::{Host, HostFile};

/// `_IOWR('F', NV_ESC_RM_CONTROL, NVOS54_PARAMETERS)`
const CONTROL: u32 = 0xc000_4600 | (SIZE as u32) << 16 | 0x2a;
const SIZE: usize = 0x20;
const PARAMS: usize = 0x10;
const STATUS: usize = 0x1c;

/// What is asked of whom.
#[derive(Clone, Copy, Debug)]
pub struct Control {
    /// The client.
    pub client: u32,
    /// Its object.
    pub object: u32,
    /// The method.
    pub command: u32,
}

impl Control {
    /// Asks RM. The number as RM left it; RM's status, or `None` for it if there was no answer,
    /// where it refuses.
    pub fn ask(
        &self,
        host: &dyn Host,
        file: &HostFile,
        scratch: &mut Scratch,
        number: u64,
    ) -> Result<u64, Option<u32>> {
        let mut bytes = [0; SIZE];
        for (at, word) in [(0, self.client), (4, self.object), (8, self.command), (0x18, 8)] {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        let mut frame = scratch.frame();
        let argument = frame.block_of(&bytes, 0).map_err(|_| None)?;
        let params = frame.block_of(&number.to_le_bytes(), 0).map_err(|_| None)?;
        frame.point(argument, PARAMS, params).map_err(|_| None)?;
        host.ioctl(file, CONTROL, &mut frame).map_err(|_| None)?;
        let status = frame.bytes(argument).get(STATUS..STATUS + 4);
        match status.and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes) {
            Some(nvguest_abi::status::OK) => {
                let answer = frame.bytes(params).try_into().map_err(|_| None)?;
                Ok(u64::from_le_bytes(answer))
            }
            status => Err(status),
        }
    }
}
