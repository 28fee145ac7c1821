//! Sections of a relocatable object with their relocations applied.

use anyhow::{bail, Result};
use object::{Object, ObjectSection, ObjectSymbol, RelocationKind, RelocationTarget};

/// The section's bytes, every absolute relocation resolved against the object itself.
pub fn data(file: &object::File<'_>, section: &object::Section<'_, '_>) -> Result<Vec<u8>> {
    let mut data = section.uncompressed_data()?.into_owned();
    for (offset, relocation) in section.relocations() {
        let RelocationTarget::Symbol(index) = relocation.target() else {
            bail!("a relocation in {} names no symbol", section.name()?);
        };
        if relocation.kind() != RelocationKind::Absolute {
            continue;
        }
        let symbol = file.symbol_by_index(index)?;
        let value = symbol.address().wrapping_add_signed(relocation.addend());
        let start = usize::try_from(offset)?;
        let width = usize::from(relocation.size() / 8);
        let Some(target) = data.get_mut(start..start + width) else {
            bail!("a relocation reaches past the end of {}", section.name()?);
        };
        target.copy_from_slice(&value.to_le_bytes()[..width]);
    }
    Ok(data)
}
