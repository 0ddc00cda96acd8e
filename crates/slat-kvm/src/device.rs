//! Devices of `KVM_CREATE_DEVICE` (api.rst 4.79): on x86 there is one type, `KVM_DEV_TYPE_VFIO`.
//!
//! Through this device a VMM tells KVM which VFIO files the VM uses. KVM asks whether their DMA is coherent with the guest's caches, and
//! gives mediated devices a pointer to its VM. Software has no incoherent caches, and mediated devices can use no VM but the
//! kernel's: here the device only checks the files and stores their identity.

use crate::errno::{Error, Result, fail};
use crate::file_id::{self, FileId};
use crate::heap;
use crate::run_page::memfd;
use crate::user;
use crate::vm::VmObject;
use kvm_bindings::*;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A VM's device of the type `KVM_DEV_TYPE_VFIO`.
#[derive(Debug)]
pub struct VfioDevice {
    vm: Arc<VmObject>,
    files: Mutex<Vec<FileId>>,
}

/// The device of a VM, if it has one.
#[derive(Debug, Default)]
pub(crate) struct Devices(Mutex<Weak<VfioDevice>>);

/// A request about the files of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileRequest {
    Add,
    Delete,
}

impl FileRequest {
    fn of(attribute: &kvm_device_attr) -> Result<Self> {
        match (attribute.group, u32::try_from(attribute.attr)) {
            (KVM_DEV_VFIO_FILE, Ok(KVM_DEV_VFIO_FILE_ADD)) => Ok(FileRequest::Add),
            (KVM_DEV_VFIO_FILE, Ok(KVM_DEV_VFIO_FILE_DEL)) => Ok(FileRequest::Delete),
            _ => fail(libc::ENXIO),
        }
    }
}

impl VmObject {
    /// `KVM_CREATE_DEVICE` without `KVM_CREATE_DEVICE_TEST`.
    ///
    /// # Errors
    /// `ENODEV` for a type that x86 does not have, `EBUSY` when the VM has such a device, what the host returns for making a
    /// descriptor.
    pub fn create_device(
        self: &Arc<Self>,
        device: &kvm_create_device,
    ) -> Result<(Arc<VfioDevice>, OwnedFd)> {
        let _call = self.begin()?;
        self.test_device(device)?;
        let mut current = (self.devices.0.lock()).unwrap_or_else(PoisonError::into_inner);
        if current.strong_count() != 0 {
            return fail(libc::EBUSY);
        }
        let fd = memfd("kvm-vfio\0", 0, true)?;
        let device = Arc::new(VfioDevice {
            vm: self.clone(),
            files: Mutex::default(),
        });
        *current = Arc::downgrade(&device);
        Ok((device, fd))
    }

    /// `KVM_CREATE_DEVICE` with `KVM_CREATE_DEVICE_TEST`: checks whether there are devices of the type.
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
    /// Whether this is a forked child: see [`VmObject::is_foreign`].
    pub fn is_foreign(&self) -> bool {
        self.vm.is_foreign()
    }

    /// `KVM_HAS_DEVICE_ATTR`.
    ///
    /// # Errors
    /// `ENXIO` for an unknown attribute.
    pub fn has_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        let _call = self.vm.begin()?;
        FileRequest::of(attribute).map(drop)
    }

    /// `KVM_SET_DEVICE_ATTR`: adds the VFIO file whose descriptor is stored at `attribute.addr` to those that the VM uses, or removes
    /// it.
    ///
    /// # Errors
    /// `ENXIO` for an unknown attribute, `EFAULT`, `EBADF`; `EINVAL` for adding a file that is not VFIO's, `EEXIST` for adding a file
    /// twice, `ENOENT` for deleting a file that was not added, `ENOMEM`.
    pub fn set_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        let _call = self.vm.begin()?;
        let request = FileRequest::of(attribute)?;
        let fd = user::read::<u32>(attribute.addr)? as RawFd;
        let file = FileId::of(fd)?;
        if request == FileRequest::Add && !is_vfio(fd)? {
            return fail(libc::EINVAL);
        }
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let known = files.iter().position(|known| *known == file);
        match (request, known) {
            (FileRequest::Add, None) => {
                heap::reserve(&mut files, 1)?;
                files.push(file);
            }
            (FileRequest::Add, Some(_)) => return fail(libc::EEXIST),
            (FileRequest::Delete, Some(index)) => drop(files.swap_remove(index)),
            (FileRequest::Delete, None) => return fail(libc::ENOENT),
        }
        Ok(())
    }

    /// `KVM_GET_DEVICE_ATTR`: no attribute can be read.
    ///
    /// # Errors
    /// `EPERM`.
    pub fn attribute(&self) -> Result<()> {
        let _call = self.vm.begin()?;
        fail(libc::EPERM)
    }
}

/// Whether a descriptor refers to a VFIO group or a VFIO device: sysfs names the class of a device node.
fn is_vfio(fd: RawFd) -> Result<bool> {
    let stat = file_id::stat(fd)?;
    if stat.st_mode & libc::S_IFMT != libc::S_IFCHR {
        return Ok(false);
    }
    let (major, minor) = (libc::major(stat.st_rdev), libc::minor(stat.st_rdev));
    match std::fs::read_link(format!("/sys/dev/char/{major}:{minor}/subsystem")) {
        Ok(class) => Ok(class.ends_with("vfio") || class.ends_with("vfio-dev")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::new(error.raw_os_error().unwrap_or(libc::EIO))),
    }
}
