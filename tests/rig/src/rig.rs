//! What a test holds: N guests, each with a backend of its own.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Result};
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::memfd::{memfd_create, MFdFlags};
use tempfile::TempDir;

use crate::accel::Accel;
use crate::assets::{Assets, DEFAULT_KERNEL};
use crate::channel::Channel;
use crate::guest::{report, Command, Guest, Output};
use crate::nvidia;
use crate::process::Daemon;
use crate::proto::{Setup, Share};
use crate::qemu::Machine;

/// How long a backend may take to listen.
const BACKEND_PATIENCE: Duration = Duration::from_secs(15);

/// What the guests' backends drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Host {
    /// The card where there is one, else the simulated card.
    Auto,
    /// The simulated card.
    Sim,
    /// The host's NVIDIA card.
    Nvidia,
}

impl Host {
    /// What `Auto` means on this machine.
    pub fn resolve(self) -> Host {
        match self {
            Host::Auto if nvidia::has_card() => Host::Nvidia,
            Host::Auto => Host::Sim,
            decided => decided,
        }
    }

    /// The backend's `--host`.
    pub fn option(self) -> &'static str {
        match self {
            Host::Auto => "auto",
            Host::Sim => "sim",
            Host::Nvidia => "nvidia",
        }
    }
}

/// What to boot.
#[derive(Debug, Clone)]
pub struct Builder {
    assets: Option<Assets>,
    kernel: String,
    guests: usize,
    host: Option<Host>,
    hotpluggable: bool,
    bootloaded: bool,
    accel: Option<Accel>,
    cpus: u32,
    memory_mib: u32,
    module_params: String,
    append: String,
    shares: Vec<(PathBuf, String)>,
    env: Vec<(String, String)>,
    gpus: Vec<String>,
    sim_cards: Option<u32>,
    backend_args: Vec<String>,
    qemu_args: Vec<String>,
    patience: Duration,
}

/// Booted guests. Dropping it kills every process of theirs and removes every
/// file.
#[derive(Debug)]
pub struct Rig {
    guests: Vec<Guest>,
    accel: Accel,
    folder: TempDir,
}

impl Rig {
    /// One guest on the default kernel, without our device until
    /// [`Builder::host`] is given.
    pub fn builder() -> Builder {
        Builder {
            assets: None,
            kernel: DEFAULT_KERNEL.to_owned(),
            guests: 1,
            host: None,
            hotpluggable: false,
            bootloaded: false,
            accel: None,
            cpus: 2,
            memory_mib: 2048,
            module_params: String::new(),
            append: String::new(),
            shares: Vec::new(),
            env: Vec::new(),
            gpus: Vec::new(),
            sim_cards: None,
            backend_args: Vec::new(),
            qemu_args: Vec::new(),
            patience: Duration::from_secs(90),
        }
    }

    /// The guests.
    pub fn guests(&self) -> &[Guest] {
        &self.guests
    }

    /// One guest.
    pub fn guest(&self, index: usize) -> &Guest {
        &self.guests[index]
    }

    /// One guest, to be changed.
    pub fn guest_mut(&mut self, index: usize) -> &mut Guest {
        &mut self.guests[index]
    }

    /// What runs the guests' instructions.
    pub fn accel(&self) -> Accel {
        self.accel
    }

    /// The folder of the guests' sockets and logs.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts the commands at the same moment, and waits for all of them: each
    /// is held in its guest until every one is ready to start.
    pub fn together<'a>(commands: impl IntoIterator<Item = Command<'a>>) -> Result<Vec<Output>> {
        let held = commands.into_iter().map(|command| command.hold().spawn());
        let mut held = held.collect::<Result<Vec<_>>>()?;
        for process in &mut held {
            process.go()?;
        }
        held.into_iter().map(|process| process.wait()).collect()
    }

    /// The last lines of every log of every guest.
    pub fn logs(&self) -> String {
        self.guests.iter().map(Guest::logs).collect()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
    }
}

impl Builder {
    /// Where QEMU, kernels and images lie, instead of [`Assets::find`].
    pub fn assets(mut self, assets: Assets) -> Self {
        self.assets = Some(assets);
        self
    }

    /// The kernel's series: one of [`crate::assets::KERNELS`].
    pub fn kernel(mut self, series: &str) -> Self {
        series.clone_into(&mut self.kernel);
        self
    }

    /// How many guests.
    pub fn guests(mut self, count: usize) -> Self {
        self.guests = count;
        self
    }

    /// A guest for each of these choices of the host's cards, as the backend's `--gpu` takes them.
    pub fn gpus<S: Into<String>>(mut self, choices: impl IntoIterator<Item = S>) -> Self {
        self.gpus = choices.into_iter().map(Into::into).collect();
        self.guests = self.gpus.len();
        self
    }

    /// Has all guests share one simulated host, which has so many cards.
    pub fn sim_cards(mut self, count: u32) -> Self {
        self.sim_cards = Some(count);
        self
    }

    /// Gives every guest our device, a backend of its own behind it.
    pub fn host(mut self, host: Host) -> Self {
        self.host = Some(host);
        self
    }

    /// Puts our device behind a PCIe root port, where it can be unplugged (as `nvdev`).
    pub fn hotpluggable(mut self) -> Self {
        self.hotpluggable = true;
        self
    }

    /// Has the firmware start the kernel, as on real machines, which takes some seconds more.
    /// Such a guest can sleep: QEMU writes a kernel that it started itself anew into the guest's
    /// memory whenever it resets devices, and a wake-up does.
    pub fn bootloaded(mut self) -> Self {
        self.bootloaded = true;
        self
    }

    /// What runs the guests' instructions, instead of finding out.
    pub fn accel(mut self, accel: Accel) -> Self {
        self.accel = Some(accel);
        self
    }

    /// Virtual processors of a guest.
    pub fn cpus(mut self, count: u32) -> Self {
        self.cpus = count;
        self
    }

    /// Memory of a guest.
    pub fn memory_mib(mut self, size: u32) -> Self {
        self.memory_mib = size;
        self
    }

    /// Words for the command line of a guest's kernel.
    pub fn append(mut self, words: &str) -> Self {
        words.clone_into(&mut self.append);
        self
    }

    /// Parameters for `virtio_nvguest.ko`.
    pub fn module_params(mut self, params: &str) -> Self {
        params.clone_into(&mut self.module_params);
        self
    }

    /// Mounts a folder of the host in the guests, read-only.
    pub fn share(mut self, folder: impl Into<PathBuf>, at: &str) -> Self {
        self.shares.push((folder.into(), at.to_owned()));
        self
    }

    /// Sets a variable in the environment of every command.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Adds words to the backend's command line.
    pub fn backend_args<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.backend_args.extend(words.into_iter().map(Into::into));
        self
    }

    /// Adds words to QEMU's command line.
    pub fn qemu_args<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.qemu_args.extend(words.into_iter().map(Into::into));
        self
    }

    /// How long a guest may take from QEMU's start to its agent's answer.
    pub fn boot_patience(mut self, limit: Duration) -> Self {
        self.patience = limit;
        self
    }

    /// Boots the guests, all at once, and waits until all are set up.
    pub fn boot(mut self) -> Result<Rig> {
        let assets = match self.assets.take() {
            Some(assets) => assets,
            None => Assets::find()?,
        };
        self.check(&assets)?;
        let host = self.host.map(Host::resolve);
        if host == Some(Host::Nvidia) {
            self.add_nvidia(&assets)?;
        }
        let accel = match self.accel {
            Some(accel) => accel,
            None => Accel::choose(&assets, &self.kernel)?,
        };
        let folder = tempfile::Builder::new()
            .prefix("nvguest-")
            .tempdir()
            .context("create a folder for sockets and logs")?;
        let cards = self.sim_cards.map(|_| shared_cards()).transpose()?;
        let root = folder.path();
        let seed = Seed { wish: &self, assets: &assets, accel, host, root, cards: cards.as_ref() };
        let starting: Vec<Starting> =
            (0..self.guests).map(|index| seed.start(index)).collect::<Result<_>>()?;
        let guests = starting.into_iter().map(|it| it.finish(&self)).collect::<Result<_>>()?;
        Ok(Rig { guests, accel, folder })
    }

    fn check(&self, assets: &Assets) -> Result<()> {
        let bootable = assets.bootable();
        if !bootable.contains(&self.kernel.as_str()) {
            bail!(
                "no kernel {:?} with an image in {}; there are {bootable:?} \
                 (`cargo xtask install` makes them)",
                self.kernel,
                assets.root().display()
            );
        }
        if self.host.is_some() && !assets.backend().exists() {
            bail!(
                "{} is missing; run `cargo xtask install` to build it",
                assets.backend().display()
            );
        }
        Ok(())
    }

    fn add_nvidia(&mut self, assets: &Assets) -> Result<()> {
        let libraries = nvidia::user_mode(assets)?;
        self.env.extend(libraries.env);
        self.shares.push((libraries.folder, libraries.at));
        Ok(())
    }

    fn setup(&self, name: &str, has_device: bool) -> Setup {
        let mut env: std::collections::BTreeMap<String, String> = [
            ("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"),
            ("HOME", "/root"),
            ("TERM", "xterm-256color"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        for (name, value) in &self.env {
            // Later folders of a path come before earlier ones.
            match env.get_mut(name) {
                Some(old) if name == "PATH" => *old = format!("{value}:{old}"),
                _ => drop(env.insert(name.clone(), value.clone())),
            }
        }
        let shares = self.shares.iter().enumerate();
        Setup {
            name: name.to_owned(),
            module_params: has_device.then(|| self.module_params.clone()),
            shares: shares.map(|(i, (_, at))| Share { tag: tag(i), path: at.clone() }).collect(),
            env,
        }
    }
}

/// A memory file for the first backend to make a host's. It lives on in those that have it.
fn shared_cards() -> Result<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    memfd_create("nvguest-cards", flags).context("make a file for simulated cards")
}

fn tag(index: usize) -> String {
    format!("share{index}")
}

/// What all guests of a rig are started from.
struct Seed<'a> {
    wish: &'a Builder,
    assets: &'a Assets,
    accel: Accel,
    host: Option<Host>,
    root: &'a Path,
    /// The memory file of the simulated host that all guests share.
    cards: Option<&'a OwnedFd>,
}

/// A guest whose QEMU has been started.
struct Starting {
    name: String,
    qemu: Daemon,
    backend: Option<Daemon>,
    listener: UnixListener,
    kernel: PathBuf,
    folder: PathBuf,
    serial: PathBuf,
    since: Instant,
}

impl Seed<'_> {
    fn start(&self, index: usize) -> Result<Starting> {
        let name = format!("guest{index}");
        let folder = self.root.join(&name);
        fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
        let backend = match self.host {
            Some(host) => Some(self.start_backend(index, &folder, host)?),
            None => None,
        };
        let agent = folder.join("agent");
        let listener =
            UnixListener::bind(&agent).with_context(|| format!("listen on {}", agent.display()))?;
        let shares: Vec<(String, String)> = (self.wish.shares.iter().enumerate())
            .map(|(i, (from, _))| (from.to_string_lossy().into_owned(), tag(i)))
            .collect();
        let machine = Machine {
            assets: self.assets,
            accel: self.accel,
            kernel: &self.wish.kernel,
            is_bootloaded: self.wish.bootloaded,
            cpus: self.wish.cpus,
            memory_mib: self.wish.memory_mib,
            append: &self.wish.append,
            folder: &folder,
            has_backend: backend.is_some(),
            is_hotpluggable: self.wish.hotpluggable,
            shares: &shares,
            extra: &self.wish.qemu_args,
        };
        let since = Instant::now();
        let qemu = Daemon::start("QEMU", &machine.command(), &folder.join("qemu.log"))?;
        let serial = folder.join("console");
        let kernel = self.assets.kernel(&self.wish.kernel);
        Ok(Starting { name, qemu, backend, listener, kernel, folder, serial, since })
    }

    fn start_backend(&self, index: usize, folder: &Path, host: Host) -> Result<Daemon> {
        let socket = folder.join("backend");
        let mut argv = vec!["env".to_owned()];
        if let (Some(count), Some(cards)) = (self.wish.sim_cards, self.cards) {
            argv.push(format!("NVGUEST_SIM_CARDS={count}"));
            let (pid, fd) = (std::process::id(), cards.as_raw_fd());
            argv.push(format!("NVGUEST_SIM_HOST=/proc/{pid}/fd/{fd}"));
        }
        argv.push(self.assets.backend().to_string_lossy().into_owned());
        argv.extend(["--socket-path".to_owned(), socket.to_string_lossy().into_owned()]);
        let admin = folder.join("admin");
        argv.extend(["--admin-socket".to_owned(), admin.to_string_lossy().into_owned()]);
        argv.extend(["--host", host.option()].map(str::to_owned));
        if nix::unistd::geteuid().is_root() {
            argv.push("--allow-root".to_owned());
        }
        if !self.wish.backend_args.iter().any(|word| word == "--log-level") {
            argv.extend(["--log-level", "info"].map(str::to_owned));
        }
        argv.extend(self.wish.gpus.get(index).map(|gpu| format!("--gpu={gpu}")));
        argv.extend(self.wish.backend_args.iter().cloned());
        let mut backend = Daemon::start("the backend", &argv, &folder.join("backend.log"))?;
        let deadline = Instant::now() + BACKEND_PATIENCE;
        // Its one connection is QEMU's, so its socket is looked for and not tried.
        while !is_listening(&socket) {
            if let Some(status) = backend.ended()? {
                bail!(
                    "guest{index}: the backend ended with {status} before it listened:\n{}",
                    backend.log_tail(40)
                );
            }
            if Instant::now() > deadline {
                bail!(
                    "guest{index}: the backend does not listen after {BACKEND_PATIENCE:?}:\n{}",
                    backend.log_tail(40)
                );
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(backend)
    }
}

/// Whether a process listens on the socket: the kernel lists it as accepting.
fn is_listening(socket: &Path) -> bool {
    const ACCEPTING: &str = "00010000";
    let path = socket.to_string_lossy();
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    sockets.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.nth(3) == Some(ACCEPTING) && words.last() == Some(&path)
    })
}

impl Starting {
    fn finish(mut self, wish: &Builder) -> Result<Guest> {
        let outcome = self.connect(wish);
        match outcome {
            Ok((channel, ready)) => Ok(Guest {
                setup: wish.setup(&self.name, self.backend.is_some()),
                kernel: self.kernel,
                folder: self.folder,
                name: self.name,
                channel,
                ready,
                qemu: self.qemu,
                backend: self.backend,
                serial: self.serial,
            }),
            Err(error) => {
                let logs =
                    report(&self.name, &self.serial, Some(&self.qemu), self.backend.as_ref());
                Err(error.context(format!("{} did not come up\n{logs}", self.name)))
            }
        }
    }

    fn connect(&mut self, wish: &Builder) -> Result<(Channel, crate::proto::Ready)> {
        let stream = self.accept(wish.patience)?;
        let left = wish.patience.saturating_sub(self.since.elapsed());
        let setup = wish.setup(&self.name, self.backend.is_some());
        let shares = setup.shares.len();
        let (channel, ready) = Channel::open(stream, setup, left.max(Duration::from_secs(1)))
            .map_err(|error| {
                let waited_out = error
                    .downcast_ref::<io::Error>()
                    .is_some_and(|it| it.kind() == io::ErrorKind::WouldBlock);
                if waited_out {
                    anyhow!("its agent did not answer within {:?}", wish.patience)
                } else {
                    error
                }
            })?;
        if shares > 0 || self.backend.is_some() {
            if let Some(problem) = ready.problems.first() {
                bail!("{problem}");
            }
        }
        Ok((channel, ready))
    }

    /// QEMU connects when it has read its command line; an error in that ends
    /// it instead.
    fn accept(&mut self, patience: Duration) -> Result<UnixStream> {
        loop {
            let mut waiting =
                [PollFd::new(std::os::fd::AsFd::as_fd(&self.listener), PollFlags::POLLIN)];
            let tick = PollTimeout::from(20u8);
            if poll(&mut waiting, tick).context("wait for QEMU")? > 0 {
                let (stream, _) = self.listener.accept().context("accept QEMU")?;
                return Ok(stream);
            }
            if let Some(status) = self.qemu.ended()? {
                bail!("QEMU ended with {status}");
            }
            if self.since.elapsed() > patience {
                bail!("QEMU did not start within {patience:?}");
            }
        }
    }
}
