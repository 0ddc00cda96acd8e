//! Opening and asking about files by path: `/dev/kvm` and KVM's module parameters are answered here.

use crate::device::{self, Special, special};
use crate::guarded::guarded;
use crate::real::{Next, call, set_errno};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Defines an exported C function. In the unit tests of this crate the C library's own must stay in force.
macro_rules! interpose {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => {
        $(
            $(#[$meta])*
            ///
            /// # Safety
            /// As for the C library's function of this name.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> $result $body
        )*
    };
}
pub(crate) use interpose;

/// Opens by path, or hands on.
///
/// # Safety
/// As for `openat`.
pub unsafe fn open_at(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    if let Some(special) = special(path) {
        return guarded(|| device::open(&special, flags)) as c_int;
    }
    // SAFETY: the caller's.
    unsafe { call!(libc::SYS_openat, directory, path, flags, mode) as c_int }
}

/// What `access` answers for a special path.
fn access_special(special: &Special, mode: c_int) -> c_int {
    let writable = match special {
        Special::Device => true,
        Special::Parameter(name, _) => slat_kvm::parameters::is_writable(name),
    };
    if mode & libc::X_OK != 0 || mode & libc::W_OK != 0 && !writable {
        set_errno(libc::EACCES);
        return -1;
    }
    0
}

/// The access rights of a parameter's file.
fn parameter_mode(name: &str) -> u32 {
    if slat_kvm::parameters::is_writable(name) {
        0o644
    } else {
        0o444
    }
}

/// Answers a stat call for a special path.
///
/// # Safety
/// `to` points to a `stat`, or the client gets what it deserves: the write is guarded.
unsafe fn stat_special(special: &Special, to: *mut libc::stat) -> c_int {
    let mut stat = device::stat();
    if let Special::Parameter(name, text) = special {
        stat.st_mode = libc::S_IFREG | parameter_mode(name);
        stat.st_rdev = 0;
        stat.st_size = text.len() as libc::off_t;
    }
    // SAFETY: plain bytes of a live value.
    let bytes =
        unsafe { std::slice::from_raw_parts((&raw const stat).cast::<u8>(), size_of_val(&stat)) };
    // SAFETY: guarded; the address is the client's.
    if unsafe { slat_guard::copy_out(to.cast(), bytes) }.is_err() {
        set_errno(libc::EFAULT);
        return -1;
    }
    0
}

/// `fstatat` and all that comes down to it.
unsafe fn stat_at(
    directory: c_int,
    path: *const c_char,
    to: *mut libc::stat,
    flags: c_int,
) -> c_int {
    if let Some(special) = special(path) {
        // SAFETY: the caller's.
        return unsafe { stat_special(&special, to) };
    }
    // SAFETY: the caller's. The kernel's struct is the C library's on x86-64.
    unsafe { call!(libc::SYS_newfstatat, directory, path, to, flags) as c_int }
}

unsafe fn access_at(directory: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
    if let Some(special) = special(path) {
        return access_special(&special, mode);
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

unsafe fn open_stream(next: &Next, path: *const c_char, mode: *const c_char) -> *mut c_void {
    if let Some(special) = special(path) {
        // SAFETY: the mode is a C string by the caller's contract.
        let writes = unsafe { std::ffi::CStr::from_ptr(mode) }
            .to_bytes()
            .iter()
            .any(|byte| b"wa+".contains(byte));
        // A stream writes by ways that do not come through here.
        if writes && special != Special::Device {
            set_errno(libc::EACCES);
            return std::ptr::null_mut();
        }
        let flags = if writes { libc::O_RDWR } else { libc::O_RDONLY };
        let fd = guarded(|| device::open(&special, flags)) as c_int;
        if fd < 0 {
            return std::ptr::null_mut();
        }
        // SAFETY: a descriptor of our own, given away.
        return unsafe { libc::fdopen(fd, mode) }.cast();
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
        // SAFETY: the caller's. Without O_CREAT the mode is not looked at.
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

    /// open(2) with large files, which is the same here.
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

    /// What `open` becomes with _FORTIFY_SOURCE.
    fn __open_2(path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: as for `open`.
        unsafe { open_at(libc::AT_FDCWD, path, flags, 0) }
    }

    /// What `open64` becomes with _FORTIFY_SOURCE.
    fn __open64_2(path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: as for `open`.
        unsafe { open_at(libc::AT_FDCWD, path, flags, 0) }
    }

    /// What `openat` becomes with _FORTIFY_SOURCE.
    fn __openat_2(directory: c_int, path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: as for `open`.
        unsafe { open_at(directory, path, flags, 0) }
    }

    /// What `openat64` becomes with _FORTIFY_SOURCE.
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

    /// stat(2).
    fn stat(path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(libc::AT_FDCWD, path, to, 0) }
    }

    /// stat(2) with large files.
    fn stat64(path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's; the structs are the same on x86-64.
        unsafe { stat_at(libc::AT_FDCWD, path, to, 0) }
    }

    /// lstat(2).
    fn lstat(path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW) }
    }

    /// lstat(2) with large files.
    fn lstat64(path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW) }
    }

    /// fstatat(2).
    fn fstatat(directory: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(directory, path, to, flags) }
    }

    /// fstatat(2) with large files.
    fn fstatat64(directory: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(directory, path, to, flags) }
    }

    /// stat(2) of programs built against an older C library.
    fn __xstat(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(libc::AT_FDCWD, path, to, 0) }
    }

    /// The same with large files.
    fn __xstat64(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(libc::AT_FDCWD, path, to, 0) }
    }

    /// lstat(2) of programs built against an older C library.
    fn __lxstat(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW) }
    }

    /// The same with large files.
    fn __lxstat64(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW) }
    }

    /// statx(2).
    fn statx(directory: c_int, path: *const c_char, flags: c_int, mask: c_uint, to: *mut libc::statx) -> c_int {
        if let Some(special) = special(path) {
            // SAFETY: all-zero is a valid `statx`.
            let mut answer: libc::statx = unsafe { std::mem::zeroed() };
            let device = special == Special::Device;
            answer.stx_mask = libc::STATX_TYPE | libc::STATX_MODE | libc::STATX_NLINK | libc::STATX_SIZE;
            answer.stx_mode = match &special {
                Special::Device => libc::S_IFCHR | 0o666,
                Special::Parameter(name, _) => libc::S_IFREG | parameter_mode(name),
            } as u16;
            answer.stx_nlink = 1;
            if device {
                (answer.stx_rdev_major, answer.stx_rdev_minor) = (10, 232);
            }
            // SAFETY: plain bytes of a live value.
            let bytes = unsafe { std::slice::from_raw_parts((&raw const answer).cast::<u8>(), size_of_val(&answer)) };
            // SAFETY: guarded; the address is the client's.
            if unsafe { slat_guard::copy_out(to.cast(), bytes) }.is_err() {
                set_errno(libc::EFAULT);
                return -1;
            }
            return 0;
        }
        // SAFETY: the caller's.
        unsafe { call!(libc::SYS_statx, directory, path, flags, mask, to) as c_int }
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
