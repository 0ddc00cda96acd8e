//! System calls whose numbers or arguments differ from other architectures. AArch64 has no `fork`, `vfork`, `open`,
//! `poll`, `unlink`, …, but only newer calls that can do the same work.

/// AUDIT_ARCH_AARCH64: the value by which a seccomp filter recognises this architecture's calls.
pub const AUDIT_ARCH: u32 = 0xc000_00b7;

/// The call that asks whether descriptors are ready.
pub const POLL: &str = "ppoll";
/// The number of the system call [`POLL`].
pub const SYS_POLL: i64 = libc::SYS_ppoll;

/// Returns the arguments of [`SYS_POLL`] that ask about `descriptor` without waiting.
pub fn poll_now(descriptor: &mut libc::pollfd) -> [usize; 6] {
    // The kernel reads this time limit (0), and writes back the time that is left, also 0. So all threads can share the
    // variable without a lock.
    static NO_TIME: [std::sync::atomic::AtomicU64; 2] =
        [const { std::sync::atomic::AtomicU64::new(0) }; 2];
    let no_time = NO_TIME.as_ptr() as usize;
    let no_mask = 0;
    [
        std::ptr::from_mut(descriptor) as usize,
        1,
        no_time,
        no_mask,
        0,
        0,
    ]
}

/// The call that removes a file.
pub const REMOVE: &str = "unlinkat";
/// The number of the system call [`REMOVE`].
pub const SYS_REMOVE: i64 = libc::SYS_unlinkat;

/// Returns the arguments of [`SYS_REMOVE`] for the file at `path`.
pub fn remove(path: &std::ffi::CStr) -> [usize; 6] {
    [libc::AT_FDCWD as usize, path.as_ptr() as usize, 0, 0, 0, 0]
}

/// Forks without the C library.
///
/// # Safety
/// The child does not use state of the C library.
#[cfg(test)]
pub unsafe fn fork() -> libc::pid_t {
    // SAFETY: the child uses no state of the C library, as this function's `# Safety` requires. The child continues on
    // a copy of this stack.
    unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as libc::pid_t }
}
