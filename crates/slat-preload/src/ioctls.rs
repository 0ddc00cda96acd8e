//! Implements ioctl: slat serves the requests to KVM, and notices requests to userfaultfd that change mappings.

use crate::files::interpose;
use crate::guarded::guarded;
use crate::memory::{self, Range};
use crate::paths::{DescriptorPath, is_kvms, read_link};
use crate::real::{Next, errno, kernel, plain, set_errno};
use crate::{heap, table, userfault};
use slat_host::mappings;
use slat_kvm::abi::KVMIO;
use slat_kvm::ioctl::Object;
use slat_kvm::notify;
use slat_kvm::thread::Section;
use std::ffi::{c_int, c_ulong};

/// The type byte of userfaultfd's requests.
const UFFDIO: u32 = 0xaa;

/// Implements ioctl. If the thread is cancelled, this function may unwind.
///
/// # Safety
/// The conditions are those of ioctl(2).
pub unsafe fn ioctl_on(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    // The kernel uses only the low 32 bits of the request.
    let number = request as u32;
    // SAFETY: the arguments are valid for ioctl(2), as this function's contract requires.
    let call = || unsafe { kernel!(libc::SYS_ioctl, fd, request, argument) };
    let kind = number >> 8 & 0xff;
    // This function calls `guarded` in one place only: two calls would take twice the space in its stack frame, which
    // is on the program's stack.
    (if table::is_ours(fd) || kind == KVMIO {
        guarded(|| kvms(fd, number, argument).unwrap_or_else(call))
    } else if kind != UFFDIO {
        plain(call())
    } else if let Some(answer) = userfault::ioctl(fd, number, argument, || plain(call())) {
        answer
    } else if notify::is_anyone_listening() {
        // SAFETY: the arguments are valid for ioctl(2), as this function's contract requires.
        unsafe { kernels_userfault(number, argument, call) }
    } else {
        mappings::advice_passed_by();
        plain(call())
    }) as c_int
}

/// Serves a request (ioctl) to KVM. `None`: `fd` is not a descriptor of KVM, or the kernel serves this request for any
/// file. Then the kernel has to serve the request.
fn kvms(fd: c_int, request: u32, argument: usize) -> Option<Result<isize, i32>> {
    let handle = table::get(fd).or_else(|| inherited(fd))?;
    if !heap::is_ready() {
        return Some(Err(libc::ENOMEM));
    }
    match handle.ioctl(request, argument as u64) {
        Ok(value) => value.map(|value| Ok(value as isize)),
        Err(error) => Some(Err(error.errno())),
    }
}

/// Recognises a descriptor of `/dev/kvm` that the table does not know. Such a descriptor may refer to slat's memfd with
/// KVM's name, which stayed open across exec or came through a socket. It may also refer to the machine's own device,
/// if the program has opened that device without slat. Not inlined, so that KVM's requests use little of the program's
/// stack.
#[cold]
#[inline(never)]
fn inherited(fd: c_int) -> Option<table::Handle> {
    const NAME: &[u8] = b"/memfd:kvm (deleted)";
    let mut name = [0; 64];
    // SAFETY: all-zero is a valid `stat`, which the call fills in.
    let is_device = || unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        kernel!(libc::SYS_fstat, fd, &raw mut stat).is_ok() && is_kvms(&stat)
    };
    let link = DescriptorPath::new(fd);
    if read_link(link.as_c_str(), &mut name) != Some(NAME) && !is_device() {
        return None;
    }
    crate::prepare().ok()?;
    table::insert(fd, Object::system());
    table::get(fd)
}

/// Passes on a request to the kernel's userfaultfd. A request that unmaps pages or removes rights changes mappings.
unsafe fn kernels_userfault(
    request: u32,
    argument: usize,
    call: impl FnOnce() -> Result<isize, i32>,
) -> isize {
    const REGISTER: u32 = 0x00;
    const MOVE: u32 = 0x05;
    const WRITEPROTECT: u32 = 0x06;
    const POISON: u32 = 0x08;
    /// `UFFDIO_WRITEPROTECT_MODE_WP`. Without it, the request only adds rights. Then nothing need be invalidated, and a
    /// vCPU that waits for this request need not be interrupted.
    const PROTECTS: u64 = 1 << 0;
    let word_at = |word: usize| {
        // SAFETY: the load is guarded, because there is a VM. The address is the client's. The kernel will refuse a bad
        // address.
        unsafe { slat_guard::load((argument as *const u64).wrapping_add(word)) }.unwrap_or(0)
    };
    let range_at = |words: [usize; 2]| {
        let [start, len] = words.map(word_at);
        Range::at(start as usize, len as usize)
    };
    match request & 0xff {
        REGISTER => memory::fault_handled(range_at([0, 1]), call),
        WRITEPROTECT if word_at(2) & PROTECTS == 0 => plain(call()),
        WRITEPROTECT | POISON => memory::around(&[range_at([0, 1])], call),
        // The first three words of the argument are destination, source and length.
        MOVE => memory::around(&[range_at([0, 2]), range_at([1, 2])], call),
        _ => plain(call()),
    }
}

unsafe extern "C-unwind" {
    /// Sets the thread's cancellation state (the C library's function). May unwind if a cancellation is pending.
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
    fn pthread_testcancel();
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;
const PTHREAD_CANCEL_DEFERRED: c_int = 0;
const PTHREAD_CANCEL_ASYNCHRONOUS: c_int = 1;

static NEXT_CANCEL: Next = Next::new(c"pthread_cancel");

/// Implements ioctl on a thread of slat's C library.
///
/// An asynchronous cancellation can end the kernel's `KVM_RUN`, but must not end Rust code. So cancellation is disabled
/// while slat works. slat's `pthread_cancel` ends `KVM_RUN`, and the thread then unwinds from this function, when slat
/// has no other frame on the stack. Before deferred handlers of the program run, the cancellation state is set back to
/// the program's, because the handlers may leave by longjmp.
///
/// # Safety
/// The conditions are those of ioctl(2).
pub unsafe fn ioctl_here(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    if !table::is_ours(fd) {
        // SAFETY: the arguments are valid for ioctl(2), as this function's contract requires.
        return unsafe { ioctl_on(fd, request, argument) };
    }
    let (mut kind, mut state) = (0, 0);
    // SAFETY: the arguments are valid for ioctl(2), as this function's contract requires. The cancellation state is
    // this thread's own.
    unsafe {
        let section = Section::enter();
        pthread_setcanceltype(PTHREAD_CANCEL_DEFERRED, &mut kind);
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut state);
        let answer = ioctl_on(fd, request, argument);
        pthread_setcancelstate(state, std::ptr::null_mut());
        let after = errno();
        drop(section);
        set_errno(after);
        if kind == PTHREAD_CANCEL_ASYNCHRONOUS {
            // Some C libraries lose the thread's result if `pthread_setcancelstate` itself cancels the thread.
            pthread_testcancel();
            pthread_setcanceltype(kind, std::ptr::null_mut());
        }
        answer
    }
}

interpose! {
    /// Replaces ioctl(2).
    ///
    /// For a request without an argument, `argument` is undefined, and is not read.
    fn ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int {
        // SAFETY: the arguments are valid for ioctl(2), as this function's contract requires.
        unsafe { ioctl_here(fd, request, argument) }
    }

    /// Replaces pthread_cancel(3).
    fn pthread_cancel(thread: usize) -> c_int {
        let Some(function) = NEXT_CANCEL.get() else {
            return libc::ENOSYS;
        };
        // SAFETY: `function` is the C library's function, which has this signature.
        let answer = unsafe { std::mem::transmute::<usize, extern "C" fn(usize) -> c_int>(function)(thread) };
        if table::is_any_ours() {
            guarded(|| {
                slat_kvm::interrupt_thread(thread);
                Ok(0)
            });
        }
        answer
    }
}
