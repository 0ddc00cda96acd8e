//! The devices of `KVM_CREATE_DEVICE` that only x86 has: none.

use crate::errno::{Result, fail};
use crate::vm::VmObject;
use kvm_bindings::kvm_device_attr;

/// A device of a type that only x86 has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum VmDevice {}

impl VmDevice {
    /// Whether there are devices of this type.
    pub(crate) fn exists(_kind: u32) -> bool {
        false
    }

    /// Returns the name to which the link of the device's descriptor in `/proc/self/fd` points.
    pub(crate) fn link(&self) -> &'static str {
        match *self {}
    }

    /// Carries out `KVM_HAS_DEVICE_ATTR`.
    pub(crate) fn has(self, _: &VmObject, _: &kvm_device_attr) -> Result<()> {
        match self {}
    }

    /// Carries out `KVM_GET_DEVICE_ATTR`.
    pub(crate) fn get(self, _: &VmObject, _: &kvm_device_attr) -> Result<()> {
        match self {}
    }

    /// Carries out `KVM_SET_DEVICE_ATTR`.
    pub(crate) fn set(self, _: &VmObject, _: &kvm_device_attr) -> Result<()> {
        match self {}
    }
}

impl VmObject {
    /// Refuses to create a device.
    ///
    /// # Errors
    /// `ENODEV`.
    pub(crate) fn create_arch_device(&self, _kind: u32) -> Result<VmDevice> {
        fail(libc::ENODEV)
    }
}
