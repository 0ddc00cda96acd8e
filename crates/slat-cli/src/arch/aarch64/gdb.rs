//! The registers that GDB sees.

/// GDB's name of the architecture.
pub const NAME: &str = "aarch64";

/// The name of the program counter.
pub const PC: &str = "pc";

/// The definitions of types that the core registers have, and GDB does not define: none.
pub const TYPES: &str = "";

/// Describes in words what a vCPU does. `value` returns a register's value, by the register's name.
pub fn describe(value: impl Fn(&str) -> u64) -> String {
    format!("at virtual address {:#x}", value(PC))
}
