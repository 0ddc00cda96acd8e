//! The identity of open files.

use crate::errno::{Result, last};
use std::os::fd::RawFd;

/// A file's device and inode number, which are the same for all descriptors of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileId(libc::dev_t, libc::ino_t);

impl FileId {
    /// Returns the file that a descriptor refers to.
    ///
    /// # Errors
    /// `EBADF`.
    pub(crate) fn of(fd: RawFd) -> Result<Self> {
        let stat = stat(fd)?;
        Ok(FileId(stat.st_dev, stat.st_ino))
    }

    /// Whether `self` identifies the file with `inode` on the device (major, minor).
    pub(crate) fn is(self, device: (u32, u32), inode: u64) -> bool {
        (libc::major(self.0), libc::minor(self.0)) == device && self.1 == inode
    }
}

/// Returns the host's `stat` of the file that a descriptor refers to.
///
/// # Errors
/// `EBADF`.
pub(crate) fn stat(fd: RawFd) -> Result<libc::stat> {
    // SAFETY: all-zero is a valid `stat`.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the call fills in a live struct.
    match unsafe { libc::fstat(fd, &mut stat) } {
        0 => Ok(stat),
        _ => Err(last()),
    }
}
