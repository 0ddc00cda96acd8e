//! System calls that not all architectures have. On AArch64 every call is the newest of its kind: there is no `open`,
//! `stat`, `dup2`, `fork`, …

/// A system call: its number and its arguments.
pub type Call = (i64, [usize; 6]);

/// The kernel's `O_LARGEFILE`, the flag for files larger than two gigabytes. The C library defines its own
/// `O_LARGEFILE` as 0.
pub const O_LARGEFILE: i32 = 0o400_000;

/// Returns the newer call that does the same work as the given call. On AArch64 the given call is always the newest.
pub fn newer(number: i64, arguments: [usize; 6]) -> Call {
    (number, arguments)
}

/// Returns the older call that the C library makes for the work of the given newer call. On AArch64 the C library makes
/// the given call itself.
pub fn older(number: i64, arguments: [usize; 6]) -> Call {
    (number, arguments)
}

/// Reorders the arguments of `clone` between the neutral order (flags, stack, parent's word, child's word, thread
/// pointer) and this architecture's order. On AArch64 the thread pointer comes before the child's word
/// (CONFIG_CLONE_BACKWARDS). The same function converts in both directions.
pub fn reordered([flags, stack, parent, child, pointer, rest]: [usize; 6]) -> [usize; 6] {
    [flags, stack, parent, pointer, child, rest]
}

/// Whether a call is `dup2`, which AArch64 does not have.
pub fn is_dup2(_number: i64) -> bool {
    false
}

/// Returns a call that makes the descriptor `to` refer to the same file as `fd`. If the call succeeds, its result may
/// be any value. If `fd` and `to` are equal, `dup3` would fail, so the returned call only checks that the descriptor is
/// open.
pub fn dup2(fd: usize, to: usize) -> Call {
    match fd == to {
        true => (libc::SYS_fcntl, [fd, libc::F_GETFD as usize, 0, 0, 0, 0]),
        false => (libc::SYS_dup3, [fd, to, 0, 0, 0, 0]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_takes_the_thread_pointer_before_the_childs_word() {
        let [flags, stack, parent, child, pointer] = [1, 2, 3, 4, 5];
        let kernels = reordered([flags, stack, parent, child, pointer, 0]);
        assert_eq!(kernels, [flags, stack, parent, pointer, child, 0]);
        assert_eq!(
            reordered(kernels),
            [flags, stack, parent, child, pointer, 0]
        );
    }

    #[test]
    fn descriptors_are_duplicated_as_dup2_does() {
        let make = |fd: i32, to: i32| {
            let (number, [a, b, c, ..]) = dup2(fd as usize, to as usize);
            // SAFETY: the call duplicates descriptors of this test.
            unsafe { libc::syscall(number, a, b, c) }
        };
        // SAFETY: the descriptors belong to this test.
        unsafe {
            let fd = libc::dup(0);
            let to = libc::dup(0);
            assert!(make(fd, to) >= 0 && make(fd, fd) >= 0);
            libc::close(fd);
            assert_eq!(make(fd, fd), -1);
            assert_eq!(make(fd, to), -1);
            libc::close(to);
        }
    }
}
