//! Who a simulated card says it is.

/// Its name, where a real card says "NVIDIA H200".
pub const NAME: &str = "nvguest simulated card";
/// The release that it answers as, unless told otherwise.
pub const RELEASE: &str = "580.159.04";
/// Its bytes of video memory, unless told otherwise.
pub const VIDEO_MEMORY: u64 = 64 << 20;
/// NVIDIA's vendor number and the device number of an H200, whose class numbers it has.
pub const PCI_ID: [u16; 2] = [0x10de, 0x2335];
/// So many cards a host has at most.
pub const MAX_CARDS: u32 = 8;

/// One of a host's cards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its number: the minor of its node, and RM's instance of it.
    pub number: u32,
    /// Its bus of domain 0.
    pub bus: u8,
    /// Its slot of that bus.
    pub slot: u8,
}

impl Identity {
    /// Card `number` of a host. The first is on a bus that guests have too, the others are on
    /// buses of their own.
    pub fn of(number: u32) -> Self {
        // CAST: bounded.
        match number.min(MAX_CARDS) as u8 {
            0 => Self { number, bus: 0, slot: 6 },
            other => Self { number, bus: 0x40 + other, slot: 0 },
        }
    }

    /// RM's name for it: domain, bus and slot (`gpuGenerate32BitId`).
    pub fn gpu_id(self) -> u32 {
        u32::from(self.bus) << 8 | u32::from(self.slot)
    }

    /// Where it is.
    pub fn pci(self) -> String {
        format!("0000:{:02x}:{:02x}.0", self.bus, self.slot)
    }

    /// Its UUID: the first card's bytes read `nvguest`, `sim-card` with a NUL between them, which
    /// is the number.
    pub fn uuid(self) -> [u8; 16] {
        let mut uuid = *b"nvguest\0sim-card";
        // CAST: bounded.
        uuid[7] = self.number.min(MAX_CARDS) as u8;
        uuid
    }

    /// The UUID as NVIDIA writes it.
    pub fn uuid_text(self) -> String {
        let hex: String = self.uuid().iter().map(|byte| format!("{byte:02x}")).collect();
        let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
        format!("GPU-{}", parts.join("-"))
    }
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
