//! System calls that not all architectures have. This one has no call whose work a newer one does: no `open`, `stat`,
//! `dup2`, `fork`, …

/// A system call: its number and its arguments.
pub type Call = (i64, [usize; 6]);

/// The kernel's flag for files larger than two gigabytes. The C library's constant is 0.
pub const O_LARGEFILE: i32 = 0o400_000;

/// Returns the newer call that does the same work as a call: here each call is the newest.
pub fn newer(number: i64, arguments: [usize; 6]) -> Call {
    (number, arguments)
}

/// Returns the call by which the C library does the work of a newer one: the same call.
pub fn older(number: i64, arguments: [usize; 6]) -> Call {
    (number, arguments)
}

/// Reorders the arguments of `clone`: from the order flags, stack, parent's word, child's word, thread pointer to this
/// architecture's, or back. Here the thread pointer comes before the child's word (CONFIG_CLONE_BACKWARDS).
pub fn reordered([flags, stack, parent, child, pointer, rest]: [usize; 6]) -> [usize; 6] {
    [flags, stack, parent, pointer, child, rest]
}

/// Whether a call is `dup2`, which does not exist here.
pub fn is_dup2(_number: i64) -> bool {
    false
}

/// Returns the call that makes `to` refer to what `fd` refers to. If it succeeds, the result may be any value. `dup3`
/// fails if both are equal. Then nothing has to be done, but a descriptor that is not open is an error.
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
            // SAFETY: duplicates descriptors of this test.
            unsafe { libc::syscall(number, a, b, c) }
        };
        // SAFETY: descriptors of this test's own.
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
