//! The list of the system calls that slat makes on the program's threads, and a bit for each that says whether a filter
//! forbids it.

use crate::arch::calls::{POLL, REMOVE, SYS_POLL, SYS_REMOVE};
use libc::{
    SYS_clock_gettime, SYS_close, SYS_epoll_ctl, SYS_fcntl, SYS_futex, SYS_getpid, SYS_getrandom,
    SYS_gettid, SYS_ioctl, SYS_madvise, SYS_mincore, SYS_mmap, SYS_mprotect, SYS_mremap,
    SYS_munmap, SYS_openat, SYS_pread64, SYS_preadv2, SYS_pwrite64, SYS_restart_syscall,
    SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_rt_tgsigqueueinfo, SYS_sched_yield, SYS_sendto,
    SYS_write,
};
use std::sync::atomic::{AtomicU64, Ordering};

/// The thread that makes a call if a filter forbids the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instead {
    /// Only the calling thread can make the call, so the filter must allow the call.
    Nobody,
    /// The helper thread makes the call.
    Helper,
    /// No thread makes the call: slat works without the result of the call.
    Omitted,
}

/// A system call, described as a filter sees it.
#[derive(Debug)]
pub struct Entry {
    /// The name of the call for messages, with the arguments that a filter may check.
    pub name: &'static str,
    /// The call's number.
    pub number: i64,
    /// Arguments with a fixed value: index and value.
    pub arguments: &'static [(usize, usize)],
    /// The thread that makes the call if a filter forbids it.
    pub instead: Instead,
}

macro_rules! calls {
    ($($(#[$doc:meta])* $id:ident: $instead:ident $name:expr, $number:ident $([$($index:literal = $value:expr),*])?;)*) => {
        /// A system call in slat's list.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Call { $($(#[$doc])* $id),* }

        impl Call {
            /// All calls in this list.
            pub const ALL: &[Call] = &[$(Call::$id),*];

            /// Returns the list's entry for the call.
            pub const fn entry(self) -> &'static Entry {
                match self {
                    $(Call::$id => &Entry {
                        name: $name,
                        number: $number,
                        arguments: &[$($(($index, $value as usize)),*)?],
                        instead: Instead::$instead,
                    }),*
                }
            }
        }
    };
}

const KEPT_FD: i32 = libc::F_DUPFD_CLOEXEC;
const LOCK_WAIT: i32 = libc::FUTEX_WAIT_BITSET | libc::FUTEX_PRIVATE_FLAG;
const WAIT: i32 = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
const WAKE: i32 = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
const OWN_MEMORY: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const TABLE_MEMORY: i32 = OWN_MEMORY | libc::MAP_NORESERVE;
const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
/// PROCMAP_QUERY of `include/uapi/linux/fs.h`.
pub const PROCMAP_QUERY: usize = 0xc068_6611;

calls! {
    /// Waits for an interrupt, a lock or the helper.
    Wait: Nobody "futex (FUTEX_WAIT_PRIVATE)", SYS_futex [1 = WAIT];
    /// Waits for a lock of the standard library.
    WaitForLock: Nobody "futex (FUTEX_WAIT_BITSET_PRIVATE)", SYS_futex [1 = LOCK_WAIT];
    /// Wakes other threads.
    Wake: Nobody "futex (FUTEX_WAKE_PRIVATE)", SYS_futex [1 = WAKE];
    /// Yields the processor. Without this call, the thread spins.
    Yield: Omitted "sched_yield", SYS_sched_yield;
    /// Asks for the thread's id, once. Without this call, slat uses the id that the C library has stored.
    ThreadId: Omitted "gettid", SYS_gettid;
    /// Blocks and unblocks signals whose handlers are deferred until slat's own code ends, and signals that only
    /// `KVM_RUN` blocks.
    SignalMask: Nobody "rt_sigprocmask", SYS_rt_sigprocmask;
    /// Ends a signal handler.
    SignalReturn: Nobody "rt_sigreturn", SYS_rt_sigreturn;
    /// Sends a signal to a thread: slat's kick, or a deferred signal that has to arrive later.
    QueueSignal: Helper "rt_tgsigqueueinfo", SYS_rt_tgsigqueueinfo;
    /// Maps memory for slat itself.
    Map: Helper "mmap", SYS_mmap [2 = READ_WRITE, 3 = OWN_MEMORY];
    /// Maps memory for page tables.
    MapTables: Helper "mmap (MAP_NORESERVE)", SYS_mmap [2 = READ_WRITE, 3 = TABLE_MEMORY];
    /// Unmaps memory of slat itself.
    Unmap: Helper "munmap", SYS_munmap;
    /// Grows memory of slat itself.
    Remap: Helper "mremap", SYS_mremap;
    /// Opens files below `/proc/self` and `/sys/kernel/mm`.
    Open: Helper "openat", SYS_openat;
    /// Reads files below `/proc/self` and `/sys/kernel/mm`.
    Read: Helper "pread64", SYS_pread64;
    /// Closes slat's own descriptors.
    Close: Helper "close", SYS_close;
    /// Makes slat's own descriptor of the program's eventfd.
    Duplicate: Helper "fcntl (F_DUPFD_CLOEXEC)", SYS_fcntl [1 = KEPT_FD];
    /// Asks whether an eventfd is non-blocking.
    Flags: Helper "fcntl (F_GETFL)", SYS_fcntl [1 = libc::F_GETFL];
    /// Asks the kernel which mapping is at an address.
    QueryMapping: Helper "ioctl (PROCMAP_QUERY)", SYS_ioctl [1 = PROCMAP_QUERY];
    /// Asks whether a write to a blocking eventfd would not block: [`calls::is_ready`](crate::calls::is_ready).
    Poll: Helper POLL, SYS_POLL;
    /// Reads an eventfd's count.
    ReadNow: Helper "preadv2 (RWF_NOWAIT)", SYS_preadv2 [5 = libc::RWF_NOWAIT];
    /// Signals an eventfd, and writes messages to the user.
    Write: Helper "write", SYS_write;
    /// Adds and removes irqfds.
    Watch: Helper "epoll_ctl", SYS_epoll_ctl;
    /// Removes the socket of `slat stat` when the program ends: [`calls::remove`](crate::calls::remove).
    Remove: Helper REMOVE, SYS_REMOVE;
    /// Makes memory that is registered with a served userfaultfd accessible, or inaccessible.
    Protect: Helper "mprotect", SYS_mprotect;
    /// Drops content of such memory that nobody needs.
    Advise: Helper "madvise", SYS_madvise;
    /// Stores the content of a page of such memory, by `/proc/self/mem`.
    WriteAt: Helper "pwrite64", SYS_pwrite64;
    /// Posts an event of a served userfaultfd.
    Send: Helper "sendto", SYS_sendto;
    /// Asks whether the program has read all these events.
    Unread: Helper "ioctl (SIOCOUTQ)", SYS_ioctl [1 = libc::TIOCOUTQ];
    /// Serves the guest's RDRAND and RDSEED.
    Random: Helper "getrandom", SYS_getrandom;
    /// Asks how long a thread has run, for guests that use Hyper-V's interface.
    ThreadTime: Helper "clock_gettime", SYS_clock_gettime;
    /// Asks which pages are in memory. Without this call, slat prefetches nothing.
    Resident: Omitted "mincore", SYS_mincore;
    /// Continues a wait that has a time limit. Without this call, slat waits without a limit.
    RestartSyscall: Omitted "restart_syscall", SYS_restart_syscall;
    /// Asks whether the thread is in a child of `vfork`. Without this call, the thread counts as not being in such a
    /// child.
    ProcessId: Omitted "getpid", SYS_getpid;
}

const _: () = assert!(Call::ALL.len() <= 64);

/// The calls that the filter of any thread, or Landlock, forbids: one bit for each call.
static FORBIDDEN: AtomicU64 = AtomicU64::new(0);

impl Call {
    const fn bit(self) -> u64 {
        1 << self as u8
    }
}

/// Whether no announced filter forbids `call`. Costs one load. Async-signal-safe.
#[inline]
pub fn is_allowed(call: Call) -> bool {
    FORBIDDEN.load(Ordering::Relaxed) & call.bit() == 0
}

/// Whether a filter forbids any call in the list.
pub fn is_any_forbidden() -> bool {
    FORBIDDEN.load(Ordering::Relaxed) != 0
}

/// Records that a filter forbids `call`.
pub(crate) fn forbid(call: Call) {
    FORBIDDEN.fetch_or(call.bit(), Ordering::Relaxed);
}

/// Records that threads of the program must not open files any more. From now on the helper opens all files.
pub fn forbid_opening() {
    forbid(Call::Open);
}
