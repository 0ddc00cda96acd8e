//! System registers, fields of PSTATE, and system instructions, with checks of the exception level that uses them (DDI
//! 0487, C5 and D17).

use crate::bits::sign_extend;
use crate::insn::SystemName;
use crate::memory::{AddressTranslation, Invalidation, Machine, Maintenance};
use crate::pstate::Pstate;
use crate::registers::{
    CNTKCTL, CPACR, CPACR_FPEN_SHIFT, CTR, OSLSR, OSLSR_LOCKED, PAR, Rights, SCTLR, SCTLR_DZE,
    SCTLR_UCI, SCTLR_UCT, SCTLR_UMA, TCR, TCR_AS, find,
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
const OSLAR: SystemName = SystemName::new(2, 0, 1, 0, 4);
const CURRENT_EL: SystemName = SystemName::new(3, 0, 4, 2, 2);
const PAN: SystemName = SystemName::new(3, 0, 4, 2, 3);

/// The bits of PSTATE's fields in the system registers DIT, PAN and DAIF.
const DIT_BIT: u64 = 1 << 24;
const PAN_BIT: u64 = 1 << 22;
const DAIF_SHIFT: u32 = 6;
/// DCZID_EL0.DZP: DC ZVA is prohibited.
const DZP: u64 = 1 << 4;

/// The number of bytes that DC ZVA clears. DCZID_EL0 has its logarithm.
pub(crate) const ZERO_BLOCK_BYTES: u32 = 64;

/// Why an access to a system register, or an instruction, is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused<F> {
    Undefined,
    /// EL1 traps the access or the instruction.
    Trapped,
    /// EL1 traps Advanced SIMD and floating point.
    VectorTrap,
    /// An access to memory failed.
    Memory(F),
}

/// Whether EL1 traps an action of EL0: the processor is at EL0, and bit `permission` of SCTLR_EL1 is clear.
pub(crate) fn is_trapped(state: &State, permission: u64) -> bool {
    !state.pstate.el1 && state.system.get(SCTLR) & permission == 0
}

fn need<F>(state: &State, permission: u64) -> Result<(), Refused<F>> {
    match is_trapped(state, permission) {
        true => Err(Refused::Trapped),
        false => Ok(()),
    }
}

/// Refuses an instruction that only EL1 may execute, if the processor is at EL0.
fn privileged<F>(state: &State) -> Result<(), Refused<F>> {
    match state.pstate.el1 {
        true => Ok(()),
        false => Err(Refused::Undefined),
    }
}

/// Whether CPACR_EL1 traps Advanced SIMD and floating point.
#[inline(always)]
pub(crate) fn vectors_are_trapped(state: &State) -> bool {
    let enabled = state.system.get(CPACR) >> CPACR_FPEN_SHIFT & 3;
    !(enabled == 3 || (enabled == 1 && state.pstate.el1))
}

fn check_vectors<F>(state: &State) -> Result<(), Refused<F>> {
    match vectors_are_trapped(state) {
        true => Err(Refused::VectorTrap),
        false => Ok(()),
    }
}

/// Refuses EL0's accesses to timers and counters that CNTKCTL_EL1 does not permit.
fn check_timer<F>(state: &State, name: SystemName) -> Result<(), Refused<F>> {
    const EL0_PHYSICAL: u64 = 1 << 0;
    const EL0_VIRTUAL: u64 = 1 << 1;
    const EL0_VIRTUAL_TIMER: u64 = 1 << 8;
    const EL0_PHYSICAL_TIMER: u64 = 1 << 9;
    let permissions = match name.parts() {
        [3, 3, 14, 0, 0] => EL0_PHYSICAL | EL0_VIRTUAL,
        [3, 3, 14, 0, 1] => EL0_PHYSICAL,
        [3, 3, 14, 0, 2] => EL0_VIRTUAL,
        [3, 3, 14, 2, _] => EL0_PHYSICAL_TIMER,
        [3, 3, 14, 3, _] => EL0_VIRTUAL_TIMER,
        _ => return Ok(()),
    };
    match state.pstate.el1 || state.system.get(CNTKCTL) & permissions != 0 {
        true => Ok(()),
        false => Err(Refused::Trapped),
    }
}

/// Reads a system register.
pub(crate) fn read<M: Machine>(
    state: &State,
    machine: &mut M,
    name: SystemName,
) -> Result<u64, Refused<M::Fault>> {
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
        // DCZID_EL0.BS is the logarithm of the number of words.
        DCZID_EL0 => {
            let size = u64::from((ZERO_BLOCK_BYTES / 4).ilog2());
            size | bit(is_trapped(state, SCTLR_DZE), DZP)
        }
        SP_EL0 | SP_SEL | CURRENT_EL | PAN => {
            privileged(state)?;
            match name {
                // While SP_EL0 is the stack pointer, an access to the register SP_EL0 is UNDEFINED.
                SP_EL0 if !state.pstate.own_stack => return Err(Refused::Undefined),
                SP_EL0 => state.other_sp,
                SP_SEL => state.pstate.own_stack.into(),
                CURRENT_EL => 1 << 2,
                _ => bit(state.pstate.pan, PAN_BIT),
            }
        }
        CTR_EL0 => {
            need(state, SCTLR_UCT)?;
            state.system.get(CTR)
        }
        _ => match find(name) {
            Some(row) => {
                if matches!(row.register().rights, Rights::El1 | Rights::El1Reads) {
                    privileged(state)?;
                }
                state.system.get(row)
            }
            None => {
                check_timer(state, name)?;
                match (machine.read_system(state, name), name.parts()) {
                    (Some(value), _) => value,
                    // Identification registers that do not exist read as zero.
                    (None, [3, 0, 0, 1..=7, _]) if state.pstate.el1 => 0,
                    _ => return Err(Refused::Undefined),
                }
            }
        },
    })
}

/// Writes a system register.
pub(crate) fn write<M: Machine>(
    state: &mut State,
    machine: &mut M,
    name: SystemName,
    value: u64,
) -> Result<(), Refused<M::Fault>> {
    match name {
        NZCV => state.set_nzcv(value as u32 & 0xf << NZCV_SHIFT),
        DIT => state.pstate.dit = value & DIT_BIT != 0,
        FPCR => {
            check_vectors(state)?;
            state.set_fpcr(value as u32);
        }
        FPSR => {
            check_vectors(state)?;
            state.set_fpsr(value as u32);
        }
        DAIF => {
            need(state, SCTLR_UMA)?;
            state.pstate.daif = (value >> DAIF_SHIFT & 15) as u8;
        }
        SP_EL0 | SP_SEL | PAN => {
            privileged(state)?;
            let pstate = state.pstate;
            match name {
                SP_EL0 if !pstate.own_stack => return Err(Refused::Undefined),
                SP_EL0 => state.other_sp = value,
                SP_SEL => state.set_pstate(Pstate {
                    own_stack: value & 1 != 0,
                    ..pstate
                }),
                _ => state.pstate.pan = value & PAN_BIT != 0,
            }
        }
        OSLAR => {
            privileged(state)?;
            let others = state.system.get(OSLSR) & !OSLSR_LOCKED;
            let lock = if value & 1 != 0 { OSLSR_LOCKED } else { 0 };
            state.system.set(OSLSR, others | lock);
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
                check_timer(state, name)?;
                machine
                    .write_system(state, name, value)
                    .ok_or(Refused::Undefined)?;
            }
        },
    }
    Ok(())
}

/// Executes MSR (immediate), which writes a field of PSTATE.
pub(crate) fn set_field<F>(
    state: &mut State,
    op1: u8,
    op2: u8,
    value: u8,
) -> Result<(), Refused<F>> {
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
        (0, 4 | 5) => {
            privileged(state)?;
            match op2 {
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

/// Refuses DC ZVA at EL0, if SCTLR_EL1.DZE does not permit it.
pub(crate) fn check_zero_block<F>(state: &State) -> Result<(), Refused<F>> {
    need(state, SCTLR_DZE)
}

/// Returns the translations that TLBI with operation `op2` and operand `value` invalidates. `None`: the operation is
/// UNDEFINED.
fn tlbi(state: &State, op2: u16, value: u64) -> Option<Invalidation> {
    let space = match state.system.get(TCR) & TCR_AS {
        0 => value >> 48 & 0xff,
        _ => value >> 48,
    } as u16;
    // The operand has bits 55 to 12 of the address; bit 55 is copied to the upper bits.
    let address = sign_extend(value << 12, 56);
    Some(match op2 {
        0 => Invalidation::All,
        2 => Invalidation::Space(space),
        // The manual lets VAE1 and VAAE1 drop the entries of all levels, and VALE1 and VAALE1 only those of the last
        // level. This CPU drops the translations of the page for all four.
        1 | 5 => Invalidation::Page {
            address,
            space: Some(space),
        },
        3 | 7 => Invalidation::Page {
            address,
            space: None,
        },
        _ => return None,
    })
}

/// Executes SYS. Maintenance of data caches has no effect, because memory is always coherent with data caches and
/// devices.
pub(crate) fn instruction<M: Machine>(
    state: &mut State,
    machine: &mut M,
    name: SystemName,
    value: u64,
) -> Result<u64, Refused<M::Fault>> {
    let maintenance = match name.parts() {
        // IC IVAU; DC CVAC, DC CVAU, DC CVAP, DC CIVAC; DC IVAC.
        [1, 3, 7, 5, 1] => Maintenance::Code,
        [1, 3, 7, 10 | 11 | 12 | 14, 1] => Maintenance::Clean,
        [1, 0, 7, 6, 1] => Maintenance::Invalidate,
        _ => return other_instruction(state, machine, name, value),
    };
    match maintenance {
        Maintenance::Invalidate => privileged(state)?,
        _ => need(state, SCTLR_UCI)?,
    }
    let maintained = machine.maintain(state, maintenance, value);
    maintained.map(|()| 0).map_err(Refused::Memory)
}

/// Executes SYS instructions other than cache maintenance by address.
fn other_instruction<M: Machine>(
    state: &mut State,
    machine: &mut M,
    name: SystemName,
    value: u64,
) -> Result<u64, Refused<M::Fault>> {
    privileged(state)?;
    match name.parts() {
        // DC ISW, DC CSW, DC CISW.
        [1, 0, 7, 6 | 10 | 14, 2] => {}
        // IC IALLUIS, IC IALLU.
        [1, 0, 7, crm @ (1 | 5), 0] => machine.invalidate(state, Invalidation::Code, crm == 1),
        // AT S1E1R, S1E1W, S1E0R, S1E0W; AT S1E1RP, S1E1WP.
        [1, 0, 7, crm @ (8 | 9), op2 @ 0..=3] if crm == 8 || op2 < 2 => {
            let translation = AddressTranslation {
                for_el0: op2 >= 2,
                is_write: op2 & 1 != 0,
                with_pan: crm == 9 && state.pstate.pan,
            };
            let par = machine.translate_address(state, translation, value);
            let par = par.map_err(Refused::Memory)?.ok_or(Refused::Undefined)?;
            state.system.set(PAR, par);
        }
        [1, 0, 8, crm @ (3 | 7), op2] => {
            let invalidation = tlbi(state, op2, value).ok_or(Refused::Undefined)?;
            machine.invalidate(state, invalidation, crm == 3);
        }
        _ => return Err(Refused::Undefined),
    }
    Ok(0)
}
