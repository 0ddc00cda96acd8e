//! The error that creating guest memory may return.

use std::fmt;
use vm_memory::mmap::FromRangesError;

/// The reason why a region was not created, or its dirty logging not changed.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// KVM_SET_USER_MEMORY_REGION failed.
    Memslot {
        /// The memslot's number.
        slot: u32,
        /// The first guest-physical address of the region.
        start: u64,
        /// The size of the region in bytes.
        size: u64,
        /// KVM's error.
        error: slat_kvm::Error,
    },
    /// The memslot with this number is to log dirty pages, but the VM logs to dirty rings, in which only writes of
    /// vCPUs can be recorded.
    Rings(u32),
    /// vm-memory refuses the region, or the host has no memory for it.
    Memory(FromRangesError),
}

impl From<FromRangesError> for Error {
    fn from(error: FromRangesError) -> Self {
        Error::Memory(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Memslot {
                slot,
                start,
                size,
                error,
            } => write!(
                f,
                "setting memslot {slot}, {size:#x} bytes at {start:#x}: {error}; the number must be free, the range in whole pages \
                 and outside the other memslots"
            ),
            Error::Rings(slot) => write!(
                f,
                "logging memslot {slot}: devices cannot write to this VM's dirty rings; use a dirty bitmap, thus do not enable \
                 KVM_CAP_DIRTY_LOG_RING"
            ),
            Error::Memory(error) => write!(f, "making a region of guest memory: {error}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Memslot { error, .. } => Some(error),
            Error::Rings(_) => None,
            Error::Memory(error) => Some(error),
        }
    }
}
