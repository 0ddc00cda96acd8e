//! [`GuestMemfdFd`].

use crate::errno::Result;
use crate::guest_memfd::GuestMemfd;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Private memory of a VM. kvm-ioctls gives the bare descriptor, on which the kernel's `fallocate` works; here it is a method.
/// The memory goes when this is dropped.
#[derive(Debug)]
pub struct GuestMemfdFd {
    guest_memfd: Arc<GuestMemfd>,
    fd: OwnedFd,
}

impl GuestMemfdFd {
    pub(super) fn new((guest_memfd, fd): (Arc<GuestMemfd>, OwnedFd)) -> Self {
        GuestMemfdFd { guest_memfd, fd }
    }

    /// `fallocate` on the descriptor: allocates the pages of a range, or, with `FALLOC_FL_PUNCH_HOLE`, gives them back.
    ///
    /// # Errors
    /// As for [`GuestMemfd::fallocate`].
    pub fn fallocate(&self, mode: i32, offset: i64, len: i64) -> Result<()> {
        self.guest_memfd.fallocate(mode, offset, len)
    }
}

impl AsRawFd for GuestMemfdFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
