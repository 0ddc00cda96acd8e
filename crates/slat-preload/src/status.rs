//! Asking about files: stat, readlink and their kin, by path and by descriptor.

use crate::files::interpose;
use crate::looks::Look;
use crate::paths::{self, Special, special};
use crate::real::{call, set_errno};
use crate::table;
use slat_kvm::thread::Section;
use std::ffi::{c_char, c_int, c_uint};
use std::io::Write;

/// What the client asks about, if that is slat's to answer.
fn asked(directory: c_int, path: *const c_char, flags: c_int) -> Option<Result<Look, i32>> {
    const KNOWN: c_int = libc::AT_EMPTY_PATH
        | libc::AT_SYMLINK_NOFOLLOW
        | libc::AT_NO_AUTOMOUNT
        | libc::AT_STATX_SYNC_TYPE;
    if flags & !KNOWN != 0 || Section::is_entered() {
        return None;
    }
    if flags & libc::AT_EMPTY_PATH != 0 && table::is_ours(directory) && paths::is_empty(path) {
        return Look::of_descriptor(directory).map(Ok);
    }
    match special(directory, path, 0)? {
        // The link itself is as the kernel shows it.
        Special::Descriptor(_) if flags & libc::AT_SYMLINK_NOFOLLOW != 0 => None,
        special => Look::of_path(special),
    }
}

/// Ends a call that answers with a struct: 0, or -1 and `errno`.
///
/// # Safety
/// `T` is plain bytes without padding that matters. `to` is the client's: the write is guarded.
unsafe fn give<T>(to: *mut T, answer: Result<T, i32>) -> c_int {
    let copied = answer.and_then(|value| {
        // SAFETY: plain bytes of a live value.
        let bytes =
            unsafe { std::slice::from_raw_parts((&raw const value).cast::<u8>(), size_of::<T>()) };
        // SAFETY: guarded; the address is the client's.
        unsafe { slat_guard::copy_out(to.cast(), bytes) }.map_err(|_| libc::EFAULT)
    });
    match copied {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// fstatat and all that comes down to it.
///
/// # Safety
/// As for `fstatat`.
pub unsafe fn stat_at(
    directory: c_int,
    path: *const c_char,
    to: *mut libc::stat,
    flags: c_int,
) -> c_int {
    if let Some(look) = asked(directory, path, flags) {
        // SAFETY: a struct of integers; the address is the caller's.
        return unsafe { give(to, look.map(Look::stat)) };
    }
    // SAFETY: the caller's. The kernel's struct is the C library's on x86-64.
    unsafe { call!(libc::SYS_newfstatat, directory, path, to, flags) as c_int }
}

/// What a descriptor's link in `/proc` says, as long as the client's buffer.
fn link_of(fd: c_int, to: *mut u8, len: usize) -> Option<Result<usize, i32>> {
    /// More than the longest name.
    const MAX: usize = 96;
    let _section = Section::enter();
    let handle = table::get(fd)?;
    // A parameter's file shows as what it is.
    let name = handle.object().link()?;
    if len as isize <= 0 || len > i32::MAX as usize {
        return Some(Err(libc::EINVAL));
    }
    let mut text = [0; MAX];
    let mut rest = &mut text[..];
    write!(rest, "{name}").expect("names are short");
    let written = (MAX - rest.len()).min(len);
    // SAFETY: guarded; the address is the client's.
    let copied = unsafe { slat_guard::copy_out(to, &text[..written]) };
    Some(copied.map(|()| written).map_err(|_| libc::EFAULT))
}

/// readlinkat and all that comes down to it.
///
/// # Safety
/// As for `readlinkat`.
pub unsafe fn read_link_at(
    directory: c_int,
    path: *const c_char,
    to: *mut c_char,
    len: usize,
) -> isize {
    let answer = special(directory, path, 0).and_then(|special| match special {
        Special::Descriptor(fd) => link_of(fd, to.cast(), len),
        Special::Slash => Some(Err(libc::ENOTDIR)),
        Special::Device | Special::Parameter(_) => Some(Err(libc::EINVAL)),
    });
    match answer {
        Some(Ok(written)) => written as isize,
        Some(Err(errno)) => {
            set_errno(errno);
            -1
        }
        // SAFETY: the caller's.
        None => unsafe { call!(libc::SYS_readlinkat, directory, path, to, len) },
    }
}

/// fstat and all that comes down to it.
///
/// # Safety
/// As for `fstat`.
pub unsafe fn stat_descriptor(fd: c_int, to: *mut libc::stat) -> c_int {
    if table::is_ours(fd)
        && !Section::is_entered()
        && let Some(look) = Look::of_descriptor(fd)
    {
        // SAFETY: a struct of integers; the address is the caller's.
        return unsafe { give(to, Ok(look.stat())) };
    }
    // SAFETY: the caller's.
    unsafe { call!(libc::SYS_fstat, fd, to) as c_int }
}

unsafe extern "C" {
    /// The C library's: reports the overflow and ends the program.
    fn __chk_fail() -> !;
}

/// Ends the program if a call may write `len` bytes to a buffer of `room` bytes, as _FORTIFY_SOURCE promises.
fn check_room(len: usize, room: usize) {
    if len > room {
        // SAFETY: does not return.
        unsafe { __chk_fail() }
    }
}

interpose! {
    /// stat(2).
    fn stat(path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(libc::AT_FDCWD, path, to, 0) }
    }

    /// stat(2) with large files: the struct is the same on x86-64.
    fn stat64(path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
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

    /// fstat(2).
    fn fstat(fd: c_int, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_descriptor(fd, to) }
    }

    /// fstat(2) with large files.
    fn fstat64(fd: c_int, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_descriptor(fd, to) }
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

    /// stat(2) of programs built against an older C library, with large files.
    fn __xstat64(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(libc::AT_FDCWD, path, to, 0) }
    }

    /// lstat(2) of programs built against an older C library.
    fn __lxstat(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW) }
    }

    /// lstat(2) of programs built against an older C library, with large files.
    fn __lxstat64(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW) }
    }

    /// fstat(2) of programs built against an older C library.
    fn __fxstat(_version: c_int, fd: c_int, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_descriptor(fd, to) }
    }

    /// fstat(2) of programs built against an older C library, with large files.
    fn __fxstat64(_version: c_int, fd: c_int, to: *mut libc::stat) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_descriptor(fd, to) }
    }

    /// fstatat(2) of programs built against an older C library.
    fn __fxstatat(_version: c_int, directory: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(directory, path, to, flags) }
    }

    /// fstatat(2) of programs built against an older C library, with large files.
    fn __fxstatat64(_version: c_int, directory: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { stat_at(directory, path, to, flags) }
    }

    /// statx(2).
    fn statx(directory: c_int, path: *const c_char, flags: c_int, mask: c_uint, to: *mut libc::statx) -> c_int {
        if let Some(look) = asked(directory, path, flags) {
            // SAFETY: a struct of integers; the address is the caller's.
            return unsafe { give(to, look.map(Look::statx)) };
        }
        // SAFETY: the caller's.
        unsafe { call!(libc::SYS_statx, directory, path, flags, mask, to) as c_int }
    }

    /// readlink(2).
    fn readlink(path: *const c_char, to: *mut c_char, len: usize) -> isize {
        // SAFETY: the caller's.
        unsafe { read_link_at(libc::AT_FDCWD, path, to, len) }
    }

    /// readlinkat(2).
    fn readlinkat(directory: c_int, path: *const c_char, to: *mut c_char, len: usize) -> isize {
        // SAFETY: the caller's.
        unsafe { read_link_at(directory, path, to, len) }
    }

    /// What `readlink` becomes with _FORTIFY_SOURCE.
    fn __readlink_chk(path: *const c_char, to: *mut c_char, len: usize, room: usize) -> isize {
        check_room(len, room);
        // SAFETY: the caller's.
        unsafe { read_link_at(libc::AT_FDCWD, path, to, len) }
    }

    /// What `readlinkat` becomes with _FORTIFY_SOURCE.
    fn __readlinkat_chk(directory: c_int, path: *const c_char, to: *mut c_char, len: usize, room: usize) -> isize {
        check_room(len, room);
        // SAFETY: the caller's.
        unsafe { read_link_at(directory, path, to, len) }
    }
}
