//! Other programs that experiments start.

use std::path::PathBuf;

/// The other programs that experiments start. If a program is missing, the experiments' parts that need it are left
/// out.
#[derive(Clone, Debug, Default)]
pub struct Others {
    /// The `slat` command.
    pub slat: Option<PathBuf>,
    /// The files that are needed to boot Linux.
    pub linux: Option<Linux>,
}

/// The files that booting Linux under QEMU on slat needs.
#[derive(Clone, Debug)]
pub struct Linux {
    /// The `slat` command.
    pub slat: PathBuf,
    /// The directory of the kernel and the initrd. `conformance/vmm/materials` makes both.
    pub materials: PathBuf,
    /// The values of the `--set` options of `slat run`.
    pub policies: Vec<String>,
}
