//! Devices of `KVM_CREATE_DEVICE` (api.rst 4.79): `KVM_DEV_TYPE_VFIO`, readers of the dirty logs ([`log_reader`]), and
//! the types that only one architecture has.

use crate::arch::VmDevice;
use crate::errno::{Result, fail};
use crate::log_reader::{self, LogReader};
use crate::run_page::memfd;
use crate::user;
use crate::vfio::{FileRequest, VfioFiles};
use crate::vm::VmObject;
use kvm_bindings::*;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const VFIO: u32 = kvm_device_type_KVM_DEV_TYPE_VFIO;

/// A VM's device. The device keeps its VM alive.
#[derive(Debug)]
pub struct DeviceObject {
    vm: Arc<VmObject>,
    kind: Kind,
}

/// The type of a device, with its state.
#[derive(Debug)]
enum Kind {
    /// The type `KVM_DEV_TYPE_VFIO`.
    Vfio(Arc<VfioFiles>),
    /// The type [`log_reader::DEVICE`].
    LogReader(Mutex<LogReader>),
    /// A type that only this architecture has.
    OfArch(VmDevice),
}

impl VmObject {
    /// Carries out `KVM_CREATE_DEVICE` without `KVM_CREATE_DEVICE_TEST`.
    ///
    /// # Errors
    /// `ENODEV` for a type that the architecture does not have, `EBUSY` if the VM has a VFIO device already, the
    /// architecture's errors for its devices, the host's error for making a descriptor.
    pub fn create_device(
        self: &Arc<Self>,
        device: &kvm_create_device,
    ) -> Result<(Arc<DeviceObject>, OwnedFd)> {
        let _call = self.begin()?;
        self.test_device(device)?;
        let fd = memfd(c"kvm-device", 0, true)?;
        let kind = match device.type_ {
            VFIO => Kind::Vfio(self.devices.create()?),
            log_reader::DEVICE => Kind::LogReader(Mutex::new(LogReader::new(self)?)),
            other => Kind::OfArch(self.create_arch_device(other)?),
        };
        let vm = self.clone();
        Ok((Arc::new(DeviceObject { vm, kind }), fd))
    }

    /// Carries out `KVM_CREATE_DEVICE` with `KVM_CREATE_DEVICE_TEST`: checks whether there are devices of the type.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn test_device(&self, device: &kvm_create_device) -> Result<()> {
        let _call = self.begin()?;
        match device.type_ {
            VFIO | log_reader::DEVICE => Ok(()),
            other if VmDevice::exists(other) => Ok(()),
            _ => fail(libc::ENODEV),
        }
    }
}

impl DeviceObject {
    /// Whether this is a forked child, in which the VM's locks may be held forever.
    pub fn is_foreign(&self) -> bool {
        self.vm.is_foreign()
    }

    /// Returns the name to which the link of the device's descriptor in `/proc/self/fd` points.
    pub fn link(&self) -> &'static str {
        match &self.kind {
            Kind::Vfio(_) => "anon_inode:kvm-vfio",
            Kind::LogReader(_) => "anon_inode:slat-log-reader",
            Kind::OfArch(device) => device.link(),
        }
    }

    /// Carries out `KVM_HAS_DEVICE_ATTR`.
    ///
    /// # Errors
    /// `ENXIO` for an unknown attribute.
    pub fn has_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        let _call = self.vm.begin()?;
        match &self.kind {
            Kind::Vfio(_) => FileRequest::of(attribute).map(drop),
            Kind::LogReader(_) => LogReader::has(attribute),
            Kind::OfArch(device) => device.has(&self.vm, attribute),
        }
    }

    /// Carries out `KVM_SET_DEVICE_ATTR`. For VFIO: adds a VFIO file to the files that the VM uses, or removes it. The
    /// file's descriptor is in the client's memory. For a reader of the dirty logs: begins or ends an epoch.
    ///
    /// # Errors
    /// `ENXIO` for an unknown attribute, `EFAULT`, the architecture's errors for its devices, [`LogReader`]'s errors; for
    /// VFIO: `EBADF`; `EINVAL` for adding a file that is not VFIO's, `EEXIST` for adding a file twice, `ENOENT` for
    /// deleting a file that was not added, `ENOMEM`.
    pub fn set_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        let _call = self.vm.begin()?;
        match &self.kind {
            Kind::Vfio(files) => {
                let request = FileRequest::of(attribute)?;
                let fd = user::read::<u32>(attribute.addr)? as RawFd;
                files.change(request, fd)
            }
            Kind::LogReader(reader) => lock(reader).set(attribute),
            Kind::OfArch(device) => device.set(&self.vm, attribute),
        }
    }

    /// Carries out `KVM_GET_DEVICE_ATTR`: writes the attribute to the client's memory.
    ///
    /// # Errors
    /// `EPERM` for VFIO: no attribute can be read. The architecture's errors for its devices, [`LogReader`]'s errors.
    pub fn get_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        let _call = self.vm.begin()?;
        match &self.kind {
            Kind::Vfio(_) => fail(libc::EPERM),
            Kind::LogReader(reader) => lock(reader).get(attribute),
            Kind::OfArch(device) => device.get(&self.vm, attribute),
        }
    }
}

fn lock(reader: &Mutex<LogReader>) -> MutexGuard<'_, LogReader> {
    reader.lock().unwrap_or_else(PoisonError::into_inner)
}
