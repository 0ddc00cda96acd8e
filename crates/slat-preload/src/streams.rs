//! read(2), write(2), lseek(2) and their variants, for KVM's descriptors. Statistics can be read, and module parameters
//! can be written. The other descriptors refuse these calls, as KVM's do.
//!
//! For descriptors that are not KVM's, this module calls the C library's own functions. These are cancellation points:
//! if a thread is cancelled in one, it unwinds through the calling function here. So such a function has no values with
//! destructors.

use crate::device;
use crate::files::{interpose, interpose_with_callers_floats};
use crate::guarded::guarded;
use crate::real::{Next, call, kernel, plain, raw, set_errno};
use crate::{table, userfault};
use slat_kvm::ioctl::Object;
use slat_kvm::thread::Section;
use slat_process::caller::with_own_floats;
use std::ffi::{c_int, c_void};

/// The file offset at which a call reads or writes.
#[derive(Clone, Copy)]
pub enum At {
    /// The current position of the descriptor.
    Position,
    /// An offset in the file, which the caller passes (pread).
    Offset(i64),
}

impl At {
    /// Converts the offset argument of preadv2 or pwritev2, for which -1 means the descriptor's position.
    pub fn of(offset: i64) -> Self {
        match offset {
            -1 => At::Position,
            offset => At::Offset(offset),
        }
    }
}

/// The data that the client writes to a special file.
#[derive(Clone, Copy)]
pub enum Data {
    /// A single buffer: its address, and its size in bytes.
    Bytes(*const c_void, usize),
    /// An array of `iovec`: its address and its number of elements.
    Vector(*const c_void, c_int),
}

/// The maximum number of bytes that one write to a module parameter's file may have.
const PAGE: usize = 4096;

impl Data {
    /// Copies the data from the client's memory: at most a page.
    fn read(self) -> Result<Vec<u8>, i32> {
        let mut bytes = Vec::new();
        match self {
            Data::Bytes(from, len) => append(&mut bytes, from.cast(), len)?,
            Data::Vector(from, count) => {
                if !(0..=libc::UIO_MAXIOV).contains(&count) {
                    return Err(libc::EINVAL);
                }
                for index in 0..count as usize {
                    let part = from.cast::<u64>().wrapping_add(2 * index);
                    // SAFETY: guarded loads may be made at any address.
                    let word = |word| unsafe { slat_guard::load(part.wrapping_add(word)) };
                    let (Ok(start), Ok(len)) = (word(0), word(1)) else {
                        return Err(libc::EFAULT);
                    };
                    append(&mut bytes, start as *const u8, len as usize)?;
                }
            }
        }
        Ok(bytes)
    }
}

/// Appends up to `len` bytes from the client's address `from`. `bytes` does not grow beyond a page.
fn append(bytes: &mut Vec<u8>, from: *const u8, len: usize) -> Result<(), i32> {
    let start = bytes.len();
    bytes.resize(start + len.min(PAGE - start), 0);
    // SAFETY: the copy is guarded, and its destination is a live buffer.
    unsafe { slat_guard::copy_in(&mut bytes[start..], from) }.map_err(|_| libc::EFAULT)
}

/// Whether `fd` was opened with this access mode.
fn is_opened(fd: c_int, access: c_int) -> bool {
    // SAFETY: the call only reads the descriptor's flags.
    let flags = unsafe {
        raw(
            libc::SYS_fcntl,
            [fd as usize, libc::F_GETFL as usize, 0, 0, 0, 0],
        )
    };
    flags as c_int & libc::O_ACCMODE == access
}

/// Returns the errno with which KVM's descriptors refuse reads and writes.
fn refusal(object: &Object, at: At) -> i32 {
    match (object, at) {
        (_, At::Offset(..0)) => libc::EINVAL,
        // Anonymous inodes have no position, so an offset fails with ESPIPE. `/dev/kvm` has a position, although it has
        // no effect.
        (Object::System(_), _) | (_, At::Position) => libc::EINVAL,
        (_, At::Offset(_)) => libc::ESPIPE,
    }
}

/// Whether the kernel has to serve a read from `fd`. If so, and `fd` has statistics, updates them first. If not, sets
/// `errno`.
pub fn before_reading(fd: c_int, at: At) -> bool {
    let _section = Section::enter();
    let Some(handle) = table::get(fd) else {
        return true;
    };
    let object = handle.object();
    let errno = match object {
        Object::Stats(stats) => {
            stats.refresh();
            return true;
        }
        Object::Parameter(_) | Object::DevicePath => return true,
        Object::System(_) if is_opened(fd, libc::O_WRONLY) => libc::EBADF,
        Object::System(_)
        | Object::Vm(_)
        | Object::Vcpu(_)
        | Object::GuestMemfd(_)
        | Object::Device(_) => refusal(object, at),
    };
    set_errno(errno);
    false
}

/// Writes to the object to which `fd` refers. `None`: `fd` is not KVM's, or refers to the path of the device only
/// (`O_PATH`). Then the kernel has to write.
pub fn written(fd: c_int, data: Data, at: At) -> Option<isize> {
    let _section = Section::enter();
    let handle = table::get(fd)?;
    let object = handle.object();
    let errno = match object {
        Object::Parameter(name) => {
            return Some(guarded(|| device::write_parameter(name, &data.read()?)));
        }
        Object::DevicePath => return None,
        Object::System(_) if is_opened(fd, libc::O_RDONLY) => libc::EBADF,
        Object::Stats(_) if matches!(at, At::Position) => libc::EBADF,
        Object::System(_)
        | Object::Vm(_)
        | Object::Vcpu(_)
        | Object::GuestMemfd(_)
        | Object::Device(_)
        | Object::Stats(_) => refusal(object, at),
    };
    set_errno(errno);
    Some(-1)
}

/// Implements lseek.
///
/// # Safety
/// The conditions are those of lseek(2).
pub unsafe fn seek(fd: c_int, offset: i64, whence: c_int) -> isize {
    let kernels = || {
        // SAFETY: the arguments are valid for lseek(2), as this function's contract requires.
        unsafe { kernel!(libc::SYS_lseek, fd, offset, whence) }
    };
    if !table::is_ours(fd) {
        return plain(kernels());
    }
    guarded(|| {
        let Some(handle) = table::get(fd) else {
            return kernels();
        };
        match handle.object() {
            Object::Parameter(_) | Object::DevicePath => kernels(),
            _ if !(libc::SEEK_SET..=libc::SEEK_HOLE).contains(&whence) => Err(libc::EINVAL),
            Object::GuestMemfd(_) => Err(libc::ESPIPE),
            // KVM's lseek on these objects returns the position and does not change it.
            Object::System(_)
            | Object::Vm(_)
            | Object::Vcpu(_)
            | Object::Stats(_)
            | Object::Device(_) => {
                // SAFETY: the arguments are valid for lseek(2), as this function's contract requires.
                unsafe { kernel!(libc::SYS_lseek, fd, 0, libc::SEEK_CUR) }
            }
        }
    })
}

/// Defines exported functions that read or write a descriptor. Each definition names a system call, and an expression
/// that is evaluated for KVM's descriptors. The expression's value is the function's result; for `None`, the function
/// makes the system call.
macro_rules! streams {
    ($($(#[$meta:meta])* fn $name:ident($fd:ident, $($argument:ident: $type:ty),*) through $next:ident = $number:expr,
        ($($given:expr),*), $first:expr;)*) => {
        $(
            static $next: Next = Next::new(match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name without NUL inside"),
            });

            interpose_with_callers_floats! {
                $(#[$meta])*
                fn $name($fd: c_int, $($argument: $type),*) -> isize {
                    if table::is_ours($fd) {
                        return with_own_floats(|| match $first {
                            Some(answer) => answer,
                            // SAFETY: the arguments are valid for the call, as this function's contract requires. A
                            // call on KVM's descriptors never blocks.
                            None => unsafe { call!($number, $fd, $($given),*) },
                        });
                    }
                    let given = [$($given as usize),*];
                    userfault::before_call($number, given[0], given[1]);
                    let Some(function) = $next.get() else {
                        // SAFETY: the arguments are valid for the call, as this function's contract requires.
                        return unsafe { call!($number, $fd, $($given),*) };
                    };
                    type Function = unsafe extern "C-unwind" fn(c_int, $($type),*) -> isize;
                    // SAFETY: `function` is the C library's function, which has this signature. The caller's arguments
                    // are valid for it.
                    unsafe { std::mem::transmute::<usize, Function>(function)($fd, $($argument),*) }
                }
            }
        )*

        /// Looks up the C library's functions in advance, so that a signal handler never has to look them up.
        pub fn prepare() {
            for next in [$(&$next),*] {
                next.get();
            }
        }
    };
}

/// Prepares to read from `fd`, for the functions that [`streams`] defines. `None`: nothing prevents the read, so the
/// kernel has to read. Otherwise the result is -1, and `errno` is set.
fn reading(fd: c_int, at: At) -> Option<isize> {
    (!before_reading(fd, at)).then_some(-1)
}

streams! {
    /// Replaces read(2).
    fn read(fd, to: *mut c_void, len: usize) through NEXT_READ
        = libc::SYS_read, (to, len), reading(fd, At::Position);
    /// Replaces `__read_chk`, which programs compiled with _FORTIFY_SOURCE call for read(2).
    fn __read_chk(fd, to: *mut c_void, len: usize, room: usize) through NEXT_READ_CHK
        = libc::SYS_read, (to, len.min(room)), reading(fd, At::Position);
    /// Replaces pread(2).
    fn pread(fd, to: *mut c_void, len: usize, offset: i64) through NEXT_PREAD
        = libc::SYS_pread64, (to, len, offset), reading(fd, At::Offset(offset));
    /// Replaces pread64, which is pread(2) for large files.
    fn pread64(fd, to: *mut c_void, len: usize, offset: i64) through NEXT_PREAD64
        = libc::SYS_pread64, (to, len, offset), reading(fd, At::Offset(offset));
    /// Replaces `__pread_chk`, which programs compiled with _FORTIFY_SOURCE call for pread(2).
    fn __pread_chk(fd, to: *mut c_void, len: usize, offset: i64, room: usize) through NEXT_PREAD_CHK
        = libc::SYS_pread64, (to, len.min(room), offset), reading(fd, At::Offset(offset));
    /// Replaces `__pread64_chk`, which programs compiled with _FORTIFY_SOURCE call for pread64.
    fn __pread64_chk(fd, to: *mut c_void, len: usize, offset: i64, room: usize) through NEXT_PREAD64_CHK
        = libc::SYS_pread64, (to, len.min(room), offset), reading(fd, At::Offset(offset));
    /// Replaces readv(2).
    fn readv(fd, to: *const c_void, count: c_int) through NEXT_READV
        = libc::SYS_readv, (to, count), reading(fd, At::Position);
    /// Replaces preadv(2). The kernel's system call takes the offset in two halves.
    fn preadv(fd, to: *const c_void, count: c_int, offset: i64) through NEXT_PREADV
        = libc::SYS_preadv, (to, count, offset, 0), reading(fd, At::Offset(offset));
    /// Replaces preadv64, which is preadv(2) for large files.
    fn preadv64(fd, to: *const c_void, count: c_int, offset: i64) through NEXT_PREADV64
        = libc::SYS_preadv, (to, count, offset, 0), reading(fd, At::Offset(offset));
    /// Replaces preadv2(2).
    fn preadv2(fd, to: *const c_void, count: c_int, offset: i64, flags: c_int) through NEXT_PREADV2
        = libc::SYS_preadv2, (to, count, offset, 0, flags), reading(fd, At::of(offset));
    /// Replaces preadv64v2, which is preadv2(2) for large files.
    fn preadv64v2(fd, to: *const c_void, count: c_int, offset: i64, flags: c_int) through NEXT_PREADV64V2
        = libc::SYS_preadv2, (to, count, offset, 0, flags), reading(fd, At::of(offset));
    /// Replaces write(2).
    fn write(fd, from: *const c_void, len: usize) through NEXT_WRITE
        = libc::SYS_write, (from, len), written(fd, Data::Bytes(from, len), At::Position);
    /// Replaces pwrite(2).
    fn pwrite(fd, from: *const c_void, len: usize, offset: i64) through NEXT_PWRITE
        = libc::SYS_pwrite64, (from, len, offset), written(fd, Data::Bytes(from, len), At::Offset(offset));
    /// Replaces pwrite64, which is pwrite(2) for large files.
    fn pwrite64(fd, from: *const c_void, len: usize, offset: i64) through NEXT_PWRITE64
        = libc::SYS_pwrite64, (from, len, offset), written(fd, Data::Bytes(from, len), At::Offset(offset));
    /// Replaces writev(2).
    fn writev(fd, from: *const c_void, count: c_int) through NEXT_WRITEV
        = libc::SYS_writev, (from, count), written(fd, Data::Vector(from, count), At::Position);
    /// Replaces pwritev(2).
    fn pwritev(fd, from: *const c_void, count: c_int, offset: i64) through NEXT_PWRITEV
        = libc::SYS_pwritev, (from, count, offset, 0), written(fd, Data::Vector(from, count), At::Offset(offset));
    /// Replaces pwritev64, which is pwritev(2) for large files.
    fn pwritev64(fd, from: *const c_void, count: c_int, offset: i64) through NEXT_PWRITEV64
        = libc::SYS_pwritev, (from, count, offset, 0), written(fd, Data::Vector(from, count), At::Offset(offset));
    /// Replaces pwritev2(2).
    fn pwritev2(fd, from: *const c_void, count: c_int, offset: i64, flags: c_int) through NEXT_PWRITEV2
        = libc::SYS_pwritev2, (from, count, offset, 0, flags), written(fd, Data::Vector(from, count), At::of(offset));
    /// Replaces pwritev64v2, which is pwritev2(2) for large files.
    fn pwritev64v2(fd, from: *const c_void, count: c_int, offset: i64, flags: c_int) through NEXT_PWRITEV64V2
        = libc::SYS_pwritev2, (from, count, offset, 0, flags), written(fd, Data::Vector(from, count), At::of(offset));
}

interpose! {
    /// Replaces lseek(2).
    fn lseek(fd: c_int, offset: i64, whence: c_int) -> i64 {
        // SAFETY: the arguments are valid for lseek(2), as this function's contract requires.
        unsafe { seek(fd, offset, whence) as i64 }
    }

    /// Replaces lseek64, which is lseek(2) for large files.
    fn lseek64(fd: c_int, offset: i64, whence: c_int) -> i64 {
        // SAFETY: the arguments are valid for lseek(2), as this function's contract requires.
        unsafe { seek(fd, offset, whence) as i64 }
    }
}
