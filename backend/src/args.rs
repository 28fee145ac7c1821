//! The command line, and nothing else.

use std::os::fd::RawFd;
use std::path::PathBuf;

use clap::{ArgGroup, Parser, ValueEnum};
use nvguest_abi::Capability;

use crate::budgets::{Budgets, VramMode, DEFAULT_WEIGHT, NO_BUDGET, WEIGHTS};
use crate::limits::{amount, Limits};
use crate::sandbox::Mode;

/// Share NVIDIA cards with a VM guest.
///
/// One process serves one guest. Start it before the VMM, which connects to the
/// socket as to any vhost-user device. With stock QEMU 11.1 or newer:
///
///   -object memory-backend-memfd,id=mem,size=2G,share=on -machine q35,memory-backend=mem
///   -chardev socket,id=nv,path=SOCKET
///   -device vhost-user-test-device-pci,chardev=nv,virtio-id=38,num_vqs=34,vq_size=256,config_size=64
///
/// Beside the socket lies SOCKET.pid, locked while this serves. With --name the sockets are
/// vhost.sock and admin.sock in nvguest/NAME under $XDG_RUNTIME_DIR, or under /run without it;
/// there `nvguest list` finds them.
///
/// Exit status: 0 the guest is gone, 1 something failed, 2 the command line is wrong,
/// 78 no profile fits the host's driver release.
#[derive(Debug, Parser)]
#[command(name = "vhost-user-nvguest", version, verbatim_doc_comment)]
#[command(group(ArgGroup::new("listen").args(["socket_path", "fd"])))]
pub struct Args {
    /// What admins call the guest: letters, digits, '.', '_' and '-'.
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub name: Option<String>,

    /// Listen on this Unix socket; it is removed at the end.
    #[arg(long, value_name = "PATH")]
    pub socket_path: Option<PathBuf>,

    /// Use this descriptor, a listening Unix socket (as systemd hands it over).
    #[arg(long, value_name = "FDNUM")]
    pub fd: Option<RawFd>,

    /// Print what this backend is, as vhost-user's conventions ask, and exit.
    #[arg(long)]
    pub print_capabilities: bool,

    /// Do everything short of serving, say what was found, and exit.
    #[arg(long)]
    pub check: bool,

    /// Which driver answers: the host's, simulated cards, or the host's if it is there.
    #[arg(long, value_enum, default_value_t = HostChoice::Auto, value_name = "HOST")]
    pub host: HostChoice,

    /// The cards to share, each by index, UUID or PCI address; all of the host's if not given.
    #[arg(long, value_name = "GPU,…|all", value_delimiter = ',')]
    pub gpu: Vec<String>,

    /// What the guest may use a card for.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "utility,graphics,video")]
    pub caps: Vec<CapabilityName>,

    /// Address space of the memory window: a power of two, e.g. 64G. 8G fits guests with
    /// 36 physical address bits.
    #[arg(long, value_name = "SIZE", default_value = "64G", value_parser = size)]
    pub window_size: u64,

    /// Memory in the window that guests' system memory comes from, so that it costs no
    /// placement: a power of two up to half of the window, 0 for none. An eighth of the
    /// window, up to 4G, if not given. Costs memory only where it is used.
    #[arg(long, value_name = "SIZE", value_parser = arena_size)]
    pub arena: Option<u64>,

    /// Profiles that you measured with abi-extract, in place of those built in.
    #[arg(long, value_name = "FOLDER")]
    pub profiles: Option<PathBuf>,

    /// Serve a driver release that no profile covers, with the nearest one. For diagnosis only.
    #[arg(long)]
    pub allow_unmeasured: bool,

    /// How long a worker looks at its queue before it sleeps, in microseconds.
    #[arg(long, value_name = "US", default_value_t = 30)]
    pub poll_us: u32,

    /// Answer root and this user on this Unix socket, as `nvguest` asks.
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,

    /// Answer scrapes of Prometheus on this Unix socket (OpenMetrics over HTTP).
    #[arg(long, value_name = "PATH")]
    pub metrics_socket: Option<PathBuf>,

    /// Write the same to this file every 10 s, whole each time, readable for all: for
    /// node_exporter's textfile collector. It is removed at the end.
    #[arg(long, value_name = "PATH")]
    pub metrics_file: Option<PathBuf>,

    /// Let root, or a user with CAP_SYS_ADMIN, start this. It gives up every capability at once,
    /// so RM takes guests for ordinary callers and not for administrators; what stays open is
    /// what root may do without a capability: the files that belong to it. Landlock closes those.
    #[arg(long)]
    pub allow_root: bool,

    /// Whether Landlock and seccomp must confine the processes, do as far as this kernel has
    /// them, or do not (for diagnosis only).
    #[arg(long, value_enum, default_value_t = Mode::BestEffort, value_name = "MODE")]
    pub sandbox: Mode,

    /// This backend is the only one of its user: then its guest's processes may share objects
    /// with each other by RM's way to share with a user (RM_SHARE), which is refused else.
    #[arg(long)]
    pub own_user: bool,

    /// Let this group connect to the sockets too; else only this user can.
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,

    /// What the guest may have at most: KEY=VALUE,… with the keys processes, files, requests,
    /// bytes (requests and bytes are of those in flight), clients, objects, placements, window
    /// and arena (bytes of them), lines (of log a second) and disables (of channels, a second).
    /// Each but the first with process- before it is what one process of the guest may have.
    #[arg(long, value_name = "KEY=VALUE,…", default_value = "", hide_default_value = true)]
    pub limits: Limits,

    /// Video memory that the guest may allocate, on all of its cards together, e.g. 8G; all that
    /// they have if not given. What RM takes by itself for its contexts and channels is not in it.
    #[arg(long, value_name = "SIZE", value_parser = vram)]
    pub vram: Option<u64>,

    /// What the guest takes for its card's memory: the card's own, and allocations beyond
    /// --vram fail (limit), or its budget (profile).
    #[arg(long, value_enum, default_value_t, value_name = "MODE")]
    pub vram_mode: VramMode,

    /// The guest's share of the card's time while others want it too, 1 to 100: its channel
    /// groups have time slices so many tenths as long as their programs'. Can change at run time.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_WEIGHT, value_parser = weight)]
    pub weight: u32,

    /// What to log: error, warn, info, debug, trace, or a filter in tracing's syntax.
    #[arg(long, value_name = "LEVEL", default_value = "warn")]
    pub log_level: String,

    /// How to log.
    #[arg(long, value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub log_format: LogFormat,

    /// Serve one guest process, on the descriptor that is standard input. Brokers start this.
    #[arg(long, hide = true)]
    pub worker: bool,

    /// Start workers for the broker on the descriptor that is standard input. Brokers start this.
    #[arg(long, hide = true)]
    pub starter: bool,

    /// A node that the starter's workers may open.
    #[arg(long, hide = true, requires = "starter")]
    pub node: Vec<PathBuf>,

    /// A file that the starter removes in the end.
    #[arg(long, hide = true, requires = "starter")]
    pub leftover: Vec<PathBuf>,

    /// The file that the starter writes metrics to.
    #[arg(long, hide = true, requires = "starter")]
    pub publish: Option<PathBuf>,
}

/// Which driver answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HostChoice {
    /// The host's if its control node is there, else a simulated card.
    Auto,
    /// A simulated card, or as many as `NVGUEST_SIM_CARDS` in the environment says.
    Sim,
    /// The host's.
    Nvidia,
}

/// How to log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines: an object a line.
    Json,
}

/// NVIDIA's own words for what a card is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CapabilityName {
    /// nvidia-smi, NVML.
    Utility,
    /// Vulkan, OpenGL.
    Graphics,
    /// NVDEC, NVENC, Vulkan Video.
    Video,
    /// CUDA: nvidia-uvm and registered guest memory.
    Compute,
    /// Screens.
    Display,
}

impl Args {
    /// The capabilities as bits of [`Capability`].
    pub fn capabilities(&self) -> u32 {
        self.caps.iter().map(|&name| Capability::from(name) as u32).fold(0, |all, bit| all | bit)
    }

    /// What the guest has of the card itself.
    pub fn budgets(&self) -> Budgets {
        let vram = self.vram.unwrap_or(NO_BUDGET);
        Budgets { vram, mode: self.vram_mode, weight: self.weight }
    }

    /// Bytes of the arena.
    pub fn arena_size(&self) -> u64 {
        const LARGEST: u64 = 4 << 30;
        let most = self.window_size / 2;
        self.arena.map_or((self.window_size / 8).min(LARGEST), |size| size.min(most))
    }
}

impl From<CapabilityName> for Capability {
    fn from(name: CapabilityName) -> Self {
        match name {
            CapabilityName::Utility => Self::Utility,
            CapabilityName::Graphics => Self::Graphics,
            CapabilityName::Video => Self::Video,
            CapabilityName::Compute => Self::Compute,
            CapabilityName::Display => Self::Display,
        }
    }
}

/// A guest's name, which is that of a folder too.
fn name(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if text.is_empty() || text.len() > 64 || text.starts_with(['.', '-']) || !text.chars().all(fits)
    {
        return Err("a name has 1 to 64 letters, digits, '.', '_' or '-', and begins with neither '.' nor '-'".into());
    }
    Ok(text.to_owned())
}

/// A window's size: a power of two from 1 MiB on, with an optional binary suffix.
fn size(text: &str) -> Result<u64, String> {
    let size = amount(text).ok_or_else(|| format!("{text:?} is not a size, e.g. 64G"))?;
    if !size.is_power_of_two() || size < 1 << 20 {
        let below = (1 << 20).max(size.checked_next_power_of_two().unwrap_or(1 << 36));
        return Err(format!("{text} is not a power of two of at least 1M; try {}M", below >> 20));
    }
    Ok(size)
}

/// A budget: less is no use to any driver.
fn vram(text: &str) -> Result<u64, String> {
    const LEAST: u64 = 64 << 20;
    let size = amount(text).ok_or_else(|| format!("{text:?} is not a size, e.g. 8G"))?;
    let fits = size >= LEAST && size != NO_BUDGET;
    fits.then_some(size).ok_or_else(|| format!("{text} is too little; give at least 64M"))
}

fn weight(text: &str) -> Result<u32, String> {
    let weight = text.parse().ok().filter(|weight| WEIGHTS.contains(weight));
    weight.ok_or_else(|| format!("{text:?} is no weight from 1 to 100"))
}

fn arena_size(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        text => size(text),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn a_name_leaves_its_folder_alone() {
        assert_eq!(name("web-1.a_b").as_deref(), Ok("web-1.a_b"));
        for text in ["", ".", "..", "../a", "a/b", "-a", "a b", &"a".repeat(65)] {
            assert!(name(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_window_is_a_power_of_two() {
        assert_eq!(size("64G"), Ok(64 << 30));
        assert_eq!(size("8589934592"), Ok(8 << 30));
        for text in ["", "G", "3G", "-1", "1K", "99999999999G"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_arena_is_an_eighth_of_the_window_if_nothing_else_is_said() {
        let arena = |args: &[&str]| Args::try_parse_from(args).unwrap().arena_size();
        assert_eq!(arena(&["x"]), 4 << 30);
        assert_eq!(arena(&["x", "--window-size=8G"]), 1 << 30);
        assert_eq!(arena(&["x", "--arena=0"]), 0);
        assert_eq!(arena(&["x", "--arena=64M"]), 64 << 20);
        assert_eq!(arena(&["x", "--arena=64G", "--window-size=8G"]), 4 << 30);
    }

    #[test]
    fn a_guest_of_which_nothing_is_said_has_all_memory_and_the_default_weight() {
        let budgets = |args: &[&str]| Args::try_parse_from(args).map(|args| args.budgets());
        let all = Budgets { vram: NO_BUDGET, mode: VramMode::Limit, weight: 10 };
        assert_eq!(budgets(&["x"]).unwrap(), all);
        let some = Budgets { vram: 8 << 30, mode: VramMode::Profile, weight: 40 };
        let args = ["x", "--vram=8G", "--vram-mode=profile", "--weight=40"];
        assert_eq!(budgets(&args).unwrap(), some);
        for wrong in ["--vram=1M", "--vram=x", "--weight=0", "--weight=101", "--vram-mode=no"] {
            assert!(budgets(&["x", wrong]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_socket_and_a_descriptor_exclude_each_other() {
        let both = Args::try_parse_from(["x", "--socket-path", "s", "--fd", "3"]);
        assert!(both.is_err());
    }
}
