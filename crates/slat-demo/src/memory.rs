//! Host memory that backs memslots.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use slat_host::mappings::{self, HugePages};
use slat_kvm::notify;

/// A range of this process's memory.
pub struct Memory {
    mapping: NonNull<u8>,
    mapped: usize,
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: a `Memory` owns its mapping, and several threads access the mapping only as atomics.
unsafe impl Sync for Memory {}
// SAFETY: the mapping is not bound to a thread.
unsafe impl Send for Memory {}

/// The size of the host pages that are requested for a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// The host uses 4 KiB pages (MADV_NOHUGEPAGE).
    Small,
    /// The host uses 2 MiB pages, if it has them (MADV_HUGEPAGE).
    Huge,
}

impl Memory {
    /// Maps `size` bytes of zeroes at a multiple of `alignment`. No page is resident yet.
    ///
    /// # Errors
    /// The errors of mmap.
    ///
    /// # Panics
    /// If `alignment` is not a power of two, or less than a page.
    pub fn new(size: usize, alignment: usize, pages: Pages) -> io::Result<Self> {
        let memory = Self::reserve(size, alignment)?;
        let (advice, wish) = match pages {
            Pages::Small => (libc::MADV_NOHUGEPAGE, HugePages::Unwanted),
            Pages::Huge => (libc::MADV_HUGEPAGE, HugePages::Wanted),
        };
        // A host without huge pages refuses the advice, and does not need it. If the host accepts the advice, this
        // reports it to slat, as every VMM that uses the crates does, because slat could find out the advice only
        // slowly.
        if memory.advise(advice).is_ok() {
            let Range { start, end } = memory.addresses();
            mappings::advised(start as usize..end as usize, wish);
        }
        Ok(memory)
    }

    /// Maps `size` bytes at a multiple of `alignment`. All of these addresses map the same `piece` bytes of memory,
    /// again and again. So a guest can have more memory than the host.
    ///
    /// # Errors
    /// The host's error when it makes a file in memory, or maps the file.
    ///
    /// # Panics
    /// If `size` is not a multiple of `piece`, and in the cases of [`Memory::new`].
    pub fn aliased(size: usize, piece: usize, alignment: usize) -> io::Result<Self> {
        assert!(size.is_multiple_of(piece));
        let file = file_in_memory(piece)?;
        let memory = Self::reserve(size, alignment)?;
        for at in memory.addresses().step_by(piece) {
            // SAFETY: the range is a part of the new mapping, which no code has used yet.
            unsafe { map_file(at, piece, &file, libc::MAP_SHARED)? };
        }
        Ok(memory)
    }

    /// Maps `size` bytes of zeroes of a new file at a multiple of `alignment`. Also returns the file.
    ///
    /// # Errors
    /// The host's error when it makes a file in memory, or maps the file.
    ///
    /// # Panics
    /// In the cases of [`Memory::new`].
    pub fn in_file(size: usize, alignment: usize) -> io::Result<(Self, File)> {
        let file = file_in_memory(size)?;
        let memory = Self::of_file(&file, size, alignment, libc::MAP_SHARED)?;
        Ok((memory, file))
    }

    /// Maps the first `size` bytes of a file, copy on write, at a multiple of `alignment`. The file must not be written
    /// as long as the mapping exists.
    ///
    /// # Errors
    /// The errors of mmap.
    ///
    /// # Panics
    /// In the cases of [`Memory::new`].
    pub fn copy_of(file: &File, size: usize, alignment: usize) -> io::Result<Self> {
        Self::of_file(file, size, alignment, libc::MAP_PRIVATE)
    }

    fn of_file(file: &File, size: usize, alignment: usize, sharing: i32) -> io::Result<Self> {
        let memory = Self::reserve(size, alignment)?;
        // SAFETY: no code has used the new mapping yet.
        unsafe { map_file(memory.address(), size, file, sharing)? };
        Ok(memory)
    }

    /// Makes an anonymous private mapping.
    fn reserve(size: usize, alignment: usize) -> io::Result<Self> {
        assert!(alignment.is_power_of_two() && alignment >= 4096);
        let mapped = size + alignment;
        // SAFETY: the call makes a new anonymous mapping at an address of the kernel's choice.
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
        // SAFETY: the mapping is larger than `size` by the alignment, and the padding is less than the alignment.
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

    /// Makes all of the memory resident and writable, as `MAP_POPULATE` would.
    ///
    /// # Errors
    /// The host's error; `ENOMEM` if the host has too little memory.
    pub fn populate(&self) -> io::Result<()> {
        match self.advise(libc::MADV_POPULATE_WRITE) {
            // EINVAL: Linux before 5.14 does not know this advice.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                for page in self.words().chunks(4096 / 8) {
                    page[0].fetch_add(0, std::sync::atomic::Ordering::Relaxed);
                }
                Ok(())
            }
            result => result,
        }
    }

    /// Discards the pages of a range, which is given in bytes. The pages are zero afterwards. Reports the change to
    /// slat's VMs, as every VMM that uses the crates does. (A real KVM notices the change without a report.)
    ///
    /// # Errors
    /// The errors of madvise.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    pub fn discard(&self, range: Range<u64>) -> io::Result<()> {
        assert!(range.end <= self.size as u64);
        let addresses = self.address() + range.start..self.address() + range.end;
        let answer = notify::around(addresses.start as usize..addresses.end as usize, || {
            // SAFETY: the range is in the mapping. While the mapping is shared, its contents are accessed only as
            // atomics.
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

    /// Returns the memory's address in this process.
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Returns the memory's addresses in this process.
    pub fn addresses(&self) -> Range<u64> {
        self.address()..self.address() + self.size as u64
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the memory as bytes. No guest runs on the memory, because the caller has exclusive access to `self`.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is `size` bytes long, initialised with zeroes, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.size) }
    }

    /// Returns the memory as words, which running guests may use at the same time.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the memory is page-aligned, `size` bytes long and initialised. All threads with this reference access
        // the memory as atomics. The guest's aligned stores are atomic, too.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.size / 8) }
    }
}

/// Makes a file of `size` bytes of zeroes, which exists only in memory.
fn file_in_memory(size: usize) -> io::Result<File> {
    // SAFETY: the argument is a C string, and the result is checked.
    let file = unsafe { libc::memfd_create(c"slat-guest".as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just opened, and no other value owns it.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(file) });
    file.set_len(size as u64)?;
    Ok(file)
}

/// Maps the beginning of `file` at `address`, shared or copy on write.
///
/// # Safety
/// - No code uses the `size` bytes at `address`, which are mapped.
unsafe fn map_file(address: u64, size: usize, file: &File, sharing: i32) -> io::Result<()> {
    let (rights, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        sharing | libc::MAP_FIXED,
    );
    // SAFETY: the range is mapped, and no code uses it, as this function's `# Safety` requires.
    let mapped = unsafe {
        libc::mmap(
            address as *mut libc::c_void,
            size,
            rights,
            flags,
            file.as_raw_fd(),
            0,
        )
    };
    match mapped {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let start = self.mapping.as_ptr() as usize;
        // SAFETY: `reserve` has made this mapping, and no reference into it exists any more.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.mapped) };
        // slat forgets its advice, because a later mapping at these addresses may have other advice.
        mappings::changed(start..start + self.mapped);
    }
}
