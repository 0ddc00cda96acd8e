//! The replacement for the text of `/proc/cpuinfo`.

use std::io::BufRead;

/// Returns `None`, which makes programs read the machine's own file: on arm64 the text does not tell whether there is
/// KVM.
pub fn with_virtualization(_: impl BufRead) -> Option<String> {
    None
}
