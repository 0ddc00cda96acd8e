//! System registers and system instructions that EL0 may use (DDI 0487, C5).

use crate::insn::SystemName;
use crate::meaning::ZERO_BLOCK_BYTES;
use crate::memory::Machine;
use crate::state::{NZCV_SHIFT, State};

const NZCV: SystemName = SystemName::new(3, 3, 4, 2, 0);
const DIT: SystemName = SystemName::new(3, 3, 4, 2, 5);
const FPCR: SystemName = SystemName::new(3, 3, 4, 4, 0);
const FPSR: SystemName = SystemName::new(3, 3, 4, 4, 1);
const TPIDR_EL0: SystemName = SystemName::new(3, 3, 13, 0, 2);
const TPIDRRO_EL0: SystemName = SystemName::new(3, 3, 13, 0, 3);
const DCZID_EL0: SystemName = SystemName::new(3, 3, 0, 0, 7);

/// PSTATE.DIT in register DIT.
const DIT_BIT: u64 = 1 << 24;
/// The bits of FPCR that exist: AHP, DN, FZ, RMode, FZ16. Traps of floating-point exceptions do not exist.
const FPCR_WRITABLE: u32 = 0x07c8_0000;
/// The bits of FPSR that exist: QC, and the cumulative exception bits.
const FPSR_WRITABLE: u32 = 0x0800_009f;

/// Reads a system register. `None`: the access is UNDEFINED.
pub(crate) fn read<M: Machine>(state: &State, machine: &mut M, name: SystemName) -> Option<u64> {
    Some(match name {
        NZCV => state.nzcv().into(),
        DIT if state.data_independent_timing => DIT_BIT,
        DIT => 0,
        FPCR => state.fpcr.into(),
        FPSR => state.fpsr.into(),
        TPIDR_EL0 => state.tpidr,
        TPIDRRO_EL0 => state.tpidr_read_only,
        // The logarithm of the number of words.
        DCZID_EL0 => (ZERO_BLOCK_BYTES / 4).ilog2().into(),
        _ => return machine.read_system(state, name),
    })
}

/// Writes a system register. `None`: the access is UNDEFINED.
pub(crate) fn write<M: Machine>(
    state: &mut State,
    machine: &mut M,
    name: SystemName,
    value: u64,
) -> Option<()> {
    match name {
        NZCV => state.set_nzcv(value as u32 & 0xf << NZCV_SHIFT),
        DIT => state.data_independent_timing = value & DIT_BIT != 0,
        FPCR => state.fpcr = value as u32 & FPCR_WRITABLE,
        FPSR => state.fpsr = value as u32 & FPSR_WRITABLE,
        TPIDR_EL0 => state.tpidr = value,
        _ => return machine.write_system(state, name, value),
    }
    Some(())
}

/// Executes MSR of an immediate. `None`: it is UNDEFINED at EL0.
pub(crate) fn set_pstate(state: &mut State, op1: u8, op2: u8, value: u8) -> Option<()> {
    match (op1, op2) {
        (3, 2) => state.data_independent_timing = value & 1 != 0,
        _ => return None,
    }
    Some(())
}

/// Executes SYS. Memory is coherent with instruction fetches and devices, so that cache maintenance has no effect.
pub(crate) fn instruction<M: Machine>(
    state: &State,
    machine: &mut M,
    name: SystemName,
    value: u64,
) -> Option<u64> {
    match name.parts() {
        // IC IVAU, DC CVAC, DC CVAU, DC CVAP, DC CIVAC.
        [1, 3, 7, 5 | 10 | 11 | 12 | 14, 1] => Some(0),
        _ => machine.system_instruction(state, name, value),
    }
}
