//! The type [`Kvm`]: the client's use of `/dev/kvm`.

use super::VmFd;
use super::descriptors::Descriptor;
use crate::errno::{Error, Result, last};
use crate::ioctl::Object;
use crate::system::System;
use crate::words::Jit;
use kvm_ioctls::Cap;
use slat::MmuKind;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// The KVM subsystem; replaces `kvm_ioctls::Kvm`.
#[derive(Debug)]
pub struct Kvm {
    pub(crate) system: Arc<System>,
    fd: OwnedFd,
    mmu: Option<MmuKind>,
    /// The program's choice of which guest code is compiled. `None`: the environment decides.
    jit: Option<Jit>,
}

impl Kvm {
    /// Opens the KVM subsystem. Needs neither `/dev/kvm` nor any privilege.
    ///
    /// # Errors
    /// The host's error for opening a descriptor; `EINVAL` for invalid policies in the environment.
    pub fn new() -> Result<Self> {
        crate::policy::current()?;
        Ok(Kvm::of(System::descriptor(true)?))
    }

    /// Makes the tables of all VMs by the MMU `mmu`. Without this call, the environment chooses the MMU ([`Kvm::new`]).
    /// (`kvm_ioctls` has no such method.)
    #[must_use]
    pub fn with_mmu(self, mmu: MmuKind) -> Self {
        Kvm {
            mmu: Some(mmu),
            ..self
        }
    }

    /// Makes all VMs compile code according to `jit`. Without this call, the environment makes this choice
    /// ([`Kvm::new`]). (`kvm_ioctls` has no such method.)
    #[must_use]
    pub fn with_jit(self, jit: Jit) -> Self {
        Kvm {
            jit: Some(jit),
            ..self
        }
    }

    /// Opens `/dev/kvm` like [`new`](Self::new). `kvm_path` must be `/dev/kvm`, even if that file does not exist, or a
    /// path to the host's KVM device.
    ///
    /// # Errors
    /// The host's error for the path, or for opening a descriptor; `ENOTTY` for a path to any other file; `EINVAL` for
    /// invalid policies in the environment.
    pub fn new_with_path<P>(kvm_path: P) -> Result<Self>
    where
        P: AsRef<CStr>,
    {
        check_path(kvm_path.as_ref())?;
        Kvm::new()
    }

    /// Returns a descriptor. [`from_raw_fd`](FromRawFd::from_raw_fd) makes a `Kvm` of this descriptor, even in a
    /// program that has inherited it.
    ///
    /// # Errors
    /// The host's error for opening a descriptor; `EINVAL` for invalid policies in the environment.
    pub fn open_with_cloexec(close_on_exec: bool) -> Result<RawFd> {
        crate::policy::current()?;
        Ok(System::descriptor(close_on_exec)?.into_raw_fd())
    }

    /// Checks `path` as [`new_with_path`](Self::new_with_path) does, and returns a descriptor as
    /// [`open_with_cloexec`](Self::open_with_cloexec) does.
    ///
    /// # Errors
    /// The host's error for the path, or for opening a descriptor; `ENOTTY` for a path to any other file; `EINVAL` for
    /// invalid policies in the environment.
    pub fn open_with_cloexec_at<P>(path: P, close_on_exec: bool) -> Result<RawFd>
    where
        P: AsRef<CStr>,
    {
        check_path(path.as_ref())?;
        Kvm::open_with_cloexec(close_on_exec)
    }

    fn of(fd: OwnedFd) -> Self {
        Kvm {
            system: Arc::new(System),
            fd,
            mmu: None,
            jit: None,
        }
    }

    /// Carries out `KVM_GET_API_VERSION`.
    pub fn get_api_version(&self) -> i32 {
        self.system.api_version()
    }

    /// Carries out `KVM_CHECK_EXTENSION` for the capability whose number is `c`.
    pub fn check_extension_raw(&self, c: std::os::raw::c_ulong) -> i32 {
        self.system.check_extension(c)
    }

    /// Carries out `KVM_CHECK_EXTENSION`.
    pub fn check_extension_int(&self, c: Cap) -> i32 {
        self.check_extension_raw(c as std::os::raw::c_ulong)
    }

    /// Whether the capability `c` exists.
    pub fn check_extension(&self, c: Cap) -> bool {
        self.check_extension_int(c) > 0
    }

    /// Carries out `KVM_GET_VCPU_MMAP_SIZE`.
    ///
    /// # Errors
    /// No error can happen.
    pub fn get_vcpu_mmap_size(&self) -> Result<usize> {
        Ok(self.system.vcpu_mmap_size())
    }

    /// Returns the recommended number of vCPUs (`KVM_CAP_NR_VCPUS`).
    pub fn get_nr_vcpus(&self) -> usize {
        self.check_extension_int(Cap::NrVcpus) as usize
    }

    /// Returns the number of memory slots that one VM can have.
    pub fn get_nr_memslots(&self) -> usize {
        self.check_extension_int(Cap::NrMemslots) as usize
    }

    /// Returns the number of vCPUs that one VM can have.
    pub fn get_max_vcpus(&self) -> usize {
        self.check_extension_int(Cap::MaxVcpus) as usize
    }

    /// Returns the number that is one more than the largest vCPU id.
    pub fn get_max_vcpu_id(&self) -> usize {
        self.check_extension_int(Cap::MaxVcpuId) as usize
    }

    /// Carries out `KVM_CREATE_VM` for a VM of the type `vm_type`.
    ///
    /// # Errors
    /// `EINVAL` for a type that the architecture does not have, and the errors of [`create_vm`](Self::create_vm).
    pub fn create_vm_with_type(&self, vm_type: u64) -> Result<VmFd> {
        let (vm, fd) = self.system.create_vm(vm_type, self.mmu, self.jit)?;
        let fd = Descriptor::new(fd, Object::Vm(vm.clone()))?;
        Ok(VmFd::new(vm, fd, self.system.vcpu_mmap_size()))
    }

    /// Makes a `VmFd` of a duplicate of a VM's descriptor, while the VM has another `VmFd`.
    ///
    /// # Errors
    /// `EBADF` for a closed descriptor, `ENOTTY` for a descriptor that is no VM's; `fd` then stays open.
    ///
    /// # Safety
    /// Nothing else owns `fd`.
    pub unsafe fn create_vmfd_from_rawfd(&self, fd: RawFd) -> Result<VmFd> {
        let vm = |object: &Object| match object {
            Object::Vm(vm) => Some(vm.clone()),
            _ => None,
        };
        // SAFETY: the caller keeps this function's contract.
        let (vm, fd) = unsafe { Descriptor::adopt(fd, vm)? };
        Ok(VmFd::new(vm, fd, self.system.vcpu_mmap_size()))
    }
}

impl AsRawFd for Kvm {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl FromRawFd for Kvm {
    unsafe fn from_raw_fd(fd: RawFd) -> Self {
        // SAFETY: the caller keeps this function's contract.
        Kvm::of(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// Checks that a path is `/dev/kvm`, or leads to the host's KVM device.
fn check_path(path: &CStr) -> Result<()> {
    /// KVM's device number: major 10 (`misc`), minor 232 (Linux' devices.txt).
    const DEVICE: libc::dev_t = libc::makedev(10, 232);
    if path == c"/dev/kvm" {
        return Ok(());
    }
    // SAFETY: all-zero is a valid `stat`.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends with NUL, and the call fills in a live struct.
    if unsafe { libc::stat(path.as_ptr(), &mut stat) } != 0 {
        return Err(last());
    }
    match stat.st_mode & libc::S_IFMT == libc::S_IFCHR && stat.st_rdev == DEVICE {
        true => Ok(()),
        false => Err(Error::new(libc::ENOTTY)),
    }
}
