//! Devices of `KVM_CREATE_DEVICE` (api.rst 4.79): on x86 there is one type, `KVM_DEV_TYPE_VFIO`.

use crate::errno::{Result, fail};
use crate::run_page::memfd;
use crate::user;
use crate::vfio::{FileRequest, VfioFiles};
use crate::vm::VmObject;
use kvm_bindings::*;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;

/// A VM's device of the type `KVM_DEV_TYPE_VFIO`. The device keeps its VM alive.
#[derive(Debug)]
pub struct VfioDevice {
    vm: Arc<VmObject>,
    files: Arc<VfioFiles>,
}

impl VmObject {
    /// Carries out `KVM_CREATE_DEVICE` without `KVM_CREATE_DEVICE_TEST`.
    ///
    /// # Errors
    /// `ENODEV` for a type that x86 does not have, `EBUSY` if the VM has such a device already, the host's error for
    /// making a descriptor.
    pub fn create_device(
        self: &Arc<Self>,
        device: &kvm_create_device,
    ) -> Result<(Arc<VfioDevice>, OwnedFd)> {
        let _call = self.begin()?;
        self.test_device(device)?;
        let files = self.devices.create()?;
        let fd = memfd(c"kvm-vfio", 0, true)?;
        let vm = self.clone();
        Ok((Arc::new(VfioDevice { vm, files }), fd))
    }

    /// Carries out `KVM_CREATE_DEVICE` with `KVM_CREATE_DEVICE_TEST`: checks whether there are devices of the type.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn test_device(&self, device: &kvm_create_device) -> Result<()> {
        let _call = self.begin()?;
        match device.type_ == kvm_device_type_KVM_DEV_TYPE_VFIO {
            true => Ok(()),
            false => fail(libc::ENODEV),
        }
    }
}

impl VfioDevice {
    /// Whether this is a forked child, in which the VM's locks may be held forever.
    pub fn is_foreign(&self) -> bool {
        self.vm.is_foreign()
    }

    /// Carries out `KVM_HAS_DEVICE_ATTR`.
    ///
    /// # Errors
    /// `ENXIO` for an unknown attribute.
    pub fn has_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        let _call = self.vm.begin()?;
        FileRequest::of(attribute).map(drop)
    }

    /// Carries out `KVM_SET_DEVICE_ATTR`: adds a VFIO file to the files that the VM uses, or removes it. The file's
    /// descriptor is stored at `attribute.addr`.
    ///
    /// # Errors
    /// `ENXIO` for an unknown attribute, `EFAULT`, `EBADF`; `EINVAL` for adding a file that is not VFIO's, `EEXIST` for
    /// adding a file twice, `ENOENT` for deleting a file that was not added, `ENOMEM`.
    pub fn set_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        let _call = self.vm.begin()?;
        let request = FileRequest::of(attribute)?;
        let fd = user::read::<u32>(attribute.addr)? as RawFd;
        self.files.change(request, fd)
    }

    /// Refuses `KVM_GET_DEVICE_ATTR`: no attribute of the device can be read.
    ///
    /// # Errors
    /// `EPERM`.
    pub fn attribute(&self) -> Result<()> {
        let _call = self.vm.begin()?;
        fail(libc::EPERM)
    }
}
