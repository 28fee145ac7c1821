//! Our device in a running QEMU: found, taken out and put in again by QMP.
//!
//! What QEMU 11.1.3 does at each step is in `docs/admin.md`, "When a backend dies".

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};

use crate::qmp::{Qmp, Refusal};

/// The generic vhost-user device of stock QEMU, and the virtio id that makes it ours.
const DRIVER: &str = "vhost-user-test-device-pci";
const VIRTIO_ID: u64 = 38;
/// Our device and its root port, as `nvguest run` calls them.
pub const DEVICE: &str = "nvguest";
pub const PORT: &str = "nvguest-port";
/// Where QEMU keeps devices, with an id and without.
const DEVICES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// Our device, with what it takes to make another like it.
#[derive(Clone, Debug, Serialize)]
pub struct Device {
    /// Its path in QEMU; none once it was taken out.
    pub path: Option<String>,
    /// Its id.
    pub id: String,
    /// The bus that it is on.
    pub bus: String,
    /// The chardev of its backend.
    pub chardev: String,
    /// Where that connects.
    pub socket: Option<PathBuf>,
    /// Whether a backend is at the other end.
    pub connected: bool,
    /// Its queues.
    num_vqs: u64,
    vq_size: u64,
    config_size: u64,
}

impl Device {
    /// The device of a machine that has none (any more), as `nvguest run` makes it.
    pub fn absent(bus: Option<&str>) -> Self {
        Self {
            path: None,
            id: DEVICE.into(),
            bus: bus.unwrap_or(PORT).into(),
            chardev: "nv".into(),
            socket: None,
            connected: false,
            num_vqs: 34,
            vq_size: 256,
            config_size: 64,
        }
    }

    /// Our device in a running QEMU.
    pub fn find(qmp: &mut Qmp) -> Result<Option<Self>> {
        for folder in DEVICES {
            let listed = qmp.execute("qom-list", json!({"path": folder}))?;
            for entry in Vec::<Listed>::deserialize(&listed).context("QEMU's list of devices")? {
                if entry.of != format!("child<{DRIVER}>") {
                    continue;
                }
                let path = format!("{folder}/{}", entry.name);
                if get(qmp, &path, "virtio-id")?.as_u64() == Some(VIRTIO_ID) {
                    let id = if folder == DEVICES[0] { &entry.name } else { DEVICE };
                    return Self::at(qmp, &path, id).map(Some);
                }
            }
        }
        Ok(None)
    }

    fn at(qmp: &mut Qmp, path: &str, id: &str) -> Result<Self> {
        let mut text = |name| -> Result<String> {
            let value = get(qmp, path, name)?;
            Ok(value.as_str().with_context(|| format!("{path} has no {name}"))?.to_owned())
        };
        let (chardev, bus) = (text("chardev")?, text("parent_bus")?);
        let mut number = |name| -> Result<u64> {
            get(qmp, path, name)?.as_u64().with_context(|| format!("{path} has no {name}"))
        };
        let [num_vqs, vq_size, config_size] =
            [number("num_vqs")?, number("vq_size")?, number("config_size")?];
        let (socket, connected) = connection(qmp, &chardev)?;
        Ok(Self {
            path: Some(path.to_owned()),
            id: id.to_owned(),
            // A bus is named by the end of its path.
            bus: bus.rsplit('/').next().unwrap_or(&bus).to_owned(),
            chardev,
            socket,
            connected,
            num_vqs,
            vq_size,
            config_size,
        })
    }

    /// Has the guest let go of the device. `Ok(false)` if it does not in time;
    /// [`Refusal`] if QEMU cannot take it out at all.
    pub fn take_out(&self, qmp: &mut Qmp, patience: Duration) -> Result<bool> {
        let Some(path) = &self.path else { return Ok(true) };
        qmp.execute("device_del", json!({"id": path}))?;
        let is_ours = |data: &Value| data["path"] == *path;
        qmp.await_event("DEVICE_DELETED", is_ours, patience)
    }

    /// Puts in a device with a new chardev, which connects to the backend at `socket`.
    pub fn put_in(&self, qmp: &mut Qmp, socket: &Path) -> Result<()> {
        // Gone with the device, if nothing else has it; else the new one needs another name.
        let _ = qmp.execute("chardev-remove", json!({"id": self.chardev}));
        let chardev = free_chardev(qmp, &self.chardev)?;
        let address = json!({"type": "unix", "data": {"path": socket}});
        let backend = json!({"type": "socket", "data": {"addr": address, "server": false}});
        qmp.execute("chardev-add", json!({"id": chardev, "backend": backend}))?;
        let device = json!({
            "driver": DRIVER,
            "id": self.id,
            "bus": self.bus,
            "chardev": chardev,
            "virtio-id": VIRTIO_ID,
            "num_vqs": self.num_vqs,
            "vq_size": self.vq_size,
            "config_size": self.config_size,
        });
        qmp.execute("device_add", device).map(drop).inspect_err(|_| {
            let _ = qmp.execute("chardev-remove", json!({"id": chardev}));
        })
    }
}

#[derive(Deserialize)]
struct Listed {
    name: String,
    #[serde(rename = "type")]
    of: String,
}

#[derive(Deserialize)]
struct Chardev {
    label: String,
    filename: String,
}

fn get(qmp: &mut Qmp, path: &str, property: &str) -> Result<Value> {
    qmp.execute("qom-get", json!({"path": path, "property": property}))
}

fn chardevs(qmp: &mut Qmp) -> Result<Vec<Chardev>> {
    let all = qmp.execute("query-chardev", json!({}))?;
    Vec::deserialize(&all).context("QEMU's list of chardevs")
}

/// The socket of a chardev and whether it is connected: "disconnected:unix:PATH".
fn connection(qmp: &mut Qmp, id: &str) -> Result<(Option<PathBuf>, bool)> {
    let chardev = chardevs(qmp)?.into_iter().find(|chardev| chardev.label == id);
    let Some(Chardev { filename, .. }) = chardev else { return Ok((None, false)) };
    let (connected, address) = match filename.strip_prefix("disconnected:") {
        Some(address) => (false, address),
        None => (true, filename.as_str()),
    };
    let path = address.strip_prefix("unix:").map(|path| path.split(",server=").next());
    Ok((path.flatten().map(PathBuf::from), connected))
}

fn free_chardev(qmp: &mut Qmp, like: &str) -> Result<String> {
    let taken = chardevs(qmp)?;
    let mut names = std::iter::once(like.to_owned()).chain((2..).map(|n| format!("{like}-{n}")));
    let free = names.find(|name| taken.iter().all(|chardev| chardev.label != *name));
    free.context("there are too many chardevs")
}

/// QEMU's own words, if it refused.
pub fn refusal(error: &anyhow::Error) -> Option<&Refusal> {
    error.downcast_ref()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::qmp::fake;

    const SHORT: Duration = Duration::from_millis(100);

    /// QEMU with our device on a root port, without a backend, and how it answers `device_del`.
    fn qemu(name: &str, arguments: &Value, del: &[Value]) -> Vec<Value> {
        let answer = |value: Value| vec![json!({"return": value})];
        match (name, arguments["path"].as_str(), arguments["property"].as_str()) {
            ("qom-list", Some("/machine/peripheral"), _) => answer(json!([
                {"name": "type", "type": "string"},
                {"name": "net", "type": "child<virtio-net-pci>"},
                {"name": "other", "type": "child<vhost-user-test-device-pci>"},
                {"name": "card", "type": "child<vhost-user-test-device-pci>"},
            ])),
            ("qom-list", ..) => answer(json!([])),
            ("qom-get", Some("/machine/peripheral/other"), _) => answer(json!(18)),
            ("qom-get", _, Some("virtio-id")) => answer(json!(38)),
            ("qom-get", _, Some("chardev")) => answer(json!("nv")),
            ("qom-get", _, Some("parent_bus")) => answer(json!("/machine/peripheral/p/port")),
            ("qom-get", _, Some("num_vqs")) => answer(json!(10)),
            ("qom-get", ..) => answer(json!(64)),
            ("query-chardev", ..) => answer(json!([
                {"label": "nv", "filename": "disconnected:unix:/run/nv.sock", "frontend-open": true},
            ])),
            ("chardev-remove", ..) => vec![json!({"error": {"desc": "Chardev 'nv' is busy"}})],
            ("device_del", ..) => del.to_vec(),
            _ => answer(json!({})),
        }
    }

    fn deleted(path: &str) -> Value {
        json!({"event": "DEVICE_DELETED", "data": {"path": path}})
    }

    fn found(del: Vec<Value>) -> (tempfile::TempDir, Qmp, Device, Arc<Mutex<Vec<Value>>>) {
        let folder = tempfile::tempdir().unwrap();
        let added = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&added);
        let (socket, _) = fake::start(folder.path(), move |name, arguments| {
            if name.ends_with("add") {
                told.lock().unwrap().push(arguments.clone());
            }
            qemu(name, arguments, &del)
        });
        let mut qmp = Qmp::connect(&socket).unwrap();
        let device = Device::find(&mut qmp).unwrap().unwrap();
        (folder, qmp, device, added)
    }

    #[test]
    fn our_device_is_told_from_others_of_its_driver() {
        let (_folder, _qmp, device, _) = found(Vec::new());
        assert_eq!(device.path.as_deref(), Some("/machine/peripheral/card"));
        assert_eq!((device.bus.as_str(), device.num_vqs), ("port", 10));
        assert_eq!(device.socket.as_deref(), Some(Path::new("/run/nv.sock")));
        assert!(!device.connected);
    }

    #[test]
    fn a_device_is_out_when_the_whole_of_it_is() {
        let ours = "/machine/peripheral/card";
        let done = json!({"return": {}});
        let part = deleted("/machine/peripheral/card/virtio-backend");
        let (_folder, mut qmp, device, _) = found(vec![done.clone(), part.clone(), deleted(ours)]);
        assert!(device.take_out(&mut qmp, SHORT).unwrap());
        let (_folder, mut qmp, device, _) = found(vec![done, part]);
        assert!(!device.take_out(&mut qmp, SHORT).unwrap(), "the guest keeps it");
    }

    #[test]
    fn a_device_that_cannot_be_taken_out_is_refused_in_qemu_s_words() {
        let desc = "Bus 'pcie.0' does not support hotplugging";
        let (_folder, mut qmp, device, _) = found(vec![json!({"error": {"desc": desc}})]);
        let error = device.take_out(&mut qmp, SHORT).unwrap_err();
        assert_eq!(refusal(&error).unwrap().reason, desc);
    }

    #[test]
    fn a_new_device_is_as_the_old_one_was_with_a_chardev_of_its_own() {
        let (_folder, mut qmp, device, added) = found(Vec::new());
        device.put_in(&mut qmp, Path::new("/run/new.sock")).unwrap();
        let added = added.lock().unwrap();
        assert_eq!(added[0]["id"], "nv-2", "the old one is busy");
        assert_eq!(added[0]["backend"]["data"]["addr"]["data"]["path"], "/run/new.sock");
        let wanted = json!({"driver": DRIVER, "id": "card", "bus": "port", "chardev": "nv-2",
            "virtio-id": 38, "num_vqs": 10, "vq_size": 64, "config_size": 64});
        assert_eq!(added[1], wanted);
    }
}
