//! System calls whose numbers or arguments differ from other architectures.

/// AUDIT_ARCH_X86_64: the value by which a seccomp filter recognises this architecture's calls.
pub const AUDIT_ARCH: u32 = 0xc000_003e;

/// The call that asks whether descriptors are ready.
pub const POLL: &str = "poll";
/// The number of the system call [`POLL`].
pub const SYS_POLL: i64 = libc::SYS_poll;

/// Returns the arguments of [`SYS_POLL`] that ask about `descriptor` without waiting.
pub fn poll_now(descriptor: &mut libc::pollfd) -> [usize; 6] {
    [std::ptr::from_mut(descriptor) as usize, 1, 0, 0, 0, 0]
}

/// The call that removes a file.
pub const REMOVE: &str = "unlink";
/// The number of the system call [`REMOVE`].
pub const SYS_REMOVE: i64 = libc::SYS_unlink;

/// Returns the arguments of [`SYS_REMOVE`] for the file at `path`.
pub fn remove(path: &std::ffi::CStr) -> [usize; 6] {
    [path.as_ptr() as usize, 0, 0, 0, 0, 0]
}

/// Forks without the C library.
///
/// # Safety
/// The child does not use state of the C library.
#[cfg(test)]
pub unsafe fn fork() -> libc::pid_t {
    // SAFETY: the child uses no state of the C library, as this function's `# Safety` requires.
    unsafe { libc::syscall(libc::SYS_fork) as libc::pid_t }
}
