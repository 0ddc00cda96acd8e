//! Implements queries about files, by path and by descriptor: stat, readlink, realpath and their variants.

use crate::environment::look_of_processors;
use crate::files::interpose;
use crate::looks::{self, Look};
use crate::paths::{self, DescriptorPath, Path, Special};
use crate::real::{Next, call, call_as_library, plain, set_errno};
use crate::table;
use slat_kvm::system;
use slat_kvm::thread::Section;
use std::ffi::{CString, c_char, c_int, c_uint};
use std::io::Write;

/// Serves a query: calls `ours` for one of KVM's files, and `kernels` for all other files. `excludes` says whether the
/// kernel's result shows that the file is none of KVM's (see [`serve`](paths::serve)).
fn ask(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    kernels: impl Fn() -> isize,
    excludes: impl Fn() -> bool,
    ours: impl FnOnce(Result<Look, i32>) -> c_int,
) -> c_int {
    const KNOWN: c_int = libc::AT_EMPTY_PATH
        | libc::AT_SYMLINK_NOFOLLOW
        | libc::AT_NO_AUTOMOUNT
        | libc::AT_STATX_SYNC_TYPE;
    if flags & !KNOWN != 0 || Section::is_entered() {
        return kernels() as c_int;
    }
    if flags & libc::AT_EMPTY_PATH != 0 && table::is_ours(directory) && paths::is_empty(path) {
        return match Look::of_descriptor(directory) {
            Some(look) => ours(Ok(look)),
            None => kernels() as c_int,
        };
    }
    let path = Path {
        directory,
        text: path,
        resolve: 0,
    };
    let ours = |special| {
        let look = match special {
            // The kernel serves a query about the link itself.
            Special::Descriptor(_) if flags & libc::AT_SYMLINK_NOFOLLOW != 0 => None,
            special => Look::of_path(special),
        };
        look.map(|look| ours(look) as isize)
    };
    paths::serve(
        path,
        kernels,
        |answer| answer == 0 && excludes(),
        |_| {},
        ours,
    ) as c_int
}

/// Whether a file's mode, device number and size show that it is neither `/dev/kvm` nor a module parameter.
fn is_other(mode: u32, device: (u32, u32), size: i64) -> bool {
    match mode & libc::S_IFMT {
        libc::S_IFCHR => device != paths::DEVICE,
        libc::S_IFREG => size != looks::SYSFS_SIZE,
        _ => true,
    }
}

/// Copies a struct to the client's memory as the last step of a call. Returns 0, or -1 and sets `errno`.
///
/// # Safety
/// `T` is plain bytes without padding that matters. `to` is an address of the client; the write is guarded.
unsafe fn give<T>(to: *mut T, answer: Result<T, i32>) -> c_int {
    let copied = answer.and_then(|value| {
        // SAFETY: the value is live and consists of plain bytes.
        let bytes =
            unsafe { std::slice::from_raw_parts((&raw const value).cast::<u8>(), size_of::<T>()) };
        // SAFETY: the copy to the client's address is guarded: a bad address is an error.
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

/// Implements fstatat and all equivalent calls. `kernels` makes the call in the kernel.
///
/// # Safety
/// The conditions are those of fstatat(2).
pub unsafe fn stat_at(
    directory: c_int,
    path: *const c_char,
    to: *mut libc::stat,
    flags: c_int,
    kernels: impl Fn() -> isize,
) -> c_int {
    let excludes = || {
        // SAFETY: the kernel has just filled in the struct. On 64-bit architectures, the kernel's struct is the C
        // library's.
        let stat = unsafe { &*to };
        let device = (libc::major(stat.st_rdev), libc::minor(stat.st_rdev));
        is_other(stat.st_mode, device, stat.st_size)
    };
    // SAFETY: the struct has only integers. The address is the caller's, and the write is guarded.
    let ours = |look: Result<Look, i32>| unsafe { give(to, look.map(Look::stat)) };
    let answer = ask(directory, path, flags, kernels, excludes, ours);
    if answer == 0 && flags & libc::AT_EMPTY_PATH != 0 {
        // SAFETY: the kernel has just filled in the struct.
        unsafe { correct(directory, to) };
    }
    answer
}

/// The text of the link in `/proc` of the memfd that slat uses for `/dev/kvm`.
const DEVICE_MEMFD: &[u8] = b"/memfd:kvm (deleted)";

/// Whether `fd` refers to slat's memfd of `/dev/kvm`, but is not in slat's table, because it stayed open across exec or
/// came through a socket. `mode`, `size` and `links` are the file's; the kernel is asked only if they fit the memfd.
fn is_inherited(fd: c_int, links: impl Into<u64>, mode: u32, size: i64) -> bool {
    let mut link = [0; 64];
    links.into() == 0
        && mode & libc::S_IFMT == libc::S_IFREG
        && size == system::DESCRIPTOR_SIZE as i64
        && paths::read_link(DescriptorPath::new(fd).as_c_str(), &mut link) == Some(DEVICE_MEMFD)
}

/// Corrects the kernel's `stat` of `fd` in two cases. In the first, `fd` refers to `/dev/kvm`, but is not in slat's
/// table. In the second, `fd` refers to the file that is opened in place of `/proc/cpuinfo`; cp(1) compares this `stat`
/// with the path's.
///
/// # Safety
/// The kernel has filled in `stat`.
unsafe fn correct(fd: c_int, stat: *mut libc::stat) {
    // SAFETY: the kernel has filled in `stat`, as this function's contract requires.
    unsafe {
        let found = &*stat;
        if is_inherited(fd, found.st_nlink, found.st_mode, found.st_size) {
            *stat = Look::Device.stat();
        } else if let Some(look) = look_of_processors(found.st_dev, found.st_ino) {
            *stat = *look;
        }
    }
}

/// Writes the text of a descriptor's link in `/proc` to the client's buffer. Returns the number of bytes written.
fn link_of(fd: c_int, to: *mut u8, len: usize) -> Option<Result<usize, i32>> {
    /// The size of the buffer for a link's text, which exceeds the longest text.
    const MAX: usize = 96;
    let _section = Section::enter();
    let handle = table::get(fd)?;
    // A parameter has no link text here, because the kernel's link already has the file's path.
    let name = handle.object().link()?;
    if len as isize <= 0 || len > i32::MAX as usize {
        return Some(Err(libc::EINVAL));
    }
    let mut text = [0; MAX];
    let mut rest = &mut text[..];
    write!(rest, "{name}").expect("names are short");
    let written = (MAX - rest.len()).min(len);
    // SAFETY: the copy to the client's address is guarded: a bad address is an error.
    let copied = unsafe { slat_guard::copy_out(to, &text[..written]) };
    Some(copied.map(|()| written).map_err(|_| libc::EFAULT))
}

/// Implements readlinkat and all equivalent calls. `kernels` makes the call in the kernel.
///
/// # Safety
/// The conditions are those of readlinkat(2).
pub unsafe fn read_link_at(
    directory: c_int,
    path: *const c_char,
    to: *mut c_char,
    len: usize,
    kernels: impl Fn() -> isize,
) -> isize {
    let ours = |special| {
        let answer = match special {
            Special::Descriptor(fd) => link_of(fd, to.cast(), len)?,
            Special::Slash => Err(libc::ENOTDIR),
            Special::Device | Special::Parameter(_) => Err(libc::EINVAL),
        };
        Some(plain(answer.map(|written| written as isize)))
    };
    let path = Path {
        directory,
        text: path,
        resolve: 0,
    };
    // SAFETY: the arguments are valid for readlinkat(2), as this function's contract requires.
    let kernels = || unsafe { corrected_link(to, kernels()) };
    // If the kernel has read a link, the path is neither the device nor a parameter.
    paths::serve(path, kernels, |answer| answer >= 0, |_| {}, ours)
}

/// Implements fstat and all equivalent calls. `kernels` makes the call in the kernel.
///
/// # Safety
/// The conditions are those of fstat(2).
pub unsafe fn stat_descriptor(
    fd: c_int,
    to: *mut libc::stat,
    kernels: impl Fn() -> isize,
) -> c_int {
    if table::is_ours(fd)
        && !Section::is_entered()
        && let Some(look) = Look::of_descriptor(fd)
    {
        // SAFETY: the struct has only integers. The address is the caller's, and the write is guarded.
        return unsafe { give(to, Ok(look.stat())) };
    }
    let answer = kernels() as c_int;
    if answer == 0 {
        // SAFETY: the kernel has just filled in the struct.
        unsafe { correct(fd, to) };
    }
    answer
}

/// Corrects the text of a link if it is the link in `/proc` of a `/dev/kvm` descriptor that is not in slat's table.
/// Returns the text's length.
///
/// # Safety
/// - The kernel has just written `written` bytes to `to`, or has failed.
unsafe fn corrected_link(to: *mut c_char, written: isize) -> isize {
    const NAME: &[u8] = b"/dev/kvm";
    if written == DEVICE_MEMFD.len() as isize {
        // SAFETY: the kernel has just written `written` bytes to `to`.
        let text = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), written as usize) };
        if text == DEVICE_MEMFD {
            text[..NAME.len()].copy_from_slice(NAME);
            return NAME.len() as isize;
        }
    }
    written
}

/// Returns the path that realpath(3) returns for a special file.
fn real_path(path: *const c_char) -> Option<CString> {
    let special = match crate::is_prepared() {
        true => paths::special(libc::AT_FDCWD, path, 0),
        // The path is read without a guard, because the C library's realpath would also read the path without a guard.
        false if path.is_null() => None,
        false => paths::special_readable(libc::AT_FDCWD, path),
    };
    let path = match special? {
        Special::Device => "/dev/kvm".to_owned(),
        Special::Parameter(name) => format!("/sys/module/kvm/parameters/{name}"),
        Special::Descriptor(fd) => {
            matches!(Look::of_descriptor(fd)?, Look::Device).then(|| "/dev/kvm".to_owned())?
        }
        // C libraries return different results for a device followed by a slash, so the C library's own function serves
        // it.
        Special::Slash => return None,
    };
    CString::new(path).ok()
}

/// Implements realpath and all equivalent calls. If `to` is null, allocates a new string.
///
/// # Safety
/// The conditions are those of realpath(3).
unsafe fn real_path_to(
    path: *const c_char,
    to: *mut c_char,
    next: impl FnOnce() -> *mut c_char,
) -> *mut c_char {
    let Some(path) = real_path(path) else {
        return next();
    };
    if to.is_null() {
        // SAFETY: `path` is a C string.
        return unsafe { libc::strdup(path.as_ptr()) };
    }
    // SAFETY: the copy to the client's address is guarded: a bad address is an error.
    match unsafe { slat_guard::copy_out(to.cast(), path.as_bytes_with_nul()) } {
        Ok(()) => to,
        Err(_) => {
            set_errno(libc::EFAULT);
            std::ptr::null_mut()
        }
    }
}

static NEXT_REALPATH: Next = Next::new(c"realpath");

/// Calls the C library's realpath.
///
/// # Safety
/// The conditions are those of realpath(3).
unsafe fn next_real_path(path: *const c_char, to: *mut c_char) -> *mut c_char {
    let Some(function) = NEXT_REALPATH.get() else {
        set_errno(libc::ENOSYS);
        return std::ptr::null_mut();
    };
    type Realpath = unsafe extern "C" fn(*const c_char, *mut c_char) -> *mut c_char;
    // SAFETY: `function` is the C library's function, which has this signature. The caller's arguments are valid for
    // it.
    unsafe { std::mem::transmute::<usize, Realpath>(function)(path, to) }
}

unsafe extern "C" {
    /// Reports a buffer overflow and ends the program, as the C library's own checks do.
    fn __chk_fail() -> !;
}

/// Ends the program if `len` exceeds `room`, the size of the caller's buffer. _FORTIFY_SOURCE requires this check.
fn check_room(len: usize, room: usize) {
    if len > room {
        // SAFETY: the call does not return.
        unsafe { __chk_fail() }
    }
}

static NEXT_FSTAT: Next = Next::new(c"fstat");

/// Looks up the C library's functions in advance, so that a signal handler never has to look them up.
pub fn prepare() {
    for next in [&NEXT_REALPATH, &NEXT_FSTAT] {
        next.get();
    }
}

/// Implements fstat. For other files, calls the C library's function, because the right system call depends on the C
/// library's version.
unsafe fn stat_by_name(fd: c_int, to: *mut libc::stat) -> c_int {
    let kernels = || match NEXT_FSTAT.get() {
        Some(function) if !Section::is_entered() => {
            type Fstat = unsafe extern "C" fn(c_int, *mut libc::stat) -> c_int;
            // SAFETY: `function` is the C library's function, which has this signature. The caller's arguments are
            // valid for it.
            unsafe { std::mem::transmute::<usize, Fstat>(function)(fd, to) as isize }
        }
        // SAFETY: the arguments are valid for fstat(2), as this function's contract requires.
        _ => unsafe { call!(libc::SYS_fstat, fd, to) },
    };
    // SAFETY: the arguments are valid for fstat(2), as this function's contract requires.
    unsafe { stat_descriptor(fd, to, kernels) }
}

/// Implements stat, lstat and fstatat for the functions that this library exports.
unsafe fn stat_by_path(
    directory: c_int,
    path: *const c_char,
    to: *mut libc::stat,
    flags: c_int,
) -> c_int {
    // SAFETY: the arguments are valid for fstatat(2), as this function's contract requires.
    unsafe {
        stat_at(directory, path, to, flags, || {
            call!(libc::SYS_newfstatat, directory, path, to, flags)
        })
    }
}

/// Implements stat or lstat for a program built against an older C library.
unsafe fn stat_as_before(path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
    let here = libc::AT_FDCWD;
    let arguments = [
        here as usize,
        path as usize,
        to as usize,
        flags as usize,
        0,
        0,
    ];
    // SAFETY: the arguments are valid for stat(2), as this function's contract requires.
    unsafe {
        stat_at(here, path, to, flags, || {
            call_as_library(libc::SYS_newfstatat, arguments)
        })
    }
}

/// Makes readlink in the kernel, by readlinkat.
unsafe fn read_link_here(path: *const c_char, to: *mut c_char, len: usize) -> isize {
    let arguments = [
        libc::AT_FDCWD as usize,
        path as usize,
        to as usize,
        len,
        0,
        0,
    ];
    // SAFETY: the arguments are valid for readlink(2), as this function's contract requires.
    unsafe { call_as_library(libc::SYS_readlinkat, arguments) }
}

interpose! {
    /// Replaces stat(2).
    fn stat(path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the arguments are valid for stat(2), as this function's contract requires.
        unsafe { stat_by_path(libc::AT_FDCWD, path, to, 0) }
    }

    /// Replaces stat64, which is stat(2) for large files. On 64-bit architectures, the struct is the same.
    fn stat64(path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the arguments are valid for stat(2), as this function's contract requires.
        unsafe { stat_by_path(libc::AT_FDCWD, path, to, 0) }
    }

    /// Replaces lstat(2).
    fn lstat(path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the arguments are valid for lstat(2), as this function's contract requires.
        unsafe { stat_by_path(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW) }
    }

    /// Replaces lstat64, which is lstat(2) for large files.
    fn lstat64(path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the arguments are valid for lstat(2), as this function's contract requires.
        unsafe { stat_by_path(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW) }
    }

    /// Replaces fstat(2).
    fn fstat(fd: c_int, to: *mut libc::stat) -> c_int {
        // SAFETY: the arguments are valid for fstat(2), as this function's contract requires.
        unsafe { stat_by_name(fd, to) }
    }

    /// Replaces fstat64, which is fstat(2) for large files.
    fn fstat64(fd: c_int, to: *mut libc::stat) -> c_int {
        // SAFETY: the arguments are valid for fstat(2), as this function's contract requires.
        unsafe { stat_by_name(fd, to) }
    }

    /// Replaces fstatat(2).
    fn fstatat(directory: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for fstatat(2), as this function's contract requires.
        unsafe { stat_by_path(directory, path, to, flags) }
    }

    /// Replaces fstatat64, which is fstatat(2) for large files.
    fn fstatat64(directory: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for fstatat(2), as this function's contract requires.
        unsafe { stat_by_path(directory, path, to, flags) }
    }

    /// Replaces `__xstat`, which programs built against an older C library call for stat(2).
    fn __xstat(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the arguments are valid for stat(2), as this function's contract requires.
        unsafe { stat_as_before(path, to, 0) }
    }

    /// Replaces `__xstat64`, which programs built against an older C library call for stat64.
    fn __xstat64(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the arguments are valid for stat(2), as this function's contract requires.
        unsafe { stat_as_before(path, to, 0) }
    }

    /// Replaces `__lxstat`, which programs built against an older C library call for lstat(2).
    fn __lxstat(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the arguments are valid for lstat(2), as this function's contract requires.
        unsafe { stat_as_before(path, to, libc::AT_SYMLINK_NOFOLLOW) }
    }

    /// Replaces `__lxstat64`, which programs built against an older C library call for lstat64.
    fn __lxstat64(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        // SAFETY: the arguments are valid for lstat(2), as this function's contract requires.
        unsafe { stat_as_before(path, to, libc::AT_SYMLINK_NOFOLLOW) }
    }

    /// Replaces `__fxstat`, which programs built against an older C library call for fstat(2).
    fn __fxstat(_version: c_int, fd: c_int, to: *mut libc::stat) -> c_int {
        // SAFETY: the arguments are valid for fstat(2), as this function's contract requires.
        unsafe { stat_descriptor(fd, to, || call!(libc::SYS_fstat, fd, to)) }
    }

    /// Replaces `__fxstat64`, which programs built against an older C library call for fstat64.
    fn __fxstat64(_version: c_int, fd: c_int, to: *mut libc::stat) -> c_int {
        // SAFETY: the arguments are valid for fstat(2), as this function's contract requires.
        unsafe { stat_descriptor(fd, to, || call!(libc::SYS_fstat, fd, to)) }
    }

    /// Replaces `__fxstatat`, which programs built against an older C library call for fstatat(2).
    fn __fxstatat(_version: c_int, directory: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for fstatat(2), as this function's contract requires.
        unsafe { stat_by_path(directory, path, to, flags) }
    }

    /// Replaces `__fxstatat64`, which programs built against an older C library call for fstatat64.
    fn __fxstatat64(_version: c_int, directory: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for fstatat(2), as this function's contract requires.
        unsafe { stat_by_path(directory, path, to, flags) }
    }

    /// Replaces statx(2).
    fn statx(directory: c_int, path: *const c_char, flags: c_int, mask: c_uint, to: *mut libc::statx) -> c_int {
        let excludes = || {
            // SAFETY: the kernel has just filled in the struct.
            let x = unsafe { &*to };
            is_other(x.stx_mode.into(), (x.stx_rdev_major, x.stx_rdev_minor), x.stx_size as i64)
        };
        // SAFETY: the struct has only integers. The address is the caller's, and the write is guarded.
        let ours = |look: Result<Look, i32>| unsafe { give(to, look.map(Look::statx)) };
        // SAFETY: the arguments are valid for statx(2), as this function's contract requires.
        let kernels = || unsafe { call!(libc::SYS_statx, directory, path, flags, mask, to) };
        let answer = ask(directory, path, flags, kernels, excludes, ours);
        if answer == 0 && flags & libc::AT_EMPTY_PATH != 0 {
            // SAFETY: the kernel has just filled in the struct.
            let x = unsafe { &mut *to };
            if is_inherited(directory, x.stx_nlink, x.stx_mode.into(), x.stx_size as i64) {
                *x = Look::Device.statx();
            }
            let device = libc::makedev(x.stx_dev_major, x.stx_dev_minor);
            if let Some(look) = look_of_processors(device, x.stx_ino) {
                (x.stx_dev_major, x.stx_dev_minor) = (libc::major(look.st_dev), libc::minor(look.st_dev));
                (x.stx_nlink, x.stx_uid, x.stx_gid) = (looks::link_count(look.st_nlink), look.st_uid, look.st_gid);
                (x.stx_mode, x.stx_ino) = (look.st_mode as u16, look.st_ino);
                (x.stx_size, x.stx_blocks) = (look.st_size as u64, look.st_blocks as u64);
            }
        }
        answer
    }

    /// Replaces readlink(2).
    fn readlink(path: *const c_char, to: *mut c_char, len: usize) -> isize {
        // SAFETY: the arguments are valid for readlink(2), as this function's contract requires.
        unsafe { read_link_at(libc::AT_FDCWD, path, to, len, || read_link_here(path, to, len)) }
    }

    /// Replaces readlinkat(2).
    fn readlinkat(directory: c_int, path: *const c_char, to: *mut c_char, len: usize) -> isize {
        // SAFETY: the arguments are valid for readlinkat(2), as this function's contract requires.
        unsafe { read_link_at(directory, path, to, len, || call!(libc::SYS_readlinkat, directory, path, to, len)) }
    }

    /// Replaces `__readlink_chk`, which programs compiled with _FORTIFY_SOURCE call for readlink(2).
    fn __readlink_chk(path: *const c_char, to: *mut c_char, len: usize, room: usize) -> isize {
        check_room(len, room);
        // SAFETY: the arguments are valid for readlink(2), as this function's contract requires.
        unsafe { read_link_at(libc::AT_FDCWD, path, to, len, || read_link_here(path, to, len)) }
    }

    /// Replaces `__readlinkat_chk`, which programs compiled with _FORTIFY_SOURCE call for readlinkat(2).
    fn __readlinkat_chk(directory: c_int, path: *const c_char, to: *mut c_char, len: usize, room: usize) -> isize {
        check_room(len, room);
        // SAFETY: the arguments are valid for readlinkat(2), as this function's contract requires.
        unsafe { read_link_at(directory, path, to, len, || call!(libc::SYS_readlinkat, directory, path, to, len)) }
    }

    /// Replaces realpath(3).
    fn realpath(path: *const c_char, to: *mut c_char) -> *mut c_char {
        // SAFETY: the arguments are valid for realpath(3), as this function's contract requires.
        unsafe { real_path_to(path, to, || next_real_path(path, to)) }
    }

    /// Replaces `__realpath_chk`, which programs compiled with _FORTIFY_SOURCE call for realpath(3).
    fn __realpath_chk(path: *const c_char, to: *mut c_char, room: usize) -> *mut c_char {
        check_room(libc::PATH_MAX as usize, room);
        // SAFETY: the arguments are valid for realpath(3), as this function's contract requires.
        unsafe { real_path_to(path, to, || next_real_path(path, to)) }
    }

    /// Replaces canonicalize_file_name(3).
    fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
        let to = std::ptr::null_mut();
        // SAFETY: the arguments are valid for canonicalize_file_name(3), as this function's contract requires.
        unsafe { real_path_to(path, to, || next_real_path(path, to)) }
    }
}
