//! A register of the CPU, as GDB describes it. The architecture has the list of registers.

/// A register, as GDB describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register {
    /// The register's name.
    pub name: &'static str,
    /// The register's size.
    pub bytes: usize,
    /// GDB's name of the register's type.
    pub kind: &'static str,
    /// GDB's name of the group to which the register belongs.
    pub feature: &'static str,
}
