//! The type [`DeviceFd`]: a client's descriptor of a VM's device.

use super::VmFd;
use super::descriptors::Descriptor;
use crate::abi;
use crate::device::DeviceObject;
use crate::errno::{Result, last};
use crate::ioctl::Object;
use crate::run_page::memfd;
use kvm_bindings::*;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// A device of a VM; replaces `kvm_ioctls::DeviceFd`.
#[derive(Debug)]
pub struct DeviceFd(Device);

#[derive(Debug)]
enum Device {
    Ours(Arc<DeviceObject>, Descriptor),
    /// A descriptor of a file that is no device of this crate. The kernel refuses all device requests to the file.
    Other(OwnedFd),
}

impl DeviceFd {
    /// Carries out `KVM_HAS_DEVICE_ATTR`.
    ///
    /// # Errors
    /// `ENXIO` for an attribute that the device does not have.
    pub fn has_device_attr(&self, device_attr: &kvm_device_attr) -> Result<()> {
        match &self.0 {
            Device::Ours(device, _) => device.has_attribute(device_attr),
            Device::Other(fd) => refusal(fd, abi::KVM_HAS_DEVICE_ATTR, device_attr),
        }
    }

    /// Carries out `KVM_SET_DEVICE_ATTR`.
    ///
    /// # Errors
    /// `ENXIO` for an unknown attribute, `EFAULT`, `EBADF`; `EINVAL` for adding a file that is not VFIO's, `EEXIST` for
    /// adding a file twice, `ENOENT` for deleting a file that was not added, `ENOMEM`.
    pub fn set_device_attr(&self, device_attr: &kvm_device_attr) -> Result<()> {
        match &self.0 {
            Device::Ours(device, _) => device.set_attribute(device_attr),
            Device::Other(fd) => refusal(fd, abi::KVM_SET_DEVICE_ATTR, device_attr),
        }
    }

    /// Carries out `KVM_GET_DEVICE_ATTR`.
    ///
    /// # Errors
    /// `EPERM` for VFIO: no attribute can be read. KVM's errors for interrupt controllers.
    ///
    /// # Safety
    /// `device_attr.addr` is the address of memory of this process, to which the call may write the attribute's value.
    pub unsafe fn get_device_attr(&self, device_attr: &mut kvm_device_attr) -> Result<()> {
        match &self.0 {
            Device::Ours(device, _) => device.get_attribute(device_attr),
            Device::Other(fd) => refusal(fd, abi::KVM_GET_DEVICE_ATTR, device_attr),
        }
    }
}

/// Passes a request to the kernel, which refuses the request. Call when `fd` refers to no device of this crate.
fn refusal(fd: &OwnedFd, request: u32, attribute: &kvm_device_attr) -> Result<()> {
    let attribute: *const kvm_device_attr = attribute;
    // SAFETY: the struct lives, and the kernel only reads it.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request as libc::Ioctl, attribute) } {
        0 => Ok(()),
        _ => Err(last()),
    }
}

impl VmFd {
    /// Carries out `KVM_CREATE_DEVICE`. With `KVM_CREATE_DEVICE_TEST`, creates no device and returns a `DeviceFd` that
    /// refuses all requests.
    ///
    /// # Errors
    /// `ENODEV` for a type that the architecture does not have, `EBUSY` or `EEXIST` when the VM has such a device.
    pub fn create_device(&self, device: &mut kvm_create_device) -> Result<DeviceFd> {
        if device.flags & KVM_CREATE_DEVICE_TEST != 0 {
            self.vm.test_device(device)?;
            return Ok(DeviceFd(Device::Other(memfd(c"kvm-device", 0, true)?)));
        }
        let (object, fd) = self.vm.create_device(device)?;
        device.fd = fd.as_raw_fd() as u32;
        let descriptor = Descriptor::new(fd, Object::Device(object.clone()))?;
        Ok(DeviceFd(Device::Ours(object, descriptor)))
    }
}

impl AsRawFd for DeviceFd {
    fn as_raw_fd(&self) -> RawFd {
        match &self.0 {
            Device::Ours(_, descriptor) => descriptor.as_raw_fd(),
            Device::Other(fd) => fd.as_raw_fd(),
        }
    }
}

impl FromRawFd for DeviceFd {
    unsafe fn from_raw_fd(fd: RawFd) -> Self {
        let device = |object: &Object| match object {
            Object::Device(device) => Some(device.clone()),
            _ => None,
        };
        // SAFETY: the caller keeps this function's contract.
        DeviceFd(match unsafe { Descriptor::adopt(fd, device) } {
            Ok((device, descriptor)) => Device::Ours(device, descriptor),
            // SAFETY: the caller keeps this function's contract, and `adopt` has not taken `fd`.
            Err(_) => Device::Other(unsafe { OwnedFd::from_raw_fd(fd) }),
        })
    }
}
