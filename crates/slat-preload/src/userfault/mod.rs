//! userfaultfd(2) where the kernel refuses it to the program.
//!
//! Containers and ordinary users usually may not use userfaultfd. VMMs need it for lazy restore, postcopy migration and
//! background snapshots. Where the kernel refuses the call, slat serves it, for private anonymous memory of the
//! program, guest memory above all. Where the kernel permits it, the program gets the kernel's, unless
//! `SLAT_USERFAULTFD` is `slat`. The same holds for the request of `/dev/userfaultfd`. Where the kernel refuses to open
//! that device, slat says that there is none: then programs make the call instead.
//!
//! # The descriptor
//! The program gets one end of a pair of stream sockets, slat keeps the other end. slat sends an event as one message
//! of 32 bytes. So the kernel itself serves `read`, `poll` and `epoll` in every process that has a copy of the
//! descriptor, also after `fork`, `exec` and SCM_RIGHTS, and the socket tells slat when the last copy is closed. The
//! program's end has a name, by which slat recognises the descriptor: it begins with [`NAME`], and the rest is random.
//!
//! # The memory
//! [`slat_host::registered`] says how accesses to missing pages wait, and how pages are provided.
//!
//! # Requests
//! In the process that has made the descriptor, ioctl carries out a request itself (`requests`). In another process,
//! slat sends the request to that process, where a thread of slat carries it out (`server`, `remote`). The content of
//! pages goes with it. So the other process, too, has to run on slat; it may be another user, and need not be allowed
//! to trace the first process.
//!
//! # What differs from the kernel's
//! * A system call of the program's own threads that accesses missing memory waits only if it is `read`, `write`, or
//!   one of their variants. Others return EFAULT. slat waits for all pages of the buffers, before the call.
//! * There are no requests `UFFDIO_CONTINUE`, `UFFDIO_MOVE` and `UFFDIO_POISON`, and no events for fork, mremap and
//!   munmap. Memory that is shared, that maps a file, or that has huge pages cannot be registered (EINVAL).
//! * Pages without content can be protected from writes, too (`UFFD_FEATURE_WP_UNPOPULATED`).
//! * One event is posted for each page, not for each thread. A thread may go on before `UFFDIO_WAKE` if
//!   `UFFDIO_COPY_MODE_DONTWAKE` has provided its page.
//! * A program that closes all its descriptors (`close_range`) closes slat's end of the sockets, too. Its memory that
//!   is missing then never comes.
//! * A thread with a seccomp filter that makes a userfaultfd has to allow `socketpair`, `bind`, `getsockname`, `fcntl`
//!   and `recvmsg`, as cloud-hypervisor does. If another process serves the userfaultfd, that thread has to allow
//!   `ppoll`, `recvfrom`, `sendto` and `sendmsg`, too, and the other process `sendmsg`, `recvmsg`, `recvfrom` and
//!   `socketpair`.
//! * A `read` of fewer than 32 bytes takes a part of an event, and `poll` reports no error for a descriptor that
//!   blocks.

mod remote;
mod requests;
mod server;
mod system_calls;

pub use system_calls::before as before_call;

use crate::environment;
use crate::guarded::guarded;
use crate::real::{Opened, errno, kernel};
use requests::Request;
use server::Served;
use slat_host::registered;
use slat_kvm::background;
use slat_process::{helper, set_errno};
use std::ffi::c_int;

/// The beginning of the name of each descriptor: 0 for an abstract name, and a text.
const NAME: [u8; 18] = *b"\0slat-userfaultfd-";
/// The number of letters after [`NAME`]: the number that belongs to the descriptor alone.
const LETTERS: usize = 16;

/// The address of a named socket.
#[repr(C)]
struct Address {
    family: u16,
    name: [u8; NAME.len() + LETTERS],
}

/// The number by which processes tell the descriptors apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Token(u64);

impl Token {
    /// Makes a new random number.
    fn new() -> Result<Self, i32> {
        let mut number = 0u64;
        // SAFETY: the call fills in the number.
        unsafe { kernel!(libc::SYS_getrandom, &raw mut number, size_of::<u64>(), 0)? };
        Ok(Token(number))
    }

    /// Returns the number of the descriptor `fd`; `None` if `fd` is not a userfaultfd that slat serves.
    fn of(fd: c_int) -> Option<Self> {
        let mut address = Address {
            family: 0,
            name: [0; NAME.len() + LETTERS],
        };
        let mut len = size_of::<Address>() as u32;
        // SAFETY: the call stores at most `len` bytes.
        unsafe { kernel!(libc::SYS_getsockname, fd, &raw mut address, &raw mut len) }.ok()?;
        let is_long = len as usize == size_of::<Address>();
        if i32::from(address.family) != libc::AF_UNIX || !is_long {
            return None;
        }
        let letters = address.name.strip_prefix(&NAME)?;
        let number = u64::from_str_radix(std::str::from_utf8(letters).ok()?, 16);
        number.ok().map(Token)
    }

    /// Names the socket `fd` after this number.
    fn name(self, fd: c_int) -> Result<(), i32> {
        let mut address = Address {
            family: libc::AF_UNIX as u16,
            name: [0; NAME.len() + LETTERS],
        };
        address.name[..NAME.len()].copy_from_slice(&NAME);
        let letters = format!("{:016x}", self.0);
        address.name[NAME.len()..].copy_from_slice(letters.as_bytes());
        let len = size_of::<Address>();
        // SAFETY: the call reads the address.
        unsafe { kernel!(libc::SYS_bind, fd, &raw const address, len) }.map(drop)
    }
}

/// Implements userfaultfd, by `kernels` if the kernel permits it.
pub fn open(flags: c_int, kernels: impl Fn() -> isize) -> isize {
    let mut refusal = libc::EPERM;
    if !environment::serves_userfaultfd() {
        let answer = kernels();
        refusal = errno();
        if answer >= 0 || ![libc::EPERM, libc::EACCES, libc::ENOSYS].contains(&refusal) {
            return answer;
        }
    }
    guarded(|| match create(flags) {
        Err(libc::EINVAL) => Err(libc::EINVAL),
        Err(libc::EMFILE) => Err(libc::EMFILE),
        // slat cannot serve the call here, so the program sees what the kernel has said.
        Err(_) => Err(refusal),
        Ok(fd) => Ok(fd as isize),
    })
}

/// Makes a descriptor. The caller owns it.
fn create(flags: c_int) -> Result<c_int, i32> {
    const USER_MODE_ONLY: c_int = 1;
    if flags & !(libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY) != 0 {
        return Err(libc::EINVAL);
    }
    crate::prepare()?;
    if !slat_host::procfs::can_write_memory() {
        return Err(libc::EPERM);
    }
    slat_guard::on_fault(registered::fault);
    // Filters may forbid the program's threads to post events, and to change the protection of pages. The helper has to
    // be there before the first filter.
    helper::start(background::start);
    let token = Token::new()?;
    let [programs, own] = pair(libc::SOCK_STREAM)?;
    token.name(programs.fd())?;
    let served = Served::new(token, own.moved_up());
    if !background::start(served) {
        served.end();
        return Err(libc::EAGAIN);
    }
    // SAFETY: the calls concern a descriptor of slat, which becomes the program's.
    unsafe {
        if flags & libc::O_NONBLOCK != 0 {
            kernel!(
                libc::SYS_fcntl,
                programs.fd(),
                libc::F_SETFL,
                libc::O_NONBLOCK
            )?;
        }
        if flags & libc::O_CLOEXEC == 0 {
            kernel!(libc::SYS_fcntl, programs.fd(), libc::F_SETFD, 0)?;
        }
    }
    Ok(programs.into_fd())
}

/// Makes a pair of connected sockets, which are closed on exec.
fn pair(kind: c_int) -> Result<[Opened; 2], i32> {
    let mut fds = [0 as c_int; 2];
    let kind = kind | libc::SOCK_CLOEXEC;
    // SAFETY: the call stores two descriptors, which no other code owns.
    unsafe {
        kernel!(
            libc::SYS_socketpair,
            libc::AF_UNIX,
            kind,
            0,
            fds.as_mut_ptr()
        )?;
        let owned = |fd: c_int| Opened::by(Ok(fd as isize)).ok_or(libc::EMFILE);
        Ok([owned(fds[0])?, owned(fds[1])?])
    }
}

/// Whether `fd` refers to `/dev/userfaultfd`: to a device with the number 10 of miscellaneous devices, which knows a
/// request that has the letter of userfaultfd.
fn is_device(fd: c_int) -> bool {
    const MISCELLANEOUS: libc::c_uint = 10;
    // SAFETY: all-zero is a valid `stat`, which the call fills in.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        kernel!(libc::SYS_fstat, fd, &raw mut stat).is_ok()
            && stat.st_mode & libc::S_IFMT == libc::S_IFCHR
            && libc::major(stat.st_rdev) == MISCELLANEOUS
    }
}

/// Carries out a request of ioctl(2). `None`: `fd` is no userfaultfd of slat. `kernels` makes the call.
#[cold]
#[inline(never)]
pub fn ioctl(
    fd: c_int,
    number: u32,
    argument: usize,
    kernels: impl Fn() -> isize,
) -> Option<isize> {
    /// `USERFAULTFD_IOC_NEW`, the only request of `/dev/userfaultfd`: it does what userfaultfd(2) does.
    const NEW: u32 = 0xaa00;
    let before = errno();
    if number == NEW {
        return is_device(fd).then(|| open(argument as c_int, kernels));
    }
    let Some(token) = Token::of(fd) else {
        set_errno(before);
        return None;
    };
    Some(guarded(|| {
        crate::prepare()?;
        let mut request = Request::read(number, argument)?;
        let result = match Served::find(token) {
            Some(served) => request.carry_out(served.handler(), request.source()),
            None => remote::carry_out(fd, token, &mut request),
        };
        request.store(argument)?;
        result.map(|()| 0)
    }))
}
