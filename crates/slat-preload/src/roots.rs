//! The calls after which a path leads elsewhere: chroot, pivot_root, setns. slat's own files are kept before, because programs that are
//! executed afterwards cannot see them.

use crate::children;
use crate::files::interpose;
use crate::real::call;
use std::ffi::{c_char, c_int};

interpose! {
    /// chroot(2).
    fn chroot(path: *const c_char) -> c_int {
        children::keep_files();
        // SAFETY: the caller's.
        unsafe { call!(libc::SYS_chroot, path) as c_int }
    }

    /// pivot_root(2).
    fn pivot_root(new: *const c_char, old: *const c_char) -> c_int {
        children::keep_files();
        // SAFETY: the caller's.
        unsafe { call!(libc::SYS_pivot_root, new, old) as c_int }
    }

    /// setns(2). Without a kind, the descriptor may be that of a mount namespace.
    fn setns(namespace: c_int, kind: c_int) -> c_int {
        if kind == 0 || kind & libc::CLONE_NEWNS != 0 {
            children::keep_files();
        }
        // SAFETY: the caller's.
        unsafe { call!(libc::SYS_setns, namespace, kind) as c_int }
    }
}
