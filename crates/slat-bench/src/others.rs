//! Other programs that experiments start.

use std::path::PathBuf;
use std::process::Command;

/// The programs besides this one that experiments start. If a program is missing, the parts that need it are omitted.
#[derive(Clone, Debug, Default)]
pub struct Others {
    /// The `slat` command.
    pub slat: Option<PathBuf>,
    /// The files that are needed to boot Linux.
    pub linux: Option<Linux>,
}

/// The files for booting Linux under QEMU on slat.
#[derive(Clone, Debug)]
pub struct Linux {
    /// The `slat` command.
    pub slat: PathBuf,
    /// The directory with the kernel and the initrd, which `conformance/vmm/materials` makes.
    pub materials: PathBuf,
    /// The values of the `--set` options of `slat run`.
    pub policies: Vec<String>,
}

/// Returns the version of a QEMU, for example `QEMU 7.2.22`. `None` if `program` is not installed.
pub(crate) fn version_of_qemu(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let said = String::from_utf8(output.stdout).ok()?;
    let number = said.strip_prefix("QEMU emulator version ")?;
    Some(format!("QEMU {}", number.split_whitespace().next()?))
}
