//! The methods of kvm-ioctls that only arm64 has.

use crate::api::{Kvm, VcpuFd, VmFd};
use crate::errno::{Result, fail};
use kvm_bindings::{KVM_VM_TYPE_ARM_IPA_SIZE_MASK, RegList, kvm_device_attr, kvm_vcpu_init};
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
        // As in kvm-ioctls, the bits of `ipa_size` outside of this mask are ignored.
        self.create_vm_with_type((ipa_size & KVM_VM_TYPE_ARM_IPA_SIZE_MASK).into())
    }
}

impl VmFd {
    /// Carries out `KVM_CREATE_IRQCHIP`: creates a GICv2.
    ///
    /// # Errors
    /// `EEXIST` when the VM has an interrupt controller, `EBUSY` when a vCPU has run, `E2BIG` for more than 8 vCPUs.
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

    /// Carries out `KVM_HAS_DEVICE_ATTR` for the VM. Its only attribute is the filter of SMCCC calls
    /// (`KVM_ARM_VM_SMCCC_FILTER`).
    ///
    /// # Errors
    /// `ENXIO` for another attribute.
    pub fn has_device_attr(&self, device_attr: &kvm_device_attr) -> Result<()> {
        self.vm.has_attribute(device_attr)
    }

    /// Carries out `KVM_SET_DEVICE_ATTR` for the VM: chooses what happens to some of the guest's calls of the firmware.
    ///
    /// # Errors
    /// `ENXIO` for another attribute. `EFAULT`. `EINVAL` for padding, an unknown action, an empty range of functions,
    /// or a range beyond the last function. `EEXIST` for a function that an earlier call has chosen, and for a function
    /// of Arm's architecture. `EBUSY` after a vCPU has run. `ENOMEM`.
    pub fn set_device_attr(&self, device_attr: &kvm_device_attr) -> Result<()> {
        self.vm.set_attribute(device_attr)
    }
}

impl VcpuFd {
    /// Carries out `KVM_ARM_VCPU_INIT`.
    ///
    /// # Errors
    /// `EINVAL` for another target than [`VmFd::get_preferred_target`] returns, for a feature that the processor does
    /// not have, and for other features than in an earlier call. `ENOENT` for an unknown feature.
    pub fn vcpu_init(&self, kvi: &kvm_vcpu_init) -> Result<()> {
        self.vcpu.init(kvi)
    }

    /// Carries out `KVM_HAS_DEVICE_ATTR` for the vCPU. The attributes are the PPIs of the timers, and
    /// `KVM_ARM_VCPU_PVTIME_IPA` if the host counts stolen time.
    ///
    /// # Errors
    /// `ENXIO` for another attribute.
    pub fn has_device_attr(&self, device_attr: &kvm_device_attr) -> Result<()> {
        self.vcpu.has_attribute(device_attr)
    }

    /// Carries out `KVM_SET_DEVICE_ATTR` for the vCPU: sets the PPI of a timer of all vCPUs, or the address of the
    /// structure for stolen time.
    ///
    /// # Errors
    /// `ENXIO` for another attribute. `EFAULT`. For the address, `EINVAL` if it is no multiple of 64 or no memslot has
    /// it, and `EEXIST` if the address was set before. For a PPI, `EINVAL` without GIC and for a number that is no PPI,
    /// and `EBUSY` after a vCPU has run.
    pub fn set_device_attr(&self, device_attr: &kvm_device_attr) -> Result<()> {
        self.vcpu.set_attribute(device_attr)
    }

    /// Carries out `KVM_GET_ONE_REG`: writes the register `reg_id` to `data`. Returns the register's size in bytes.
    ///
    /// # Errors
    /// `ENOEXEC` before [`vcpu_init`](Self::vcpu_init). `ENOENT` for an unknown register. `EINVAL` if `data` has less
    /// bytes than the register.
    pub fn get_one_reg(&self, reg_id: u64, data: &mut [u8]) -> Result<usize> {
        let mut value = [0; 16];
        let len = self.vcpu.get_one_reg(reg_id, &mut value)?;
        match data.get_mut(..len) {
            Some(data) => data.copy_from_slice(&value[..len]),
            None => return fail(libc::EINVAL),
        }
        Ok(len)
    }

    /// Carries out `KVM_SET_ONE_REG`: sets the register `reg_id` to `data`. Returns the register's size in bytes.
    ///
    /// # Errors
    /// `ENOEXEC` before [`vcpu_init`](Self::vcpu_init). `ENOENT` for an unknown register. `EINVAL` for a value that the
    /// register cannot have, and if `data` has less bytes than the register.
    pub fn set_one_reg(&self, reg_id: u64, data: &[u8]) -> Result<usize> {
        let mut len = 0;
        self.vcpu.set_one_reg(reg_id, |value| {
            len = value.len();
            match data.get(..len) {
                Some(data) => value.copy_from_slice(data),
                None => return fail(libc::EINVAL),
            }
            Ok(())
        })?;
        Ok(len)
    }

    /// Carries out `KVM_GET_REG_LIST`: writes the ids of all registers to `reg_list`.
    ///
    /// # Errors
    /// `ENOEXEC` before [`vcpu_init`](Self::vcpu_init). `E2BIG` if the list is too short.
    pub fn get_reg_list(&self, reg_list: &mut RegList) -> Result<()> {
        let registers = self.vcpu.registers()?;
        let room = reg_list.as_slice().len();
        if room < registers.len() {
            return fail(libc::E2BIG);
        }
        reg_list.retain({
            let mut kept = 0;
            let count = registers.len();
            move |_| {
                kept += 1;
                kept <= count
            }
        });
        reg_list.as_mut_slice().copy_from_slice(&registers);
        Ok(())
    }
}
