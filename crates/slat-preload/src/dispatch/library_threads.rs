//! The threads that the C library creates in a program that is linked with that C library, and the stacks on which slat
//! serves these threads' calls.

use crate::files::interpose_with_callers_floats;
use crate::guarded::guarded;
use crate::loaded;
use crate::real::{Next, kernel, map_memory};
use crate::user_dispatch::{arm_thread, disarm_thread, is_armed};
use slat_kvm::thread::Section;
use slat_process::{page_size, pointers, stack};
use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::OnceLock;

/// The size of the stack on which a thread's calls are served. The standard library gives its threads the same size.
pub const STACK: usize = 2 << 20;

/// The key whose destructor unmaps a thread's stack.
static KEY: OnceLock<libc::pthread_key_t> = OnceLock::new();

/// Unmaps the stack of a thread that ends. The kernel serves the thread's further calls.
unsafe extern "C" fn drop_stack(low: *mut c_void) {
    disarm_thread();
    stack::set(0, 0);
    // SAFETY: `make_stack` has mapped this stack. No call is being served on it, because this function runs in the C
    // library's code.
    let _ = unsafe { kernel!(libc::SYS_munmap, low, STACK) };
}

/// Registers the destructor that unmaps the stacks made by [`make_stack`]. Call when the program starts.
pub fn prepare() {
    KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the call fills in a live key. `drop_stack` is a function of this library, which is never unloaded.
        unsafe { libc::pthread_key_create(&mut key, Some(drop_stack)) };
        key
    });
}

/// Makes a stack for this thread's calls. Ends the process if there is no memory.
pub fn make_stack() {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_NORESERVE | libc::MAP_STACK;
    // SAFETY: the call maps new memory.
    let Ok(low) = (unsafe { map_memory(0, STACK, access, flags) }) else {
        const MESSAGE: &str = "slat: there is no memory for a thread's stack\n";
        // SAFETY: the buffer is live. Then the process ends.
        unsafe {
            let _ = kernel!(libc::SYS_write, 2, MESSAGE.as_ptr(), MESSAGE.len());
            let _ = kernel!(libc::SYS_exit_group, 66);
        }
        unreachable!("the process has ended");
    };
    // SAFETY: nothing uses the lowest page yet. The page becomes the guard page.
    let _ = unsafe { kernel!(libc::SYS_mprotect, low, page_size(), libc::PROT_NONE) };
    stack::set(low, low + STACK);
    if let Some(key) = KEY.get() {
        // SAFETY: `prepare` has made the key. The key is one of the first keys, whose values need no memory.
        unsafe { libc::pthread_setspecific(*key, low as *const c_void) };
    }
}

/// The C library's `pthread_create`.
pub type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    extern "C-unwind" fn(*mut c_void) -> *mut c_void,
    *mut c_void,
) -> c_int;

pub static NEXT_CREATE: Next = Next::new(c"pthread_create");

/// The function that a thread made by the C library runs, and its argument. `T` is the function's result.
struct Routine<T> {
    routine: extern "C-unwind" fn(*mut c_void) -> T,
    argument: *mut c_void,
}

/// The first function of a thread that the C library has created, for the program or for slat.
extern "C-unwind" fn first<T>(start: *mut c_void) -> T {
    let Routine { routine, argument } = {
        let _section = Section::enter();
        // SAFETY: `make` has made the `Routine` for this thread.
        *unsafe { Box::from_raw(start.cast::<Routine<T>>()) }
    };
    match loaded::is_loaded() {
        // A thread of slat's own may have its creator's thread pointers and a seccomp filter. So its calls from code
        // outside the C library must be dispatched, too, and then be made at the gate, an instruction in the C
        // library's text.
        true => {
            // SAFETY: the first thread has also separated its thread pointers.
            unsafe { pointers::separate_own() };
            arm_thread();
        }
        // The stack is made before the routine runs, because a filter may forbid the necessary calls later.
        false => {
            arm_thread();
            make_stack();
        }
    }
    routine(argument)
}

/// Creates a thread by calling `create`, a function of the C library that takes the function to run. The thread's calls
/// are dispatched if its creator's calls are. Returns the result of `create`: 0 is success.
fn make<T>(
    routine: extern "C-unwind" fn(*mut c_void) -> T,
    argument: *mut c_void,
    create: impl FnOnce(extern "C-unwind" fn(*mut c_void) -> T, *mut c_void) -> c_int,
) -> c_int {
    // slat's own threads make no calls that the kernel would have to dispatch.
    if !is_armed() || Section::is_entered() && !loaded::is_loaded() {
        return create(routine, argument);
    }
    let mut start = null_mut();
    guarded(|| {
        start = Box::into_raw(Box::new(Routine { routine, argument }));
        Ok(0)
    });
    let failed = create(first::<T>, start.cast());
    if failed != 0 {
        guarded(|| {
            // SAFETY: no thread was created, so no thread owns the value.
            drop(unsafe { Box::from_raw(start) });
            Ok(0)
        });
    }
    failed
}

static NEXT_THRD: Next = Next::new(c"thrd_create");

/// The C library's `thrd_create`.
type CreateShort = unsafe extern "C" fn(
    *mut c_void,
    extern "C-unwind" fn(*mut c_void) -> c_int,
    *mut c_void,
) -> c_int;

interpose_with_callers_floats! {
    /// Replaces thrd_create(3).
    fn thrd_create(
        thread: *mut c_void,
        routine: extern "C-unwind" fn(*mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int {
        const THRD_ERROR: c_int = 2;
        let Some(next) = NEXT_THRD.get() else {
            return THRD_ERROR;
        };
        // SAFETY: the C library's function has this signature. The caller's arguments are valid for it.
        let create = |routine, argument| unsafe { transmute::<usize, CreateShort>(next)(thread, routine, argument) };
        make(routine, argument, create)
    }

    /// Replaces pthread_create(3).
    fn pthread_create(
        thread: *mut libc::pthread_t,
        attributes: *const libc::pthread_attr_t,
        routine: extern "C-unwind" fn(*mut c_void) -> *mut c_void,
        argument: *mut c_void,
    ) -> c_int {
        let Some(next) = NEXT_CREATE.get() else {
            return libc::EAGAIN;
        };
        // SAFETY: the C library's function has this signature. The caller's arguments are valid for it.
        let create = |routine, argument| unsafe { transmute::<usize, Create>(next)(thread, attributes, routine, argument) };
        make(routine, argument, create)
    }
}
