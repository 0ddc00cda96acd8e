//! The registers for GDB.

/// GDB's name of the architecture.
pub const NAME: &str = "aarch64";

/// The name of the program counter.
pub const PC: &str = "pc";

/// Returns the definitions of the types that GDB's feature uses but does not define, if a register of type `kind` is the
/// first one of its feature: none, because there is no register yet.
pub fn types(_kind: &str, _is_first: bool) -> &'static str {
    ""
}

/// Describes what a vCPU does. `value` returns the value of a register, by its name.
pub fn describe(value: impl Fn(&str) -> u64) -> String {
    format!("at virtual address {:#x}", value(PC))
}
