//! State that belongs to this process, and that its forked children do not share.
//!
//! KVM returns `EIO` to a process that uses a VM of another address space. A forked child has a copy of the memory of
//! slat's objects, but lacks the threads that may hold their locks, so it must not touch any object. A few words that
//! the kernel clears in the child of every fork (`MADV_WIPEONFORK`) tell parent and child apart without a system call,
//! even if the program forks without the C library. A child of `vfork` shares these words with its parent, as it shares
//! all memory.

use crate::arch::memory::OwnPages;
use crate::noted::{note_first, noted_thread_id};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// The words of slat that the kernel clears in a forked child (`MADV_WIPEONFORK`).
#[repr(C)]
struct Wiped {
    /// The generation of this process: 1 for the first process that uses slat, one more for each forked descendant that
    /// uses slat. 0 until slat first needs the generation.
    generation: AtomicU64,
    /// The id of this process. 0 until [`owner`] or [`note_owner`] stores the id.
    pid: AtomicI32,
    /// The number of VMs that live in this process.
    live_vms: AtomicUsize,
    /// The tracepoints that this process records, one bit for each.
    traced: AtomicU64,
}

/// The words are in their own pages of anonymous memory, as `MADV_WIPEONFORK` requires.
static WIPED: OwnPages<Wiped> = OwnPages(Wiped {
    generation: AtomicU64::new(0),
    pid: AtomicI32::new(0),
    live_vms: AtomicUsize::new(0),
    traced: AtomicU64::new(0),
});

/// The highest generation so far. A forked child inherits this value and counts on.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// Passes `advice` about [`WIPED`] to madvise(2). Returns whether the kernel accepts the advice.
fn advise(advice: i32) -> bool {
    let start = (&raw const WIPED).cast_mut().cast();
    // SAFETY: the pages are slat's own, and contain only `WIPED`; the advice does not change their contents.
    unsafe { libc::madvise(start, size_of::<OwnPages<Wiped>>(), advice) == 0 }
}

/// Whether the kernel is an emulator that ignores advice (qemu-user 7.2). Such an emulator accepts even advice that
/// does not exist.
pub(crate) fn ignores_advice() -> bool {
    advise(-1)
}

/// Makes the kernel clear [`WIPED`] in the children of all later forks.
fn watch() {
    // A flag instead of a `Once`, because a child that is forked during the work would wait for a `Once` forever. So
    // two threads may both do the work, which does no harm.
    static WATCHING: AtomicBool = AtomicBool::new(false);
    extern "C" fn in_child() {
        WIPED.0.generation.store(0, Ordering::Relaxed);
        WIPED.0.pid.store(0, Ordering::Relaxed);
        WIPED.0.live_vms.store(0, Ordering::Relaxed);
        WIPED.0.traced.store(0, Ordering::Relaxed);
    }
    if !WATCHING.load(Ordering::Acquire) {
        let is_wiped = !ignores_advice() && advise(libc::MADV_WIPEONFORK);
        if !is_wiped {
            // Without MADV_WIPEONFORK, at least the C library's forks clear the words.
            // SAFETY: the handler is async-signal-safe, because it only stores to atomics.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        }
        WATCHING.store(true, Ordering::Release);
    }
}

/// Returns the counter of VMs that live in this process. In a forked child, the counter is 0. Costs one load.
pub fn live_vms() -> &'static AtomicUsize {
    &WIPED.0.live_vms
}

/// Returns the tracepoints that this process records, one bit for each. In a forked child, there are none.
#[inline(always)]
pub fn traced() -> &'static AtomicU64 {
    &WIPED.0.traced
}

/// Returns the id of the process that owns this memory. In a child of `vfork`, the owner is the parent.
pub fn owner() -> i32 {
    watch();
    match WIPED.0.pid.load(Ordering::Relaxed) {
        0 => {
            let pid = std::process::id() as i32;
            WIPED.0.pid.store(pid, Ordering::Relaxed);
            pid
        }
        pid => pid,
    }
}

/// Stores the id of this process for [`owner`]. Call in a child that the C library has just forked. If slat knows where
/// the C library stores the id, makes no system call. The id is stored now because a `vfork` child of this child could
/// not use the C library's id later.
pub fn note_owner() {
    match noted_thread_id() {
        Some(id) => {
            WIPED.0.pid.store(id, Ordering::Relaxed);
            note_first();
        }
        None => drop(owner()),
    }
}

/// Identifies the process in which an object was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Birth(u64);

impl Birth {
    /// Returns the calling process.
    pub fn here() -> Self {
        watch();
        let known = WIPED.0.generation.load(Ordering::Acquire);
        if known != 0 {
            return Birth(known);
        }
        let new = GENERATION.fetch_add(1, Ordering::Relaxed) + 1;
        let set =
            (WIPED.0.generation).compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire);
        Birth(set.map_or_else(|faster| faster, |_| new))
    }

    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// Whether the calling process is the process in which the object was created.
    pub fn is_here(self) -> bool {
        self.0 == WIPED.0.generation.load(Ordering::Relaxed)
    }
}

/// A global variable of which every process has its own value. A forked child begins with a new value. It does not
/// touch the inherited value, because threads that the child does not have may hold locks in it.
#[derive(Debug)]
pub struct PerProcess<T: 'static> {
    current: AtomicPtr<Held<T>>,
}

#[derive(Debug)]
struct Held<T> {
    birth: Birth,
    value: T,
}

impl<T: Default + Sync + 'static> PerProcess<T> {
    /// Makes a variable that is empty until the first use.
    pub const fn new() -> Self {
        PerProcess {
            current: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Returns this process's value. `None`: the value was not used yet.
    pub fn peek(&'static self) -> Option<&'static T> {
        // SAFETY: a published value is never freed.
        let held = unsafe { self.current.load(Ordering::Acquire).as_ref()? };
        held.birth.is_here().then_some(&held.value)
    }

    /// Returns this process's value. The first use makes the value.
    pub fn get(&'static self) -> &'static T {
        self.get_or_start(|_| {})
    }

    /// Returns the value like [`get`](Self::get). If this call makes the value, also calls `start` with the value.
    pub fn get_or_start(&'static self, start: impl FnOnce(&'static T)) -> &'static T {
        if let Some(value) = self.peek() {
            return value;
        }
        let birth = Birth::here();
        let old = self.current.load(Ordering::Acquire);
        let new = Box::into_raw(Box::new(Held {
            birth,
            value: T::default(),
        }));
        match self
            .current
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => {
                // SAFETY: the value was published above, and is never freed.
                let value = unsafe { &(*new).value };
                start(value);
                value
            }
            Err(_) => {
                // SAFETY: `new` was not published, so this thread alone owns it.
                drop(unsafe { Box::from_raw(new) });
                self.get_or_start(start)
            }
        }
    }
}

impl<T: Default + Sync + 'static> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_is_another_process() {
        let birth = Birth::here();
        assert!(birth.is_here());
        // SAFETY: the child only reads an atomic, and exits.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(birth.is_here()));
            }
            let mut status = -1;
            libc::waitpid(child, &mut status, 0);
            status
        };
        assert_eq!(status, 0, "the child took itself for its parent");
        assert!(birth.is_here());
    }

    #[test]
    fn a_child_forked_without_the_c_library_is_another_process() {
        if ignores_advice() {
            return eprintln!("skipped: this kernel does not wipe pages of forked children");
        }
        let (birth, parent) = (Birth::here(), owner());
        // SAFETY: the child only reads atomics, and exits. It does not use the C library's state.
        let status = unsafe {
            let child = crate::arch::calls::fork();
            if child == 0 {
                let other = !birth.is_here() && Birth::here() != birth && owner() != parent;
                libc::_exit(i32::from(!other));
            }
            let mut status = -1;
            libc::waitpid(child, &mut status, 0);
            status
        };
        assert_eq!(status, 0, "the child took itself for its parent");
        assert!(birth.is_here() && owner() == parent);
    }
}
