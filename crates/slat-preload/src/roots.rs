//! The calls after which a path may lead to another file: chroot, pivot_root, setns, unshare. Before these calls slat
//! maps its own files, because programs that are executed afterwards cannot see them. This module also has mount, by
//! which a jailer makes `/dev/kvm` visible to its program.
//!
//! A program may define functions with these names, which call `syscall`. So the functions here that serve `syscall`
//! have other names.

use crate::children;
use crate::files::interpose;
use crate::looks::Look;
use crate::paths::{Special, special};
use crate::real::{call, errno};
use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};

/// Whether a path leads to `/dev/kvm`, or is the link in `/proc` of slat's descriptor of `/dev/kvm`.
fn is_device(path: *const c_char) -> bool {
    match special(libc::AT_FDCWD, path, 0) {
        Some(Special::Device) => true,
        Some(Special::Descriptor(fd)) => matches!(Look::of_descriptor(fd), Some(Look::Device)),
        _ => false,
    }
}

/// Makes the call `number` (chroot or pivot_root), after which paths may lead to other files.
///
/// # Safety
/// The conditions are those of the system call `number`.
pub unsafe fn leave(number: i64, arguments: [usize; 2]) -> c_int {
    children::keep_files();
    let [a, b] = arguments;
    // SAFETY: the arguments are valid for the call `number`, as this function's contract requires.
    unsafe { call!(number, a, b) as c_int }
}

/// Implements setns. If `kind` is 0, the namespace may be of any kind, including a mount namespace.
///
/// # Safety
/// The conditions are those of setns(2).
pub unsafe fn enter(namespace: c_int, kind: c_int) -> c_int {
    if kind == 0 || kind & libc::CLONE_NEWNS != 0 {
        children::keep_files();
    }
    // SAFETY: the arguments are valid for setns(2), as this function's contract requires.
    unsafe { call!(libc::SYS_setns, namespace, kind) as c_int }
}

/// Implements unshare. In a new mount namespace the program may mount another file system over slat's files.
///
/// # Safety
/// The conditions are those of unshare(2).
pub unsafe fn separate(kinds: c_int) -> c_int {
    if kinds & libc::CLONE_NEWNS != 0 {
        children::keep_files();
    }
    // SAFETY: the arguments are valid for unshare(2), as this function's contract requires.
    unsafe { call!(libc::SYS_unshare, kinds) as c_int }
}

/// Implements mount. A bind mount of `/dev/kvm` mounts the machine's own device. If the machine has no such device, or
/// if the source is the path of slat's descriptor, which the kernel cannot mount, another device is mounted instead.
/// slat later recognises the new path by its name.
///
/// # Safety
/// The conditions are those of mount(2).
pub unsafe fn bind(
    source: *const c_char,
    target: *const c_char,
    kind: *const c_char,
    flags: c_ulong,
    data: *const c_void,
) -> c_int {
    let mount = |source: *const c_char| {
        // SAFETY: the arguments are valid for mount(2), as this function's contract requires. The source is the
        // caller's source or a string that ends with 0.
        unsafe { call!(libc::SYS_mount, source, target, kind, flags, data) as c_int }
    };
    let answer = mount(source);
    if answer == 0
        || flags & libc::MS_BIND == 0
        || !matches!(errno(), libc::ENOENT | libc::EINVAL)
        || !is_device(source)
    {
        return answer;
    }
    let others: [&CStr; 2] = [c"/dev/kvm", c"/dev/null"];
    let mut tried = others.iter().map(|other| mount(other.as_ptr()));
    tried.find(|answer| *answer == 0).unwrap_or(answer)
}

interpose! {
    /// Replaces chroot(2).
    fn chroot(path: *const c_char) -> c_int {
        // SAFETY: the arguments are valid for chroot(2), as this function's contract requires.
        unsafe { leave(libc::SYS_chroot, [path as usize, 0]) }
    }

    /// Replaces pivot_root(2).
    fn pivot_root(new: *const c_char, old: *const c_char) -> c_int {
        // SAFETY: the arguments are valid for pivot_root(2), as this function's contract requires.
        unsafe { leave(libc::SYS_pivot_root, [new as usize, old as usize]) }
    }

    /// Replaces setns(2).
    fn setns(namespace: c_int, kind: c_int) -> c_int {
        // SAFETY: the arguments are valid for setns(2), as this function's contract requires.
        unsafe { enter(namespace, kind) }
    }

    /// Replaces unshare(2).
    fn unshare(kinds: c_int) -> c_int {
        // SAFETY: the arguments are valid for unshare(2), as this function's contract requires.
        unsafe { separate(kinds) }
    }

    /// Replaces mount(2).
    fn mount(
        source: *const c_char,
        target: *const c_char,
        kind: *const c_char,
        flags: c_ulong,
        data: *const c_void,
    ) -> c_int {
        // SAFETY: the arguments are valid for mount(2), as this function's contract requires.
        unsafe { bind(source, target, kind, flags, data) }
    }
}
