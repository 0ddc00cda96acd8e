//! The methods of kvm-ioctls that only arm64 has.

use crate::api::{Kvm, VmFd};
use crate::errno::Result;
use kvm_bindings::{KVM_VM_TYPE_ARM_IPA_SIZE_MASK, kvm_vcpu_init};
use kvm_ioctls::Cap;

impl Kvm {
    /// Carries out `KVM_CREATE_VM` for a VM whose guest-physical addresses are as wide as possible, as kvm-ioctls does.
    ///
    /// # Errors
    /// `ENOMEM`, or the host's error for opening a descriptor.
    pub fn create_vm(&self) -> Result<VmFd> {
        self.create_vm_with_ipa_size(self.get_host_ipa_limit() as u32)
    }

    /// Returns the most bits that a guest-physical address can have (`KVM_CAP_ARM_VM_IPA_SIZE`).
    pub fn get_host_ipa_limit(&self) -> i32 {
        self.check_extension_int(Cap::ArmVmIPASize)
    }

    /// Carries out `KVM_CREATE_VM` for a VM whose guest-physical addresses have `ipa_size` bits. 0 means 40 bits.
    ///
    /// # Errors
    /// `EINVAL` for less than 32 bits, and for more bits than [`get_host_ipa_limit`](Self::get_host_ipa_limit) returns.
    pub fn create_vm_with_ipa_size(&self, ipa_size: u32) -> Result<VmFd> {
        // As in kvm-ioctls, the other bits are ignored.
        self.create_vm_with_type((ipa_size & KVM_VM_TYPE_ARM_IPA_SIZE_MASK).into())
    }
}

impl VmFd {
    /// Carries out `KVM_CREATE_IRQCHIP`.
    ///
    /// # Errors
    /// `ENXIO`: there is no interrupt controller yet.
    pub fn create_irq_chip(&self) -> Result<()> {
        self.vm.create_irqchip()
    }

    /// Carries out `KVM_ARM_PREFERRED_TARGET`: sets `kvi` to the target for which vCPUs should be initialised.
    ///
    /// # Errors
    /// `EIO` in a forked child.
    pub fn get_preferred_target(&self, kvi: &mut kvm_vcpu_init) -> Result<()> {
        *kvi = self.vm.preferred_target()?;
        Ok(())
    }
}
