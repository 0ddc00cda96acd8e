//! Other programs that experiments start.

use std::path::PathBuf;

/// The other programs that experiments start. If a program is missing, the parts that need it are omitted.
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
