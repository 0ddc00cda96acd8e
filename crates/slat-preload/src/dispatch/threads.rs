//! Threads and processes that the program creates by its own system calls.
//!
//! slat's code runs on each thread of the program, and needs a thread of slat's C library for that. So slat makes each
//! new thread of a loaded program as a thread of slat's C library. This thread continues where the program's thread
//! begins, with the program's stack and thread pointer. When the program ends its thread, the library's thread returns.
//!
//! A child of `vfork` would run on the stack on which slat serves the parent's call. So the child gets a copy of the
//! memory instead; the parent nevertheless waits for the child.

use super::filters::{self, Inherited};
use super::frame::{self, Frame, KeptFrame};
use super::library_threads::{Create, NEXT_CREATE, STACK};
use super::request::*;
use super::{block_all, robust, rseq};
use crate::arch::frame::begin_process;
use crate::arch::threads::{self, leave};
use crate::real::{error, kernel};
use crate::user_dispatch::arm_thread;
use crate::{forks, loaded};
use slat_guard::Section;
use slat_process::{pointers, stack, wait};
use std::cell::Cell;
use std::ffi::c_void;
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Creates a thread or a process. Returns the kernel's result in the caller, and for a process also in the child.
pub fn make(frame: &mut Frame, request: &Request) -> isize {
    if request.has(THREAD) {
        return match loaded::is_loaded() {
            true => make_thread(frame, request),
            false => refuse("a thread that the C library does not know"),
        };
    }
    if request.has(VM) && !request.has(VFORK) {
        return match (loaded::is_loaded(), request.stack_top()) {
            (false, Some(top)) if request.fits() => make_beside(frame, request, top),
            _ => refuse("a process that shares memory with its maker"),
        };
    }
    make_process(frame, request)
}

fn refuse(what: &str) -> isize {
    slat_kvm::messages::say(format_args!(
        "clone: slat cannot follow {what}; the call answers ENOSYS"
    ));
    error(libc::ENOSYS)
}

/// Creates a process that shares memory with its creator and has its own stack. LeakSanitizer creates such a process to
/// examine the program's threads. slat's code cannot run in this process, which has no thread of slat's C library, so
/// the kernel serves its calls.
fn make_beside(frame: &Frame, request: &Request, top: usize) -> isize {
    // SAFETY: the program gives this stack to the child. If the program has put data on that stack, the frame is below
    // this data and its red zone. The parent continues here.
    unsafe {
        let copy = &mut *frame.copy_below(top - stack::RED_ZONE);
        copy.alternate = NO_STACK;
        copy.set_result(0);
        copy.set_sp(top);
        begin_process(copy, request.clone_arguments())
    }
}

/// Stores a thread's id at the address that the program has given for it. Ignores a bad address, as the kernel does.
fn tell(address: u64, number: u32) {
    // SAFETY: the store to the program's word is guarded (a bad address is an error).
    let _ = unsafe { slat_guard::store(address as *mut u32, number) };
}

fn make_process(frame: &mut Frame, request: &Request) -> isize {
    let copied = request.with_a_copy_of_memory();
    // All signals are blocked, because no handler may run in the child before the child's calls are dispatched. The
    // return to the program restores the mask.
    block_all();
    let is_fork = copied.is_fork();
    let answer = match is_fork {
        // Other threads may be creating threads during the fork. The C library's own fork then repairs the library's
        // data in the child.
        // SAFETY: the call takes no pointer. The child continues here.
        true => match unsafe { libc::fork() } {
            -1 => error(slat_process::errno()),
            child => child as isize,
        },
        // SAFETY: the program has asked for a process with a copy of the memory. The child continues here.
        false => forks::around(|| unsafe { copied.issue() }),
    };
    if answer > 0 && is_fork && copied.has(PARENT_SET_TID) {
        tell(copied.parent_tid, answer as u32);
    }
    if answer == 0 {
        BEGUN_AT.set(0);
        set_clear_at_exit(0);
        if is_fork && copied.has(CHILD_SET_TID) {
            tell(copied.child_tid, slat_process::thread_id() as u32);
        }
        if is_fork && copied.has(CHILD_CLEAR_TID) {
            set_clear_at_exit(copied.child_tid as usize);
        }
        THREADS.store(1, Ordering::Relaxed);
        NOT_SEPARATE.store(0, Ordering::Relaxed);
        if let Some(top) = request.stack_top() {
            frame.set_sp(top);
        }
        if request.has(SET_TLS) {
            pointers::set_programs(request.tls as usize);
        }
    }
    answer
}

thread_local! {
    // These variables have neither initialisers nor destructors, because signal handlers read them.
    /// The word that becomes 0 when this thread ends (set_tid_address(2)), or 0.
    static CLEAR_AT_EXIT: Cell<usize> = const { Cell::new(0) };
    /// The stack pointer at which the thread of slat's C library continues after the program's thread has ended; 0 on
    /// the first thread.
    static BEGUN_AT: Cell<usize> = const { Cell::new(0) };
}

/// The number of the loaded program's threads that have not ended.
static THREADS: AtomicU32 = AtomicU32::new(1);

/// The number of new threads that still use their creator's base of GS. The creator may already have returned.
static NOT_SEPARATE: AtomicU32 = AtomicU32::new(0);

/// The signal by which a C library cancels threads. slat's C library never starts a thread with this signal blocked.
pub const SIGCANCEL: usize = 32;

/// Waits until each new thread has its own base of GS. Call before sending [`SIGCANCEL`] to a thread. If the thread
/// still had its creator's base of GS, its signal handler could change the creator's thread pointers.
pub fn wait_until_separate() {
    loop {
        match NOT_SEPARATE.load(Ordering::Acquire) {
            0 => return,
            count => wait::sleep(&NOT_SEPARATE, count, None),
        };
    }
}

/// Sets the address of the word that slat clears when this thread ends (set_tid_address(2)). slat then wakes a thread
/// that waits for the word.
pub fn set_clear_at_exit(address: usize) {
    CLEAR_AT_EXIT.set(address);
}

/// The state of a thread without an alternate stack.
const NO_STACK: libc::stack_t = libc::stack_t {
    ss_sp: null_mut(),
    ss_flags: libc::SS_DISABLE,
    ss_size: 0,
};

/// A thread that is being created. The thread's creator does not wait until the thread runs, because that may take long
/// on busy processors. So creator and thread each have a reference to this value.
struct Start {
    frame: KeptFrame,
    request: Request,
    /// The thread pointer that the program has chosen for the thread.
    pointer: usize,
    filters: Inherited,
    /// The thread's id, which the thread itself stores.
    number: AtomicU32,
    told: AtomicU32,
}

/// The states of [`Start::told`]: whether the thread's id is stored at the address that its creator has given.
const NOT_TOLD: u32 = 0;
const BEING_TOLD: u32 = 1;
const TOLD: u32 = 2;

impl Start {
    /// Stores the thread's id for its creator (CLONE_PARENT_SETTID). The creator calls this function before it returns
    /// to the program, and the new thread calls it before it runs the program's code. So the program finds the id in
    /// both threads. The id is not stored again later, because the program may then use the word for something else.
    fn tell_maker(&self, number: u32) {
        if !self.request.has(PARENT_SET_TID) {
            return;
        }
        let claimed = (self.told).compare_exchange(
            NOT_TOLD,
            BEING_TOLD,
            Ordering::Relaxed,
            Ordering::Acquire,
        );
        if claimed.is_ok() {
            tell(self.request.parent_tid, number);
            self.told.store(TOLD, Ordering::Release);
            wait::wake(&self.told);
        }
        while self.told.load(Ordering::Acquire) != TOLD {
            wait::sleep(&self.told, BEING_TOLD, None);
        }
    }
}

fn make_thread(frame: &Frame, request: &Request) -> isize {
    let Some(create) = NEXT_CREATE.get() else {
        return error(libc::ENOSYS);
    };
    let start = {
        let _section = Section::enter();
        Arc::new(Start {
            // SAFETY: the kernel or slat has filled in the frame.
            frame: unsafe { frame.keep() },
            request: *request,
            pointer: match request.has(SET_TLS) {
                true => request.tls as usize,
                false => pointers::programs(),
            },
            filters: filters::of_this_thread(),
            number: AtomicU32::new(0),
            told: AtomicU32::new(NOT_TOLD),
        })
    };
    THREADS.fetch_add(1, Ordering::Relaxed);
    NOT_SEPARATE.fetch_add(1, Ordering::Relaxed);
    // The new thread inherits this signal mask.
    block_all();
    let given = Arc::into_raw(Arc::clone(&start));
    // SAFETY: the function is the C library's. The attributes are on the stack. The thread has its own reference to
    // `start`.
    let made = unsafe {
        let create = transmute::<usize, Create>(create);
        let mut attributes = std::mem::zeroed();
        let mut thread = 0;
        let mut failed = libc::pthread_attr_init(&mut attributes);
        if failed == 0 {
            libc::pthread_attr_setstacksize(&mut attributes, STACK);
            failed = create(&mut thread, &attributes, begin, given.cast_mut().cast());
            libc::pthread_attr_destroy(&mut attributes);
        }
        match failed {
            0 => Ok(thread),
            failed => Err(failed),
        }
    };
    let answer = match made {
        Ok(thread) => {
            // If the thread has already ended, the C library does not know its id any more, but the thread has stored
            // its id.
            let number = number_of(thread).unwrap_or_else(|| start.number.load(Ordering::Acquire));
            start.tell_maker(number);
            // SAFETY: the thread was made joinable, so that `number_of` may look at it even if it has ended.
            unsafe { libc::pthread_detach(thread) };
            number as isize
        }
        Err(failed) => {
            THREADS.fetch_sub(1, Ordering::Relaxed);
            is_separate();
            // SAFETY: no thread was created, so no thread owns the reference.
            drop(unsafe { Arc::from_raw(given) });
            error(failed)
        }
    };
    let _section = Section::enter();
    drop(start);
    answer
}

/// Decrements the number of threads without their own base of GS, for which [`wait_until_separate`] waits.
fn is_separate() {
    NOT_SEPARATE.fetch_sub(1, Ordering::Release);
    wait::wake(&NOT_SEPARATE);
}

/// Returns the kernel's id of a thread that is not detached. `None`: the thread has ended.
fn number_of(thread: libc::pthread_t) -> Option<u32> {
    let mut clock = 0;
    // SAFETY: the C library keeps the data of a thread that was not joined. `clock` is live.
    let failed = unsafe { libc::pthread_getcpuclockid(thread, &mut clock) };
    // Bits 3 and higher of a thread's clock id are the inverted thread id (`include/linux/posix-timers_types.h`,
    // CPUCLOCK_PID).
    let number = !(clock >> 3) as u32;
    (failed == 0 && number != 0).then_some(number)
}

/// The first function of a thread of slat's C library that runs a thread of the program. Returns when that thread ends.
extern "C-unwind" fn begin(start: *mut c_void) -> *mut c_void {
    // SAFETY: the argument points to a `Start`.
    BEGUN_AT.with(|begun_at| unsafe { run(start.cast(), begun_at.as_ptr()) });
    null_mut()
}

/// Stores the stack pointer for [`leave`], and calls [`go`] on this stack.
#[unsafe(naked)]
unsafe extern "C" fn run(start: *const Start, begun_at: *mut usize) {
    threads::run!(go)
}

/// Continues as the program's thread.
unsafe extern "C" fn go(start: *const Start) -> ! {
    /// The number of bytes at the low end of the stack that this function itself needs.
    const OWN: usize = 16 << 10;
    // SAFETY: the creator has passed its reference to this thread. The processor has the instructions that the first
    // thread has used. The thread's stack is free between its end and this function's own part. The copy of the frame
    // there says where the program's thread begins.
    unsafe {
        let start = Arc::from_raw(start);
        let request = &start.request;
        filters::inherit(start.filters);
        pointers::separate(start.pointer);
        is_separate();
        let high = BEGUN_AT.get() - OWN;
        stack::set(stack_end(), high);
        let copy = &mut *start.frame.frame().copy_below(high);
        stack::set_used_to(&raw const *copy as usize);
        copy.alternate = NO_STACK;
        copy.set_result(0);
        if let Some(top) = request.stack_top() {
            copy.set_sp(top);
        }
        let number = slat_process::thread_id() as u32;
        start.number.store(number, Ordering::Release);
        start.tell_maker(number);
        if request.has(CHILD_SET_TID) {
            tell(request.child_tid, number);
        }
        if request.has(CHILD_CLEAR_TID) {
            set_clear_at_exit(request.child_tid as usize);
        }
        {
            let _section = Section::enter();
            drop(start);
        }
        arm_thread();
        frame::resume(copy)
    }
}

/// Returns the low end of this thread's stack: its lowest address above the guard page.
fn stack_end() -> usize {
    // SAFETY: the attributes are on the stack, and describe this thread, which exists.
    unsafe {
        let mut attributes = std::mem::zeroed();
        let (mut low, mut size) = (null_mut(), 0);
        libc::pthread_getattr_np(libc::pthread_self(), &mut attributes);
        libc::pthread_attr_getstack(&attributes, &mut low, &mut size);
        libc::pthread_attr_destroy(&mut attributes);
        low as usize
    }
}

/// Implements exit(2): ends this thread. For the program's last thread, ends the whole process, which slat's own
/// threads would otherwise keep alive.
pub fn exit(status: usize) -> ! {
    block_all();
    if loaded::is_loaded() {
        if THREADS.fetch_sub(1, Ordering::AcqRel) == 1 {
            crate::at_exit();
            // SAFETY: the call ends the process.
            let _ = unsafe { kernel!(libc::SYS_exit_group, status) };
        }
        rseq::leave();
        robust::leave();
    }
    pointers::forget();
    let clear = CLEAR_AT_EXIT.get();
    if clear != 0 {
        // SAFETY: the store to the word that the program has named is guarded, and the call only wakes the threads
        // that wait for this word.
        unsafe {
            let _ = slat_guard::store(clear as *mut u32, 0);
            let _ = kernel!(libc::SYS_futex, clear, libc::FUTEX_WAKE, 1);
        }
    }
    match BEGUN_AT.get() {
        0 => loop {
            // SAFETY: the call ends the thread.
            let _ = unsafe { kernel!(libc::SYS_exit, status) };
        },
        // SAFETY: `run` has stored `begun_at`. All signals are blocked.
        begun_at => unsafe { leave(begun_at) },
    }
}
