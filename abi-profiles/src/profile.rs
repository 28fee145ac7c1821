//! A profile as it is measured and checked in: every fact of one driver release.
//!
//! `abi-extract` writes it, [`crate::store`] reads it, [`crate::compile`] turns it
//! into what a worker needs. Offsets and sizes are bytes of the x86-64 layout,
//! which is the aarch64 one too.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Everything measured of one release. Keys of the maps are the ABI's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// The release that was measured.
    pub release: String,
    /// Ioctls of `nvidia.ko`, by NVIDIA's name; a second struct of one number is `NAME/STRUCT`.
    pub escapes: BTreeMap<String, Escape>,
    /// RM controls, by command.
    pub controls: BTreeMap<u32, Control>,
    /// RM classes, by number.
    pub classes: BTreeMap<u32, Class>,
    /// Commands of `nvidia-uvm.ko`, by the whole ioctl number.
    pub uvm: BTreeMap<u32, Command>,
    /// Commands of `nvidia-modeset.ko`, by their place in `enum NvKmsIoctlCommand`.
    pub nvkms: BTreeMap<u32, Command>,
    /// Commands of `nvidia-drm.ko`, by number after `DRM_COMMAND_BASE`.
    pub drm: BTreeMap<u32, Command>,
    /// Layouts of the structs that the sections above name.
    pub structs: BTreeMap<String, Struct>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Who may call, by the mark RM itself checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// Any caller.
    User,
    /// A caller with CAP_SYS_ADMIN on the host.
    Admin,
    /// A client of the kernel's own.
    Kernel,
    /// RM itself.
    Internal,
}

impl Access {
    /// The word in the files.
    pub fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Admin => "admin",
            Self::Kernel => "kernel",
            Self::Internal => "internal",
        }
    }
}

/// Which way a buffer goes, seen from the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// The driver reads it.
    In,
    /// The driver writes it.
    Out,
    /// Both.
    Inout,
    /// The driver looks at the pointer alone.
    None,
}

impl Direction {
    /// The word in the files.
    pub fn name(self) -> &'static str {
        match self {
            Self::In => "in",
            Self::Out => "out",
            Self::Inout => "inout",
            Self::None => "none",
        }
    }
}

/// A pointer in a block, and how long what it points at is: count × elem.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Pointer {
    /// NVIDIA's name of the field.
    pub field: String,
    /// Its offset; a pointer is 8 bytes.
    pub at: u16,
    /// Which way the bytes go.
    pub dir: Direction,
    /// Bytes of an element; without a count, of the whole.
    pub elem: u32,
    /// The field that counts elements.
    #[serde(default, skip_serializing_if = "is_default")]
    pub count: Option<String>,
    /// Its offset.
    #[serde(default, skip_serializing_if = "is_default")]
    pub count_at: Option<u16>,
    /// Its width in bytes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub count_width: Option<u8>,
    /// The driver multiplies the count by itself.
    #[serde(default, skip_serializing_if = "is_default")]
    pub squared: bool,
    /// The driver takes more than its usual limit of 1 MiB.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unbounded: bool,
}

/// A file descriptor in a block.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// NVIDIA's name of the field.
    pub field: String,
    /// Its offset.
    pub at: u16,
    /// Its width: 4 or 8 bytes.
    pub width: u8,
    /// Kinds of file it may name: `ctl gpu uvm modeset cap`, space-separated.
    pub kinds: String,
    /// Values that mean "no file": `negative`, `zero`, `foreign`, space-separated.
    #[serde(default, skip_serializing_if = "is_default")]
    pub none: String,
}

/// One ioctl of `nvidia.ko`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Escape {
    /// Low 8 bits of the ioctl number.
    pub nr: u32,
    /// The argument's struct.
    #[serde(rename = "struct")]
    pub layout: String,
    /// Bytes of the argument; of an element if `array`.
    pub size: u32,
    /// Offset of RM's status.
    #[serde(default, skip_serializing_if = "is_default")]
    pub status: Option<u16>,
    /// Any positive number of elements.
    #[serde(default, skip_serializing_if = "is_default")]
    pub array: bool,
    /// The argument names another call.
    #[serde(default, skip_serializing_if = "is_default")]
    pub indirect: bool,
    /// Offset of the field that picks a layout: command, class or function.
    #[serde(default, skip_serializing_if = "is_default")]
    pub select: Option<u16>,
    /// Pointers of the argument itself.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pointers: Vec<Pointer>,
    /// Descriptors of the argument itself.
    #[serde(default, skip_serializing_if = "is_default")]
    pub files: Vec<File>,
}

/// One RM control.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Control {
    /// NVIDIA's name of the command; of its handler where no header names it.
    pub name: String,
    /// Bytes of its parameters.
    pub size: u32,
    /// Who may call.
    pub access: Access,
    /// The other `RMCTRL_FLAGS_*` of this release, space-separated.
    #[serde(default, skip_serializing_if = "is_default")]
    pub flags: String,
    /// Rights on the object (`RS_ACCESS_*` bits) that a caller needs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rights: u32,
    /// Fingerprint of the parameters' layout: a field that moves changes it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub layout: String,
    /// RM answers through its converter to this newer command.
    #[serde(default, skip_serializing_if = "is_default")]
    pub converted_to: Option<String>,
    /// Pointers in the parameters.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pointers: Vec<Pointer>,
    /// Descriptors in the parameters.
    #[serde(default, skip_serializing_if = "is_default")]
    pub files: Vec<File>,
    /// Fields that look like pointers or descriptors, space-separated, of which no source
    /// says what RM does with them: such a control is refused.
    #[serde(default, skip_serializing_if = "is_default")]
    pub wild: String,
}

/// Whether RM takes parameters with a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Params {
    /// It ignores the pointer.
    None,
    /// It takes them if given.
    Optional,
    /// It needs them.
    Required,
}

impl Params {
    /// The word in the files.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Optional => "optional",
            Self::Required => "required",
        }
    }
}

/// One RM class.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// NVIDIA's name.
    pub name: String,
    /// Who may allocate.
    pub access: Access,
    /// Whether there are parameters.
    pub params: Params,
    /// Their struct.
    #[serde(default, rename = "struct", skip_serializing_if = "is_default")]
    pub layout: String,
    /// Bytes that RM copies, whatever the caller's size says.
    #[serde(default, skip_serializing_if = "is_default")]
    pub size: u32,
    /// Internal classes it may be a child of, space-separated; `any`, `root`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub parents: String,
    /// The other `RS_FLAGS_*`, space-separated.
    #[serde(default, skip_serializing_if = "is_default")]
    pub flags: String,
    /// Descriptors in the parameters.
    #[serde(default, skip_serializing_if = "is_default")]
    pub files: Vec<File>,
}

/// A command of another module.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Command {
    /// NVIDIA's name.
    pub name: String,
    /// The argument's struct; empty if there is none.
    #[serde(default, rename = "struct", skip_serializing_if = "is_default")]
    pub layout: String,
    /// Bytes of the argument.
    #[serde(default, skip_serializing_if = "is_default")]
    pub size: u32,
    /// Offset of the module's status.
    #[serde(default, skip_serializing_if = "is_default")]
    pub status: Option<u16>,
    /// Pointers of the argument.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pointers: Vec<Pointer>,
    /// Descriptors of the argument.
    #[serde(default, skip_serializing_if = "is_default")]
    pub files: Vec<File>,
}

/// The layout of a struct.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Struct {
    /// Bytes of the whole.
    pub size: u32,
    /// `path@offset:bytes` for each field, space-separated. Arrays are `path[n]@…`, with the
    /// bytes of one element; pointers end in `*`, bit-fields in `/first bit+bits`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fields: String,
}

impl Struct {
    /// Offset and bytes of the field with this path.
    pub fn field(&self, path: &str) -> Option<(u32, u32)> {
        self.fields.split(' ').find_map(|field| {
            let (name, place) = field.split_once('@')?;
            let name = name.split_once('[').map_or(name, |(bare, _)| bare);
            let (offset, size) = place.split_once(':')?;
            let digits = size.find(|c: char| !c.is_ascii_digit()).unwrap_or(size.len());
            (name == path).then_some((offset.parse().ok()?, size[..digits].parse().ok()?))
        })
    }
}

/// A profile file: a root, or the differences from a parent.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FileForm {
    /// The release.
    pub release: String,
    /// The release that it differs from.
    #[serde(default, skip_serializing_if = "is_default")]
    pub parent: Option<String>,
    /// Keys that the parent has and this release has not, by section.
    #[serde(default, skip_serializing_if = "is_default")]
    pub removed: BTreeMap<String, Vec<String>>,
    /// See [`Profile::escapes`]; keys of the numbered sections are `0x` and eight digits.
    #[serde(default, skip_serializing_if = "is_default")]
    pub escapes: BTreeMap<String, Escape>,
    /// See [`Profile::controls`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub controls: BTreeMap<String, Control>,
    /// See [`Profile::classes`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub classes: BTreeMap<String, Class>,
    /// See [`Profile::uvm`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub uvm: BTreeMap<String, Command>,
    /// See [`Profile::nvkms`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub nvkms: BTreeMap<String, Command>,
    /// See [`Profile::drm`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub drm: BTreeMap<String, Command>,
    /// See [`Profile::structs`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub structs: BTreeMap<String, Struct>,
}
