//! Raw descriptors, and the objects of this crate to which they refer.
//!
//! kvm-ioctls can make an object of any descriptor, because the kernel knows to which object the descriptor refers.
//! This crate lists the objects that clients hold by their files, so that a duplicate of a descriptor refers to the
//! same object. The list keeps an object as long as the client holds a [`Descriptor`] of it. A raw descriptor alone
//! keeps an object in the list only if the object is guest_memfd memory, for which the client gets only a raw
//! descriptor.

use crate::errno::{Result, fail};
use crate::file_id::FileId;
use crate::guest_memfd::GuestMemfd;
use crate::heap;
use crate::ioctl::Object;
use crate::process::PerProcess;
use crate::vm::VmObject;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// An entry of the list: an object that clients hold.
#[derive(Debug)]
struct Entry {
    file: FileId,
    object: Object,
    /// The number of [`Descriptor`]s that refer to the object.
    descriptors: usize,
    /// A VM that uses the object. As long as the VM lives, it keeps the object in the list, even if there is no
    /// [`Descriptor`] of the object.
    vm: Weak<VmObject>,
}

/// The objects of this process, in the order of their files.
static ENTRIES: PerProcess<Mutex<Vec<Entry>>> = PerProcess::new();

fn entries() -> MutexGuard<'static, Vec<Entry>> {
    (ENTRIES.get().lock()).unwrap_or_else(PoisonError::into_inner)
}

fn find(entries: &[Entry], file: FileId) -> std::result::Result<usize, usize> {
    entries.binary_search_by_key(&file, |entry| entry.file)
}

fn insert(entry: Entry) -> Result<()> {
    let mut entries = entries();
    heap::reserve(&mut entries, 1)?;
    // A file that is in the list is still open, so no other file has the same device and inode number.
    let (Ok(index) | Err(index)) = find(&entries, entry.file);
    entries.insert(index, entry);
    Ok(())
}

/// Owns a descriptor, and keeps the object that the descriptor refers to in the list. Dropping this value closes the
/// descriptor.
#[derive(Debug)]
pub(super) struct Descriptor {
    fd: OwnedFd,
    file: FileId,
}

impl Descriptor {
    /// Puts a new object and its descriptor into the list.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn new(fd: OwnedFd, object: Object) -> Result<Self> {
        let file = FileId::of(fd.as_raw_fd())?;
        insert(Entry {
            file,
            object,
            descriptors: 1,
            vm: Weak::new(),
        })?;
        Ok(Descriptor { fd, file })
    }

    /// Takes ownership of a client's descriptor. Returns the object that the descriptor refers to, unpacked by `is`.
    /// After an error the client still owns the descriptor.
    ///
    /// # Errors
    /// `EBADF` for a closed descriptor. `ENOTTY`, as from the kernel's `ioctl`, if the descriptor refers to no object,
    /// or `is` returns `None`.
    ///
    /// # Safety
    /// Nothing else owns the descriptor.
    pub(super) unsafe fn adopt<T>(
        fd: RawFd,
        is: impl FnOnce(&Object) -> Option<T>,
    ) -> Result<(T, Descriptor)> {
        let file = FileId::of(fd)?;
        let mut entries = entries();
        let entry = find(&entries, file).map(|index| &mut entries[index]);
        let Some((entry, object)) = entry.ok().and_then(|entry| {
            let object = is(&entry.object)?;
            Some((entry, object))
        }) else {
            return fail(libc::ENOTTY);
        };
        entry.descriptors += 1;
        // SAFETY: the descriptor is open, because `fstat` has succeeded. The caller passes its ownership on.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok((object, Descriptor { fd, file }))
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}

/// Gives the client a raw descriptor of private memory. The list keeps the memory as long as its VM lives. If the
/// client makes a [`Descriptor`] of the raw descriptor, the list keeps the memory until the client drops that
/// [`Descriptor`].
///
/// # Errors
/// `ENOMEM`.
pub(super) fn give_away(fd: OwnedFd, memory: Arc<GuestMemfd>, vm: &Arc<VmObject>) -> Result<RawFd> {
    insert(Entry {
        file: FileId::of(fd.as_raw_fd())?,
        object: Object::GuestMemfd(memory),
        descriptors: 0,
        vm: Arc::downgrade(vm),
    })?;
    Ok(fd.into_raw_fd())
}

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // A forked child has an empty list of its own, which does not hold this object.
        if ENTRIES.peek().is_none() {
            return;
        }
        let released = {
            let mut entries = entries();
            let Ok(index) = find(&entries, self.file) else {
                return;
            };
            entries[index].descriptors -= 1;
            (entries[index].descriptors == 0).then(|| entries.remove(index))
        };
        if let Some(released) = released {
            // The object is dropped after the list is unlocked, because its drop may lock the list again.
            drop(released);
            release_memory();
        }
    }
}

/// Releases private memory whose VM was dropped and that no [`Descriptor`] keeps.
fn release_memory() {
    let is_released = |entry: &Entry| {
        let private = matches!(entry.object, Object::GuestMemfd(_));
        private && entry.descriptors == 0 && entry.vm.strong_count() == 0
    };
    loop {
        let released = {
            let mut entries = entries();
            let index = entries.iter().position(is_released);
            index.map(|index| entries.remove(index))
        };
        if released.is_none() {
            return;
        }
    }
}
