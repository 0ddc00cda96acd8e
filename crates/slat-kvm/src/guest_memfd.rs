//! Private guest memory: `KVM_CREATE_GUEST_MEMFD` and `KVM_SET_MEMORY_ATTRIBUTES` (api.rst 4.141, 4.142).
//!
//! A guest_memfd is a memfd that slat maps for itself, at an address that the client is not told. The client gets a descriptor with
//! `O_PATH`, through which the kernel refuses to read, write or map the file.
//!
//! A slot is bound to the *address range* of that mapping, which is reserved as long as the slot lives. When the last descriptor
//! is closed the memory is released, and nothing is mapped in the range: private accesses fail from then on.

use crate::errno::{Error, Result, fail, last};
use crate::file_id::FileId;
use crate::notify;
use crate::process::Birth;
use crate::run_page::{Shared, memfd};
use crate::thread::Section;
use kvm_bindings::kvm_create_guest_memfd;
use slat::Hva;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

const PAGE: u64 = 4096;

/// Private memory of one VM, which its descriptors refer to. Closing the last of them drops this and releases the memory.
#[derive(Debug)]
pub struct GuestMemfd {
    file: FileId,
    memory: Arc<Shared>,
    birth: Birth,
}

impl GuestMemfd {
    /// Creates private memory and the descriptor that refers to it.
    fn create(size: u64) -> Result<(Self, OwnedFd)> {
        let len = usize::try_from(size).map_err(|_| Error::new(libc::EINVAL))?;
        let file = memfd("kvm-gmem\0", len, true)?;
        let memory = Arc::new(Shared::map(&file, 0, len)?);
        slat_host::mappings::changed(range_of(&memory));
        let path = format!("/proc/self/fd/{}\0", file.as_raw_fd());
        // Like KVM's, the descriptor stays open across `exec`.
        // SAFETY: the path is NUL-terminated.
        let fd = unsafe { libc::open(path.as_ptr().cast(), libc::O_PATH) };
        if fd < 0 {
            return Err(last());
        }
        // SAFETY: a descriptor that has just been opened and that nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let guest_memfd = GuestMemfd {
            file: FileId::of(fd.as_raw_fd())?,
            memory,
            birth: Birth::here(),
        };
        Ok((guest_memfd, fd))
    }

    fn size(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Whether this is a forked child.
    pub fn is_foreign(&self) -> bool {
        !self.birth.is_here()
    }

    /// Allocates the pages of a range, or frees them, as `fallocate` does. Freeing is an invalidation, after which the pages read as
    /// zeroes.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for a mode without `FALLOC_FL_KEEP_SIZE` or with anything but `FALLOC_FL_PUNCH_HOLE` besides, `EINVAL` for a
    /// range that is empty, not of whole pages, or (but for a hole) reaches beyond the end, `EIO` in a forked child, and what the
    /// host returns for allocating.
    pub fn fallocate(&self, mode: i32, offset: i64, len: i64) -> Result<()> {
        if self.is_foreign() {
            return fail(libc::EIO);
        }
        let (Ok(start), Ok(len @ 1..)) = (u64::try_from(offset), u64::try_from(len)) else {
            return fail(libc::EINVAL);
        };
        let hole = mode & libc::FALLOC_FL_PUNCH_HOLE != 0;
        if mode & !libc::FALLOC_FL_PUNCH_HOLE != libc::FALLOC_FL_KEEP_SIZE {
            return fail(libc::EOPNOTSUPP);
        }
        if !start.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return fail(libc::EINVAL);
        }
        let end = start.saturating_add(len);
        if end > self.size() && !hole {
            return fail(libc::EINVAL);
        }
        let part = start.min(self.size())..end.min(self.size());
        if part.is_empty() {
            return Ok(());
        }
        let _section = Section::enter();
        let range = range_of(&self.memory);
        let range = range.start + part.start as usize..range.start + part.end as usize;
        let advise = |advice| {
            // SAFETY: our own mapping, which only guarded accesses reach.
            match unsafe { libc::madvise(range.start as *mut _, range.len(), advice) } {
                0 => Ok(()),
                _ => Err(last()),
            }
        };
        match hole {
            true => notify::around(range.clone(), || advise(libc::MADV_REMOVE)),
            false => advise(libc::MADV_POPULATE_WRITE),
        }
    }
}

impl Drop for GuestMemfd {
    fn drop(&mut self) {
        if self.is_foreign() {
            // A forked child has the parent's mapping, too, but none of the VMs that use it.
            return;
        }
        let _section = Section::enter();
        let range = range_of(&self.memory);
        notify::around(range.clone(), || {
            self.memory.forget();
            slat_host::mappings::changed(range.clone());
        });
    }
}

fn range_of(memory: &Shared) -> Range<usize> {
    let start = memory.start() as usize;
    start..start + memory.len()
}

/// The private memory of a VM.
#[derive(Debug, Default)]
pub(crate) struct PrivateMemory {
    files: Mutex<Vec<Weak<GuestMemfd>>>,
    /// The memory that slots are bound to, by the client's slot number (address space included). Locked while a slot is changed
    /// that is, or may have been, bound.
    bound: Mutex<BTreeMap<u32, Arc<Shared>>>,
}

/// The locked bindings of a VM's slots to private memory, held while one of these slots is changed.
pub(crate) struct Bindings<'a>(MutexGuard<'a, BTreeMap<u32, Arc<Shared>>>);

impl Bindings<'_> {
    /// Binds `slot` to `memory`; `None` removes the binding.
    pub(crate) fn set(&mut self, slot: u32, memory: Option<Arc<Shared>>) {
        match memory {
            Some(memory) => self.0.insert(slot, memory),
            None => self.0.remove(&slot),
        };
    }
}

impl PrivateMemory {
    pub(crate) fn bindings(&self) -> Bindings<'_> {
        Bindings((self.bound.lock()).unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    fn files(&self) -> MutexGuard<'_, Vec<Weak<GuestMemfd>>> {
        (self.files.lock()).unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Creates private memory, and the descriptor that refers to it.
    ///
    /// # Errors
    /// `EINVAL` for flags and a size that is 0 or not of whole pages, what the host returns for making a file.
    pub(crate) fn create(
        &self,
        args: &kvm_create_guest_memfd,
    ) -> Result<(Arc<GuestMemfd>, OwnedFd)> {
        let len = i64::try_from(args.size).unwrap_or(0);
        if args.flags != 0 || len == 0 || !args.size.is_multiple_of(PAGE) {
            return fail(libc::EINVAL);
        }
        let (guest_memfd, fd) = GuestMemfd::create(args.size)?;
        let guest_memfd = Arc::new(guest_memfd);
        let mut files = self.files();
        files.retain(|file| file.strong_count() != 0);
        files.push(Arc::downgrade(&guest_memfd));
        Ok((guest_memfd, fd))
    }

    /// Returns the memory of the guest_memfd that `fd` refers to, and the address for a slot of `size` bytes from `offset` on.
    ///
    /// # Errors
    /// `EBADF` for a closed descriptor; `EINVAL` for one that is no guest_memfd of this VM, and for a part that is not of whole pages
    /// or reaches beyond the end.
    pub(crate) fn part(&self, fd: u32, offset: u64, size: u64) -> Result<(Arc<Shared>, Hva)> {
        let file = FileId::of(fd as RawFd)?;
        let known = self
            .files()
            .iter()
            .filter_map(Weak::upgrade)
            .find(|known| known.file == file);
        let known = known.ok_or(Error::new(libc::EINVAL))?;
        let end = offset.checked_add(size).filter(|end| *end <= known.size());
        if !offset.is_multiple_of(PAGE) || end.is_none() {
            return fail(libc::EINVAL);
        }
        let address = Hva(known.memory.start() as u64 + offset);
        Ok((known.memory.clone(), address))
    }
}
