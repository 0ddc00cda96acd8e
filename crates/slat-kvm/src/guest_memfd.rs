//! Guest memory that is a file: `KVM_CREATE_GUEST_MEMFD` (api.rst 4.142).
//!
//! A guest_memfd is a memfd that slat maps for itself, at an address that the client does not know. The flags determine
//! which descriptor the client gets. The client maps this descriptor by the kernel's own `mmap`, and the kernel raises
//! the faults of that mapping:
//!
//! | flags | descriptor | the client's mapping |
//! |---|---|---|
//! | without [`FLAG_MMAP`] | the memfd with `O_PATH` | none: the kernel refuses to read, write or map it |
//! | [`FLAG_MMAP`] | an empty memfd | SIGBUS everywhere: the memory is private |
//! | both | the memfd | the memory; SIGBUS after its end; NUMA policies are those of any memfd |
//!
//! The preload library refuses `read` and `write` for each of these descriptors, and shows the size of the memory as
//! the size of the file. slat does not see the system calls of a client that uses the crate. Such a client can read and
//! write the third descriptor's file, and finds the second descriptor's file empty.
//!
//! A slot is bound to the *address range* of slat's mapping, which is reserved as long as the slot lives. When the last
//! descriptor is closed, the memory is released, and the range has no mapping. Then accesses to the slot fail. In KVM,
//! a mapping keeps the file open. So if the client still has a mapping when the last descriptor is closed, slat keeps
//! the memory as long as slots are bound to it.

use crate::errno::{Error, Result, fail, last};
use crate::file_id::FileId;
use crate::notify;
use crate::process::Birth;
use crate::run_page::{Shared, memfd, seal};
use crate::thread::Section;
use kvm_bindings::kvm_create_guest_memfd;
use slat::Hva;
use slat_host::{page_size, procfs};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_int};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// `GUEST_MEMFD_FLAG_MMAP`: the client may map the file, and slots take all their memory from it.
pub const FLAG_MMAP: u64 = 1 << 0;
/// `GUEST_MEMFD_FLAG_INIT_SHARED`: the memory is shared with the client, so the client can access its mapping of the
/// file.
pub const FLAG_INIT_SHARED: u64 = 1 << 1;

/// Returns the flags that a guest_memfd can have. In a VM with private memory (`protected`), memory attributes
/// determine which memory is shared. So no file of such a VM is shared from the start.
pub fn flags(protected: bool) -> u64 {
    match protected {
        true => FLAG_MMAP,
        false => FLAG_MMAP | FLAG_INIT_SHARED,
    }
}

/// Guest memory of one VM, to which descriptors refer. When the last descriptor is closed, this value is dropped and
/// the memory is released.
#[derive(Debug)]
pub struct GuestMemfd {
    /// The file to which the descriptors of this memory refer.
    file: FileId,
    memory: Arc<Shared>,
    /// The flags of the memory: [`FLAG_MMAP`] and [`FLAG_INIT_SHARED`].
    flags: u64,
    birth: Birth,
}

impl GuestMemfd {
    /// Creates guest memory and the descriptor that refers to it.
    fn create(size: u64, flags: u64) -> Result<(Self, OwnedFd)> {
        const NAME: &CStr = c"kvm-gmem";
        let len = usize::try_from(size).map_err(|_| Error::new(libc::EINVAL))?;
        let file = memfd(NAME, len, true)?;
        let memory = Arc::new(Shared::map(&file, 0, len)?);
        slat_host::mappings::changed(range_of(&memory));
        let (file, access) = match (flags & FLAG_MMAP != 0, flags & FLAG_INIT_SHARED != 0) {
            (false, _) => (file, libc::O_PATH),
            (true, true) => (file, libc::O_RDWR),
            (true, false) => (memfd(NAME, 0, true)?, libc::O_RDWR),
        };
        seal(&file, libc::F_SEAL_SEAL)?;
        let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let path = path.expect("there is no NUL in it");
        let (begin, path) = slat_host::procfs::reached_by(&path);
        // Like KVM's, the descriptor stays open across `exec`.
        // SAFETY: the path is NUL-terminated.
        let fd = unsafe { libc::openat(begin, path.as_ptr(), access) };
        if fd < 0 {
            return Err(last());
        }
        // SAFETY: the descriptor has just been opened, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let guest_memfd = GuestMemfd {
            file: FileId::of(fd.as_raw_fd())?,
            memory,
            flags,
            birth: Birth::here(),
        };
        Ok((guest_memfd, fd))
    }

    /// Returns the number of bytes of memory.
    pub fn size(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Checks whether the client may map the descriptor with this protection and these flags.
    ///
    /// # Errors
    /// The kernel's, in its order: `EINVAL` for flags that are no kind of mapping of a file, `EPERM` for memory that
    /// could be executed, `ENODEV` without [`FLAG_MMAP`], `EINVAL` for a private mapping.
    pub fn check_mapping(&self, protection: c_int, flags: c_int) -> Result<()> {
        let private = match flags & libc::MAP_TYPE {
            libc::MAP_PRIVATE => true,
            libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE => false,
            _ => return fail(libc::EINVAL),
        };
        if flags & libc::MAP_HUGETLB != 0 {
            fail(libc::EINVAL)
        } else if protection & libc::PROT_EXEC != 0 {
            fail(libc::EPERM)
        } else if self.flags & FLAG_MMAP == 0 {
            fail(libc::ENODEV)
        } else if private {
            fail(libc::EINVAL)
        } else {
            Ok(())
        }
    }

    /// Whether the memory's descriptors refer to the file with this `inode` on the device (major, minor).
    pub fn is_file(&self, device: (u32, u32), inode: u64) -> bool {
        self.file.is(device, inode)
    }

    /// Whether the client has a mapping of the memory.
    fn is_mapped(&self) -> bool {
        let own = range_of(&self.memory);
        let mut found = false;
        if self.flags == FLAG_MMAP | FLAG_INIT_SHARED {
            procfs::each_mapped_file(&mut |range, device, inode| {
                found |= self.is_file(device, inode) && !own.contains(&range.start);
            });
        }
        found
    }

    /// Whether this is a forked child.
    pub fn is_foreign(&self) -> bool {
        !self.birth.is_here()
    }

    /// Allocates the pages of a range, or frees them, as `fallocate` does. Freeing is an invalidation. After that the
    /// pages read as zeroes, also in the client's mappings of the file.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for a mode without `FALLOC_FL_KEEP_SIZE`, or with any other flag than `FALLOC_FL_PUNCH_HOLE`.
    /// `EFBIG` for a range that no file can have. `EINVAL` for a range that is empty, not of whole pages, or (except
    /// for a hole) reaches beyond the end. `EIO` in a forked child. The host's error for allocating.
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
        let end = start.saturating_add(len);
        if end > i64::MAX as u64 {
            return fail(libc::EFBIG);
        }
        if !start.is_multiple_of(page_size() as u64) || !len.is_multiple_of(page_size() as u64) {
            return fail(libc::EINVAL);
        }
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
            // SAFETY: the mapping is slat's own, and all accesses to it are guarded.
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
            // The parent process owns the memory. The child has a copy of the mapping, but none of the VMs that use it,
            // so there is nothing to release.
            return;
        }
        let _section = Section::enter();
        if self.is_mapped() {
            return;
        }
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

/// A part of a guest_memfd to which a slot is bound.
pub(crate) struct Part {
    pub(crate) memory: Arc<Shared>,
    /// The backing address of the slot's first byte.
    pub(crate) start: Hva,
    /// Whether all memory of the slot comes from the guest_memfd, and no memory comes from `userspace_addr`
    /// (`KVM_MEMSLOT_GMEM_ONLY`).
    pub(crate) only: bool,
}

/// The guest_memfds of a VM, and the slots that are bound to them.
#[derive(Debug, Default)]
pub(crate) struct PrivateMemory {
    files: Mutex<Vec<Weak<GuestMemfd>>>,
    /// The memory to which each slot is bound. The key is the client's slot number, which includes the address space.
    /// This lock is held while a bound slot is created, changed or deleted.
    bound: Mutex<BTreeMap<u32, Arc<Shared>>>,
}

/// The locked bindings of a VM's slots to private memory. A call holds this lock while it changes a bound slot.
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

    /// Creates guest memory, and the descriptor that refers to it. `flags` may have only the flags that the VM
    /// supports.
    ///
    /// # Errors
    /// `EINVAL` for other flags, and for a size that is 0 or not of whole pages; the host's error for making a file.
    pub(crate) fn create(
        &self,
        args: &kvm_create_guest_memfd,
        flags: u64,
    ) -> Result<(Arc<GuestMemfd>, OwnedFd)> {
        let len = i64::try_from(args.size).unwrap_or(0);
        if args.flags & !flags != 0 || len == 0 || !args.size.is_multiple_of(page_size() as u64) {
            return fail(libc::EINVAL);
        }
        let (guest_memfd, fd) = GuestMemfd::create(args.size, args.flags)?;
        let guest_memfd = Arc::new(guest_memfd);
        let mut files = self.files();
        files.retain(|file| file.strong_count() != 0);
        files.push(Arc::downgrade(&guest_memfd));
        Ok((guest_memfd, fd))
    }

    /// Returns a part of the guest_memfd to which `fd` refers: the `size` bytes from `offset` on, for a slot of this
    /// size.
    ///
    /// # Errors
    /// `EBADF` for a closed descriptor. `EINVAL` for a descriptor that is no guest_memfd of this VM, and for a part
    /// that is not of whole pages or reaches beyond the end.
    pub(crate) fn part(&self, fd: u32, offset: u64, size: u64) -> Result<Part> {
        let file = FileId::of(fd as RawFd)?;
        let known = self
            .files()
            .iter()
            .filter_map(Weak::upgrade)
            .find(|known| known.file == file);
        let known = known.ok_or(Error::new(libc::EINVAL))?;
        let end = offset.checked_add(size).filter(|end| *end <= known.size());
        if !offset.is_multiple_of(page_size() as u64) || end.is_none() {
            return fail(libc::EINVAL);
        }
        Ok(Part {
            memory: known.memory.clone(),
            start: Hva(known.memory.start() as u64 + offset),
            only: known.flags & FLAG_MMAP != 0,
        })
    }
}
