//! A register of the CPU, as GDB describes registers. The list of registers belongs to the architecture.

/// A register of the CPU, in GDB's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register {
    /// The register's name.
    pub name: &'static str,
    /// The number of bytes of the register.
    pub bytes: usize,
    /// GDB's name of the register's type.
    pub kind: &'static str,
    /// GDB's name of the group to which the register belongs.
    pub feature: &'static str,
}
