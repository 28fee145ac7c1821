//! The loader, the devices that it finds, and what they are.

use std::ffi::CStr;
use std::sync::Arc;

use ash::vk;
use serde::Serialize;

use crate::error::{Called, Error, Result};

/// The oldest version of Vulkan that has all that is used without asking.
const VERSION: u32 = vk::API_VERSION_1_2;

/// The loader and an instance.
pub struct Instance {
    pub(super) raw: ash::Instance,
    // INVARIANT: dropped after `raw`, whose functions lie in the library that it keeps loaded.
    _entry: ash::Entry,
}

/// A device as the loader lists it.
#[derive(Debug, Clone, Serialize)]
pub struct Physical {
    /// What `--device` can name it by.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// `discrete`, `integrated`, `virtual`, `cpu` or `other`.
    pub kind: &'static str,
    /// The driver's name and release.
    pub driver: String,
    /// The version of Vulkan that it speaks.
    pub vulkan: String,
    /// MiB of its own memory: of its largest heap that is device-local.
    pub memory_mib: u64,
    /// Its UUID, as `nvidia-smi -L` writes it after `GPU-`.
    pub uuid: String,
    #[serde(skip)]
    pub(super) raw: vk::PhysicalDevice,
    #[serde(skip)]
    pub(super) extensions: Vec<String>,
    #[serde(skip)]
    pub(super) nanoseconds_per_tick: f64,
}

impl Instance {
    /// Loads the loader and makes an instance.
    pub fn new() -> Result<Arc<Instance>> {
        // SAFETY: the library named libvulkan.so.1 is the Vulkan loader; starting it has no
        // requirement of its own.
        let entry =
            unsafe { ash::Entry::load() }.map_err(|error| Error::NoVulkan(plain(&error)))?;
        let about = vk::ApplicationInfo::default()
            .application_name(c"nesprobe")
            .engine_name(c"nesprobe")
            .api_version(VERSION);
        let info = vk::InstanceCreateInfo::default().application_info(&about);
        // SAFETY: what `info` points to outlives the call.
        let raw = match unsafe { entry.create_instance(&info, None) } {
            Err(vk::Result::ERROR_INCOMPATIBLE_DRIVER) => return Err(no_driver()),
            result => result.called("vkCreateInstance")?,
        };
        Ok(Arc::new(Instance { raw, _entry: entry }))
    }

    /// Every device that speaks a version of Vulkan that is new enough.
    pub fn devices(&self) -> Result<Vec<Physical>> {
        // SAFETY: the instance is alive.
        let all = match unsafe { self.raw.enumerate_physical_devices() } {
            Err(vk::Result::ERROR_INITIALIZATION_FAILED) => Vec::new(),
            result => result.called("vkEnumeratePhysicalDevices")?,
        };
        let mut devices = Vec::new();
        for raw in all {
            // SAFETY: the device is the instance's.
            let version = unsafe { self.raw.get_physical_device_properties(raw) }.api_version;
            if version >= VERSION {
                devices.push(self.describe(raw, devices.len())?);
            }
        }
        if devices.is_empty() {
            return Err(no_driver());
        }
        Ok(devices)
    }

    fn describe(&self, raw: vk::PhysicalDevice, index: usize) -> Result<Physical> {
        let mut driver = vk::PhysicalDeviceDriverProperties::default();
        let mut ids = vk::PhysicalDeviceIDProperties::default();
        let mut all =
            vk::PhysicalDeviceProperties2::default().push_next(&mut driver).push_next(&mut ids);
        // SAFETY: the device speaks Vulkan 1.2, which has both structs.
        unsafe { self.raw.get_physical_device_properties2(raw, &mut all) };
        let core = all.properties;
        // SAFETY: the device is the instance's.
        let extensions = unsafe { self.raw.enumerate_device_extension_properties(raw) }
            .called("vkEnumerateDeviceExtensionProperties")?;
        let version = core.api_version;
        Ok(Physical {
            index,
            name: text(core.device_name_as_c_str()),
            kind: kind(core.device_type),
            driver: format!(
                "{} {}",
                text(driver.driver_name_as_c_str()),
                text(driver.driver_info_as_c_str())
            ),
            vulkan: format!(
                "{}.{}.{}",
                vk::api_version_major(version),
                vk::api_version_minor(version),
                vk::api_version_patch(version)
            ),
            memory_mib: self.local_memory(raw) >> 20,
            uuid: uuid(&ids.device_uuid),
            raw,
            extensions: extensions.iter().map(|it| text(it.extension_name_as_c_str())).collect(),
            nanoseconds_per_tick: f64::from(core.limits.timestamp_period),
        })
    }

    /// Bytes of the device's largest heap of its own.
    fn local_memory(&self, raw: vk::PhysicalDevice) -> u64 {
        // SAFETY: the device is the instance's.
        let memory = unsafe { self.raw.get_physical_device_memory_properties(raw) };
        let heaps = memory.memory_heaps_as_slice().iter();
        let own = heaps.filter(|heap| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
        own.map(|heap| heap.size).max().unwrap_or(0)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: every device of the instance holds an Arc of it, so none is left.
        unsafe { self.raw.destroy_instance(None) };
    }
}

impl Physical {
    /// Whether the device has an extension.
    pub fn has(&self, extension: &CStr) -> bool {
        self.extensions.iter().any(|it| it.as_bytes() == extension.to_bytes())
    }
}

fn no_driver() -> Error {
    Error::NoDevice(
        "the Vulkan loader found no device that speaks Vulkan 1.2; install a driver, or name its \
         manifest in VK_DRIVER_FILES (NVIDIA's is nvidia_icd.json)"
            .to_owned(),
    )
}

/// An error of the loader with what it is caused by, which ash leaves to `source`.
fn plain(error: &ash::LoadingError) -> String {
    let source = std::error::Error::source(error).map(ToString::to_string);
    source.unwrap_or_else(|| error.to_string())
}

fn text(field: std::result::Result<&CStr, std::ffi::FromBytesUntilNulError>) -> String {
    field.unwrap_or_default().to_string_lossy().into_owned()
}

fn kind(kind: vk::PhysicalDeviceType) -> &'static str {
    match kind {
        vk::PhysicalDeviceType::DISCRETE_GPU => "discrete",
        vk::PhysicalDeviceType::INTEGRATED_GPU => "integrated",
        vk::PhysicalDeviceType::VIRTUAL_GPU => "virtual",
        vk::PhysicalDeviceType::CPU => "cpu",
        _ => "other",
    }
}

fn uuid(bytes: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The device that `--device` names: by index, by UUID, or by a part of its name.
/// Unasked, the first that is no software.
pub fn choose<'a>(devices: &'a [Physical], wish: Option<&str>) -> Result<&'a Physical> {
    let Some(wish) = wish else {
        let hardware = devices.iter().find(|it| it.kind != "cpu").or(devices.first());
        return hardware.ok_or_else(no_driver);
    };
    let wanted = wish.to_lowercase();
    let bare = wanted.strip_prefix("gpu-").unwrap_or(&wanted).replace('-', "");
    let found: Vec<&Physical> = match wanted.parse::<usize>() {
        Ok(index) => devices.iter().filter(|it| it.index == index).collect(),
        Err(_) => {
            let by_uuid = |it: &&Physical| it.uuid.replace('-', "") == bare;
            let by_name = |it: &&Physical| it.name.to_lowercase().contains(&wanted);
            match devices.iter().find(by_uuid) {
                Some(device) => vec![device],
                None => devices.iter().filter(by_name).collect(),
            }
        }
    };
    match found.as_slice() {
        [device] => Ok(device),
        [] => Err(Error::NoDevice(format!("no device is {wish:?}; there is {}", listed(devices)))),
        several => Err(Error::Choice(format!(
            "{wish:?} is the name of {}; say the number or the UUID",
            listed(several.iter().copied())
        ))),
    }
}

fn listed<'a>(devices: impl IntoIterator<Item = &'a Physical>) -> String {
    let each = devices.into_iter().map(|it| format!("{} ({}, {})", it.index, it.name, it.uuid));
    each.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(index: usize, name: &str, kind: &'static str, first: u8) -> Physical {
        let mut bytes = [0; 16];
        bytes[0] = first;
        Physical {
            index,
            name: name.to_owned(),
            kind,
            driver: String::new(),
            vulkan: String::new(),
            memory_mib: 0,
            uuid: uuid(&bytes),
            raw: vk::PhysicalDevice::null(),
            extensions: Vec::new(),
            nanoseconds_per_tick: 1.0,
        }
    }

    fn three() -> [Physical; 3] {
        [
            device(0, "llvmpipe (LLVM 15)", "cpu", 1),
            device(1, "NVIDIA H200", "discrete", 2),
            device(2, "NVIDIA H200", "discrete", 3),
        ]
    }

    #[test]
    fn unasked_the_first_that_is_no_software_is_taken() {
        assert_eq!(choose(&three(), None).unwrap().index, 1);
        assert_eq!(choose(&three()[..1], None).unwrap().index, 0);
    }

    #[test]
    fn a_device_is_named_by_number_or_part_of_its_name() {
        assert_eq!(choose(&three(), Some("2")).unwrap().index, 2);
        assert_eq!(choose(&three(), Some("LLVM")).unwrap().index, 0);
    }

    #[test]
    fn a_uuid_is_taken_as_nvidia_smi_writes_it_and_without_dashes() {
        let with = Some("GPU-03000000-0000-0000-0000-000000000000");
        assert_eq!(choose(&three(), with).unwrap().index, 2);
        let without = Some("03000000000000000000000000000000");
        assert_eq!(choose(&three(), without).unwrap().index, 2);
    }

    #[test]
    fn a_name_that_two_devices_have_is_refused() {
        assert!(matches!(choose(&three(), Some("h200")), Err(Error::Choice(_))));
    }

    #[test]
    fn a_device_that_is_not_there_is_answered_with_those_that_are() {
        let error = choose(&three(), Some("7")).unwrap_err().to_string();
        assert!(error.contains("llvmpipe"), "{error}");
    }
}
