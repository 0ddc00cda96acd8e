//! The calls of a VM that only arm64 has.

use crate::arch::aarch64::eager_split;
use crate::arch::aarch64::identification::Identification;
use crate::arch::aarch64::state::Power;
use crate::errno::{Result, fail};
use crate::user;
use crate::vm::VmObject;
use kvm_bindings::*;
use std::sync::atomic::Ordering;

impl VmObject {
    /// Whether a vCPU that is created now can have this id.
    pub(crate) fn allows_vcpu_id(&self, _id: u32) -> bool {
        true
    }

    /// Enables a capability that not every architecture has: `KVM_CAP_ARM_NISV_TO_USER`, `KVM_CAP_ARM_SYSTEM_SUSPEND`,
    /// `KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE`, `KVM_CAP_ARM_WRITABLE_IMP_ID_REGS`.
    ///
    /// # Errors
    /// `EINVAL`: for an unknown capability, for enabling `KVM_CAP_ARM_WRITABLE_IMP_ID_REGS` when there are vCPUs, and
    /// in the cases of [`eager_split::set_chunk`].
    pub(crate) fn enable_arch_cap(&self, cap: u32, argument: u64) -> Result<()> {
        match cap {
            KVM_CAP_ARM_NISV_TO_USER => self.arch.report_nisv(),
            KVM_CAP_ARM_SYSTEM_SUSPEND => self.arch.allow_suspend(),
            KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE => {
                return eager_split::set_chunk(&self.engine, argument);
            }
            KVM_CAP_ARM_WRITABLE_IMP_ID_REGS => {
                return self.before_vcpus(|| {
                    self.arch.settings().allow_implementation();
                    Ok(())
                });
            }
            _ => return fail(libc::EINVAL),
        }
        Ok(())
    }

    /// Switches all vCPUs off. Call when the guest has asked for the end of the system. The client is expected to reset
    /// the vCPUs.
    pub(crate) fn stop_vcpus(&self) {
        for vcpu in self.interrupts.vcpus.read().iter() {
            vcpu.arch.set_power(Power::Off);
            vcpu.notice();
        }
    }

    /// Carries out `KVM_ARM_PREFERRED_TARGET`: returns the target for which a client should initialise vCPUs, without
    /// features. As in KVM, it is the generic target on every processor.
    ///
    /// # Errors
    /// `EIO` in a forked child. Every call of a VM returns this error.
    pub fn preferred_target(&self) -> Result<kvm_vcpu_init> {
        let _call = self.begin()?;
        Ok(kvm_vcpu_init {
            target: KVM_ARM_TARGET_GENERIC_V8,
            ..Default::default()
        })
    }

    /// Carries out `KVM_HAS_DEVICE_ATTR`: the VM's only attribute is the filter of SMCCC calls.
    ///
    /// # Errors
    /// `ENXIO` for another attribute.
    pub fn has_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        let _call = self.begin()?;
        match (attribute.group, attribute.attr) {
            (KVM_ARM_VM_SMCCC_CTRL, filter) if filter == KVM_ARM_VM_SMCCC_FILTER.into() => Ok(()),
            _ => fail(libc::ENXIO),
        }
    }

    /// Carries out `KVM_SET_DEVICE_ATTR`: chooses what happens to some of the guest's calls
    /// (`KVM_ARM_VM_SMCCC_FILTER`).
    ///
    /// # Errors
    /// `ENXIO` for another attribute. `EFAULT`. `EINVAL` for padding, an unknown action, an empty range of functions,
    /// or a range beyond the last function. `EEXIST` if the filter already has one of the functions, or if one belongs
    /// to Arm's architecture. `EBUSY` after a vCPU has run. `ENOMEM`.
    pub fn set_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        self.has_attribute(attribute)?;
        let filter: kvm_smccc_filter = user::read(attribute.addr)?;
        let _call = self.begin()?;
        self.arch.settings().add_filter(&filter)
    }

    /// Checks that no vCPU runs. A call whose effect a running vCPU could notice is refused otherwise.
    ///
    /// # Errors
    /// `EBUSY`.
    pub(crate) fn check_rest(&self) -> Result<()> {
        let vcpus = self.vcpus();
        let mut runners = vcpus.iter().map(|vcpu| &vcpu.runner);
        match runners.any(|runner| runner.load(Ordering::SeqCst) != 0) {
            true => fail(libc::EBUSY),
            false => Ok(()),
        }
    }

    /// Carries out `KVM_ARM_SET_COUNTER_OFFSET`: sets the offset of the virtual counter and of the physical one. Later
    /// writes of these counters have no effect.
    ///
    /// # Errors
    /// `EINVAL` if the reserved field is not zero. `EBUSY` while a vCPU runs.
    pub(crate) fn set_counter_offset(&self, offset: &kvm_arm_counter_offset) -> Result<()> {
        let _call = self.begin()?;
        if offset.reserved != 0 {
            return fail(libc::EINVAL);
        }
        self.check_rest()?;
        self.arch.counter_offsets.set_both(offset.counter_offset);
        Ok(())
    }

    /// Carries out `KVM_ARM_GET_REG_WRITABLE_MASKS`: returns the bits that a client may change of the registers that
    /// identify the processor.
    ///
    /// # Errors
    /// `EINVAL` for reserved fields, and for another range than `KVM_ARM_FEATURE_ID_RANGE`.
    pub fn writable_masks(
        &self,
        range: &reg_mask_range,
    ) -> Result<[u64; KVM_ARM_FEATURE_ID_RANGE_SIZE as usize]> {
        let _call = self.begin()?;
        match range.range == KVM_ARM_FEATURE_ID_RANGE && range.reserved == [0; 13] {
            true => Ok(Identification::writable_masks()),
            false => fail(libc::EINVAL),
        }
    }
}
