//! The vCPU's shared memory: the `kvm_run` page, the pages that only some architectures have, and the page of the ring
//! of coalesced I/O.
//!
//! The vCPU's descriptor is a memfd of the same size, so the client's own `mmap` of the descriptor maps the shared
//! pages. If RLIMIT_FSIZE forbids a file of this size, the memfd is empty, and slat's memory replaces the client's
//! mapping. The client may write to the pages at any time, even while the vCPU runs. So every access here is volatile,
//! and a checked value is never read a second time.
//!
//! # Order
//! The accesses here are not ordered, and need no order. The thread that calls `KVM_RUN` uses the page before and after
//! the call, in program order. Another thread of the client may set `immediate_exit` at any time, and then sends a
//! signal to end the run. The kernel holds the same lock when it sends and when it delivers a signal. So the receiver
//! sees all stores that the sender made before the signal. If `KVM_RUN` begins after the signal, it reads the new
//! value; if it began before, the signal ends it. KVM promises no more.

use crate::errno::{Error, Result, fail, last};
use crate::fields::{field, set_field};
use crate::file_id::FileId;
use crate::messages;
use kvm_bindings::*;
use slat_host::page_size;
use slat_process::file_size::limited;
use std::ffi::CStr;
use std::io::{self, Write as _};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

/// Returns the value of `KVM_GET_VCPU_MMAP_SIZE`. The last page is that of the ring of coalesced I/O.
pub fn mmap_size() -> usize {
    (KVM_COALESCED_MMIO_PAGE_OFFSET as usize + 1) * page_size()
}

/// Returns the offset of the dirty ring in the file of a vCPU's descriptor.
pub fn ring_offset() -> usize {
    KVM_DIRTY_LOG_PAGE_OFFSET as usize * page_size()
}

/// Memory shared with the client, mapped until it is dropped.
#[derive(Debug)]
pub(crate) struct Shared {
    start: NonNull<u8>,
    len: usize,
    /// The file of the memory. `None` if the host can map the memory again without a descriptor.
    file: Option<Kept>,
}

/// A file of slat that stays open. The file's descriptor is in the client's table, so the client may close the
/// descriptor, and another file may get its number.
#[derive(Debug)]
struct Kept {
    file: ManuallyDrop<OwnedFd>,
    id: FileId,
}

impl Kept {
    fn new(file: OwnedFd) -> Result<Self> {
        let id = FileId::of(file.as_raw_fd())?;
        let file = ManuallyDrop::new(file);
        Ok(Kept { file, id })
    }

    /// Returns the file's descriptor.
    ///
    /// # Errors
    /// `EBADF` if the client has closed it.
    fn fd(&self) -> Result<RawFd> {
        let fd = self.file.as_raw_fd();
        match FileId::of(fd)? == self.id {
            true => Ok(fd),
            false => fail(libc::EBADF),
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.fd().is_ok() {
            // SAFETY: `self` is being dropped, so the value is not used again.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

// SAFETY: all accesses to the shared memory are volatile or atomic loads and stores, so threads may share it.
unsafe impl Send for Shared {}
// SAFETY: all accesses to the shared memory are volatile or atomic loads and stores, so threads may share it.
unsafe impl Sync for Shared {}

impl Shared {
    /// Maps `len` bytes from `offset` on of the file that `fd` refers to.
    ///
    /// # Errors
    /// The host's error for the mapping.
    pub(crate) fn map(fd: &OwnedFd, offset: usize, len: usize) -> Result<Self> {
        Self::map_with(libc::MAP_SHARED, fd.as_raw_fd(), offset, len)
    }

    /// Maps new memory, which [`Shared::show_at`] can map a second time. The memory needs no descriptor, so the client
    /// keeps all its descriptors. The exception is a host on which mremap(2) cannot map memory a second time, such as
    /// qemu-user, which runs amd64 programs on arm64. There the memory is a file that stays open.
    ///
    /// # Errors
    /// The host's error for the mapping.
    pub(crate) fn new(len: usize) -> Result<Self> {
        let memory = Self::map_with(libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0, len)?;
        // SAFETY: an old length of 0 adds a mapping of shared memory, at an address of the host's choice.
        let again = unsafe { libc::mremap(memory.start().cast(), 0, len, libc::MREMAP_MAYMOVE) };
        if again != libc::MAP_FAILED {
            // SAFETY: `mremap` has just made this mapping, and no other code knows its address.
            unsafe { libc::munmap(again, len) };
            return Ok(memory);
        }
        Self::new_file(len)
    }

    /// Maps the memory of a new file, which stays open.
    ///
    /// # Errors
    /// The host's error for the file or the mapping.
    fn new_file(len: usize) -> Result<Self> {
        let file = memfd(c"slat-shared", len, true)?;
        let mut memory = Self::map(&file, 0, len)?;
        memory.file = Some(Kept::new(file)?);
        Ok(memory)
    }

    fn map_with(flags: i32, fd: i32, offset: usize, len: usize) -> Result<Self> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let offset = offset as libc::off_t;
        // SAFETY: the host chooses the address of the new mapping.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, fd, offset) };
        if address == libc::MAP_FAILED {
            return Err(last());
        }
        let start = NonNull::new(address.cast()).expect("mmap does not map address 0");
        let file = None;
        Ok(Shared { start, len, file })
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Unmaps the memory but keeps its addresses reserved (`PROT_NONE`). After this call, accesses to the memory must
    /// be guarded.
    pub(crate) fn forget(&self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the call replaces slat's own mapping, into which no reference points. If the host has no memory for
        // another mapping, the old mapping stays until this value is dropped.
        unsafe { libc::mmap(self.start().cast(), self.len, libc::PROT_NONE, flags, -1, 0) };
    }

    /// Maps page number `page` of this memory at `address`, in addition to its present mapping. Call only for memory
    /// that [`Shared::new`] has made.
    ///
    /// # Errors
    /// The host's error for the mapping; `EBADF` if it needs a descriptor that the client has closed (with
    /// close_range(2), for example).
    ///
    /// # Safety
    /// The page belongs to a mapping that the caller may replace.
    pub(crate) unsafe fn show_at(&self, page: usize, address: usize) -> Result<()> {
        assert!(page * page_size() < self.len);
        let shown = match &self.file {
            None => {
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                let from = self.start().wrapping_add(page * page_size());
                // SAFETY: with an old length of 0, `mremap` leaves the old mapping of shared memory as it is and adds a
                // second mapping; the caller may replace the page at `address`.
                unsafe { libc::mremap(from.cast(), 0, page_size(), flags, address) }
            }
            Some(kept) => {
                let fd = kept.fd()?;
                let rights = libc::PROT_READ | libc::PROT_WRITE;
                let flags = libc::MAP_SHARED | libc::MAP_FIXED;
                let offset = (page * page_size()) as libc::off_t;
                // SAFETY: the caller may replace the page at `address`.
                unsafe { libc::mmap(address as *mut _, page_size(), rights, flags, fd, offset) }
            }
        };
        if shown == libc::MAP_FAILED {
            return Err(last());
        }
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: slat made the mapping, and this drop ends its last use.
        unsafe { libc::munmap(self.start().cast(), self.len) };
    }
}

/// One mapping of a vCPU's shared pages.
#[derive(Debug)]
pub struct RunPage {
    memory: Shared,
    /// Whether the shared memory is the descriptor's file. If so, the client's own `mmap` maps it.
    is_file: bool,
}

impl RunPage {
    /// Creates the shared pages and the descriptor of the vCPU `vcpu_id`. The mapping outlives the descriptor. If
    /// `ring` is not 0, the file has space for a dirty ring of `ring` bytes at [`ring_offset`].
    ///
    /// # Errors
    /// The host's error for creating or mapping the memory.
    pub fn create(vcpu_id: u32, ring: usize) -> Result<(RunPage, OwnedFd)> {
        let size = if ring == 0 {
            mmap_size()
        } else {
            ring_offset() + ring
        };
        // The name is formatted without the heap. The buffer has space for ten digits.
        let mut name = [0u8; 32];
        let mut rest = &mut name[..];
        write!(rest, "kvm-vcpu:{vcpu_id}\0").expect("it fits");
        let name = CStr::from_bytes_until_nul(&name).expect("it was just written");
        let (fd, page) = match sized_memfd(name, size, true) {
            Err(error) if error.errno() == libc::EFBIG && ring == 0 => {
                let memory = Shared::new(mmap_size())?;
                let is_file = false;
                (memfd(name, 0, true)?, RunPage { memory, is_file })
            }
            made => {
                let fd = made.inspect_err(|error| refused_size(name, size, *error))?;
                let page = RunPage::map(&fd)?;
                (fd, page)
            }
        };
        seal(&fd, libc::F_SEAL_SEAL)?;
        Ok((page, fd))
    }

    /// Maps the pages of a vCPU's descriptor.
    ///
    /// # Errors
    /// The host's error for mapping the memory.
    pub fn map(fd: &OwnedFd) -> Result<RunPage> {
        Ok(RunPage {
            memory: Shared::map(fd, 0, mmap_size())?,
            is_file: true,
        })
    }

    /// Maps the pages into the client's mapping of the descriptor, if that mapping does not show them already.
    ///
    /// # Errors
    /// The host's error for the mapping.
    ///
    /// # Safety
    /// `address` and `len` are a new mapping of the vCPU's descriptor, from `offset` on.
    pub(crate) unsafe fn show(&self, address: usize, len: usize, offset: u64) -> Result<()> {
        if self.is_file {
            return Ok(());
        }
        let mapped = offset..offset.saturating_add(len as u64);
        let mut pages = (0..mmap_size() / page_size())
            .filter(|page| mapped.contains(&((page * page_size()) as u64)));
        pages.try_for_each(|page| {
            let at = address + page * page_size() - offset as usize;
            // SAFETY: the page belongs to the mapping that the caller names.
            unsafe { self.memory.show_at(page, at) }
        })
    }

    /// Returns the address of the mapping's first page, which is `kvm_run`.
    pub(crate) fn address(&self) -> usize {
        self.memory.start() as usize
    }

    /// Returns the address of the `kvm_run` struct.
    pub fn ptr(&self) -> *mut kvm_run {
        self.memory.start().cast()
    }

    /// Whether the client asked for `KVM_RUN` to return at once.
    pub fn immediate_exit(&self) -> bool {
        field!(self, immediate_exit) != 0
    }

    /// Returns the exit reason.
    pub fn exit_reason(&self) -> u32 {
        field!(self, exit_reason)
    }

    /// Sets the exit reason.
    pub fn set_exit_reason(&self, reason: u32) {
        set_field!(self, reason, exit_reason);
    }
}

/// Creates a memfd of fixed size, `size` bytes, called `name`. The descriptors of KVM's objects refer to such memfds.
/// So if the client makes some other system call on such a descriptor, no harm is done.
///
/// The client's threads may use the descriptor's number before slat has returned it to the client. So the memfd is
/// sealed against shrinking while it is empty. So no page that slat maps is ever removed from the file. A store to a
/// removed page would raise SIGBUS.
///
/// # Errors
/// The host's error. `EPERM` if another thread has made the file longer than `size` meanwhile. `EFBIG`, and a message,
/// if the client's RLIMIT_FSIZE forbids the size.
pub fn memfd(name: &CStr, size: usize, close_on_exec: bool) -> Result<OwnedFd> {
    sized_memfd(name, size, close_on_exec).inspect_err(|error| refused_size(name, size, *error))
}

/// Makes a memory file like [`memfd`], but prints no message if the client's RLIMIT_FSIZE forbids the size.
///
/// # Errors
/// The errors are those of [`memfd`].
pub(crate) fn sized_memfd(name: &CStr, size: usize, close_on_exec: bool) -> Result<OwnedFd> {
    let fd = unsealed_memfd(name, close_on_exec)?;
    seal(&fd, libc::F_SEAL_SHRINK)?;
    if size != 0 {
        limited(|| {
            // SAFETY: the call takes no pointer. The descriptor is slat's own.
            match unsafe { libc::ftruncate(fd.as_raw_fd(), size as libc::off_t) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        })
        .map_err(|error| Error::new(error.raw_os_error().unwrap_or(libc::EIO)))?;
    }
    seal(&fd, libc::F_SEAL_GROW)?;
    Ok(fd)
}

/// If RLIMIT_FSIZE forbids the memfd, prints a message that says so. KVM's documentation does not explain the error,
/// because KVM needs no file for its objects.
fn refused_size(name: &CStr, size: usize, error: Error) {
    if error.errno() == libc::EFBIG {
        messages::say(format_args!(
            "RLIMIT_FSIZE (ulimit -f) forbids slat the {size} bytes of {}; the call answers EFBIG",
            name.to_string_lossy()
        ));
    }
}

/// Creates an empty memfd called `name`, whose size can change. Such a memfd must not be mapped.
///
/// # Errors
/// The host's error for creating the file.
pub fn unsealed_memfd(name: &CStr, close_on_exec: bool) -> Result<OwnedFd> {
    let flags = libc::MFD_ALLOW_SEALING | if close_on_exec { libc::MFD_CLOEXEC } else { 0 };
    // SAFETY: the name is NUL-terminated.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if fd < 0 {
        return Err(last());
    }
    // SAFETY: the descriptor has just been opened, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds seals to a memfd: `F_SEAL_…`.
///
/// # Errors
/// The host's error: `EPERM` once the memfd has `F_SEAL_SEAL`.
pub(crate) fn seal(memfd: &OwnedFd, seals: i32) -> Result<()> {
    // SAFETY: the call takes no pointer.
    match unsafe { libc::fcntl(memfd.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(()),
        _ => Err(last()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_descriptor_maps_to_the_same_pages() {
        let (ours, fd) = RunPage::create(3, 0).unwrap();
        let theirs = RunPage::map(&fd).unwrap();
        drop(fd);
        set_field!(theirs, 1, immediate_exit);
        assert!(ours.immediate_exit());
    }

    #[test]
    fn nobody_can_change_the_size_of_a_memfd() {
        for size in [0, page_size()] {
            let fd = memfd(c"test", size, true).unwrap();
            for other in [0, 1, 2 * page_size()] {
                // SAFETY: the call takes no pointer. The descriptor is slat's own.
                let cut = unsafe { libc::ftruncate(fd.as_raw_fd(), other as libc::off_t) };
                assert_eq!(cut == 0, other == size, "from {size} to {other} bytes");
            }
        }
    }

    #[test]
    fn memory_is_shown_at_other_addresses_with_a_file_and_without() {
        for memory in [
            Shared::new(2 * page_size()),
            Shared::new_file(2 * page_size()),
        ] {
            let memory = memory.unwrap();
            let places = [(); 2].map(|()| Shared::new(page_size()).unwrap());
            for place in &places {
                // SAFETY: the replaced page is the whole of a mapping that the test has made.
                unsafe { memory.show_at(1, place.start() as usize).unwrap() };
            }
            // SAFETY: the accesses are within mappings that live to the end of the loop.
            unsafe {
                memory.start().add(page_size()).write_volatile(7);
                assert_eq!(places.map(|place| place.start().read_volatile()), [7, 7]);
            }
        }
    }

    #[test]
    fn a_file_that_the_client_has_replaced_is_neither_shown_nor_closed() {
        let memory = Shared::new_file(page_size()).unwrap();
        let place = Shared::new(page_size()).unwrap();
        let kept = memory.file.as_ref().unwrap().fd().unwrap();
        let other = memfd(c"other", 0, true).unwrap();
        // SAFETY: the call takes no pointer. It replaces the file of `memory`, as a client can.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), kept) }, kept);
        // SAFETY: the replaced page is the whole of a mapping that the test has made.
        let shown = unsafe { memory.show_at(0, place.start() as usize) };
        assert_eq!(shown.unwrap_err().errno(), libc::EBADF);
        drop(memory);
        assert_eq!(
            FileId::of(kept).unwrap(),
            FileId::of(other.as_raw_fd()).unwrap()
        );
        // SAFETY: `dup2` has made this descriptor, and nothing else owns it.
        unsafe { libc::close(kept) };
    }

    #[test]
    fn the_struct_is_in_the_first_page() {
        assert!(size_of::<kvm_run>() <= page_size());
    }
}
