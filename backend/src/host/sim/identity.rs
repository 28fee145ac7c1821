//! Who the simulated card says it is.

/// Its name, where a real card says "NVIDIA H200".
pub const NAME: &str = "nvguest simulated card";
/// The release that it answers as, unless told otherwise.
pub const RELEASE: &str = "580.159.04";
/// Its bytes of video memory, unless told otherwise.
pub const VIDEO_MEMORY: u64 = 64 << 20;
/// RM's number of a card: domain, bus and slot (`gpuGenerate32BitId`).
pub const GPU_ID: u32 = 0x6;
/// Where it is.
pub const PCI: &str = "0000:00:06.0";
/// Its slot of that bus.
pub const SLOT: u8 = 6;
/// NVIDIA's vendor number and the device number of an H200, whose class numbers it has.
pub const PCI_ID: [u16; 2] = [0x10de, 0x2335];
/// Its UUID: the text of the bytes reads `nvguest`, `sim-card`.
pub const UUID: [u8; 16] = *b"nvguest\0sim-card";

/// The UUID as NVIDIA writes it.
pub fn uuid_text() -> String {
    let hex: String = UUID.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Its configuration space: a type 0 header without capabilities.
pub fn config_space() -> Vec<u8> {
    let mut config = vec![0; 256];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x00, &PCI_ID[0].to_le_bytes());
    put(0x02, &PCI_ID[1].to_le_bytes());
    // Memory and bus master on.
    put(0x04, &[0x06, 0x00]);
    // Revision a1, a 3D controller.
    put(0x08, &[0xa1, 0x00, 0x02, 0x03]);
    // 64-bit prefetchable memory where a card has its registers, video memory and its rest.
    for at in [0x10, 0x18, 0x20] {
        put(at, &[0x0c, 0, 0, 0, 0, 0, 0, 0]);
    }
    put(0x2c, &PCI_ID[0].to_le_bytes());
    put(0x2e, &0x18be_u16.to_le_bytes());
    put(0x3d, &[1]);
    config
}
