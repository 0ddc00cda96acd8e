//! Owner, mode and extended attributes of KVM's files, by path.
//!
//! libvirt gives each guest a `/dev` of its own: it reads the device's access control list, and sets the node's owner.
//! slat serves every user, so it does not store owner and mode: calls that change them succeed, and `stat` shows the
//! same as before. There are no extended attributes, as on a file system without them.

use crate::files::interpose;
use crate::paths::{Special, special};
use crate::real::{call, kernel, plain};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Returns the result of a call about the special file at `path`: that of `of_file` for a file of KVM's. `None`: the
/// kernel has to serve the call, as it always does before the program's first use of KVM.
fn about(
    directory: c_int,
    path: *const c_char,
    of_file: impl FnOnce() -> Result<isize, i32>,
) -> Option<isize> {
    if !crate::is_prepared() {
        return None;
    }
    let result = match special(directory, path, 0)? {
        Special::Device | Special::Parameter(_) => of_file(),
        Special::Slash => Err(libc::ENOTDIR),
        Special::Descriptor(_) => return None,
    };
    Some(plain(result))
}

/// Returns the result of an operation that only the owner of KVM's files, root, may do.
fn as_owner() -> Result<isize, i32> {
    // SAFETY: no arguments.
    match unsafe { kernel!(libc::SYS_geteuid) } {
        Ok(0) => Ok(0),
        _ => Err(libc::EPERM),
    }
}

/// Does fchownat, and all calls equivalent to it. `kernels` makes the kernel's call.
pub fn change_owner(
    directory: c_int,
    path: *const c_char,
    user: c_uint,
    group: c_uint,
    kernels: impl FnOnce() -> isize,
) -> c_int {
    let answer = about(directory, path, || match (user, group) {
        (c_uint::MAX, c_uint::MAX) => Ok(0),
        _ => as_owner(),
    });
    answer.unwrap_or_else(kernels) as c_int
}

/// Does fchmodat, and all calls equivalent to it. `kernels` makes the kernel's call.
pub fn change_mode(
    directory: c_int,
    path: *const c_char,
    kernels: impl FnOnce() -> isize,
) -> c_int {
    about(directory, path, as_owner).unwrap_or_else(kernels) as c_int
}

/// Does a call with number `number`, which reads or writes extended attributes of the file at `path`.
///
/// # Safety
/// As for the call.
pub unsafe fn extended(number: i64, path: *const c_char, arguments: [usize; 4]) -> isize {
    let answer = about(libc::AT_FDCWD, path, || match number {
        libc::SYS_listxattr | libc::SYS_llistxattr => Ok(0),
        _ => Err(libc::EOPNOTSUPP),
    });
    let [b, c, d, e] = arguments;
    // SAFETY: the caller's.
    answer.unwrap_or_else(|| unsafe { call!(number, path, b, c, d, e) })
}

interpose! {
    /// chown(2).
    fn chown(path: *const c_char, user: c_uint, group: c_uint) -> c_int {
        // SAFETY: the caller's.
        unsafe { change_owner(libc::AT_FDCWD, path, user, group, || call!(libc::SYS_chown, path, user, group)) }
    }

    /// lchown(2).
    fn lchown(path: *const c_char, user: c_uint, group: c_uint) -> c_int {
        // SAFETY: the caller's.
        unsafe { change_owner(libc::AT_FDCWD, path, user, group, || call!(libc::SYS_lchown, path, user, group)) }
    }

    /// fchownat(2).
    fn fchownat(directory: c_int, path: *const c_char, user: c_uint, group: c_uint, flags: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { change_owner(directory, path, user, group, || call!(libc::SYS_fchownat, directory, path, user, group, flags)) }
    }

    /// chmod(2).
    fn chmod(path: *const c_char, mode: c_uint) -> c_int {
        // SAFETY: the caller's.
        unsafe { change_mode(libc::AT_FDCWD, path, || call!(libc::SYS_chmod, path, mode)) }
    }

    /// getxattr(2).
    fn getxattr(path: *const c_char, name: *const c_char, to: *mut c_void, len: usize) -> isize {
        // SAFETY: the caller's.
        unsafe { extended(libc::SYS_getxattr, path, [name as usize, to as usize, len, 0]) }
    }

    /// lgetxattr(2).
    fn lgetxattr(path: *const c_char, name: *const c_char, to: *mut c_void, len: usize) -> isize {
        // SAFETY: the caller's.
        unsafe { extended(libc::SYS_lgetxattr, path, [name as usize, to as usize, len, 0]) }
    }

    /// listxattr(2).
    fn listxattr(path: *const c_char, to: *mut c_char, len: usize) -> isize {
        // SAFETY: the caller's.
        unsafe { extended(libc::SYS_listxattr, path, [to as usize, len, 0, 0]) }
    }

    /// llistxattr(2).
    fn llistxattr(path: *const c_char, to: *mut c_char, len: usize) -> isize {
        // SAFETY: the caller's.
        unsafe { extended(libc::SYS_llistxattr, path, [to as usize, len, 0, 0]) }
    }

    /// setxattr(2).
    fn setxattr(path: *const c_char, name: *const c_char, from: *const c_void, len: usize, flags: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { extended(libc::SYS_setxattr, path, [name as usize, from as usize, len, flags as usize]) as c_int }
    }

    /// lsetxattr(2).
    fn lsetxattr(path: *const c_char, name: *const c_char, from: *const c_void, len: usize, flags: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { extended(libc::SYS_lsetxattr, path, [name as usize, from as usize, len, flags as usize]) as c_int }
    }
}
