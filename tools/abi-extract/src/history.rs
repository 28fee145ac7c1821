//! The history of the interface, as a document.

use anyhow::Result;
use nvguest_abi::store::Store;

/// The document's text.
pub fn document(_store: &Store) -> Result<String> {
    Ok(String::new())
}
