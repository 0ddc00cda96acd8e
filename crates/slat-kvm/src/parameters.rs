//! KVM's module parameters: the values in `/sys/module/kvm/parameters`, and the effect of writing them. The
//! architecture has the list of parameters.
//!
//! Each process has its own parameters. A write changes all live VMs of the process, and VMs created later.

use crate::arch;
use crate::errno::{Result, fail};

/// Returns the name of a parameter as a static string; `None` if there is no such parameter. Takes no lock and
/// allocates nothing.
pub fn known(name: &[u8]) -> Option<&'static str> {
    arch::parameter_names().find(|known| known.as_bytes() == name)
}

/// Returns the name of a parameter, and its value as the file shows it, without the newline. `None`: the parameter does
/// not exist.
pub fn read(name: &str) -> Option<(&'static str, String)> {
    let name = known(name.as_bytes())?;
    Some((name, arch::parameter(name)?))
}

/// Whether the parameter `name` can be written.
pub fn is_writable(name: &str) -> bool {
    arch::WRITABLE_PARAMETERS.contains(&name)
}

/// Writes a parameter.
///
/// # Errors
/// `EACCES` for a parameter that cannot be written, `EINVAL` for an invalid value.
pub fn write(name: &str, text: &str) -> Result<()> {
    match is_writable(name) {
        true => arch::set_parameter(name, text.trim_end_matches('\n')),
        false => fail(libc::EACCES),
    }
}
