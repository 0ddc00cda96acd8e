//! Finds C library functions that the program looks up by name in a library it has opened:
//! `dlsym(dlopen("libc.so.6"), "open")`.
//!
//! The dynamic linker looks for such a name in the opened library and in the libraries it needs, but not in preloaded
//! libraries. Foreign function interfaces find the C library's functions in this way: Python's `CDLL("libc.so.6")`,
//! Node's koffi, Java's Panama. If this library has a function of the same name, slat returns its own function to the
//! program.

use crate::arch::{entries, files};
use std::ffi::{c_char, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicUsize, Ordering};

type Dlsym = unsafe extern "C-unwind" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The address of the C library's `dlsym`, or 0 before its first use. Assembly reads the variable.
static REAL: AtomicUsize = AtomicUsize::new(0);

/// Finds the C library's `dlsym` by dlvsym(3), because this library replaces `dlsym`. Returns its address.
extern "C" fn real() -> usize {
    let known = REAL.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let version = files::FIRST_VERSION.as_ptr();
    // SAFETY: the names end with NUL.
    let found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version) };
    REAL.store(found as usize, Ordering::Relaxed);
    found as usize
}

/// Returns the linker's information about the object that contains `address`: the object's start, and its file's name.
/// Both are valid as long as the object is loaded.
pub fn object_of(address: *const c_void) -> Option<libc::Dl_info> {
    // SAFETY: all-zero is a valid `Dl_info`, which the call fills in.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        (libc::dladdr(address, &mut info) != 0).then_some(info)
    }
}

/// Whether two addresses are in the same object (program or library).
fn are_together(one: *const c_void, other: *const c_void) -> bool {
    let start = |address| object_of(address).map(|object| object.dli_fbase);
    start(one).is_some_and(|found| Some(found) == start(other))
}

/// Returns a handle of this library. Null if the dynamic linker does not know the library by its name.
fn this_library() -> *mut c_void {
    static HANDLE: AtomicUsize = AtomicUsize::new(0);
    let mut handle = HANDLE.load(Ordering::Relaxed) as *mut c_void;
    if handle.is_null()
        && let Some(object) = object_of(real as *const c_void)
    {
        // SAFETY: the name ends with 0.
        handle = unsafe { libc::dlopen(object.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        HANDLE.store(handle as usize, Ordering::Relaxed);
    }
    handle
}

/// Implements dlsym for a library's handle.
extern "C-unwind" fn look_up(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: `real` returns the address of the C library's function, which has this signature. `name` is valid for
    // dlsym(3), as this function's caller ensures.
    let find = |handle| unsafe { transmute::<usize, Dlsym>(real())(handle, name) };
    let found = find(handle);
    // slat replaces only functions of the C library.
    if found.is_null() || !are_together(found, libc::getppid as *const c_void) {
        return found;
    }
    let library = this_library();
    if library.is_null() {
        return found;
    }
    // `find` looks in this library, and then in the C library, which this library needs.
    let ours = find(library);
    match are_together(ours, real as *const c_void) {
        true => ours,
        false => found,
    }
}

/// Replaces dlsym(3).
///
/// The results for `RTLD_NEXT` and `RTLD_DEFAULT` depend on the caller's address. So this function jumps to the C
/// library's function, which then sees the original return address.
///
/// # Safety
/// The conditions are those of dlsym(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    entries::look_up!(look_up, REAL, real)
}
