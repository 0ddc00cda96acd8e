//! Access to the low half of a 64-bit value, and to EDX:EAX.

use crate::Cpu;

/// Returns the low half of a value.
pub(super) fn low_half(v: u64) -> u64 {
    v & 0xffff_ffff
}

/// Returns the value in EDX:EAX.
pub(super) fn edx_eax(cpu: &Cpu) -> u64 {
    low_half(cpu.state.gpr[0]) | cpu.state.gpr[2] << 32
}

/// Sets EDX:EAX.
pub(super) fn set_edx_eax(cpu: &mut Cpu, v: u64) {
    cpu.state.gpr[0] = low_half(v);
    cpu.state.gpr[2] = v >> 32;
}
