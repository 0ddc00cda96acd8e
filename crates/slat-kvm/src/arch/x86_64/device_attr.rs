//! Device attributes of `/dev/kvm` and of vCPUs: `KVM_HAS_DEVICE_ATTR`, `KVM_GET_DEVICE_ATTR`, `KVM_SET_DEVICE_ATTR`.
//!
//! | object | group | attribute |
//! |---|---|---|
//! | `/dev/kvm` | 0 | `KVM_X86_XCOMP_GUEST_SUPP`: the bits that a guest's XCR0 can have |
//! | vCPU | `KVM_VCPU_TSC_CTRL` | `KVM_VCPU_TSC_OFFSET`: guest's TSC minus the scaled TSC of the host |

use crate::arch::x86_64::clock::TscChange;
use crate::arch::x86_64::cpuid;
use crate::errno::{Result, fail};
use crate::system::System;
use crate::vcpu::VcpuObject;
use kvm_bindings::*;

impl System {
    /// Reads an attribute of `/dev/kvm`.
    ///
    /// # Errors
    /// `ENXIO` for an attribute that does not exist.
    pub fn device_attribute(&self, attribute: &kvm_device_attr) -> Result<u64> {
        match (attribute.group, u32::try_from(attribute.attr)) {
            (0, Ok(KVM_X86_XCOMP_GUEST_SUPP)) => Ok(cpuid::supported_xcr0()),
            _ => fail(libc::ENXIO),
        }
    }
}

/// Checks that vCPUs have this attribute.
///
/// # Errors
/// `ENXIO` for an attribute that does not exist.
fn check(attribute: &kvm_device_attr) -> Result<()> {
    match (attribute.group, u32::try_from(attribute.attr)) {
        (KVM_VCPU_TSC_CTRL, Ok(KVM_VCPU_TSC_OFFSET)) => Ok(()),
        _ => fail(libc::ENXIO),
    }
}

impl VcpuObject {
    /// Carries out `KVM_HAS_DEVICE_ATTR`.
    ///
    /// # Errors
    /// `ENXIO` for an attribute that does not exist.
    pub fn has_device_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        let _call = self.vm.begin()?;
        check(attribute)
    }

    /// Carries out `KVM_GET_DEVICE_ATTR`. Returns the value.
    ///
    /// # Errors
    /// `ENXIO` for an attribute that does not exist.
    pub fn device_attribute(&self, attribute: &kvm_device_attr) -> Result<u64> {
        check(attribute)?;
        Ok(self.lock()?.machine.tsc.offset())
    }

    /// Carries out `KVM_SET_DEVICE_ATTR`: sets the attribute to the value that `read` returns. The argument of `read`
    /// is the value's address in the client's memory.
    ///
    /// # Errors
    /// `ENXIO` for an attribute that does not exist, and the errors of `read`.
    pub fn set_device_attribute(
        &self,
        attribute: &kvm_device_attr,
        read: impl FnOnce(u64) -> Result<u64>,
    ) -> Result<()> {
        check(attribute)?;
        let offset = read(attribute.addr)?;
        let change = TscChange::Offset(offset);
        self.lock()?.machine.change_tsc(change);
        Ok(())
    }
}
