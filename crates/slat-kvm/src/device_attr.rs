//! Device attributes: `KVM_HAS_DEVICE_ATTR` and its kin on `/dev/kvm` and on vCPUs.
//!
//! | object | group | attribute |
//! |---|---|---|
//! | `/dev/kvm` | 0 | `KVM_X86_XCOMP_GUEST_SUPP`: what a guest's XCR0 can hold |
//! | vCPU | `KVM_VCPU_TSC_CTRL` | `KVM_VCPU_TSC_OFFSET`: guest TSC less the host's |

use crate::cpuid;
use crate::errno::{Result, fail};
use crate::system::System;
use crate::vcpu::VcpuObject;
use kvm_bindings::*;

impl System {
    /// Reads an attribute of `/dev/kvm`.
    ///
    /// # Errors
    /// `ENXIO` for one that does not exist.
    pub fn device_attribute(&self, attribute: &kvm_device_attr) -> Result<u64> {
        match (attribute.group, u32::try_from(attribute.attr)) {
            (0, Ok(KVM_X86_XCOMP_GUEST_SUPP)) => Ok(cpuid::supported_xcr0()),
            _ => fail(libc::ENXIO),
        }
    }
}

/// Whether a vCPU has an attribute.
///
/// # Errors
/// `ENXIO` if not.
fn check(attribute: &kvm_device_attr) -> Result<()> {
    match (attribute.group, u32::try_from(attribute.attr)) {
        (KVM_VCPU_TSC_CTRL, Ok(KVM_VCPU_TSC_OFFSET)) => Ok(()),
        _ => fail(libc::ENXIO),
    }
}

impl VcpuObject {
    /// `KVM_HAS_DEVICE_ATTR`.
    ///
    /// # Errors
    /// `ENXIO` for an attribute that does not exist.
    pub fn has_device_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        let _call = self.vm.begin()?;
        check(attribute)
    }

    /// `KVM_GET_DEVICE_ATTR`: the value.
    ///
    /// # Errors
    /// `ENXIO` for an attribute that does not exist.
    pub fn device_attribute(&self, attribute: &kvm_device_attr) -> Result<u64> {
        check(attribute)?;
        Ok(self.lock()?.machine.tsc.offset())
    }

    /// `KVM_SET_DEVICE_ATTR`, to the value that `read` finds at an address in the client's memory.
    ///
    /// # Errors
    /// `ENXIO` for an attribute that does not exist, and what `read` answers.
    pub fn set_device_attribute(
        &self,
        attribute: &kvm_device_attr,
        read: impl FnOnce(u64) -> Result<u64>,
    ) -> Result<()> {
        check(attribute)?;
        let offset = read(attribute.addr)?;
        let mut inner = self.lock()?;
        let machine = &mut inner.machine;
        machine.vm.clock.set_tsc_offset(&mut machine.tsc, offset);
        inner.machine.clock_page_changed();
        Ok(())
    }
}
