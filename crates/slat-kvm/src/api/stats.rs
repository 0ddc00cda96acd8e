//! The type [`StatsFd`]: the statistics of a VM or a vCPU.

use crate::errno::Result;
use crate::stats::StatsObject;
use slat::Shared;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

/// The statistics of a VM or a vCPU in KVM's binary format (`KVM_GET_STATS_FD`, which kvm-ioctls does not have).
#[derive(Debug)]
pub struct StatsFd {
    stats: Shared<StatsObject>,
    file: File,
}

impl StatsFd {
    pub(super) fn new((stats, fd): (Shared<StatsObject>, OwnedFd)) -> Self {
        StatsFd {
            stats,
            file: fd.into(),
        }
    }

    /// Reads bytes from offset `offset` on, as `pread` does from KVM's descriptor.
    ///
    /// # Errors
    /// The host's error for the read.
    pub fn read_at(&self, to: &mut [u8], offset: u64) -> io::Result<usize> {
        self.stats.refresh();
        self.file.read_at(to, offset)
    }

    /// Returns the names and values of the statistics. A histogram's values are its buckets.
    ///
    /// # Errors
    /// `EIO` in a forked child.
    pub fn values(&self) -> Result<Vec<(&'static str, Vec<u64>)>> {
        self.stats.values()
    }
}

impl AsRawFd for StatsFd {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}
