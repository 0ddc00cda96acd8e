//! Memory for a guest.

use std::sync::atomic::{AtomicU32, Ordering};

/// Anonymous memory, mapped until this is dropped. The guest and the test use it through atomics and raw pointers.
pub struct Memory {
    start: *mut u8,
    len: usize,
}

// SAFETY: the memory is plain shared memory, which no reference points into.
unsafe impl Send for Memory {}
// SAFETY: the memory is plain shared memory, which no reference points into.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(len: usize) -> Self {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: the host chooses the address of the new mapping.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let start = start.cast();
        Memory { start, len }
    }

    pub fn address(&self) -> u64 {
        self.start as u64
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: the bytes are in the mapping, and no guest runs yet.
        unsafe { self.start.add(at).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    /// Returns a copy of `len` bytes. No guest runs meanwhile.
    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: the bytes are in the mapping, and nothing writes to them.
        unsafe { self.start.add(at).copy_to(bytes.as_mut_ptr(), len) };
        bytes
    }

    /// Returns the word at `at`, which the guest may change at any time.
    pub fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.len);
        // SAFETY: the word is in the mapping, which lives as long as the result.
        unsafe { AtomicU32::from_ptr(self.start.add(at).cast()) }
    }

    pub fn load(&self, at: usize) -> u32 {
        self.word(at).load(Ordering::SeqCst)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}
