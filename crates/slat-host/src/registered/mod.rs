//! Memory that a client has registered with a userfaultfd which slat serves (`slat-preload`), because the kernel
//! refuses the client its own.
//!
//! A page that is not there yet is *absent*: an access to it waits until the client's handler has provided the page. A
//! *protected* page can be read; a write waits until the handler has lifted the protection. Two kinds of accesses meet
//! such a page:
//!
//! - A vCPU: before the engine maps a page, [`resolve`] waits for the page. Such pages are mapped one by one. No access
//!   touches host memory before the page is there.
//! - The client's own threads, such as the VMM's devices. slat keeps an absent page inaccessible (`PROT_NONE`) and a
//!   protected page read-only, so the access faults, and the handler of SIGSEGV waits ([`fault`]). For a system call
//!   that reads or writes the client's memory, [`await_range`] waits before the call: the kernel would end it with
//!   EFAULT.
//!
//! An access that has to wait posts one event to the handler for each page, however many threads wait for the page.
//! Kernels post an event for each thread. (Handlers must expect both: the kernel posts no second event if the threads
//! come one after the other.) An event is posted again only after the handler has woken the waiting threads and the
//! page is still missing.
//!
//! # How a page is provided
//! slat writes the content by `/proc/self/mem`, which ignores the protection of private memory, and then makes the page
//! accessible. So no thread sees a page before its whole content is there. Only private anonymous memory with pages of
//! the usual size can be registered.
//!
//! The kernel splits a mapping for each stretch of accessible pages. If a process gets too many mappings
//! (`vm.max_map_count`, usually 65530), providing a page fails with `ENOMEM`.
//!
//! # Concurrency
//! Each page has an atomic byte with its state. Look-ups take no lock, because the handler of SIGSEGV makes them. All
//! changes are made under one lock of the process, in an order that never lets an access pass too early: a page is
//! marked before it becomes inaccessible, and becomes accessible before the mark is removed. A region is never freed: a
//! look-up may still read it. Its pages have the state 0 then, which says that they are not registered.
//!
//! Waiting threads sleep on one counter of the process, [`CHANGES`]. A thread reads the counter, then the state, and
//! sleeps only while the counter has the value that it has read. A change stores the state before it raises the
//! counter. A vCPU waits for at most [`A_WHILE`] at a time, because it must notice signals and requests of other
//! threads.
//!
//! A forked child has the memory, but no handler serves it there. As on Linux, its missing pages read as zero: the
//! child's first access lifts the protection of the region.

mod change;

pub use change::{
    Content, discarded, discarding, fill, forget, protected, register, release_all, removing,
    set_protection, unregister, wake,
};

use crate::process::{Birth, PerProcess};
use slat::{Access, ResolveError};
use slat_process::calls::{self, Call, is_allowed};
use slat_process::{page_size, wait};
use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering::*,
};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The bits of a page's state. 0: the page is not registered.
mod state {
    /// Registered with `UFFDIO_REGISTER_MODE_MISSING`.
    pub(super) const MISSING: u8 = 1;
    /// Registered with `UFFDIO_REGISTER_MODE_WP`.
    pub(super) const WP: u8 = 2;
    /// The handler has not provided the page yet.
    pub(super) const ABSENT: u8 = 4;
    /// The handler has to lift the protection before a write.
    pub(super) const PROTECTED: u8 = 8;
    /// An event for the page was posted, and the handler has not woken the threads that wait.
    pub(super) const ASKED: u8 = 16;
    /// The client may read the page.
    pub(super) const READ: u8 = 32;
    /// The client may write the page.
    pub(super) const WRITE: u8 = 64;
}

/// Returns the bits of a state for what the client may do with a page.
fn rights(readable: bool, writable: bool) -> u8 {
    let read = if readable { state::READ } else { 0 };
    let write = if writable { state::WRITE } else { 0 };
    read | write
}

/// `UFFDIO_REGISTER_MODE_MISSING`.
pub const MODE_MISSING: u64 = state::MISSING as u64;
/// `UFFDIO_REGISTER_MODE_WP`.
pub const MODE_WP: u64 = state::WP as u64;

/// `UFFD_FEATURE_EVENT_REMOVE`: the handler is told of pages that madvise(2) drops.
pub const EVENT_REMOVE: u64 = 1 << 3;
/// `UFFD_FEATURE_THREAD_ID`: events have the id of the thread that waits.
pub const THREAD_ID: u64 = 1 << 8;
/// `UFFD_FEATURE_EXACT_ADDRESS`: events have the address of the access, and not that of its page.
pub const EXACT_ADDRESS: u64 = 1 << 11;

/// A userfaultfd that slat serves: the end to which slat posts events.
#[derive(Debug)]
pub struct Handler {
    /// A socket. The client reads the events from its other end.
    pub socket: i32,
    /// The features that the client has asked for, and [`Self::IS_READY`].
    pub features: AtomicU64,
    /// The number of changes of which the client has not read the event yet. Meanwhile pages cannot be provided.
    changing: AtomicU32,
    /// Whether the client has closed all its copies of the descriptor.
    is_closed: AtomicBool,
}

impl Handler {
    /// Bit of [`features`](Self::features): the client has made the request `UFFDIO_API`.
    pub const IS_READY: u64 = 1 << 63;

    /// Makes a handler that gets its events by `socket`.
    pub fn new(socket: i32) -> Self {
        Handler {
            socket,
            features: AtomicU64::new(0),
            changing: AtomicU32::new(0),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Records that the client has closed the descriptor, so that nothing waits for it any more.
    pub fn close(&self) {
        self.is_closed.store(true, SeqCst);
    }

    fn has(&self, feature: u64) -> bool {
        self.features.load(Relaxed) & feature != 0
    }

    /// Posts an event: its number, and three words that depend on the event. Returns `false` if the queue is full, or
    /// nobody can read it. Async-signal-safe.
    fn post(&self, event: u8, words: [u64; 3]) -> bool {
        let message = [u64::from(event), words[0], words[1], words[2]];
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let (start, len) = (message.as_ptr() as usize, size_of_val(&message));
        let arguments = [self.socket as usize, start, len, flags as usize, 0, 0];
        // SAFETY: the message is live, and the socket is slat's own.
        let sent = unsafe { calls::make(Call::Send, arguments) };
        sent.is_ok()
    }

    /// Whether the client has not read all events.
    fn has_unread(&self) -> bool {
        let mut bytes = 0i32;
        let arguments = [
            self.socket as usize,
            libc::TIOCOUTQ as usize,
            &raw mut bytes as usize,
            0,
            0,
            0,
        ];
        // SAFETY: the request stores one integer.
        unsafe { calls::make(Call::Unread, arguments) }.is_ok() && bytes != 0
    }
}

/// A registered range.
struct Region {
    range: Range<usize>,
    birth: Birth,
    handler: &'static Handler,
    /// The states of the pages.
    pages: &'static [AtomicU8],
}

impl Region {
    fn state(&self, address: usize) -> Option<&'static AtomicU8> {
        let offset = address.checked_sub(self.range.start)?;
        self.pages.get(offset / page_size())
    }
}

/// The number of regions that can exist at a time. A VMM has a few.
const REGIONS: usize = 512;

/// The regions. A null entry is free. A forked child finds its parent's regions here.
static TABLE: [AtomicPtr<Region>; REGIONS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; REGIONS];
/// One more than the largest index that was ever used.
static END: AtomicUsize = AtomicUsize::new(0);
/// The number of regions. One load decides whether anything here is of interest.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Raised by each change for which a thread may wait.
static CHANGES: AtomicU32 = AtomicU32::new(0);

/// The lock of all changes.
static LOCK: PerProcess<Mutex<()>> = PerProcess::new();

fn lock() -> MutexGuard<'static, ()> {
    LOCK.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether any memory is registered. One load.
#[inline]
pub fn is_any() -> bool {
    COUNT.load(Relaxed) != 0
}

/// Calls `visit` for each region of the table, until it returns `false`.
fn each_region(mut visit: impl FnMut(&'static AtomicPtr<Region>, &'static Region) -> bool) {
    for entry in &TABLE[..END.load(Acquire)] {
        // SAFETY: regions are never freed.
        if let Some(region) = unsafe { entry.load(Acquire).as_ref() }
            && !visit(entry, region)
        {
            return;
        }
    }
}

/// Returns the region in which `address` is registered, and the state of the page. In a forked child, ends a
/// registration that the child has inherited.
fn find(address: usize) -> Option<(&'static Region, &'static AtomicU8)> {
    let mut found = None;
    each_region(|_, region| {
        let page = region.state(address);
        found = page
            .filter(|page| page.load(Acquire) != 0)
            .map(|page| (region, page));
        if found.is_some() && !region.birth.is_here() {
            change::leave_to_child(region);
            found = None;
        }
        found.is_none()
    });
    found
}

/// Whether the parent of this forked child has registered `address`, and the child has not accessed it yet.
fn is_inherited(address: usize) -> bool {
    let mut found = false;
    each_region(|_, region| {
        let page = region.state(address);
        found = !region.birth.is_here() && page.is_some_and(|page| page.load(Acquire) != 0);
        !found
    });
    found
}

/// What an access to a registered page has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Make the access.
    Go,
    /// Wait until the handler has provided the page, or has lifted its protection. The flags are those of the event.
    Wait { flags: u64 },
    /// Fail: the client's own rights do not allow the access.
    Fail,
}

/// Returns what an access to a page in this state has to do.
fn step(state: u8, write: bool) -> Step {
    const WRITE: u64 = 1;
    const WP: u64 = 2;
    let needed = match write {
        true => state::WRITE,
        false => state::READ,
    };
    match () {
        () if state & needed == 0 => Step::Fail,
        () if state & state::ABSENT != 0 => Step::Wait {
            flags: if write { WRITE } else { 0 },
        },
        () if write && state & state::PROTECTED != 0 => Step::Wait { flags: WRITE | WP },
        () => Step::Go,
    }
}

/// Posts the event of an access at `address`, unless the handler knows it already.
fn ask(region: &Region, page: &AtomicU8, address: usize, flags: u64) {
    const PAGEFAULT: u8 = 0x12;
    if page.fetch_or(state::ASKED, SeqCst) & state::ASKED != 0 {
        return;
    }
    let handler = region.handler;
    let address = match handler.has(EXACT_ADDRESS) {
        true => address,
        false => address & !(page_size() - 1),
    };
    let thread = match handler.has(THREAD_ID) {
        true => slat_process::thread_id() as u64,
        false => 0,
    };
    if !handler.post(PAGEFAULT, [flags, address as u64, thread]) {
        // The queue is full. The thread tries again when it has slept.
        page.fetch_and(!state::ASKED, SeqCst);
    }
}

/// The longest sleep between two looks at what else a thread has to do.
const A_WHILE: Duration = Duration::from_millis(2);

/// Sleeps until something has changed since `seen` was read, but not longer than [`A_WHILE`].
fn sleep(seen: u32) {
    match is_allowed(Call::RestartSyscall) {
        true => drop(wait::sleep(&CHANGES, seen, Some(A_WHILE))),
        // Then the thread must not sleep with a time limit (`wait`).
        false => wait::yield_now(),
    }
}

/// Raises [`CHANGES`] and wakes all threads that wait.
fn announce() {
    CHANGES.fetch_add(1, SeqCst);
    wait::wake(&CHANGES);
}

/// Makes an access wait. Returns [`Step::Wait`] if the thread has waited and has to look again; `None` if the page is
/// not registered any more.
fn look(address: usize, write: bool) -> Option<Step> {
    let seen = CHANGES.load(SeqCst);
    let (region, page) = find(address)?;
    let step = step(page.load(SeqCst), write);
    if let Step::Wait { flags } = step {
        ask(region, page, address, flags);
        sleep(seen);
    }
    Some(step)
}

/// Resolves the page at `address` for a vCPU: waits until the page is there, and touches it by `touch`. Returns whether
/// the page may be mapped writable; `None` if the page is not registered.
///
/// # Errors
/// [`ResolveError::Interrupted`] after a short wait: the vCPU looks at its other work, and makes the access again.
pub(crate) fn resolve(
    address: usize,
    access: Access,
    touch: impl FnOnce() -> Result<(), ResolveError>,
) -> Option<Result<bool, ResolveError>> {
    if !is_any() {
        return None;
    }
    match look(address, access == Access::Write)? {
        Step::Go => {}
        Step::Fail => return Some(Err(ResolveError::BadAddress)),
        Step::Wait { .. } => {
            // An older kick must not count as an interruption of this wait.
            slat_guard::forget_kick();
            return Some(Err(ResolveError::Interrupted));
        }
    }
    let (_, page) = find(address)?;
    let state = page.load(SeqCst);
    let is_writable = state & (state::WRITE | state::PROTECTED) == state::WRITE;
    Some(touch().map(|()| is_writable))
}

thread_local! {
    // The variables have neither an initialiser nor a destructor, because a handler uses them.
    /// This thread's faults on registered pages whose state allows the access.
    static IN_VAIN: Row = const { Row::new() };
    /// This thread's faults on memory that is not registered.
    static ELSEWHERE: Row = const { Row::new() };
}

/// The address of a thread's last fault of some kind, and how many such faults at that address came in a row.
struct Row(Cell<(usize, u32)>);

impl Row {
    const fn new() -> Self {
        Row(Cell::new((0, 0)))
    }

    /// Adds a fault at `address`, the first of a new row if `begins`. Returns the number of faults in the row before it.
    fn add(&self, address: usize, begins: bool) -> u32 {
        let (last, times) = self.0.get();
        let before = if last == address && !begins { times } else { 0 };
        self.0.set((address, before + 1));
        before
    }
}

/// Handles a fault of the client's own code at `address`. Returns `true` if the access is to be made again: the page is
/// there now, or may be. Async-signal-safe.
pub fn fault(address: usize, write: bool) -> bool {
    /// A fault without a reason is the moment before a page becomes accessible. More in a row mean that the client has
    /// changed the rights of its memory in a way that slat does not see.
    const MOST_IN_VAIN: u32 = 10_000;
    /// A registration may end between the access and this call. So an access that is not to memory which is registered,
    /// or which the client itself may not access, is made again, a few times.
    const MOST_ELSEWHERE: u32 = 2;
    let mut has_waited = false;
    let was_registered = is_inherited(address);
    loop {
        match look(address, write) {
            Some(Step::Wait { .. }) => has_waited = true,
            Some(Step::Go) => {
                return IN_VAIN.with(|row| row.add(address, has_waited)) < MOST_IN_VAIN;
            }
            // Another thread has just ended the registration, or this thread did, in a forked child.
            None if has_waited || was_registered => return true,
            Some(Step::Fail) | None => {
                return ELSEWHERE.with(|row| row.add(address, false)) < MOST_ELSEWHERE;
            }
        }
    }
}

/// Waits until the pages of `range` are there, as far as they are registered. Call before a system call that accesses
/// the client's memory.
pub fn await_range(range: Range<usize>, write: bool) {
    let size = page_size();
    let mut regions = false;
    each_region(|_, region| {
        regions |= region.range.start < range.end && range.start < region.range.end;
        !regions
    });
    if !regions {
        return;
    }
    for page in (range.start & !(size - 1)..range.end).step_by(size) {
        let address = page.max(range.start);
        while let Some(Step::Wait { .. }) = look(address, write) {}
    }
}

/// Whether `address` is registered.
pub(crate) fn is_registered(address: usize) -> bool {
    is_any() && find(address).is_some()
}
