//! Mappings between guard pages, and patterns that make stray writes visible.

use std::ops::Range;

/// The size of a host page.
pub const PAGE: usize = 4096;

/// A reserved range of addresses, which this value owns.
#[derive(Debug)]
pub struct Reserved {
    start: usize,
    len: usize,
}

/// Maps new anonymous memory with these rights at `range`, which is in a [`Reserved`]. Returns whether the mapping
/// succeeded.
///
/// # Safety
/// Only guests and guarded accesses use the current mapping of `range`.
pub unsafe fn remap(range: Range<usize>, rights: i32) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: only guests and guarded accesses use the mapping that is replaced, as this function's `# Safety`
    // requires.
    unsafe {
        libc::mmap(range.start as *mut _, range.len(), rights, flags, -1, 0) != libc::MAP_FAILED
    }
}

/// Replaces the mapping of `range` like [`remap`], but by the pages of a file, and then truncates the file to half its
/// size, so that accesses to the second half of `range` cause SIGBUS.
///
/// # Safety
/// Only guests and guarded accesses use the current mapping of `range`.
pub unsafe fn remap_beyond_file(range: Range<usize>) -> bool {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    let len = range.len();
    // SAFETY: the system calls use a descriptor of our own. Only guests and guarded accesses use the mapping that is
    // replaced, as this function's `# Safety` requires.
    unsafe {
        let fd = libc::memfd_create(c"file".as_ptr(), libc::MFD_CLOEXEC);
        let mapped = libc::ftruncate(fd, len as libc::off_t) == 0
            && libc::mmap(range.start as *mut _, len, rights, flags, fd, 0) != libc::MAP_FAILED
            && libc::ftruncate(fd, (len / 2) as libc::off_t) == 0;
        libc::close(fd);
        mapped
    }
}

impl Reserved {
    /// Reserves `len` bytes of addresses. None of them is accessible yet.
    pub fn new(len: usize) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the call makes a new mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "{len} bytes of address space");
        Reserved {
            start: start as usize,
            len,
        }
    }

    /// Makes the returned value the owner of `range`.
    ///
    /// # Safety
    /// `range` is a mapping that nothing else unmaps or replaces.
    pub unsafe fn owning(range: Range<usize>) -> Self {
        Reserved {
            start: range.start,
            len: range.len(),
        }
    }

    /// Returns the first address of the reserved range.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Returns the range of all addresses.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Makes `len` bytes from `offset` on accessible. They are zero.
    pub fn open(&self, offset: usize, len: usize) {
        assert!(offset + len <= self.len);
        let start = self.start + offset;
        // SAFETY: the addresses belong to this value, and no code has accessed them yet.
        assert!(unsafe { remap(start..start + len, libc::PROT_READ | libc::PROT_WRITE) });
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value. The streams have dropped their objects, so nothing uses it any
        // more.
        unsafe { libc::munmap(self.start as *mut _, self.len) };
    }
}

/// Returns the word of the pattern for the address `address`. The words of all addresses are different, and a guest is
/// unlikely to write such a word.
fn untouched(address: usize) -> u64 {
    (address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0xc0de_cafe_0000_0000
}

/// Fills `range`, which consists of whole words, with the pattern.
///
/// # Safety
/// `range` is writable memory to which no reference exists.
pub unsafe fn fill(range: Range<usize>) {
    for at in range.step_by(8) {
        // SAFETY: the range is writable and has no references, as this function's `# Safety` requires.
        unsafe { (at as *mut u64).write_volatile(untouched(at)) };
    }
}

/// Returns the address of the first word of `range` that differs from the pattern that [`fill`] has written. `None`: no
/// word differs.
///
/// # Safety
/// `range` is readable memory.
pub unsafe fn first_touched(range: Range<usize>) -> Option<usize> {
    // SAFETY: the range is readable, as this function's `# Safety` requires.
    range
        .step_by(8)
        .find(|at| unsafe { (*at as *const u64).read_volatile() } != untouched(*at))
}

/// Memory between two guard pages. Outside each guard page there is a canary: a page that must not be written.
///
/// ```text
/// canary | no access | memory | no access | canary
/// ```
#[derive(Debug)]
pub struct Guarded {
    all: Reserved,
    len: usize,
}

impl Guarded {
    /// Reserves `len` bytes between guard pages. `len` is a multiple of the page size. None of the bytes is accessible
    /// yet.
    pub fn reserve(len: usize) -> Self {
        assert!(len.is_multiple_of(PAGE));
        let all = Reserved::new(len + 4 * PAGE);
        all.open(0, PAGE);
        all.open(len + 3 * PAGE, PAGE);
        let guarded = Guarded { all, len };
        for canary in guarded.canaries() {
            // SAFETY: the canary has just become accessible, and no reference to it exists.
            unsafe { fill(canary) };
        }
        guarded
    }

    /// Makes `len` accessible bytes of zeroes between guard pages.
    pub fn new(len: usize) -> Self {
        let guarded = Self::reserve(len);
        guarded.open(0, len);
        guarded
    }

    /// Makes `len` bytes from `offset` on accessible.
    pub fn open(&self, offset: usize, len: usize) {
        assert!(offset + len <= self.len);
        self.all.open(2 * PAGE + offset, len);
    }

    /// Returns the first address of the memory.
    pub fn start(&self) -> usize {
        self.all.start() + 2 * PAGE
    }

    /// Returns the addresses of the memory.
    pub fn range(&self) -> Range<usize> {
        self.start()..self.start() + self.len
    }

    fn canaries(&self) -> [Range<usize>; 2] {
        let all = self.all.range();
        [all.start..all.start + PAGE, all.end - PAGE..all.end]
    }

    /// Panics if a canary was written.
    pub fn check(&self) {
        for canary in self.canaries() {
            // SAFETY: the canary became accessible when this value was made, and stays so.
            let touched = unsafe { first_touched(canary) };
            if let Some(at) = touched {
                panic!("{at:#x}, beside {:#x?}, was written", self.range());
            }
        }
    }

    /// Writes `bytes` at `offset`.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        // SAFETY: the address is in the memory, and the owner of this value has made the range accessible.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                (self.start() + offset) as *mut u8,
                bytes.len(),
            )
        };
    }

    /// Returns a copy of `len` bytes from `offset` on.
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: the address is in the memory, and the owner of this value has made the range accessible.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (self.start() + offset) as *const u8,
                bytes.as_mut_ptr(),
                len,
            )
        };
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "was written")]
    fn a_write_beyond_the_guard_page_is_seen() {
        let guarded = Guarded::new(PAGE);
        guarded.check();
        // SAFETY: the address is in the second half of the canary.
        unsafe { ((guarded.range().end + PAGE + 2048) as *mut u8).write_volatile(1) };
        guarded.check();
    }
}
