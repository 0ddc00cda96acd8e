//! Other programs that experiments start.

use std::path::PathBuf;

/// The other programs that experiments start. If a program is missing, the parts of experiments that need it are left
/// out.
#[derive(Clone, Debug, Default)]
pub struct Others {
    /// The `slat` command.
    pub slat: Option<PathBuf>,
    /// The files for booting Linux.
    pub linux: Option<Linux>,
}

/// The files that booting Linux under QEMU on slat needs.
#[derive(Clone, Debug)]
pub struct Linux {
    /// The `slat` command.
    pub slat: PathBuf,
    /// Directory of the kernel and initrd made by `conformance/vmm/materials`.
    pub materials: PathBuf,
    /// The values of the `--set` options of `slat run`.
    pub policies: Vec<String>,
}
