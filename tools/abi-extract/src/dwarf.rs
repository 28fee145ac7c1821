//! Layouts of C types, read from the debug information that the compiler wrote.

use anyhow::{anyhow, bail, Context, Result};
use gimli::{AttributeValue, DebuggingInformationEntry, LittleEndian, UnitOffset};
use object::Object;
use std::collections::HashMap;
use std::sync::Arc;

type Reader = gimli::EndianReader<LittleEndian, Arc<[u8]>>;
type Unit = gimli::Unit<Reader>;
type Entry<'a> = DebuggingInformationEntry<'a, 'a, Reader>;

/// What a field is made of, as far as a layout cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A number, an enum or a flag.
    Scalar,
    /// A pointer, or NVIDIA's 64-bit stand-in for one (`NvP64`).
    Pointer,
    /// A struct or union; its own fields follow it.
    Compound,
}

/// A field, with its path from the outermost struct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Names joined by dots; nothing for an anonymous member; `[]` for "of each element".
    pub path: String,
    /// Bytes from the start of the outermost struct, in the first element of an array.
    pub offset: u32,
    /// Bytes of one element.
    pub size: u32,
    /// Elements, of an array.
    pub count: Option<u32>,
    /// First bit and number of bits, of a bit-field.
    pub bits: Option<(u32, u32)>,
    /// What it is.
    pub kind: Kind,
}

/// A type's size and fields, in order of declaration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Bytes.
    pub size: u32,
    /// Every field at every depth.
    pub fields: Vec<Field>,
}

impl Layout {
    /// The field with this path.
    pub fn field(&self, path: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.path == path)
    }

    /// Eight hex digits that change when anything but a name does.
    pub fn fingerprint(&self) -> String {
        let mut hash: u32 = 0x811c_9dc5;
        let mut eat = |word: u32| {
            for byte in word.to_le_bytes() {
                hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
            }
        };
        eat(self.size);
        for field in self.fields.iter().filter(|field| field.kind != Kind::Compound) {
            let (bit, bits) = field.bits.unwrap_or((0, 0));
            for word in [field.offset, field.size, field.count.unwrap_or(0), bit, bits] {
                eat(word);
            }
            eat(u32::from(field.kind == Kind::Pointer));
        }
        format!("{hash:08x}")
    }
}

/// The debug information of one object file.
pub struct Debug {
    dwarf: gimli::Dwarf<Reader>,
    units: Vec<Unit>,
    variables: HashMap<String, (usize, UnitOffset)>,
}

impl Debug {
    /// Reads it, and notes where each variable's type is.
    pub fn read(file: &object::File<'_>) -> Result<Self> {
        let load = |id: gimli::SectionId| -> Result<Reader> {
            let data = match file.section_by_name(id.name()) {
                Some(section) => crate::relocate::data(file, &section)?,
                None => Vec::new(),
            };
            Ok(Reader::new(Arc::from(data), LittleEndian))
        };
        let dwarf = gimli::Dwarf::load(load)?;
        let mut units = Vec::new();
        let mut headers = dwarf.units();
        while let Some(header) = headers.next()? {
            units.push(dwarf.unit(header)?);
        }
        let mut debug = Self { dwarf, units, variables: HashMap::new() };
        debug.variables = debug.find_variables()?;
        Ok(debug)
    }

    fn find_variables(&self) -> Result<HashMap<String, (usize, UnitOffset)>> {
        let mut variables = HashMap::new();
        for (index, unit) in self.units.iter().enumerate() {
            let mut entries = unit.entries();
            while let Some((_, entry)) = entries.next_dfs()? {
                if entry.tag() != gimli::DW_TAG_variable {
                    continue;
                }
                if let (Some(name), Some(kind)) = (self.name(unit, entry)?, reference(entry)?) {
                    variables.insert(name, (index, kind));
                }
            }
        }
        Ok(variables)
    }

    /// The layout of the type that variable `name` points to.
    pub fn pointee(&self, name: &str) -> Result<Layout> {
        let (index, offset) = *self
            .variables
            .get(name)
            .ok_or_else(|| anyhow!("the object has no debug information for {name}"))?;
        let unit = &self.units[index];
        let entry = unit.entry(offset)?;
        if entry.tag() != gimli::DW_TAG_pointer_type {
            bail!("{name} is no pointer");
        }
        let Some(target) = reference(&entry)? else { bail!("{name} points to void") };
        let mut layout = Layout { size: self.size(unit, target)?, fields: Vec::new() };
        let (target, _) = self.strip(unit, target)?;
        if is_compound(unit.entry(target)?.tag()) {
            self.members(unit, target, ("", 0), &mut layout.fields)
                .with_context(|| format!("layout of {name}"))?;
        }
        Ok(layout)
    }

    fn members(
        &self,
        unit: &Unit,
        of: UnitOffset,
        (prefix, base): (&str, u32),
        fields: &mut Vec<Field>,
    ) -> Result<()> {
        let mut tree = unit.entries_tree(Some(of))?;
        let mut children = tree.root()?.children();
        while let Some(child) = children.next()? {
            let entry = child.entry();
            if entry.tag() == gimli::DW_TAG_member {
                self.member(unit, entry, (prefix, base), fields)?;
            }
        }
        Ok(())
    }

    fn member(
        &self,
        unit: &Unit,
        entry: &Entry<'_>,
        (prefix, base): (&str, u32),
        fields: &mut Vec<Field>,
    ) -> Result<()> {
        let name = self.name(unit, entry)?;
        let kind = reference(entry)?.ok_or_else(|| anyhow!("field {name:?} has no type"))?;
        let path = match (&name, prefix) {
            (None, prefix) => prefix.to_owned(),
            (Some(name), "") => name.clone(),
            (Some(name), prefix) => format!("{prefix}.{name}"),
        };
        let (offset, bits) = self.place(unit, entry, kind)?;
        let offset = base + offset;
        let (element, count) = self.element(unit, kind)?;
        let (target, typedef_is_p64) = self.strip(unit, element)?;
        let tag = unit.entry(target)?.tag();
        let kind = match tag {
            _ if typedef_is_p64 => Kind::Pointer,
            gimli::DW_TAG_pointer_type => Kind::Pointer,
            _ if is_compound(tag) => Kind::Compound,
            gimli::DW_TAG_base_type | gimli::DW_TAG_enumeration_type => Kind::Scalar,
            other => bail!("field {path} is of a kind not understood: {other}"),
        };
        let size = self.size(unit, element)?;
        if name.is_some() {
            fields.push(Field { path: path.clone(), offset, size, count, bits, kind });
        }
        if kind == Kind::Compound {
            let inner = if count.is_some() { format!("{path}[]") } else { path };
            self.members(unit, target, (&inner, offset), fields)?;
        }
        Ok(())
    }

    /// Offset within the parent, and the bits of a bit-field.
    #[allow(clippy::type_complexity)]
    fn place(
        &self,
        unit: &Unit,
        entry: &Entry<'_>,
        kind: UnitOffset,
    ) -> Result<(u32, Option<(u32, u32)>)> {
        let number = |at| -> Result<Option<u32>> {
            Ok(match entry.attr_value(at)? {
                Some(value) => Some(u32::try_from(
                    value.udata_value().ok_or_else(|| anyhow!("{at} is not a number"))?,
                )?),
                None => None,
            })
        };
        if let Some(bit) = number(gimli::DW_AT_data_bit_offset)? {
            let bits = number(gimli::DW_AT_bit_size)?.ok_or_else(|| anyhow!("bits unknown"))?;
            let unit_bits = self.size(unit, kind)? * 8;
            let offset = bit / unit_bits * (unit_bits / 8);
            return Ok((offset, Some((bit - offset * 8, bits))));
        }
        if number(gimli::DW_AT_bit_size)?.is_some() {
            bail!("a bit-field in an older form of DWARF than version 4's; use gcc 11 or newer");
        }
        Ok((number(gimli::DW_AT_data_member_location)?.unwrap_or(0), None))
    }

    /// The element type and the number of elements (all dimensions), if it is an array.
    fn element(&self, unit: &Unit, kind: UnitOffset) -> Result<(UnitOffset, Option<u32>)> {
        let (stripped, p64) = self.strip(unit, kind)?;
        let entry = unit.entry(stripped)?;
        if p64 || entry.tag() != gimli::DW_TAG_array_type {
            return Ok((kind, None));
        }
        let inner = reference(&entry)?.ok_or_else(|| anyhow!("array of nothing"))?;
        let mut count = 1u32;
        let mut tree = unit.entries_tree(Some(stripped))?;
        let mut children = tree.root()?.children();
        while let Some(child) = children.next()? {
            let entry = child.entry();
            let bound = entry.attr_value(gimli::DW_AT_upper_bound)?.and_then(|v| v.udata_value());
            let total = entry.attr_value(gimli::DW_AT_count)?.and_then(|v| v.udata_value());
            count *= u32::try_from(total.or(bound.map(|bound| bound + 1)).unwrap_or(0))?;
        }
        let (inner, deeper) = self.element(unit, inner)?;
        Ok((inner, Some(count * deeper.unwrap_or(1))))
    }

    /// The type below typedefs and qualifiers, and whether one of them was `NvP64`.
    fn strip(&self, unit: &Unit, mut kind: UnitOffset) -> Result<(UnitOffset, bool)> {
        let mut p64 = false;
        loop {
            let entry = unit.entry(kind)?;
            match entry.tag() {
                gimli::DW_TAG_typedef
                | gimli::DW_TAG_const_type
                | gimli::DW_TAG_volatile_type
                | gimli::DW_TAG_atomic_type => {
                    p64 |= self.name(unit, &entry)?.as_deref() == Some("NvP64");
                    kind = reference(&entry)?.ok_or_else(|| anyhow!("a typedef of void"))?;
                }
                _ => return Ok((kind, p64)),
            }
        }
    }

    fn size(&self, unit: &Unit, kind: UnitOffset) -> Result<u32> {
        let (kind, _) = self.strip(unit, kind)?;
        let entry = unit.entry(kind)?;
        if entry.tag() == gimli::DW_TAG_array_type {
            let (inner, count) = self.element(unit, kind)?;
            return Ok(self.size(unit, inner)? * count.unwrap_or(1));
        }
        let size = entry.attr_value(gimli::DW_AT_byte_size)?.and_then(|v| v.udata_value());
        let size = size.ok_or_else(|| {
            let name = self.name(unit, &entry).ok().flatten().unwrap_or_default();
            anyhow!("type {name} is declared but not defined")
        })?;
        Ok(u32::try_from(size)?)
    }

    fn name(&self, unit: &Unit, entry: &Entry<'_>) -> Result<Option<String>> {
        let Some(value) = entry.attr_value(gimli::DW_AT_name)? else { return Ok(None) };
        let text = self.dwarf.attr_string(unit, value)?;
        Ok(Some(gimli::Reader::to_string_lossy(&text)?.into_owned()))
    }
}

fn is_compound(tag: gimli::DwTag) -> bool {
    matches!(tag, gimli::DW_TAG_structure_type | gimli::DW_TAG_union_type)
}

fn reference(entry: &Entry<'_>) -> Result<Option<UnitOffset>> {
    match entry.attr_value(gimli::DW_AT_type)? {
        None => Ok(None),
        Some(AttributeValue::UnitRef(offset)) => Ok(Some(offset)),
        Some(other) => bail!("a reference to a type in a form not understood: {other:?}"),
    }
}
