//! The attributes of `KVM_ARM_VCPU_TIMER_CTRL`: the PPIs of the timers' outputs, which all vCPUs of a VM share.

use crate::errno::{Result, fail};
use crate::user;
use crate::vcpu::VcpuObject;
use kvm_bindings::*;
use slat_gic::interrupt::{PRIVATE, SGIS};

/// Returns the index of the timer that an attribute names.
///
/// # Errors
/// `ENXIO` for a timer that does not exist.
fn place(attribute: &kvm_device_attr) -> Result<usize> {
    match (attribute.group, u32::try_from(attribute.attr)) {
        (KVM_ARM_VCPU_TIMER_CTRL, Ok(KVM_ARM_VCPU_TIMER_IRQ_VTIMER)) => Ok(0),
        (KVM_ARM_VCPU_TIMER_CTRL, Ok(KVM_ARM_VCPU_TIMER_IRQ_PTIMER)) => Ok(1),
        _ => fail(libc::ENXIO),
    }
}

impl VcpuObject {
    /// Checks that the attribute's timer exists.
    ///
    /// # Errors
    /// `ENXIO`.
    pub(crate) fn has_timer(&self, attribute: &kvm_device_attr) -> Result<()> {
        place(attribute).map(drop)
    }

    /// Writes the PPI of a timer to the client's memory.
    ///
    /// # Errors
    /// `ENXIO`, `EFAULT`.
    pub(crate) fn get_timer_ppi(&self, attribute: &kvm_device_attr) -> Result<()> {
        let place = place(attribute)?;
        let _call = self.vm.begin()?;
        let interrupts = &self.vm.interrupts;
        let ppi = interrupts.arch.timer_ppis(|timers| timers.ppis[place]);
        user::write(attribute.addr, &ppi)
    }

    /// Sets the PPI of a timer of all vCPUs.
    ///
    /// # Errors
    /// `EINVAL` without GIC and for a number that is no PPI, `ENXIO` for an unknown timer, `EBUSY` after a vCPU has
    /// run, `EFAULT`.
    pub(crate) fn set_timer_ppi(&self, attribute: &kvm_device_attr) -> Result<()> {
        let _call = self.vm.begin()?;
        let place = place(attribute)?;
        let interrupts = &self.vm.interrupts;
        if !interrupts.exist() {
            return fail(libc::EINVAL);
        }
        let ppi: u32 = user::read(attribute.addr)?;
        if !(SGIS..PRIVATE).contains(&ppi) {
            return fail(libc::EINVAL);
        }
        interrupts.arch.timer_ppis(|timers| {
            if timers.are_fixed {
                return fail(libc::EBUSY);
            }
            timers.ppis[place] = ppi;
            Ok(())
        })
    }
}
