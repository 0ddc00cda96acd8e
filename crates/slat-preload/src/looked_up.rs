//! Functions of the C library that the program looks up by name in a library it has opened: `dlsym(dlopen("libc.so.6"), "open")`.
//!
//! The names of a library that was opened are found in that library and those it needs, whatever is preloaded. Foreign function
//! interfaces reach the C library so: Python's `CDLL("libc.so.6")`, Node's koffi, Java's Panama. They get this library's function where
//! it has one of the name.

use std::ffi::{c_char, c_void};
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

type Dlsym = unsafe extern "C-unwind" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The C library's `dlsym`, or 0 before its first use. Assembly reads it.
static REAL: AtomicUsize = AtomicUsize::new(0);

/// Looks up the C library's `dlsym`, which cannot be looked up by `dlsym`. Returns its address.
extern "C" fn real() -> usize {
    let known = REAL.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // The version that x86-64 began with: every C library still has it.
    // SAFETY: NUL-terminated names.
    let found =
        unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), c"GLIBC_2.2.5".as_ptr()) };
    REAL.store(found as usize, Ordering::Relaxed);
    found as usize
}

/// Returns the start of the object that contains `address`.
fn object_of(address: *const c_void) -> Option<*mut c_void> {
    // SAFETY: all-zero is a valid `Dl_info`, which the call fills in.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        (libc::dladdr(address, &mut info) != 0).then_some(info.dli_fbase)
    }
}

/// Opens this library, which is loaded already. Null if the linker does not know it by its name.
fn this_library() -> *mut c_void {
    static HANDLE: AtomicUsize = AtomicUsize::new(0);
    let mut handle = HANDLE.load(Ordering::Relaxed);
    if handle == 0 {
        // SAFETY: all-zero is a valid `Dl_info`; the name that the call gives lives as long as the library.
        handle = unsafe {
            let mut info: libc::Dl_info = std::mem::zeroed();
            match libc::dladdr(real as *const c_void, &mut info) {
                0 => return null_mut(),
                _ => libc::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) as usize,
            }
        };
        HANDLE.store(handle, Ordering::Relaxed);
    }
    handle as *mut c_void
}

/// Does dlsym for a handle that names a library.
extern "C-unwind" fn look_up(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: `real` returns the C library's function of this signature. The arguments are the caller's.
    let find = |handle| unsafe { transmute::<usize, Dlsym>(real())(handle, name) };
    let found = find(handle);
    // Where the C library itself is. A function without a name that anything replaces.
    let libc = object_of(libc::getppid as *const c_void);
    if found.is_null() || libc.is_none() || object_of(found) != libc {
        return found;
    }
    let library = this_library();
    if library.is_null() {
        return found;
    }
    // In this library, or else in the C library, which it needs.
    let ours = find(library);
    match !ours.is_null() && object_of(ours) == object_of(real as *const c_void) {
        true => ours,
        false => found,
    }
}

/// dlsym(3).
///
/// What `RTLD_NEXT` and `RTLD_DEFAULT` find depends on who calls: the C library's function is jumped to, and sees that caller.
///
/// # Safety
/// As for `dlsym`.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "lea rax, [rdi + 1]",
        "cmp rax, 1", // RTLD_NEXT is -1, RTLD_DEFAULT 0.
        "jbe 2f",
        "jmp {look_up}",
        "2:",
        "mov rax, [rip + {known}]",
        "test rax, rax",
        "jnz 3f",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {real}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "3:",
        "jmp rax",
        look_up = sym look_up,
        known = sym REAL,
        real = sym real,
    )
}
