//! Registers by id: `KVM_GET_ONE_REG`, `KVM_SET_ONE_REG` and `KVM_GET_REG_LIST`.
//!
//! On x86 an id names an MSR or one of KVM's own registers. KVM has only one register of its own: the guest's
//! shadow-stack pointer, which exists only with shadow stacks. This CPU has no shadow stacks, so the list of registers
//! is empty.

use crate::errno::{Result, fail};
use crate::vcpu::VcpuObject;
use kvm_bindings::{KVM_REG_SIZE_U64, KVM_REG_X86, kvm_msr_entry};

/// The bits of an id besides the index: architecture, size, type, and bits that have to be clear.
const KIND: u64 = !0xffff_ffff;
/// The type of a register that is an MSR: `KVM_X86_REG_TYPE_MSR`.
const TYPE_MSR: u64 = 2 << 32;

/// Returns the MSR that `id` names.
fn msr(id: u64) -> Result<u32> {
    match id & KIND == KVM_REG_X86 | KVM_REG_SIZE_U64 | TYPE_MSR {
        true => Ok(id as u32),
        false => fail(libc::EINVAL),
    }
}

impl VcpuObject {
    /// Carries out `KVM_GET_ONE_REG`.
    ///
    /// # Errors
    /// `EINVAL` for an id that names no register of this vCPU.
    pub fn get_one_reg(&self, id: u64) -> Result<u64> {
        let mut entries = [kvm_msr_entry {
            index: msr(id)?,
            ..Default::default()
        }];
        match self.get_msrs(&mut entries)? {
            0 => fail(libc::EINVAL),
            _ => Ok(entries[0].data),
        }
    }

    /// Carries out `KVM_SET_ONE_REG`. `data` returns the value.
    ///
    /// # Errors
    /// `EINVAL` for an id that names no register of this vCPU, and for a value that the register cannot hold; the
    /// errors of `data`.
    pub fn set_one_reg(&self, id: u64, data: impl FnOnce() -> Result<u64>) -> Result<()> {
        let entry = kvm_msr_entry {
            index: msr(id)?,
            data: data()?,
            ..Default::default()
        };
        match self.set_msrs(&[entry])? {
            0 => fail(libc::EINVAL),
            _ => Ok(()),
        }
    }
}
