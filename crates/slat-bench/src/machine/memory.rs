//! Host memory behind memslots.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use slat_host::mappings::{self, HugePages};
use slat_kvm::notify;

/// A stretch of this process's memory.
pub struct Memory {
    mapping: NonNull<u8>,
    mapped: usize,
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: a `Memory` owns its mapping, and gives it out to several threads as atomics only.
unsafe impl Sync for Memory {}
// SAFETY: no thread has a special relation to the mapping.
unsafe impl Send for Memory {}

/// What the host is asked to back a [`Memory`] with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// 4 KiB pages: MADV_NOHUGEPAGE.
    Small,
    /// 2 MiB pages where the host has them: MADV_HUGEPAGE.
    Huge,
}

impl Memory {
    /// `size` bytes of zeroes that begin at a multiple of `alignment`. Nothing is resident yet.
    ///
    /// # Errors
    /// What mmap answers.
    ///
    /// # Panics
    /// If `alignment` is not a power of two, or less than a page.
    pub fn new(size: usize, alignment: usize, pages: Pages) -> io::Result<Self> {
        let memory = Self::reserve(size, alignment)?;
        let (advice, wish) = match pages {
            Pages::Small => (libc::MADV_NOHUGEPAGE, HugePages::Unwanted),
            Pages::Huge => (libc::MADV_HUGEPAGE, HugePages::Wanted),
        };
        // A host without huge pages refuses the advice, and needs none. The kernel has no cheap way
        // to ask for advice given: slat is told, as a VMM on the crates does.
        if memory.advise(advice).is_ok() {
            let Range { start, end } = memory.addresses();
            mappings::advised(start as usize..end as usize, wish);
        }
        Ok(memory)
    }

    /// `size` bytes that begin at a multiple of `alignment` and show the same `piece` bytes of memory
    /// again and again: more guest memory than the host has.
    ///
    /// # Errors
    /// What the host answers to making a file in memory, and to mapping it.
    ///
    /// # Panics
    /// If `size` is no multiple of `piece`, or as [`Memory::new`].
    pub fn aliased(size: usize, piece: usize, alignment: usize) -> io::Result<Self> {
        assert!(size.is_multiple_of(piece));
        // SAFETY: a name; the answer is checked.
        let file = unsafe { libc::memfd_create(c"slat-bench".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor made just now.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        let file = File::from(file);
        file.set_len(piece as u64)?;
        let memory = Self::reserve(size, alignment)?;
        for at in memory.addresses().step_by(piece) {
            // SAFETY: replaces a part of the mapping made just now, which nobody has used.
            let mapped = unsafe {
                libc::mmap(
                    at as *mut libc::c_void,
                    piece,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED | libc::MAP_FIXED,
                    file.as_raw_fd(),
                    0,
                )
            };
            if mapped == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(memory)
    }

    /// An anonymous private mapping.
    fn reserve(size: usize, alignment: usize) -> io::Result<Self> {
        assert!(alignment.is_power_of_two() && alignment >= 4096);
        let mapped = size + alignment;
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
        let padding = mapping.as_ptr().align_offset(alignment);
        // SAFETY: the padding is less than the alignment, by which the mapping is larger.
        let start = unsafe { mapping.add(padding) };
        Ok(Memory {
            mapping,
            mapped,
            start,
            size,
        })
    }

    fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the range lies in the mapping; none of the advice given here changes its contents.
        let answer = unsafe { libc::madvise(self.start.as_ptr().cast(), self.size, advice) };
        match answer {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Makes all of it resident and writable, as `MAP_POPULATE` would.
    ///
    /// # Errors
    /// What the host answers; `ENOMEM` when there is not so much memory.
    pub fn populate(&self) -> io::Result<()> {
        match self.advise(libc::MADV_POPULATE_WRITE) {
            // Linux before 5.14.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                for page in self.words().chunks(4096 / 8) {
                    page[0].fetch_add(0, std::sync::atomic::Ordering::Relaxed);
                }
                Ok(())
            }
            result => result,
        }
    }

    /// Gives the pages of a range, which is counted in bytes, back to the host: zeroes come in their
    /// place. VMs of slat's are told, as a VMM on the crates does; a real KVM knows.
    ///
    /// # Errors
    /// What madvise answers.
    ///
    /// # Panics
    /// If the range reaches out of the memory.
    pub fn discard(&self, range: Range<u64>) -> io::Result<()> {
        assert!(range.end <= self.size as u64);
        let addresses = self.address() + range.start..self.address() + range.end;
        let answer = notify::around(addresses.start as usize..addresses.end as usize, || {
            // SAFETY: inside the mapping, whose contents are shown as atomics only while it is shared.
            unsafe {
                libc::madvise(
                    addresses.start as *mut libc::c_void,
                    (range.end - range.start) as usize,
                    libc::MADV_DONTNEED,
                )
            }
        });
        match answer {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Where it begins in this process.
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Its addresses in this process.
    pub fn addresses(&self) -> Range<u64> {
        self.address()..self.address() + self.size as u64
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
        let start = self.mapping.as_ptr() as usize;
        // SAFETY: the mapping made in `reserve`; whoever borrowed from it is gone.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.mapped) };
        // The next mapping there is another one, with advice of its own.
        mappings::changed(start..start + self.mapped);
    }
}
