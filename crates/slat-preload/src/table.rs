//! Which descriptors are KVM's, and what stands behind them.
//!
//! While no descriptor is KVM's, a look-up costs one load; then one that is not costs two more, and one that is a reference
//! count.
//!
//! # How a look-up stays safe against a close
//! What a slot of the table points to is a [`Cell`]: memory that is never given back, only used again. A look-up raises the
//! cell's count, unless it is zero, and then looks whether the slot still points to the cell. If it does, the cell holds what
//! the descriptor means, and cannot be emptied as long as the count is held; if not, the count is given back and the look-up
//! begins again. That the cell may meanwhile have come to hold something else is harmless: nobody looks into it before the
//! second check.

use slat_kvm::ioctl::Object;
use slat_kvm::process::PerProcess;
use std::cell::UnsafeCell;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// Descriptors per part of the table.
const PART: usize = 1024;
/// Parts: descriptors go to a million, the kernel's own default limit.
const PARTS: usize = 1024;

type Part = [AtomicPtr<Cell>; PART];

static TABLE: [AtomicPtr<Part>; PARTS] = [const { AtomicPtr::new(ptr::null_mut()) }; PARTS];
/// One more than the largest descriptor that ever was KVM's.
static END: AtomicUsize = AtomicUsize::new(0);
/// Descriptors that are KVM's.
static OPEN: AtomicUsize = AtomicUsize::new(0);
/// Emptied cells.
static FREE: PerProcess<Mutex<Vec<&'static Cell>>> = PerProcess::new();

/// Holds an object while somebody uses it.
pub struct Cell {
    users: AtomicU32,
    object: UnsafeCell<Option<Object>>,
}

// SAFETY: `object` is written only while `users` is zero and the cell is in nobody's hands, read only while it is not.
unsafe impl Sync for Cell {}

/// A use of an object. The object lives as long as the last of them, or the last descriptor.
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
        // SAFETY: a cell without users that is not in the free list belongs to us. A stale look-up may raise and lower the
        // count, but does not look inside.
        unsafe { *cell.object.get() = Some(object) };
        // The count may be raised for a moment by a stale look-up: add, do not store.
        cell.users.fetch_add(1, Ordering::AcqRel);
        Handle(cell)
    }

    /// The object.
    pub fn object(&self) -> &Object {
        // SAFETY: we are a user; nobody writes.
        unsafe { (*self.0.object.get()).as_ref() }.expect("a used cell holds an object")
    }

    /// Forgets the use without giving it back: for objects of a parent process.
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
    // SAFETY: the last user was the only one that could look inside; stale look-ups do not.
    let object = unsafe { (*cell.object.get()).take() };
    // A stale look-up that raises the count from zero is impossible: it refuses zero.
    free_cells().push(cell);
    drop(object);
}

fn free_cells() -> std::sync::MutexGuard<'static, Vec<&'static Cell>> {
    FREE.get()
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn slot(fd: i32) -> Option<&'static AtomicPtr<Cell>> {
    let fd = usize::try_from(fd).ok()?;
    let part = TABLE.get(fd / PART)?.load(Ordering::Acquire);
    // SAFETY: parts are published whole and never freed.
    Some(unsafe { &part.as_ref()?[fd % PART] })
}

fn slot_or_new(fd: i32) -> Option<&'static AtomicPtr<Cell>> {
    if let Some(slot) = slot(fd) {
        return Some(slot);
    }
    let place = TABLE.get(usize::try_from(fd).ok()? / PART)?;
    let part = Box::into_raw(Box::new([const { AtomicPtr::new(ptr::null_mut()) }; PART]));
    if place
        .compare_exchange(ptr::null_mut(), part, Ordering::AcqRel, Ordering::Acquire)
        .is_err()
    {
        // SAFETY: not published.
        drop(unsafe { Box::from_raw(part) });
    }
    slot(fd)
}

/// Whether any descriptor is KVM's. One load: this is asked at every change of the program's descriptors.
#[inline]
pub fn is_any_ours() -> bool {
    OPEN.load(Ordering::Relaxed) != 0
}

/// Whether a descriptor is KVM's.
#[inline]
pub fn is_ours(fd: i32) -> bool {
    is_any_ours() && slot(fd).is_some_and(|slot| !slot.load(Ordering::Relaxed).is_null())
}

/// What stands behind a descriptor, if it is KVM's.
pub fn get(fd: i32) -> Option<Handle> {
    let slot = slot(fd)?;
    loop {
        let pointer = slot.load(Ordering::Acquire);
        // SAFETY: cells are never freed.
        let cell: &'static Cell = unsafe { pointer.as_ref()? };
        let raised = cell
            .users
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |users| {
                if users == 0 { None } else { Some(users + 1) }
            });
        if raised.is_err() {
            // Being emptied: the slot changes any moment.
            std::hint::spin_loop();
            continue;
        }
        // The count is ours to give back, whatever the cell holds now.
        let handle = Handle(cell);
        if slot.load(Ordering::Acquire) == pointer {
            return Some(handle);
        }
    }
}

/// Makes a descriptor stand for a new object. False when its number is beyond the table.
pub fn insert(fd: i32, object: Object) -> bool {
    share(fd, Handle::new(object))
}

/// Makes a descriptor stand for the same object as another. False when its number is beyond the table.
pub fn share(fd: i32, handle: Handle) -> bool {
    let Some(slot) = slot_or_new(fd) else {
        return false;
    };
    END.fetch_max(fd as usize + 1, Ordering::AcqRel);
    let Handle(cell) = handle;
    std::mem::forget(handle);
    OPEN.fetch_add(1, Ordering::Relaxed);
    release(slot.swap(ptr::from_ref(cell).cast_mut(), Ordering::AcqRel));
    true
}

/// Ends what a descriptor stands for. To be called before the descriptor is closed: afterwards its number may be in use again.
pub fn remove(fd: i32) {
    if let Some(slot) = slot(fd) {
        release(slot.swap(ptr::null_mut(), Ordering::AcqRel));
    }
}

/// The descriptors in a range that are KVM's.
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
        // A forked child closes its parent's objects: they must not be dropped in here.
        if handle.object().is_foreign() {
            handle.leak();
        }
    }
}
