//! The registers, as GDB numbers them: none, because there is no CPU yet.

use crate::arch::aarch64::cpu::State;
use crate::gdb::Register;

/// All registers, in GDB's order.
pub const REGISTERS: [Register; 0] = [];

/// The number of bytes of the values of all registers, one after another.
pub const BLOCK: usize = 0;

/// Writes the values of all registers to `block`.
pub(crate) fn get(state: &State, _block: &mut [u8; BLOCK]) {
    match *state {}
}

/// Sets a register. Returns `false` for a register that does not exist, or cannot be set.
pub(crate) fn set(state: &mut State, _register: usize, _value: &[u8]) -> bool {
    match *state {}
}
