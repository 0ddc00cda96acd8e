//! Opening files by path, and asking whether they open: slat serves `/dev/kvm` and KVM's module parameters itself.

use crate::device::{self, How, Opening};
use crate::guarded::guarded;
use crate::paths::{Special, is_device, special};
use crate::real::{Next, call, errno, set_errno};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Defines an exported C function, which runs with slat's own flags and floating point ([`caller`](slat_process::caller)). In the unit tests of this crate the C library's own must stay in force.
///
/// A handler of the program that was deferred runs at the end of such a function, and may unwind by `pthread_exit`.
macro_rules! interpose {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => {
        $crate::files::interpose_with_callers_floats! {
            $($(#[$meta])* fn $name($($argument: $type),*) -> $result { slat_process::caller::with_own_floats(|| $body) })*
        }
    };
}
pub(crate) use interpose;

/// Like [`interpose`], but for a function that makes a thread, which begins with its maker's floating point.
macro_rules! interpose_with_callers_floats {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => {
        $(
            #[allow(non_snake_case, reason = "the C library's name")]
            mod $name {
                use super::*;

                pub(super) unsafe extern "C-unwind" fn inner($($argument: $type),*) -> $result $body
            }

            $(#[$meta])*
            ///
            /// # Safety
            /// As for the C library's function of this name.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            #[unsafe(naked)]
            pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> $result {
                std::arch::naked_asm!(
                    slat_process::with_own_flags!(),
                    inner = sym $name::inner,
                    flags = const slat_process::caller::FLAGS,
                )
            }
        )*
    };
}
pub(crate) use interpose_with_callers_floats;

/// Opens the special file that a path leads to. `None`: the kernel has to open it.
fn open_special(directory: c_int, path: *const c_char, opening: Opening) -> Option<c_int> {
    let answer = match special(directory, path, opening.how().resolve)? {
        Special::Device => guarded(|| device::open(opening)),
        Special::Parameter(name) => guarded(|| device::open_parameter(name, opening)),
        Special::Slash => guarded(|| Err(libc::ENOTDIR)),
        Special::Descriptor(fd) => {
            let mut kernels = false;
            let answer = guarded(|| match device::open_again(fd, opening) {
                Some(answer) => answer,
                None => {
                    kernels = true;
                    Ok(0)
                }
            });
            if kernels {
                return None;
            }
            answer
        }
    };
    Some(answer as c_int)
}

/// Opens a path, or passes the call to the kernel.
///
/// # Safety
/// As for `openat`.
pub unsafe fn open_at(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // Without flags that create a file, the caller need not have passed a mode.
    let creates = flags & (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) != 0;
    let opening = Opening::open(flags, if creates { mode } else { 0 });
    if let Some(answer) = open_special(directory, path, opening) {
        return answer;
    }
    // SAFETY: the caller's.
    let opened = unsafe { call!(libc::SYS_openat, directory, path, flags, mode) as c_int };
    // A node of KVM's under another name, on a machine without KVM.
    if opened < 0 && errno() == libc::ENODEV && is_device(directory, path, 0) {
        return guarded(|| device::open(opening)) as c_int;
    }
    opened
}

/// openat2(2), which has no function in the C library.
///
/// # Safety
/// As for `openat2`; bad memory is an error, though.
pub unsafe fn open_at_2(
    directory: c_int,
    path: *const c_char,
    how: *const How,
    size: usize,
) -> isize {
    // Another size is that of a kernel whose flags slat does not know.
    if size == size_of::<How>()
        && let Some(how) = how_at(directory, path, how)
        && let Some(answer) = open_special(directory, path, Opening::Open2(how))
    {
        return answer as isize;
    }
    // SAFETY: the caller's.
    unsafe { call!(libc::SYS_openat2, directory, path, how, size) }
}

/// Returns the arguments of openat2, for a path whose last component is special however it is resolved. `None` also for memory
/// that cannot be read, and for an unknown `RESOLVE_` flag.
fn how_at(directory: c_int, path: *const c_char, how: *const How) -> Option<How> {
    /// RESOLVE_NO_XDEV to RESOLVE_CACHED.
    const RESOLVE_KNOWN: u64 = 0x3f;
    special(directory, path, 0).or_else(|| special(directory, path, libc::RESOLVE_IN_ROOT))?;
    let mut words = [0; size_of::<How>()];
    // SAFETY: a guarded copy into a live buffer: `special` has found something, so the handlers are installed.
    unsafe { slat_guard::copy_in(&mut words, how.cast()) }.ok()?;
    // SAFETY: three integers, as long as the array.
    let how: How = unsafe { std::mem::transmute(words) };
    (how.resolve & !RESOLVE_KNOWN == 0).then_some(how)
}

/// Does faccessat, and all calls that amount to it.
///
/// # Safety
/// As for `faccessat`.
pub unsafe fn access_at(directory: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
    const MODES: c_int = libc::R_OK | libc::W_OK | libc::X_OK;
    let writable = match special(directory, path, 0) {
        // The kernel refuses an invalid mode before it looks at the path.
        _ if mode & !MODES != 0 => None,
        Some(Special::Device) => Some(Ok(true)),
        Some(Special::Parameter(name)) => Some(Ok(slat_kvm::parameters::is_writable(name))),
        Some(Special::Slash) => Some(Err(libc::ENOTDIR)),
        Some(Special::Descriptor(_)) | None => None,
    };
    if let Some(writable) = writable {
        return guarded(|| match writable? {
            writable if mode & libc::X_OK != 0 || mode & libc::W_OK != 0 && !writable => {
                Err(libc::EACCES)
            }
            _ => Ok(0),
        }) as c_int;
    }
    // SAFETY: the caller's.
    unsafe {
        if flags == 0 {
            return call!(libc::SYS_faccessat, directory, path, mode) as c_int;
        }
        call!(libc::SYS_faccessat2, directory, path, mode, flags) as c_int
    }
}

static NEXT_FOPEN: Next = Next::new(c"fopen");
static NEXT_FOPEN64: Next = Next::new(c"fopen64");

/// Converts fopen's mode to flags of open(2): fopen(3).
fn flags_of(mode: &[u8]) -> c_int {
    let has = |letter| mode.contains(&letter);
    let access = match (has(b'+'), mode.first()) {
        (true, _) => libc::O_RDWR,
        (false, Some(b'r')) => libc::O_RDONLY,
        (false, _) => libc::O_WRONLY,
    };
    let create = match mode.first() {
        Some(b'w') => libc::O_CREAT | libc::O_TRUNC,
        Some(b'a') => libc::O_CREAT | libc::O_APPEND,
        _ => 0,
    };
    let exclusive = if has(b'x') { libc::O_EXCL } else { 0 };
    let close_on_exec = if has(b'e') { libc::O_CLOEXEC } else { 0 };
    access | create | exclusive | close_on_exec
}

unsafe fn open_stream(next: &Next, path: *const c_char, mode: *const c_char) -> *mut c_void {
    if let Some(special) = special(libc::AT_FDCWD, path, 0) {
        // SAFETY: the mode is a C string by the caller's contract.
        let flags = flags_of(unsafe { std::ffi::CStr::from_ptr(mode) }.to_bytes());
        // A stream writes without calling slat's `write`.
        if flags & libc::O_ACCMODE != libc::O_RDONLY && matches!(special, Special::Parameter(_)) {
            set_errno(libc::EACCES);
            return std::ptr::null_mut();
        }
        if let Some(fd) = open_special(libc::AT_FDCWD, path, Opening::open(flags, 0o666)) {
            if fd < 0 {
                return std::ptr::null_mut();
            }
            // SAFETY: a descriptor of our own, whose ownership passes to the stream.
            return unsafe { libc::fdopen(fd, mode) }.cast();
        }
    }
    let Some(function) = next.get() else {
        set_errno(libc::ENOSYS);
        return std::ptr::null_mut();
    };
    type Fopen = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut c_void;
    // SAFETY: the C library's function of that name has this signature; the arguments are the caller's.
    unsafe { std::mem::transmute::<usize, Fopen>(function)(path, mode) }
}

interpose! {
    /// open(2).
    fn open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        // SAFETY: the caller's. Without O_CREAT the mode is not read.
        unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
    }

    /// creat(2).
    fn creat(path: *const c_char, mode: c_uint) -> c_int {
        // SAFETY: as for `open`.
        unsafe { open_at(libc::AT_FDCWD, path, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, mode) }
    }

    /// creat(2) with large files.
    fn creat64(path: *const c_char, mode: c_uint) -> c_int {
        // SAFETY: as for `open`.
        unsafe { open_at(libc::AT_FDCWD, path, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, mode) }
    }

    /// open(2) with large files: no difference on x86-64.
    fn open64(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        // SAFETY: as for `open`.
        unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
    }

    /// openat(2).
    fn openat(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        // SAFETY: as for `open`.
        unsafe { open_at(directory, path, flags, mode) }
    }

    /// openat(2) with large files.
    fn openat64(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        // SAFETY: as for `open`.
        unsafe { open_at(directory, path, flags, mode) }
    }

    /// open(2), as _FORTIFY_SOURCE calls it.
    fn __open_2(path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: as for `open`.
        unsafe { open_at(libc::AT_FDCWD, path, flags, 0) }
    }

    /// open(2) with large files, as _FORTIFY_SOURCE calls it.
    fn __open64_2(path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: as for `open`.
        unsafe { open_at(libc::AT_FDCWD, path, flags, 0) }
    }

    /// openat(2), as _FORTIFY_SOURCE calls it.
    fn __openat_2(directory: c_int, path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: as for `open`.
        unsafe { open_at(directory, path, flags, 0) }
    }

    /// openat(2) with large files, as _FORTIFY_SOURCE calls it.
    fn __openat64_2(directory: c_int, path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: as for `open`.
        unsafe { open_at(directory, path, flags, 0) }
    }

    /// access(2).
    fn access(path: *const c_char, mode: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { access_at(libc::AT_FDCWD, path, mode, 0) }
    }

    /// euidaccess(3).
    fn euidaccess(path: *const c_char, mode: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { access_at(libc::AT_FDCWD, path, mode, libc::AT_EACCESS) }
    }

    /// eaccess(3).
    fn eaccess(path: *const c_char, mode: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { access_at(libc::AT_FDCWD, path, mode, libc::AT_EACCESS) }
    }

    /// faccessat(2).
    fn faccessat(directory: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { access_at(directory, path, mode, flags) }
    }

    /// fopen(3).
    fn fopen(path: *const c_char, mode: *const c_char) -> *mut c_void {
        // SAFETY: the caller's.
        unsafe { open_stream(&NEXT_FOPEN, path, mode) }
    }

    /// fopen(3) with large files.
    fn fopen64(path: *const c_char, mode: *const c_char) -> *mut c_void {
        // SAFETY: the caller's.
        unsafe { open_stream(&NEXT_FOPEN64, path, mode) }
    }
}
