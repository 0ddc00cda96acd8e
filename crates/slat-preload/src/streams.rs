//! read(2), write(2) and their kin, for the descriptors that change or mean something when they are read or written: statistics,
//! and KVM's module parameters.
//!
//! For all others the C library's own functions are called: these are points at which a thread may be cancelled, which unwinds
//! through here. So there is nothing on the stack that would want to be dropped.

use crate::device;
use crate::guarded::guarded;
use crate::real::{Next, call, set_errno};
use crate::table;
use slat_kvm::ioctl::Object;
use std::ffi::{c_int, c_void};

/// Brings what is about to be read up to date. False: it cannot be read.
fn before_reading(fd: c_int) -> bool {
    if let Some(handle) = table::get(fd) {
        match handle.object() {
            Object::Stats(stats) => stats.refresh(),
            Object::GuestMemfd(_) => {
                set_errno(libc::EINVAL);
                return false;
            }
            _ => {}
        }
    }
    true
}

/// A write to a module parameter; `None` if the descriptor is none.
///
/// # Safety
/// As for `write`; bad memory is an error, though.
pub unsafe fn write_parameter(fd: c_int, from: *const c_void, len: usize) -> Option<isize> {
    let handle = table::get(fd)?;
    let Object::Parameter(name) = handle.object() else {
        return None;
    };
    Some(guarded(|| device::write_parameter(name, from.cast(), len)))
}

macro_rules! reading {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),*) through $next:ident = $number:expr, ($($given:expr),*);)*) => {
        $(
            static $next: Next = Next::new(match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name without NUL inside"),
            });

            $(#[$meta])*
            ///
            /// # Safety
            /// As for the C library's function of this name.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C-unwind" fn $name(fd: c_int, $($argument: $type),*) -> isize {
                if table::is_ours(fd) {
                    if !before_reading(fd) {
                        return -1;
                    }
                    // SAFETY: the caller's. What is ours never blocks.
                    return unsafe { call!($number, fd, $($given),*) };
                }
                let Some(function) = $next.get() else {
                    // SAFETY: the caller's.
                    return unsafe { call!($number, fd, $($given),*) };
                };
                type Function = unsafe extern "C-unwind" fn(c_int, $($type),*) -> isize;
                // SAFETY: the C library's function of that name has this signature; the arguments are the caller's.
                unsafe { std::mem::transmute::<usize, Function>(function)(fd, $($argument),*) }
            }
        )*

        /// Looks the C library's functions up, before a signal handler could be the first to need one.
        pub fn prepare() {
            for next in [$(&$next,)* &NEXT_WRITE] {
                next.get();
            }
        }
    };
}

reading! {
    /// read(2).
    fn read(to: *mut c_void, len: usize) through NEXT_READ = libc::SYS_read, (to, len);
    /// What `read` becomes with _FORTIFY_SOURCE.
    fn __read_chk(to: *mut c_void, len: usize, room: usize) through NEXT_READ_CHK = libc::SYS_read, (to, len.min(room));
    /// pread(2).
    fn pread(to: *mut c_void, len: usize, offset: i64) through NEXT_PREAD = libc::SYS_pread64, (to, len, offset);
    /// pread(2) with large files.
    fn pread64(to: *mut c_void, len: usize, offset: i64) through NEXT_PREAD64 = libc::SYS_pread64, (to, len, offset);
    /// What `pread` becomes with _FORTIFY_SOURCE.
    fn __pread_chk(to: *mut c_void, len: usize, offset: i64, room: usize) through NEXT_PREAD_CHK
        = libc::SYS_pread64, (to, len.min(room), offset);
    /// What `pread64` becomes with _FORTIFY_SOURCE.
    fn __pread64_chk(to: *mut c_void, len: usize, offset: i64, room: usize) through NEXT_PREAD64_CHK
        = libc::SYS_pread64, (to, len.min(room), offset);
    /// readv(2).
    fn readv(to: *const c_void, count: c_int) through NEXT_READV = libc::SYS_readv, (to, count);
    /// preadv(2). The kernel takes the offset in two halves.
    fn preadv(to: *const c_void, count: c_int, offset: i64) through NEXT_PREADV = libc::SYS_preadv, (to, count, offset, 0);
    /// preadv(2) with large files.
    fn preadv64(to: *const c_void, count: c_int, offset: i64) through NEXT_PREADV64 = libc::SYS_preadv, (to, count, offset, 0);
}

static NEXT_WRITE: Next = Next::new(c"write");

/// write(2).
///
/// # Safety
/// As for `write`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn write(fd: c_int, from: *const c_void, len: usize) -> isize {
    if table::is_ours(fd)
        // SAFETY: the caller's.
        && let Some(answer) = unsafe { write_parameter(fd, from, len) }
    {
        return answer;
    }
    let Some(function) = NEXT_WRITE.get() else {
        // SAFETY: the caller's.
        return unsafe { call!(libc::SYS_write, fd, from, len) };
    };
    type Function = unsafe extern "C-unwind" fn(c_int, *const c_void, usize) -> isize;
    // SAFETY: the C library's function of that name has this signature; the arguments are the caller's.
    unsafe { std::mem::transmute::<usize, Function>(function)(fd, from, len) }
}

/// read and its kin by number, through `syscall`: brings up to date, and leaves the call to the caller. What cannot be read the
/// kernel refuses, too.
pub fn reads(fd: c_int) {
    if table::is_ours(fd) {
        before_reading(fd);
    }
}
