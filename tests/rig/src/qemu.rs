//! QEMU's command line.

use std::path::Path;

use crate::accel::Accel;
use crate::assets::Assets;
use crate::proto::PORT;

/// What one machine is made of.
pub struct Machine<'a> {
    pub assets: &'a Assets,
    pub accel: Accel,
    pub kernel: &'a str,
    /// The firmware starts the kernel, and not QEMU.
    pub is_bootloaded: bool,
    pub cpus: u32,
    pub memory_mib: u32,
    /// More words for the kernel's command line.
    pub append: &'a str,
    /// Holds the sockets `agent`, `backend` and `qmp` and the file `console`.
    pub folder: &'a Path,
    pub has_backend: bool,
    /// Our device is in a slot that it can be taken out of.
    pub is_hotpluggable: bool,
    /// Folders of the host and the tags of their 9p devices.
    pub shares: &'a [(String, String)],
    pub extra: &'a [String],
}

impl Machine<'_> {
    /// The whole command line.
    pub fn command(&self) -> Vec<String> {
        let mut argv = self.assets.qemu_command();
        let mut add = |words: &[&str]| argv.extend(words.iter().map(|word| (*word).to_owned()));
        let file = |name: &str| self.folder.join(name).to_string_lossy().into_owned();
        let kernel = self.assets.kernel(self.kernel);
        let memory = self.memory_mib;

        add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        add(&["-accel", self.accel.option(), "-cpu", self.accel.cpu()]);
        add(&["-smp", &self.cpus.to_string(), "-m", &format!("{memory}M")]);
        add(&["-object", &format!("memory-backend-memfd,id=mem,size={memory}M,share=on")]);
        add(&["-M", "q35,memory-backend=mem,usb=off,sata=off,smbus=off,vmport=off"]);
        let file_of_kernel = if self.is_bootloaded { "vmlinuz" } else { "vmlinux" };
        add(&["-kernel", &kernel.join(file_of_kernel).to_string_lossy()]);
        add(&["-initrd", &kernel.join("image").to_string_lossy()]);
        let words = format!("console=ttyS0 loglevel=4 panic=-1 oops=panic {}", self.append);
        add(&["-append", words.trim_end()]);
        add(&["-chardev", &format!("file,id=console,path={}", file("console"))]);
        add(&["-serial", "chardev:console"]);
        add(&["-qmp", &format!("unix:{},server=on,wait=off", file("qmp"))]);
        add(&["-chardev", &format!("socket,id=agent,path={}", file("agent"))]);
        add(&["-device", "virtio-serial-pci,max_ports=2"]);
        add(&["-device", &format!("virtserialport,id=agent,chardev=agent,name={PORT}")]);
        for (folder, tag) in self.shares {
            let folder = folder.replace(',', ",,");
            add(&[
                "-fsdev",
                &format!(
                    "local,id={tag},path={folder},security_model=none,readonly=on,multidevs=remap"
                ),
            ]);
            add(&["-device", &format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}")]);
        }
        if self.has_backend {
            add(&["-chardev", &format!("socket,id=nv,path={}", file("backend"))]);
            let bus = if self.is_hotpluggable { ",bus=nvport" } else { "" };
            if self.is_hotpluggable {
                add(&["-device", "pcie-root-port,id=nvport,chassis=1"]);
            }
            let device = "vhost-user-test-device-pci,id=nvdev,chardev=nv,virtio-id=38,num_vqs=34";
            add(&["-device", &format!("{device},vq_size=256,config_size=64{bus}")]);
        }
        argv.extend(self.extra.iter().cloned());
        argv
    }
}
