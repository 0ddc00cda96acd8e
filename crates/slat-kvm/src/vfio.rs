//! The state of a device of the type `KVM_DEV_TYPE_VFIO`.
//!
//! Through this device a VMM tells KVM which VFIO files the VM uses. KVM asks each file whether its DMA is coherent
//! with the guest's caches, and gives mediated devices a pointer to its VM. slat's guests have no incoherent caches,
//! and mediated devices can use only the kernel's own VMs. So slat's device only checks the files and stores their
//! identity.

use crate::errno::{Error, Result, fail};
use crate::file_id::{self, FileId};
use crate::heap;
use kvm_bindings::*;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The VFIO files of a VM: the state of its VFIO device.
#[derive(Debug, Default)]
pub(crate) struct VfioFiles(Mutex<Vec<FileId>>);

/// The VFIO device of a VM, if the VM has one.
#[derive(Debug, Default)]
pub(crate) struct Devices(Mutex<Weak<VfioFiles>>);

impl Devices {
    /// Makes the VFIO device. The device exists as long as the returned value is held.
    ///
    /// # Errors
    /// `EBUSY` if there already is a device.
    pub(crate) fn create(&self) -> Result<Arc<VfioFiles>> {
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if current.strong_count() != 0 {
            return fail(libc::EBUSY);
        }
        let files = Arc::default();
        *current = Arc::downgrade(&files);
        Ok(files)
    }
}

/// A request about the files of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileRequest {
    Add,
    Delete,
}

impl FileRequest {
    pub(crate) fn of(attribute: &kvm_device_attr) -> Result<Self> {
        match (attribute.group, u32::try_from(attribute.attr)) {
            (KVM_DEV_VFIO_FILE, Ok(KVM_DEV_VFIO_FILE_ADD)) => Ok(FileRequest::Add),
            (KVM_DEV_VFIO_FILE, Ok(KVM_DEV_VFIO_FILE_DEL)) => Ok(FileRequest::Delete),
            _ => fail(libc::ENXIO),
        }
    }
}

impl VfioFiles {
    /// Adds the VFIO file that `fd` refers to, or removes it.
    ///
    /// # Errors
    /// `EBADF`; `EINVAL` for adding a file that is not VFIO's, `EEXIST` for adding a file twice, `ENOENT` for deleting
    /// a file that was not added, `ENOMEM`.
    pub(crate) fn change(&self, request: FileRequest, fd: RawFd) -> Result<()> {
        let file = FileId::of(fd)?;
        if request == FileRequest::Add && !is_vfio(fd)? {
            return fail(libc::EINVAL);
        }
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
}

/// Whether a descriptor refers to a VFIO group or a VFIO device. sysfs tells the class of a device node.
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
