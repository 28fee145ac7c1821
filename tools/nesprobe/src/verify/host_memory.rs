//! Memory of this process, used by the device.

use std::sync::Arc;

use super::pattern;
use crate::checks::{Checks, Seen};
use crate::error::{name, Error, Result};
use crate::vk::{import_host, Buffer, Commands, Device, HostPages, Wish};

/// Bytes that are imported.
const SIZE: u64 = 1 << 20;

pub fn check(device: &Arc<Device>, checks: &mut Checks) {
    checks.run("external-host-memory", || {
        if !device.physical.has(ash::ext::external_memory_host::NAME) {
            return Ok(Seen::Nothing("no VK_EXT_external_memory_host".to_owned()));
        }
        let buffer = match import_host(device, HostPages::new(device, SIZE)?) {
            // The extension lets a driver refuse any memory that it does not like.
            Err(Error::Vulkan { result, .. }) => {
                return Ok(Seen::Nothing(format!("refused cleanly: {}", name(result))));
            }
            made => made?,
        };
        from_and_to(device, &buffer)
    });
}

fn from_and_to(device: &Arc<Device>, imported: &std::rc::Rc<Buffer>) -> Result<Seen> {
    // CAST: 64-bit only.
    let size = imported.size() as usize;
    let (ours, theirs) = (pattern(6, size), pattern(7, size));
    let seen = Buffer::new(device, imported.size(), Wish::Host)?;
    let other = Buffer::holding(device, &theirs)?;
    imported.write(&ours)?;
    Commands::run(device, &device.graphics, |recorder| {
        recorder.copy(imported, &seen);
        recorder.copy(&other, imported);
    })?;
    let read = Seen::words("", &ours, &seen.read()?);
    if read != Seen::Same(String::new()) {
        return Ok(read);
    }
    let what = "1 MiB of this process, copied from and to by the device";
    Ok(Seen::words(what, &theirs, &imported.read()?))
}
