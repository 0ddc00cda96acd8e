//! The calls of a VM that only arm64 has.

use crate::arch::aarch64::state::Power;
use crate::errno::{Result, fail};
use crate::vm::VmObject;
use kvm_bindings::*;

impl VmObject {
    /// Whether a vCPU that is created now can have this id.
    pub(crate) fn allows_vcpu_id(&self, _id: u32) -> bool {
        true
    }

    /// Enables a capability that not every architecture has: `KVM_CAP_ARM_NISV_TO_USER`.
    ///
    /// # Errors
    /// `EINVAL`: there is no such capability.
    pub(crate) fn enable_arch_cap(&self, cap: u32, _argument: u64) -> Result<()> {
        match cap {
            KVM_CAP_ARM_NISV_TO_USER => self.arch.report_nisv(),
            _ => return fail(libc::EINVAL),
        }
        Ok(())
    }

    /// Switches all vCPUs off, because the guest has asked for the end of the system. The client resets them.
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

    /// Refuses `KVM_CREATE_IRQCHIP`.
    ///
    /// # Errors
    /// `ENXIO`, as KVM on a host without GIC.
    pub fn create_irqchip(&self) -> Result<()> {
        let _call = self.begin()?;
        fail(libc::ENXIO)
    }

    /// Refuses `KVM_ARM_SET_DEVICE_ADDR`.
    ///
    /// # Errors
    /// `ENXIO` for the GIC, as KVM on a host without GIC; `ENODEV` for any other device.
    pub fn set_device_address(&self, address: &kvm_arm_device_addr) -> Result<()> {
        let _call = self.begin()?;
        match address.id >> KVM_ARM_DEVICE_ID_SHIFT & u64::from(u16::MAX) {
            device if device == KVM_ARM_DEVICE_VGIC_V2.into() => fail(libc::ENXIO),
            _ => fail(libc::ENODEV),
        }
    }

    /// Refuses `KVM_HAS_DEVICE_ATTR` and `KVM_SET_DEVICE_ATTR` of a VM: it has no attributes.
    ///
    /// # Errors
    /// `ENXIO`.
    pub fn device_attribute(&self) -> Result<()> {
        let _call = self.begin()?;
        fail(libc::ENXIO)
    }
}
