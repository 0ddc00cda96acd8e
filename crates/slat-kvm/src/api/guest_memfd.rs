//! The type [`GuestMemfdFd`]: private guest memory of a VM.

use super::VmFd;
use super::descriptors::{self, Descriptor};
use crate::errno::Result;
use crate::guest_memfd::GuestMemfd;
use crate::ioctl::Object;
use kvm_bindings::kvm_create_guest_memfd;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

/// Guest memory that is a file (a guest_memfd). With kvm-ioctls, clients only have a raw descriptor, and use the system
/// call `fallocate` on it. In slat, clients call the method [`fallocate`](Self::fallocate) instead. Dropping this value
/// releases the memory.
#[derive(Debug)]
pub struct GuestMemfdFd {
    guest_memfd: Arc<GuestMemfd>,
    fd: Descriptor,
}

impl VmFd {
    /// Carries out `KVM_CREATE_GUEST_MEMFD`. Returns a descriptor, which the caller closes. The memory lives as long as
    /// the VM, even after the descriptor is closed, unless the caller makes a [`GuestMemfdFd`] of the descriptor.
    ///
    /// # Errors
    /// `EINVAL` for flags that `KVM_CAP_GUEST_MEMFD_FLAGS` does not have, and for a size that is 0 or not of whole
    /// pages; the host's error for making a file.
    pub fn create_guest_memfd(&self, gmem: kvm_create_guest_memfd) -> Result<RawFd> {
        let (memory, fd) = self.vm.create_guest_memfd(&gmem)?;
        descriptors::give_away(fd, memory, &self.vm)
    }
}

impl GuestMemfdFd {
    /// Takes ownership of a descriptor that [`VmFd::create_guest_memfd`] returned.
    ///
    /// # Errors
    /// `EBADF` for a closed descriptor, `ENOTTY` for any other descriptor.
    ///
    /// # Safety
    /// Nothing else owns `fd`.
    pub unsafe fn from_raw(fd: RawFd) -> Result<Self> {
        let memory = |object: &Object| match object {
            Object::GuestMemfd(memory) => Some(memory.clone()),
            _ => None,
        };
        // SAFETY: the caller keeps this function's contract.
        let (guest_memfd, fd) = unsafe { Descriptor::adopt(fd, memory)? };
        Ok(GuestMemfdFd { guest_memfd, fd })
    }

    /// Allocates the pages of a range, or, with `FALLOC_FL_PUNCH_HOLE`, frees them, as `fallocate` does
    /// on KVM's descriptor.
    ///
    /// # Errors
    /// The errors are those of [`GuestMemfd::fallocate`].
    pub fn fallocate(&self, mode: i32, offset: i64, len: i64) -> Result<()> {
        self.guest_memfd.fallocate(mode, offset, len)
    }
}

impl AsRawFd for GuestMemfdFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
