//! The registers that GDB sees.

/// GDB's name of the architecture.
pub const NAME: &str = "aarch64";

/// The name of the program counter.
pub const PC: &str = "pc";

/// Returns the definitions of the types that one of GDB's register features uses but does not define. On this
/// architecture there are none, because no register is shown yet.
pub fn types(_kind: &str, _is_first: bool) -> &'static str {
    ""
}

/// Describes in words what a vCPU does. `value` returns a register's value, by the register's name.
pub fn describe(value: impl Fn(&str) -> u64) -> String {
    format!("at virtual address {:#x}", value(PC))
}
