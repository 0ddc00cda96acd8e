//! Host memory behind a memslot of the built-in program.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use slat_host::mappings::HugePages;

/// An anonymous private mapping, aligned for huge pages.
pub struct Memory {
    mapping: NonNull<u8>,
    mapped: usize,
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: a `Memory` owns its mapping, and gives it out to several threads as atomics only.
unsafe impl Sync for Memory {}

const HUGE_PAGE: usize = 2 << 20;

impl Memory {
    /// `size` bytes of zeroes, with huge pages or without where the host leaves the choice.
    pub fn new(size: usize, huge_pages: bool) -> io::Result<Self> {
        let mapped = size + HUGE_PAGE;
        // SAFETY: a new anonymous mapping at a place the kernel chooses.
        let mapping = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapping == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping = NonNull::new(mapping.cast::<u8>()).expect("a mapping is not at 0");
        let padding = mapping.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: at most HUGE_PAGE - 1 bytes of padding; the mapping is that much larger.
        let start = unsafe { mapping.add(padding) };
        let advice = if huge_pages {
            libc::MADV_HUGEPAGE
        } else {
            libc::MADV_NOHUGEPAGE
        };
        // SAFETY: the range lies in the mapping made above; the advice changes no contents.
        let refused = unsafe { libc::madvise(start.as_ptr().cast(), size, advice) } != 0;
        // A host without huge pages refuses the advice, and needs none. The kernel has no cheap
        // way to ask for advice given: slat is told, as a VMM on the crates does.
        if !refused {
            let begin = start.as_ptr() as usize;
            let wish = if huge_pages {
                HugePages::Wanted
            } else {
                HugePages::Unwanted
            };
            slat_host::mappings::advised(begin..begin + size, wish);
        }
        Ok(Memory {
            mapping,
            mapped,
            start,
            size,
        })
    }

    /// Where it lies in this process.
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Its size in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The bytes, while no guest runs on them: exclusive access to `self` stands for that.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is `size` bytes long, initialised (zero), and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.size) }
    }

    /// The words, shared with running guests.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: page aligned, `size` bytes long, initialised, and all threads that hold this see
        // it as atomics, as the guest's own aligned stores are.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.size / 8) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; whoever borrowed from it is gone.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.mapped) };
    }
}
