//! Serves the C library's functions `syscall` and `prctl`: calls slat's function for the system call with the given
//! number.

use crate::arch::calls;
use crate::device::How;
use crate::files::interpose;
use crate::real::{call, plain, raw, result};
use crate::{
    attributes, children, fds, files, forks, ioctls, landlock, memory, roots, seccomp, status,
    streams, table, userfault,
};
use std::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};

/// Whether a system call creates a process with a copy of the memory.
fn forks(number: c_long, argument: usize) -> bool {
    let flags = match number {
        libc::SYS_clone => argument as u64,
        // Reads the flags, which are the first word of `clone_args`. If the word cannot be read, the kernel's call
        // fails.
        libc::SYS_clone3 => {
            // SAFETY: if the handlers are installed, a guarded load may be made at any address. Otherwise no VM exists,
            // and the program has passed an address that the kernel will read next.
            unsafe { slat_guard::load(argument as *const u64) }.unwrap_or(libc::CLONE_VM as u64)
        }
        _ => 0,
    };
    flags & libc::CLONE_VM as u64 == 0
}

/// Whether an argument is a descriptor that slat serves.
fn ours(fd: usize) -> bool {
    table::is_ours(fd as c_int)
}

/// Makes a system call for the program, which has called the C library's `syscall` or has entered the kernel by an
/// instruction of its own. Returns -1 and sets errno on an error, like the C library.
///
/// # Safety
/// The conditions are those of the system call itself. Arguments that a call does not have are undefined and not read.
pub unsafe fn by_number(number: c_long, arguments: [usize; 6]) -> isize {
    // SAFETY: the arguments are valid for the call `number`, as this function's contract requires.
    let kernels = || plain(result(unsafe { raw(number, arguments) }));
    let (number, [a, b, c, d, e, f]) = calls::newer(number, arguments);
    userfault::before_call(number, b, c);
    // SAFETY: the arguments are valid for the call `number`, as this function's contract requires.
    unsafe {
        match number {
            libc::SYS_userfaultfd => userfault::open(a as c_int, kernels),
            libc::SYS_openat => {
                let path = b as *const c_char;
                files::open_at(a as c_int, path, c as c_int, d as c_uint, kernels)
            }
            libc::SYS_close => fds::close(a as c_int) as isize,
            libc::SYS_close_range => {
                fds::close_within(a as c_uint, b as c_uint, c as c_int) as isize
            }
            libc::SYS_dup => fds::dup(a as c_int) as isize,
            _ if calls::is_dup2(number) => fds::dup2(a as c_int, b as c_int) as isize,
            libc::SYS_dup3 => fds::dup3(a as c_int, b as c_int, c as c_int) as isize,
            libc::SYS_fcntl => fds::fcntl(a as c_int, b as c_int, c as c_ulong) as isize,
            libc::SYS_ioctl => ioctls::ioctl_on(a as c_int, b as c_ulong, c) as isize,
            libc::SYS_mmap => memory::map(a, b, c as c_int, d as c_int, e as c_int, f as i64),
            libc::SYS_munmap => memory::unmap(a, b),
            libc::SYS_shmdt => memory::detach(a),
            libc::SYS_shmat => memory::attach(a as c_int, b, c as c_int),
            libc::SYS_mremap => memory::remap(a, b, c, d as c_int, e),
            libc::SYS_madvise => memory::advise(a, b, c as c_int),
            libc::SYS_mprotect | libc::SYS_pkey_mprotect => {
                memory::protect(number, a, b, c as c_int, d as c_int)
            }
            libc::SYS_fallocate => memory::allocate(a as c_int, b as c_int, c as i64, d as i64),
            libc::SYS_ftruncate => memory::truncate(a as c_int, b as i64),
            // slat serves these calls only for KVM's descriptors. slat's functions for other descriptors are
            // cancellation points, like the C library's, but `syscall` is not a cancellation point.
            libc::SYS_read if ours(a) => streams::read(a as c_int, b as *mut c_void, c),
            libc::SYS_pread64 if ours(a) => {
                streams::pread(a as c_int, b as *mut c_void, c, d as i64)
            }
            libc::SYS_readv if ours(a) => {
                streams::readv(a as c_int, b as *const c_void, c as c_int)
            }
            libc::SYS_preadv if ours(a) => {
                streams::preadv(a as c_int, b as *const c_void, c as c_int, d as i64)
            }
            libc::SYS_preadv2 if ours(a) => streams::preadv2(
                a as c_int,
                b as *const c_void,
                c as c_int,
                d as i64,
                f as c_int,
            ),
            libc::SYS_write if ours(a) => streams::write(a as c_int, b as *const c_void, c),
            libc::SYS_pwrite64 if ours(a) => {
                streams::pwrite(a as c_int, b as *const c_void, c, d as i64)
            }
            libc::SYS_writev if ours(a) => {
                streams::writev(a as c_int, b as *const c_void, c as c_int)
            }
            libc::SYS_pwritev if ours(a) => {
                streams::pwritev(a as c_int, b as *const c_void, c as c_int, d as i64)
            }
            libc::SYS_pwritev2 if ours(a) => streams::pwritev2(
                a as c_int,
                b as *const c_void,
                c as c_int,
                d as i64,
                f as c_int,
            ),
            libc::SYS_lseek => streams::seek(a as c_int, b as i64, c as c_int),
            libc::SYS_fstat => {
                status::stat_descriptor(a as c_int, b as *mut libc::stat, kernels) as isize
            }
            libc::SYS_newfstatat => status::stat_at(
                a as c_int,
                b as *const c_char,
                c as *mut libc::stat,
                d as c_int,
                kernels,
            ) as isize,
            libc::SYS_statx => status::statx(
                a as c_int,
                b as *const c_char,
                c as c_int,
                d as c_uint,
                e as *mut libc::statx,
            ) as isize,
            libc::SYS_clone | libc::SYS_clone3 if forks(number, a) => forks::around(kernels),
            libc::SYS_execve => children::execute(
                a as *const c_char,
                b as *const *const c_char,
                c as *const *const c_char,
            ) as isize,
            libc::SYS_execveat => {
                let (words, environment) = (c as *const *const c_char, d as *const *const c_char);
                children::execute_at(
                    a as c_int,
                    b as *const c_char,
                    words,
                    environment,
                    e as c_int,
                ) as isize
            }
            libc::SYS_chroot | libc::SYS_pivot_root => roots::leave(number, [a, b]) as isize,
            libc::SYS_setns => roots::enter(a as c_int, b as c_int) as isize,
            libc::SYS_unshare => roots::separate(a as c_int) as isize,
            libc::SYS_mount => roots::bind(
                a as *const c_char,
                b as *const c_char,
                c as *const c_char,
                d as c_ulong,
                e as *const c_void,
            ) as isize,
            libc::SYS_readlinkat => {
                let (path, to) = (b as *const c_char, c as *mut c_char);
                status::read_link_at(a as c_int, path, to, d, kernels)
            }
            libc::SYS_faccessat | libc::SYS_faccessat2 => {
                files::access_at(a as c_int, b as *const c_char, c as c_int, kernels)
            }
            libc::SYS_fchownat => {
                let (path, user, group) = (b as *const c_char, c as c_uint, d as c_uint);
                attributes::change_owner(a as c_int, path, user, group, kernels) as isize
            }
            libc::SYS_fchmodat => {
                attributes::change_mode(a as c_int, b as *const c_char, kernels) as isize
            }
            libc::SYS_getxattr
            | libc::SYS_lgetxattr
            | libc::SYS_listxattr
            | libc::SYS_llistxattr
            | libc::SYS_setxattr
            | libc::SYS_lsetxattr => attributes::extended(number, a as *const c_char, [b, c, d, e]),
            libc::SYS_openat2 => {
                files::open_at_2(a as c_int, b as *const c_char, c as *const How, d)
            }
            libc::SYS_seccomp if a as c_uint == libc::SECCOMP_SET_MODE_FILTER => {
                seccomp::install(b, c, |flags, program| call!(number, a, flags, program))
            }
            libc::SYS_landlock_add_rule => landlock::add_rule(a as c_int, b, c, d as c_uint),
            libc::SYS_landlock_restrict_self => landlock::restrict_self(a as c_int, b as c_uint),
            libc::SYS_prctl => prctl(
                a as c_int,
                b as c_ulong,
                c as c_ulong,
                d as c_ulong,
                e as c_ulong,
            ) as isize,
            _ => kernels(),
        }
    }
}

interpose! {
    /// Replaces syscall(2).
    fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
        // SAFETY: the arguments are valid for syscall(2), as this function's contract requires.
        unsafe {
            match number {
                libc::SYS_ioctl => ioctls::ioctl_here(a as c_int, b as c_ulong, c) as c_long,
                _ => by_number(number, [a, b, c, d, e, f]) as c_long,
            }
        }
    }

    /// Replaces prctl(2).
    fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
        // SAFETY: the arguments are valid for prctl(2), as this function's contract requires.
        unsafe {
            let call = || call!(libc::SYS_prctl, option, a, b, c, d);
            let filters = option == libc::PR_SET_SECCOMP && a == c_ulong::from(libc::SECCOMP_MODE_FILTER);
            (match filters {
                true => seccomp::filtering(b as usize, call),
                false => call(),
            }) as c_int
        }
    }
}
