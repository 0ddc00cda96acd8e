//! The table of the descriptors that are KVM's, and of the objects to which they refer.
//!
//! If no descriptor is KVM's, a look-up costs one load. Otherwise a look-up costs three loads; if the descriptor is
//! KVM's, the look-up also changes a reference count.
//!
//! # How a look-up stays safe against a close
//! An entry of the table points to a [`Cell`]: memory that is never freed, only reused. A look-up raises the cell's
//! count, unless the count is zero, and then checks whether the entry still points to the cell. If it does, the cell
//! holds the descriptor's object, and cannot be emptied until the look-up lowers the count. If the entry has changed,
//! the look-up lowers the count and begins again. Then the cell may hold another object. That is harmless, because no
//! look-up reads the object before the second check.
//!
//! # Order
//! Each change of an entry or of a count is an acquire and a release (`AcqRel`). Suppose that a cell is reused between
//! a look-up's two checks. The look-up raised a count that belongs to the new object, and the old entry was emptied
//! before the cell got that count. So the second check finds the entry changed. A thread that reuses a cell has
//! acquired the last use of the cell's old object.

use crate::errno::{Result, fail};
use crate::ioctl::{Answer, Object};
use crate::process::PerProcess;
use std::cell::UnsafeCell;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// The number of descriptors in one part of the table.
const PART: usize = 1024;
/// The number of parts. The table has a million descriptors, which is the kernel's own default limit.
const PARTS: usize = 1024;

type Part = [AtomicPtr<Cell>; PART];

static TABLE: [AtomicPtr<Part>; PARTS] = [const { AtomicPtr::new(ptr::null_mut()) }; PARTS];
/// One more than the largest descriptor that was ever KVM's.
static END: AtomicUsize = AtomicUsize::new(0);
/// The number of descriptors that are KVM's.
static OPEN: AtomicUsize = AtomicUsize::new(0);
/// Cells that were emptied, and can be reused.
static FREE: PerProcess<Mutex<Vec<&'static Cell>>> = PerProcess::new();

/// Holds an object while the object has users.
pub struct Cell {
    users: AtomicU32,
    object: UnsafeCell<Option<Object>>,
}

// SAFETY: a thread writes `object` only while `users` is zero and the cell is not shared. Threads read `object` only
// while `users` is above zero.
unsafe impl Sync for Cell {}

/// A reference to an object, which the object's cell counts. The object lives until it has no reference and no
/// descriptor.
pub struct Handle(&'static Cell);

impl Handle {
    fn new(object: Object) -> Self {
        let reused = free_cells().pop();
        let cell = reused.unwrap_or_else(|| {
            Box::leak(Box::new(Cell {
                users: AtomicU32::new(0),
                object: UnsafeCell::new(None),
            }))
        });
        // SAFETY: this call has taken the cell from the free list or created it, so no other thread writes the object.
        // A stale look-up may raise and lower the count, but does not read the object.
        unsafe { *cell.object.get() = Some(object) };
        // The count is increased by 1, not set to 1, because a stale look-up may have raised it and may not have
        // lowered it yet.
        cell.users.fetch_add(1, Ordering::AcqRel);
        Handle(cell)
    }

    /// Returns the object (VM, vCPU, device, …) of this handle.
    pub fn object(&self) -> &Object {
        // SAFETY: this handle is a user of the object, so no thread writes the object.
        unsafe { (*self.0.object.get()).as_ref() }.expect("a used cell holds an object")
    }

    /// Carries out a request, and adds the object that the request creates to the table. Returns the result of `ioctl`.
    /// `None`: the caller makes the system call, because the kernel itself carries out this request for any file.
    ///
    /// # Errors
    /// The errors are those of [`Object::ioctl`]; `EMFILE` if the new descriptor's number is beyond the table.
    pub fn ioctl(&self, request: u32, argument: u64) -> Result<Option<i32>> {
        let value = match self.object().ioctl(request, argument)? {
            Answer::Value(value) => value,
            Answer::Created(object, fd) => adopt(fd, object)?,
            Answer::Stored(object, fd) => adopt(fd, object).map(|_| 0)?,
            Answer::Kernels => return Ok(None),
        };
        Ok(Some(value))
    }

    /// Drops the handle without lowering the count. Call for objects of a parent process.
    fn leak(self) {
        std::mem::forget(self);
    }
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        self.0.users.fetch_add(1, Ordering::Relaxed);
        Handle(self.0)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.0.users.fetch_sub(1, Ordering::AcqRel) == 1 {
            retire(self.0);
        }
    }
}

/// Empties a cell whose count has reached zero.
fn retire(cell: &'static Cell) {
    // SAFETY: the count is zero, so no thread uses the object, and a stale look-up never reads the object.
    let object = unsafe { (*cell.object.get()).take() };
    // A stale look-up does not raise a count of zero, so the cell can be reused now.
    free_cells().push(cell);
    drop(object);
}

fn free_cells() -> std::sync::MutexGuard<'static, Vec<&'static Cell>> {
    FREE.get()
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn entry(fd: i32) -> Option<&'static AtomicPtr<Cell>> {
    let fd = usize::try_from(fd).ok()?;
    let part = TABLE.get(fd / PART)?.load(Ordering::Acquire);
    // SAFETY: a part of the table is initialised before it is published, and is never freed.
    Some(unsafe { &part.as_ref()?[fd % PART] })
}

fn entry_or_new(fd: i32) -> Option<&'static AtomicPtr<Cell>> {
    if let Some(entry) = entry(fd) {
        return Some(entry);
    }
    let place = TABLE.get(usize::try_from(fd).ok()? / PART)?;
    let part = Box::into_raw(Box::new([const { AtomicPtr::new(ptr::null_mut()) }; PART]));
    if place
        .compare_exchange(ptr::null_mut(), part, Ordering::AcqRel, Ordering::Acquire)
        .is_err()
    {
        // SAFETY: `part` was never published, so no other thread has a pointer to it.
        drop(unsafe { Box::from_raw(part) });
    }
    entry(fd)
}

/// Whether any descriptor is KVM's. slat calls this function at every change of the program's descriptors. So it costs
/// only one load.
#[inline]
pub fn is_any_ours() -> bool {
    OPEN.load(Ordering::Relaxed) != 0
}

/// Whether a descriptor is KVM's.
#[inline]
pub fn is_ours(fd: i32) -> bool {
    is_any_ours() && entry(fd).is_some_and(|entry| !entry.load(Ordering::Relaxed).is_null())
}

/// Returns the KVM object that `fd` refers to; `None` if `fd` is not KVM's.
pub fn get(fd: i32) -> Option<Handle> {
    let entry = entry(fd)?;
    loop {
        let pointer = entry.load(Ordering::Acquire);
        // SAFETY: cells are never freed.
        let cell: &'static Cell = unsafe { pointer.as_ref()? };
        let raised = cell
            .users
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |users| {
                if users == 0 { None } else { Some(users + 1) }
            });
        if raised.is_err() {
            // The cell is being emptied, so another thread is about to change the entry.
            std::hint::spin_loop();
            continue;
        }
        // If the check below fails, dropping this handle lowers the count again. The cell may hold another object by
        // then.
        let handle = Handle(cell);
        if entry.load(Ordering::Acquire) == pointer {
            return Some(handle);
        }
    }
}

/// Makes `fd` refer to a new object. Returns `false` if the descriptor's number is beyond the table.
pub fn insert(fd: i32, object: Object) -> bool {
    share(fd, Handle::new(object))
}

/// Adds an object and its descriptor to the table. Returns the descriptor, which the client now owns.
///
/// # Errors
/// `EMFILE` if the descriptor's number is beyond the table.
pub fn adopt(fd: OwnedFd, object: Object) -> Result<i32> {
    let fd = fd.into_raw_fd();
    if insert(fd, object) {
        return Ok(fd);
    }
    // SAFETY: `into_raw_fd` has returned this descriptor, and nothing else owns it.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    fail(libc::EMFILE)
}

/// Makes `fd` refer to the object of `handle`. Returns `false` if the descriptor's number is beyond the table.
pub fn share(fd: i32, handle: Handle) -> bool {
    let Some(entry) = entry_or_new(fd) else {
        return false;
    };
    END.fetch_max(fd as usize + 1, Ordering::AcqRel);
    let Handle(cell) = handle;
    std::mem::forget(handle);
    OPEN.fetch_add(1, Ordering::Relaxed);
    release(entry.swap(ptr::from_ref(cell).cast_mut(), Ordering::AcqRel));
    true
}

/// Removes the entry of `fd`. Call before the descriptor is closed. After that, the kernel may give the number to
/// another file.
pub fn remove(fd: i32) {
    if let Some(entry) = entry(fd) {
        release(entry.swap(ptr::null_mut(), Ordering::AcqRel));
    }
}

/// Returns the descriptors in a range that are KVM's.
pub fn ours_within(first: u32, last: u32) -> impl Iterator<Item = i32> {
    let end = END
        .load(Ordering::Acquire)
        .min((last as usize).saturating_add(1));
    (first as usize..end)
        .map(|fd| fd as i32)
        .filter(|&fd| is_ours(fd))
}

fn release(cell: *mut Cell) {
    // SAFETY: cells are never freed.
    if let Some(cell) = unsafe { cell.as_ref() } {
        OPEN.fetch_sub(1, Ordering::Relaxed);
        let handle = Handle(cell);
        // The calling process is a forked child, which closes an object of its parent. The child must not drop the
        // object.
        if handle.object().is_foreign() {
            handle.leak();
        }
    }
}
