//! System calls that not all architectures have. x86-64 has many old calls (`open`, `stat`, `fork`, …) whose work a
//! newer call can do, too.

use libc::AT_FDCWD;

/// A system call: its number and its arguments.
pub type Call = (i64, [usize; 6]);

/// The kernel's `O_LARGEFILE`, the flag for files larger than two gigabytes. The C library defines its own
/// `O_LARGEFILE` as 0.
pub const O_LARGEFILE: i32 = 0o100_000;

/// The flags with which `openat` does the work of `creat`.
const CREATING: usize = (libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC) as usize;
/// The flags with which `clone` does the work of `fork`.
const FORKING: usize = libc::SIGCHLD as usize;
/// The flags with which `clone` does the work of `vfork`.
const BORROWING: usize = FORKING | libc::CLONE_VM as usize | libc::CLONE_VFORK as usize;
const HERE: usize = AT_FDCWD as usize;
const NOT_FOLLOWED: usize = libc::AT_SYMLINK_NOFOLLOW as usize;

/// Returns the newer call that does the same work as the given call, with its additional arguments (a directory or
/// flags). A call for which there is no newer call is returned unchanged.
pub fn newer(number: i64, arguments: [usize; 6]) -> Call {
    let [a, b, c, ..] = arguments;
    match number {
        libc::SYS_open => (libc::SYS_openat, [HERE, a, b, c, 0, 0]),
        libc::SYS_creat => (libc::SYS_openat, [HERE, a, CREATING, b, 0, 0]),
        libc::SYS_stat => (libc::SYS_newfstatat, [HERE, a, b, 0, 0, 0]),
        libc::SYS_lstat => (libc::SYS_newfstatat, [HERE, a, b, NOT_FOLLOWED, 0, 0]),
        libc::SYS_readlink => (libc::SYS_readlinkat, [HERE, a, b, c, 0, 0]),
        libc::SYS_access => (libc::SYS_faccessat, [HERE, a, b, 0, 0, 0]),
        libc::SYS_chown => (libc::SYS_fchownat, [HERE, a, b, c, 0, 0]),
        libc::SYS_lchown => (libc::SYS_fchownat, [HERE, a, b, c, NOT_FOLLOWED, 0]),
        libc::SYS_chmod => (libc::SYS_fchmodat, [HERE, a, b, 0, 0, 0]),
        libc::SYS_fork => (libc::SYS_clone, [FORKING, 0, 0, 0, 0, 0]),
        libc::SYS_vfork => (libc::SYS_clone, [BORROWING, 0, 0, 0, 0, 0]),
        _ => (number, arguments),
    }
}

/// Returns the older call that the C library makes for the work of the given newer call. If the directory argument is
/// the current directory, returns the older call without a directory argument. The seccomp filters of programs expect
/// the older call.
pub fn older(number: i64, arguments: [usize; 6]) -> Call {
    let [HERE, a, b, c, d, _] = arguments else {
        return (number, arguments);
    };
    match (number, c, d) {
        (libc::SYS_openat, ..) if b == CREATING => (libc::SYS_creat, [a, c, 0, 0, 0, 0]),
        (libc::SYS_openat, ..) => (libc::SYS_open, [a, b, c, 0, 0, 0]),
        (libc::SYS_newfstatat, 0, _) => (libc::SYS_stat, [a, b, 0, 0, 0, 0]),
        (libc::SYS_newfstatat, NOT_FOLLOWED, _) => (libc::SYS_lstat, [a, b, 0, 0, 0, 0]),
        (libc::SYS_readlinkat, ..) => (libc::SYS_readlink, [a, b, c, 0, 0, 0]),
        (libc::SYS_faccessat, ..) => (libc::SYS_access, [a, b, 0, 0, 0, 0]),
        (libc::SYS_fchownat, _, 0) => (libc::SYS_chown, [a, b, c, 0, 0, 0]),
        (libc::SYS_fchownat, _, NOT_FOLLOWED) => (libc::SYS_lchown, [a, b, c, 0, 0, 0]),
        (libc::SYS_fchmodat, ..) => (libc::SYS_chmod, [a, b, 0, 0, 0, 0]),
        _ => (number, arguments),
    }
}

/// Reorders the arguments of `clone` between the neutral order (flags, stack, parent's word, child's word, thread
/// pointer) and this architecture's order. On x86-64 both orders are the same.
pub fn reordered(arguments: [usize; 6]) -> [usize; 6] {
    arguments
}

/// Whether a call is `dup2`, for which [`newer`] has no equivalent: `dup3` fails if both descriptors are equal.
pub fn is_dup2(number: i64) -> bool {
    number == libc::SYS_dup2
}

/// Returns a call that makes the descriptor `to` refer to the same file as `fd`. If the call succeeds, its result may
/// be any value.
pub fn dup2(fd: usize, to: usize) -> Call {
    (libc::SYS_dup2, [fd, to, 0, 0, 0, 0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_librarys_call_is_found_again() {
        let calls = [
            (libc::SYS_open, [1, 2, 3, 0, 0, 0]),
            (libc::SYS_creat, [1, 0o600, 0, 0, 0, 0]),
            (libc::SYS_stat, [1, 2, 0, 0, 0, 0]),
            (libc::SYS_lstat, [1, 2, 0, 0, 0, 0]),
            (libc::SYS_readlink, [1, 2, 3, 0, 0, 0]),
            (libc::SYS_access, [1, 2, 0, 0, 0, 0]),
            (libc::SYS_chown, [1, 2, 3, 0, 0, 0]),
            (libc::SYS_lchown, [1, 2, 3, 0, 0, 0]),
            (libc::SYS_chmod, [1, 2, 0, 0, 0, 0]),
        ];
        for (number, arguments) in calls {
            let (newer_number, with_directory) = newer(number, arguments);
            assert_ne!(newer_number, number);
            assert_eq!(with_directory[0], HERE, "call {number}");
            assert_eq!(older(newer_number, with_directory), (number, arguments));
        }
        for number in [libc::SYS_fork, libc::SYS_vfork] {
            assert_eq!(newer(number, [9; 6]).0, libc::SYS_clone);
        }
    }

    #[test]
    fn calls_in_another_directory_and_all_others_stay() {
        let elsewhere = (libc::SYS_openat, [7, 1, 2, 3, 0, 0]);
        assert_eq!(older(elsewhere.0, elsewhere.1), elsewhere);
        for number in [libc::SYS_openat, libc::SYS_ioctl, libc::SYS_read] {
            assert_eq!(
                newer(number, [1, 2, 3, 4, 5, 6]),
                (number, [1, 2, 3, 4, 5, 6])
            );
        }
        // A stat call whose flags the older call cannot express is not changed.
        let flagged = (
            libc::SYS_newfstatat,
            [HERE, 1, 2, libc::AT_EMPTY_PATH as usize, 0, 0],
        );
        assert_eq!(older(flagged.0, flagged.1), flagged);
    }
}
