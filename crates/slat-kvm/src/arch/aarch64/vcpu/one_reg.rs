//! Registers by id: `KVM_GET_ONE_REG`, `KVM_SET_ONE_REG` and `KVM_GET_REG_LIST` (api.rst 4.68, "ARM registers").
//!
//! An id consists of the register's size, its group, and its number in the group. This file has four groups. The number
//! of a core register is its offset in `kvm_regs`. The number of a system register consists of the fields of its name.
//! The registers of the firmware and of its optional services have consecutive numbers.

use crate::arch::aarch64::firmware;
use crate::arch::aarch64::identification::IdRegister;
use crate::arch::aarch64::settings::SERVICE_REGISTERS;
use crate::errno::{Result, fail};
use crate::vcpu::{Inner, VcpuObject};
use kvm_bindings::*;
use slat_a64::{Pstate, State, SystemName};
use std::mem::offset_of;

/// The bits of an id that name the architecture, the size, and the group.
const KIND: u64 = !0xffff;
const CORE_U32: u64 = KVM_REG_ARM64 | KVM_REG_SIZE_U32 | KVM_REG_ARM_CORE as u64;
const CORE_U64: u64 = KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64;
const CORE_U128: u64 = KVM_REG_ARM64 | KVM_REG_SIZE_U128 | KVM_REG_ARM_CORE as u64;
const SYSTEM: u64 = KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM64_SYSREG as u64;
const FIRMWARE: u64 = KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_FW as u64;
const SERVICES: u64 = KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_FW_FEAT_BMAP as u64;

const SPSR_EL1: SystemName = SystemName::new(3, 0, 4, 0, 0);
const ELR_EL1: SystemName = SystemName::new(3, 0, 4, 0, 1);
/// OSLSR_EL1, and its bit OSLK: the guest's lock of its debug registers.
const OSLSR_EL1: SystemName = SystemName::new(2, 0, 1, 1, 4);
const OSLK: u64 = 1 << 1;

/// A core register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Core {
    X(usize),
    /// SP_EL0 or, with `true`, SP_EL1.
    Sp(bool),
    Pc,
    Pstate,
    Elr,
    Spsr,
    /// The saved program status of an AArch32 mode, which this processor does not have. The register is always zero.
    AbsentSpsr,
    V(usize),
    Fpsr,
    Fpcr,
}

/// The number of elements of `kvm_regs::spsr`.
const SPSRS: usize = 5;

/// Returns the number of a core register in its group: the offset of its field in `kvm_regs`, in words of 4 bytes.
const fn word(offset: usize) -> u64 {
    offset as u64 / 4
}

impl Core {
    /// Returns all core registers with their ids.
    fn all() -> impl Iterator<Item = (u64, Core)> {
        const REGS: usize = offset_of!(kvm_regs, regs);
        const FP: usize = offset_of!(kvm_regs, fp_regs);
        let x = (0..31).map(|n| {
            let at = REGS + offset_of!(user_pt_regs, regs) + 8 * n;
            (CORE_U64 | word(at), Core::X(n))
        });
        let special = [
            (REGS + offset_of!(user_pt_regs, sp), Core::Sp(false)),
            (REGS + offset_of!(user_pt_regs, pc), Core::Pc),
            (REGS + offset_of!(user_pt_regs, pstate), Core::Pstate),
            (offset_of!(kvm_regs, sp_el1), Core::Sp(true)),
            (offset_of!(kvm_regs, elr_el1), Core::Elr),
        ];
        let special = special.map(|(at, register)| (CORE_U64 | word(at), register));
        let spsr = (0..SPSRS).map(|n| {
            let at = offset_of!(kvm_regs, spsr) + 8 * n;
            let register = if n == 0 { Core::Spsr } else { Core::AbsentSpsr };
            (CORE_U64 | word(at), register)
        });
        let v = (0..32).map(|n| {
            let at = FP + offset_of!(user_fpsimd_state, vregs) + 16 * n;
            (CORE_U128 | word(at), Core::V(n))
        });
        let float = [
            (FP + offset_of!(user_fpsimd_state, fpsr), Core::Fpsr),
            (FP + offset_of!(user_fpsimd_state, fpcr), Core::Fpcr),
        ];
        let float = float.map(|(at, register)| (CORE_U32 | word(at), register));
        x.chain(special).chain(spsr).chain(v).chain(float)
    }

    /// Returns the core register that `id` names.
    ///
    /// # Errors
    /// `ENOENT` for a number after the last register. `EINVAL` for a smaller number that names no register, and for a
    /// wrong size.
    fn of(id: u64) -> Result<Self> {
        const END: u64 = word(size_of::<kvm_regs>());
        if id & !KIND >= END {
            return fail(libc::ENOENT);
        }
        match Self::all().find(|(known, _)| *known == id) {
            Some((_, register)) => Ok(register),
            None => fail(libc::EINVAL),
        }
    }

    fn get(self, state: &State) -> u128 {
        match self {
            Core::X(n) => state.x[n].into(),
            Core::Sp(el1) => state.stack_pointer(el1).into(),
            Core::Pc => state.pc.into(),
            Core::Pstate => (state.pstate().bits() | u64::from(state.nzcv())).into(),
            Core::Elr => state.system(ELR_EL1).unwrap_or(0).into(),
            Core::Spsr => state.system(SPSR_EL1).unwrap_or(0).into(),
            Core::AbsentSpsr => 0,
            Core::V(n) => state.v[n],
            Core::Fpsr => state.fpsr.into(),
            Core::Fpcr => state.fpcr.into(),
        }
    }

    /// Sets this core register.
    ///
    /// # Errors
    /// `EINVAL` for a PSTATE of a mode that the processor does not have.
    fn set(self, state: &mut State, value: u128) -> Result<()> {
        let word = value as u64;
        match self {
            Core::X(n) => state.x[n] = word,
            Core::Sp(el1) => state.set_stack_pointer(el1, word),
            Core::Pc => state.pc = word,
            Core::Pstate => match Pstate::returned(word) {
                Some(pstate) => {
                    state.set_pstate(pstate);
                    state.set_nzcv(word as u32);
                }
                None => return fail(libc::EINVAL),
            },
            Core::Elr => {
                state.set_system(ELR_EL1, word);
            }
            Core::Spsr => {
                state.set_system(SPSR_EL1, word);
            }
            Core::AbsentSpsr => {}
            Core::V(n) => state.v[n] = value,
            Core::Fpsr => state.set_fpsr(word as u32),
            Core::Fpcr => state.set_fpcr(word as u32),
        }
        Ok(())
    }
}

/// Whether the API treats this system register as a core register.
fn is_core(name: SystemName) -> bool {
    matches!(name, SPSR_EL1 | ELR_EL1)
}

impl Inner {
    /// Returns an error if the client has not initialised the vCPU yet.
    ///
    /// # Errors
    /// `ENOEXEC`.
    pub(crate) fn check_initialised(&self) -> Result<()> {
        match self.arch.features {
            Some(_) => Ok(()),
            None => fail(libc::ENOEXEC),
        }
    }

    fn get_system(&mut self, name: SystemName) -> Result<u64> {
        if let Some(register) = IdRegister::of(name) {
            return Ok(self.machine.settings().identification().get(register));
        }
        let held = self.cpu.state.system(name).filter(|_| !is_core(name));
        match held.or_else(|| self.machine.system_register(name)) {
            Some(value) => Ok(value),
            None => fail(libc::ENOENT),
        }
    }

    fn set_system(&mut self, name: SystemName, value: u64) -> Result<()> {
        if let Some(register) = IdRegister::of(name) {
            return self.machine.settings().identify(register, value);
        }
        let old = self.get_system(name)?;
        if name == OSLSR_EL1 && (value ^ old) & !OSLK != 0 {
            return fail(libc::EINVAL);
        }
        let is_held = self.cpu.state.system(name).is_some();
        let is_set = match is_held {
            true => slat_a64::is_writable(name) && self.cpu.state.set_system(name, value),
            false => self.machine.set_system_register(name, value),
        };
        // A register that cannot be set accepts only its present value, so that a client can write back the value that
        // it has read.
        match is_set || value == old {
            true => Ok(()),
            false => fail(libc::EINVAL),
        }
    }
}

impl VcpuObject {
    /// Carries out `KVM_GET_ONE_REG`: writes the register's bytes to the beginning of `value`. Returns the number of
    /// these bytes.
    ///
    /// # Errors
    /// `ENOEXEC` before `KVM_ARM_VCPU_INIT`. `ENOENT` for an id that names no register of this vCPU, `EINVAL` for a
    /// core register with another size.
    pub fn get_one_reg(&self, id: u64, value: &mut [u8; 16]) -> Result<usize> {
        let mut inner = self.lock_initialised()?;
        self.accept_start(&mut inner);
        let register = match id & KIND {
            CORE_U32 | CORE_U64 | CORE_U128 => Core::of(id)?.get(&inner.cpu.state),
            SYSTEM => inner.get_system(SystemName(id as u16))?.into(),
            FIRMWARE => firmware::get(&self.vm.arch, id as u16)?.into(),
            SERVICES => inner
                .machine
                .settings()
                .services(id as u16 as usize)?
                .into(),
            _ => return fail(libc::ENOENT),
        };
        *value = register.to_le_bytes();
        Ok(size_of_register(id))
    }

    /// Carries out `KVM_SET_ONE_REG`. `data` fills the slice that it gets with the client's value.
    ///
    /// # Errors
    /// `ENOEXEC` before `KVM_ARM_VCPU_INIT`. `ENOENT` for an id that names no register of this vCPU. `EINVAL` for a
    /// core register with another size, and for a value that the register cannot hold. `EBUSY` for a setting of the VM
    /// that cannot change after a vCPU has run. The errors of `data`.
    pub fn set_one_reg(&self, id: u64, data: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let mut inner = self.lock_initialised()?;
        self.accept_start(&mut inner);
        let mut value = [0; 16];
        data(&mut value[..size_of_register(id).min(16)])?;
        let value = u128::from_le_bytes(value);
        let word = value as u64;
        match id & KIND {
            CORE_U32 | CORE_U64 | CORE_U128 => Core::of(id)?.set(&mut inner.cpu.state, value),
            SYSTEM => {
                let done = inner.set_system(SystemName(id as u16), word);
                // Translation may depend on the register that was set.
                inner.flush_translations();
                done
            }
            FIRMWARE => firmware::set(&self.vm.arch, id as u16, word),
            SERVICES => (inner.machine.settings()).set_services(id as u16 as usize, word),
            _ => fail(libc::ENOENT),
        }
    }

    /// Carries out `KVM_GET_REG_LIST`: returns the ids of all registers.
    ///
    /// # Errors
    /// `ENOEXEC` before `KVM_ARM_VCPU_INIT`.
    pub fn registers(&self) -> Result<Vec<u64>> {
        let inner = self.lock_initialised()?;
        let system = slat_a64::system_registers()
            .filter(|name| !is_core(*name) && IdRegister::of(*name).is_none())
            .chain(IdRegister::names())
            .chain(inner.machine.system_registers())
            .map(|name| SYSTEM | u64::from(name.0));
        let core = Core::all().map(|(id, _)| id);
        let firmware = firmware::NUMBERS.iter().map(|n| FIRMWARE | u64::from(*n));
        let services = (0..SERVICE_REGISTERS).map(|n| SERVICES | n as u64);
        Ok(core.chain(firmware).chain(services).chain(system).collect())
    }
}

/// Returns the size of a register in bytes, which its id contains.
fn size_of_register(id: u64) -> usize {
    1 << ((id & KVM_REG_SIZE_MASK) >> KVM_REG_SIZE_SHIFT)
}
