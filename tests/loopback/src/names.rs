//! Names.
pub fn named(text: &str, _release: &str) -> String {
    text.to_owned()
}
