//! Implements the system calls that take a path and get or set owner, mode and extended attributes, for `/dev/kvm` and
//! slat's other KVM files.
//!
//! libvirt makes a separate `/dev` for each guest. To do so, libvirt reads the device's access control list, and sets
//! the node's owner. slat serves every user, so it does not store an owner and a mode. Calls that change owner or mode
//! succeed, and `stat` shows the same values as before. KVM's files have no extended attributes, like files on a file
//! system without support for them.

use crate::files::interpose;
use crate::paths::{Special, special};
use crate::real::{call, call_as_library, kernel, plain};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Handles a call about the file at `path`. Returns the result of `of_file` if `path` is one of KVM's files. `None`:
/// `path` names another file or a descriptor, or the program has not used KVM yet. Then the kernel has to serve the
/// call.
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

/// Returns the result of an operation that only root may do, because root owns KVM's files: 0 for root, otherwise
/// `EPERM`.
fn as_owner() -> Result<isize, i32> {
    // SAFETY: the call has no arguments.
    match unsafe { kernel!(libc::SYS_geteuid) } {
        Ok(0) => Ok(0),
        _ => Err(libc::EPERM),
    }
}

/// Implements fchownat and all equivalent calls. `kernels` makes the call in the kernel.
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

/// Implements fchmodat and all equivalent calls. `kernels` makes the call in the kernel.
pub fn change_mode(
    directory: c_int,
    path: *const c_char,
    kernels: impl FnOnce() -> isize,
) -> c_int {
    about(directory, path, as_owner).unwrap_or_else(kernels) as c_int
}

/// Makes the system call `number`, which reads or writes extended attributes of the file at `path`.
///
/// # Safety
/// The conditions are those of the system call `number`.
pub unsafe fn extended(number: i64, path: *const c_char, arguments: [usize; 4]) -> isize {
    let answer = about(libc::AT_FDCWD, path, || match number {
        libc::SYS_listxattr | libc::SYS_llistxattr => Ok(0),
        _ => Err(libc::EOPNOTSUPP),
    });
    let [b, c, d, e] = arguments;
    // SAFETY: the arguments are valid for the call `number`, as this function's contract requires.
    answer.unwrap_or_else(|| unsafe { call!(number, path, b, c, d, e) })
}

/// Makes chown or lchown in the kernel, by fchownat.
///
/// # Safety
/// The conditions are those of chown(2).
unsafe fn change_owner_here(
    path: *const c_char,
    user: c_uint,
    group: c_uint,
    flags: c_int,
) -> isize {
    let (here, path) = (libc::AT_FDCWD as usize, path as usize);
    let arguments = [here, path, user as usize, group as usize, flags as usize, 0];
    // SAFETY: the arguments are valid for chown(2), as this function's contract requires.
    unsafe { call_as_library(libc::SYS_fchownat, arguments) }
}

interpose! {
    /// Replaces chown(2).
    fn chown(path: *const c_char, user: c_uint, group: c_uint) -> c_int {
        // SAFETY: the arguments are valid for chown(2), as this function's contract requires.
        unsafe { change_owner(libc::AT_FDCWD, path, user, group, || change_owner_here(path, user, group, 0)) }
    }

    /// Replaces lchown(2).
    fn lchown(path: *const c_char, user: c_uint, group: c_uint) -> c_int {
        // SAFETY: the arguments are valid for lchown(2), as this function's contract requires.
        unsafe {
            change_owner(libc::AT_FDCWD, path, user, group, || {
                change_owner_here(path, user, group, libc::AT_SYMLINK_NOFOLLOW)
            })
        }
    }

    /// Replaces fchownat(2).
    fn fchownat(directory: c_int, path: *const c_char, user: c_uint, group: c_uint, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for fchownat(2), as this function's contract requires.
        unsafe { change_owner(directory, path, user, group, || call!(libc::SYS_fchownat, directory, path, user, group, flags)) }
    }

    /// Replaces chmod(2).
    fn chmod(path: *const c_char, mode: c_uint) -> c_int {
        // SAFETY: the arguments are valid for chmod(2), as this function's contract requires.
        unsafe {
            change_mode(libc::AT_FDCWD, path, || {
                let arguments = [libc::AT_FDCWD as usize, path as usize, mode as usize, 0, 0, 0];
                call_as_library(libc::SYS_fchmodat, arguments)
            })
        }
    }

    /// Replaces getxattr(2).
    fn getxattr(path: *const c_char, name: *const c_char, to: *mut c_void, len: usize) -> isize {
        // SAFETY: the arguments are valid for getxattr(2), as this function's contract requires.
        unsafe { extended(libc::SYS_getxattr, path, [name as usize, to as usize, len, 0]) }
    }

    /// Replaces lgetxattr(2).
    fn lgetxattr(path: *const c_char, name: *const c_char, to: *mut c_void, len: usize) -> isize {
        // SAFETY: the arguments are valid for lgetxattr(2), as this function's contract requires.
        unsafe { extended(libc::SYS_lgetxattr, path, [name as usize, to as usize, len, 0]) }
    }

    /// Replaces listxattr(2).
    fn listxattr(path: *const c_char, to: *mut c_char, len: usize) -> isize {
        // SAFETY: the arguments are valid for listxattr(2), as this function's contract requires.
        unsafe { extended(libc::SYS_listxattr, path, [to as usize, len, 0, 0]) }
    }

    /// Replaces llistxattr(2).
    fn llistxattr(path: *const c_char, to: *mut c_char, len: usize) -> isize {
        // SAFETY: the arguments are valid for llistxattr(2), as this function's contract requires.
        unsafe { extended(libc::SYS_llistxattr, path, [to as usize, len, 0, 0]) }
    }

    /// Replaces setxattr(2).
    fn setxattr(path: *const c_char, name: *const c_char, from: *const c_void, len: usize, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for setxattr(2), as this function's contract requires.
        unsafe { extended(libc::SYS_setxattr, path, [name as usize, from as usize, len, flags as usize]) as c_int }
    }

    /// Replaces lsetxattr(2).
    fn lsetxattr(path: *const c_char, name: *const c_char, from: *const c_void, len: usize, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for lsetxattr(2), as this function's contract requires.
        unsafe { extended(libc::SYS_lsetxattr, path, [name as usize, from as usize, len, flags as usize]) as c_int }
    }
}
