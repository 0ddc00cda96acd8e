//! System registers, fields of PSTATE, and system instructions, with who may use them (DDI 0487, C5 and D17).

use crate::insn::SystemName;
use crate::meaning::ZERO_BLOCK_BYTES;
use crate::memory::Machine;
use crate::pstate::Pstate;
use crate::registers::{
    CPACR, CPACR_FPEN_SHIFT, Rights, SCTLR, SCTLR_DZE, SCTLR_UCI, SCTLR_UCT, SCTLR_UMA, find,
};
use crate::state::{NZCV_SHIFT, State};

const NZCV: SystemName = SystemName::new(3, 3, 4, 2, 0);
const DAIF: SystemName = SystemName::new(3, 3, 4, 2, 1);
const DIT: SystemName = SystemName::new(3, 3, 4, 2, 5);
const FPCR: SystemName = SystemName::new(3, 3, 4, 4, 0);
const FPSR: SystemName = SystemName::new(3, 3, 4, 4, 1);
const CTR_EL0: SystemName = SystemName::new(3, 3, 0, 0, 1);
const DCZID_EL0: SystemName = SystemName::new(3, 3, 0, 0, 7);
const SP_EL0: SystemName = SystemName::new(3, 0, 4, 1, 0);
const SP_SEL: SystemName = SystemName::new(3, 0, 4, 2, 0);
const CURRENT_EL: SystemName = SystemName::new(3, 0, 4, 2, 2);
const PAN: SystemName = SystemName::new(3, 0, 4, 2, 3);
const UAO: SystemName = SystemName::new(3, 0, 4, 2, 4);

/// The bits of the fields of PSTATE in their registers.
const DIT_BIT: u64 = 1 << 24;
const UAO_BIT: u64 = 1 << 23;
const PAN_BIT: u64 = 1 << 22;
const DAIF_SHIFT: u32 = 6;
/// DCZID_EL0.DZP: DC ZVA is prohibited.
const DZP: u64 = 1 << 4;

/// The bits of FPCR that exist: AHP, DN, FZ, RMode, FZ16. Traps of floating-point exceptions do not exist.
const FPCR_WRITABLE: u32 = 0x07c8_0000;
/// The bits of FPSR that exist: QC, and the cumulative exception bits.
const FPSR_WRITABLE: u32 = 0x0800_009f;

/// Why an access or an instruction is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Undefined,
    /// EL1 traps it.
    Trapped,
    /// EL1 traps Advanced SIMD and floating point.
    VectorTrap,
}

/// Whether EL0 lacks the bit of SCTLR_EL1 that permits it something.
pub(crate) fn is_trapped(state: &State, permission: u64) -> bool {
    !state.pstate.el1 && state.system.get(SCTLR) & permission == 0
}

fn need(state: &State, permission: u64) -> Result<(), Refused> {
    match is_trapped(state, permission) {
        true => Err(Refused::Trapped),
        false => Ok(()),
    }
}

/// Refuses to EL0 what only EL1 has.
fn privileged(state: &State) -> Result<(), Refused> {
    match state.pstate.el1 {
        true => Ok(()),
        false => Err(Refused::Undefined),
    }
}

/// Refuses Advanced SIMD and floating point, if CPACR_EL1 says so.
#[inline(always)]
pub(crate) fn check_vectors(state: &State) -> Result<(), Refused> {
    let enabled = state.system.get(CPACR) >> CPACR_FPEN_SHIFT & 3;
    match enabled == 3 || (enabled == 1 && state.pstate.el1) {
        true => Ok(()),
        false => Err(Refused::VectorTrap),
    }
}

/// Reads a system register.
pub(crate) fn read<M: Machine>(
    state: &State,
    machine: &mut M,
    name: SystemName,
) -> Result<u64, Refused> {
    let bit = |is: bool, bit: u64| if is { bit } else { 0 };
    Ok(match name {
        NZCV => state.nzcv().into(),
        DIT => bit(state.pstate.dit, DIT_BIT),
        FPCR => {
            check_vectors(state)?;
            state.fpcr.into()
        }
        FPSR => {
            check_vectors(state)?;
            state.fpsr.into()
        }
        DAIF => {
            need(state, SCTLR_UMA)?;
            u64::from(state.pstate.daif) << DAIF_SHIFT
        }
        // The logarithm of the number of words.
        DCZID_EL0 => {
            let size = u64::from((ZERO_BLOCK_BYTES / 4).ilog2());
            size | bit(is_trapped(state, SCTLR_DZE), DZP)
        }
        SP_EL0 | SP_SEL | CURRENT_EL | PAN | UAO => {
            privileged(state)?;
            match name {
                // With SP_EL0 as the stack pointer, its register is UNDEFINED.
                SP_EL0 if !state.pstate.own_stack => return Err(Refused::Undefined),
                SP_EL0 => state.other_sp,
                SP_SEL => state.pstate.own_stack.into(),
                CURRENT_EL => 1 << 2,
                PAN => bit(state.pstate.pan, PAN_BIT),
                _ => bit(state.pstate.uao, UAO_BIT),
            }
        }
        CTR_EL0 => {
            need(state, SCTLR_UCT)?;
            machine.read_system(state, name).ok_or(Refused::Undefined)?
        }
        _ => match find(name) {
            Some(row) => {
                if matches!(row.register().rights, Rights::El1 | Rights::El1Reads) {
                    privileged(state)?;
                }
                state.system.get(row)
            }
            None => match (machine.read_system(state, name), name.parts()) {
                (Some(value), _) => value,
                // Registers for identification that do not exist are zero.
                (None, [3, 0, 0, 1..=7, _]) if state.pstate.el1 => 0,
                _ => return Err(Refused::Undefined),
            },
        },
    })
}

/// Writes a system register.
pub(crate) fn write<M: Machine>(
    state: &mut State,
    machine: &mut M,
    name: SystemName,
    value: u64,
) -> Result<(), Refused> {
    match name {
        NZCV => state.set_nzcv(value as u32 & 0xf << NZCV_SHIFT),
        DIT => state.pstate.dit = value & DIT_BIT != 0,
        FPCR => {
            check_vectors(state)?;
            state.fpcr = value as u32 & FPCR_WRITABLE;
        }
        FPSR => {
            check_vectors(state)?;
            state.fpsr = value as u32 & FPSR_WRITABLE;
        }
        DAIF => {
            need(state, SCTLR_UMA)?;
            state.pstate.daif = (value >> DAIF_SHIFT & 15) as u8;
        }
        SP_EL0 | SP_SEL | PAN | UAO => {
            privileged(state)?;
            let pstate = state.pstate;
            match name {
                SP_EL0 if !pstate.own_stack => return Err(Refused::Undefined),
                SP_EL0 => state.other_sp = value,
                SP_SEL => state.set_pstate(Pstate {
                    own_stack: value & 1 != 0,
                    ..pstate
                }),
                PAN => state.pstate.pan = value & PAN_BIT != 0,
                _ => state.pstate.uao = value & UAO_BIT != 0,
            }
        }
        CURRENT_EL | DCZID_EL0 | CTR_EL0 => return Err(Refused::Undefined),
        _ => match find(name) {
            Some(row) => match row.register().rights {
                Rights::El1Reads => return Err(Refused::Undefined),
                Rights::El1 | Rights::El0Reads => {
                    privileged(state)?;
                    state.system.write(row, value);
                    machine.system_written(state, name);
                }
                Rights::All => state.system.write(row, value),
            },
            None => {
                machine
                    .write_system(state, name, value)
                    .ok_or(Refused::Undefined)?;
            }
        },
    }
    Ok(())
}

/// Executes MSR of an immediate.
pub(crate) fn set_field(state: &mut State, op1: u8, op2: u8, value: u8) -> Result<(), Refused> {
    let is = value & 1 != 0;
    match (op1, op2) {
        (3, 2) => state.pstate.dit = is,
        (3, 6 | 7) => {
            need(state, SCTLR_UMA)?;
            let daif = state.pstate.daif;
            state.pstate.daif = if op2 == 6 {
                daif | value
            } else {
                daif & !value
            };
        }
        (0, 3..=5) => {
            privileged(state)?;
            match op2 {
                3 => state.pstate.uao = is,
                4 => state.pstate.pan = is,
                _ => state.set_pstate(Pstate {
                    own_stack: is,
                    ..state.pstate
                }),
            }
        }
        _ => return Err(Refused::Undefined),
    }
    Ok(())
}

/// Refuses DC ZVA, if SCTLR_EL1 says so.
pub(crate) fn check_zero_block(state: &State) -> Result<(), Refused> {
    need(state, SCTLR_DZE)
}

/// Executes SYS. Memory is coherent with instruction fetches and devices, so that cache maintenance has no effect.
pub(crate) fn instruction<M: Machine>(
    state: &State,
    machine: &mut M,
    name: SystemName,
    value: u64,
) -> Result<u64, Refused> {
    match name.parts() {
        // IC IVAU, DC CVAC, DC CVAU, DC CVAP, DC CIVAC.
        [1, 3, 7, 5 | 10 | 11 | 12 | 14, 1] => need(state, SCTLR_UCI).map(|()| 0),
        // IC IALLUIS, IC IALLU, DC IVAC, DC ISW, DC CSW, DC CISW.
        [1, 0, 7, 1 | 5, 0] | [1, 0, 7, 6, 1 | 2] | [1, 0, 7, 10 | 14, 2] => {
            privileged(state).map(|()| 0)
        }
        _ => machine
            .system_instruction(state, name, value)
            .ok_or(Refused::Undefined),
    }
}
