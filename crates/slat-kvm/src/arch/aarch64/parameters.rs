//! The parameters of KVM's module for arm64.

use crate::errno::{Result, fail};

/// The names and the values of the parameters.
const FIXED: &[(&str, &str)] = &[("halt_poll_ns", "0")];
/// The parameters that can be written.
pub(crate) const WRITABLE: &[&str] = &[];

/// Returns the names of all parameters.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    FIXED.iter().map(|(name, _)| *name)
}

/// Returns the value of a parameter, as the file shows it, without the newline.
pub(crate) fn value(name: &str) -> Option<String> {
    let found = FIXED.iter().find(|(known, _)| *known == name);
    found.map(|(_, value)| (*value).to_owned())
}

/// Refuses to write a parameter.
///
/// # Errors
/// `EACCES`.
pub(crate) fn write(_name: &str, _text: &str) -> Result<()> {
    fail(libc::EACCES)
}
