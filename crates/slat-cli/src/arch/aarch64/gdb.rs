//! The description of the registers for GDB.

/// GDB's name of the architecture.
pub const NAME: &str = "aarch64";

/// The name of the program counter.
pub const PC: &str = "pc";

/// The XML definitions of register types that GDB itself does not define. On this architecture, there are none.
pub const TYPES: &str = "";

/// Describes in words what a vCPU does. `value` returns a register's value, by the register's name.
pub fn describe(value: impl Fn(&str) -> u64) -> String {
    format!("at virtual address {:#x}", value(PC))
}
