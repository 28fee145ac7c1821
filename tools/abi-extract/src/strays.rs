//! Finds what looks like a pointer or a descriptor and is in no list: silence is a bug.

use nvguest_abi::profile::Control;

use crate::dwarf::{Kind, Layout};

/// Fields of a control's parameters that look like a pointer or a descriptor and of which
/// nothing says what RM does with them.
pub fn wild(control: &Control, layout: &Layout) -> String {
    let known = |path: &str| {
        control.pointers.iter().any(|pointer| pointer.field == path)
            || control.files.iter().any(|file| file.field == path)
    };
    let fields = layout.fields.iter().filter(|field| {
        let last = field.path.rsplit('.').next().unwrap_or_default().to_lowercase();
        let descriptor = last == "fd" || last.ends_with("descriptor") || last.ends_with("osevent");
        (field.kind == Kind::Pointer || descriptor) && !known(&field.path)
    });
    fields.map(|field| field.path.as_str()).collect::<Vec<_>>().join(" ")
}
