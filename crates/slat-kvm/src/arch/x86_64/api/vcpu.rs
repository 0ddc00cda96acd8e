//! Calls of a [`VcpuFd`] that only x86 has, besides those for its registers.

use crate::api::VcpuFd;
use crate::errno::Result;
use kvm_bindings::{kvm_enable_cap, kvm_sync_regs, kvm_translation};
use kvm_ioctls::SyncReg;

impl VcpuFd {
    /// Carries out `KVM_ENABLE_CAP` of a vCPU: `KVM_CAP_ENFORCE_PV_FEATURE_CPUID`, `KVM_CAP_HYPERV_SYNIC`,
    /// `KVM_CAP_HYPERV_SYNIC2` and `KVM_CAP_HYPERV_ENFORCE_CPUID`.
    ///
    /// # Errors
    /// `EINVAL` for any other capability, for flags and bad arguments, and for a SynIC without a local APIC.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        self.vcpu.enable_cap(cap)
    }

    /// Carries out `KVM_KVMCLOCK_CTRL`.
    ///
    /// # Errors
    /// `EINVAL` when the guest does not use the clock.
    pub fn kvmclock_ctrl(&self) -> Result<()> {
        self.vcpu.kvmclock_ctrl()
    }

    /// Carries out `KVM_GET_TSC_KHZ`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_tsc_khz(&self) -> Result<u32> {
        self.vcpu.tsc_khz()
    }

    /// Carries out `KVM_SET_TSC_KHZ`.
    ///
    /// # Errors
    /// `EINVAL` for a frequency that the guest's TSC cannot have.
    pub fn set_tsc_khz(&self, freq: u32) -> Result<()> {
        self.vcpu.set_tsc_khz(freq)
    }

    /// Carries out `KVM_TRANSLATE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn translate_gva(&self, gva: u64) -> Result<kvm_translation> {
        self.vcpu.translate(gva)
    }

    /// Carries out `KVM_NMI`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn nmi(&self) -> Result<()> {
        self.vcpu.nmi()
    }

    /// Carries out `KVM_SMI`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn smi(&self) -> Result<()> {
        self.vcpu.smi()
    }

    /// Carries out `KVM_INTERRUPT`, which kvm-ioctls does not have.
    ///
    /// # Errors
    /// `EINVAL` for a vector beyond 255, `ENXIO` if the VM has an 8259, `EEXIST` if a vCPU with a local APIC has not
    /// accepted the last interrupt.
    pub fn interrupt(&self, vector: u32) -> Result<()> {
        self.vcpu.interrupt(vector)
    }

    /// Makes every run store the registers `reg` in `kvm_run`.
    pub fn set_sync_valid_reg(&mut self, reg: SyncReg) {
        self.get_kvm_run().kvm_valid_regs |= reg as u64;
    }

    /// Makes the next run load the registers `reg` from `kvm_run`.
    pub fn set_sync_dirty_reg(&mut self, reg: SyncReg) {
        self.get_kvm_run().kvm_dirty_regs |= reg as u64;
    }

    /// Undoes [`set_sync_valid_reg`](Self::set_sync_valid_reg): runs no longer store the registers `reg` in `kvm_run`.
    pub fn clear_sync_valid_reg(&mut self, reg: SyncReg) {
        self.get_kvm_run().kvm_valid_regs &= !(reg as u64);
    }

    /// Undoes [`set_sync_dirty_reg`](Self::set_sync_dirty_reg): the next run does not load the registers `reg`.
    pub fn clear_sync_dirty_reg(&mut self, reg: SyncReg) {
        self.get_kvm_run().kvm_dirty_regs &= !(reg as u64);
    }

    /// Returns a copy of the registers in `kvm_run`.
    pub fn sync_regs(&self) -> kvm_sync_regs {
        // SAFETY: the mapping is the client's own, and every bit pattern of the registers is valid.
        unsafe { (*self.run.ptr()).s.regs }
    }

    /// Returns the registers in `kvm_run`, which the caller may change.
    pub fn sync_regs_mut(&mut self) -> &mut kvm_sync_regs {
        // SAFETY: every bit pattern of the registers is valid, and the other field of the union is padding.
        unsafe { &mut self.get_kvm_run().s.regs }
    }
}
