//! Files in memory that other programs can open by a path.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

/// A file in memory. Programs of the same user can open it at its path as long as this value exists.
pub struct MemoryFile(pub File);

impl MemoryFile {
    /// Makes an empty file.
    ///
    /// # Errors
    /// The error of memfd_create(2).
    pub fn new() -> io::Result<Self> {
        // SAFETY: the name is a C string.
        let fd = unsafe { libc::memfd_create(c"slat-bench".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just opened, and no other value owns it.
        Ok(MemoryFile(unsafe { File::from_raw_fd(fd) }))
    }

    /// Returns the path at which other programs find the file.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}
