//! Makes system calls without the C library's functions of the same names.
//!
//! This library replaces functions of the C library. If slat called such a function by its name, it would call this
//! library again.

use crate::arch::calls;
pub use slat_process::calls::{raw, result};
use slat_process::file_size::limited;
pub use slat_process::{errno, set_errno};

/// Returns an error as the kernel does: the negated errno.
pub fn error(errno: i32) -> isize {
    -(errno as isize)
}

/// Returns the value of a success, or -1 for an error. Like the C library, sets `errno` for an error, and does not
/// change it on success.
pub fn plain(result: Result<isize, i32>) -> isize {
    result.unwrap_or_else(|errno| {
        set_errno(errno);
        -1
    })
}

/// Calls [`raw`] with fewer arguments. Returns the result as `Ok(value)` or `Err(errno)`.
macro_rules! kernel {
    ($number:expr $(, $argument:expr)* $(,)?) => {{
        let given = [$($argument as usize),*];
        let mut arguments = [0usize; 6];
        arguments[..given.len()].copy_from_slice(&given);
        $crate::real::result($crate::real::raw($number, arguments))
    }};
}
/// Calls [`raw`] with fewer arguments. Returns -1 and sets `errno` for an error, like the C library.
macro_rules! call {
    ($($given:tt)*) => {
        $crate::real::plain($crate::real::kernel!($($given)*))
    };
}
pub(crate) use {call, kernel};

/// Makes a system call as the C library's function does on this architecture, perhaps by an [`older`](calls::older)
/// call. Returns -1 and sets `errno` for an error, like the C library.
///
/// # Safety
/// The conditions are those of the system call `number`.
pub unsafe fn call_as_library(number: i64, arguments: [usize; 6]) -> isize {
    let (number, arguments) = calls::older(number, arguments);
    // SAFETY: the arguments are valid for the call `number`, as this function's contract requires.
    plain(result(unsafe { raw(number, arguments) }))
}

/// Maps `len` bytes of private anonymous memory at `at`, with `flags` (`MAP_FIXED…`,
/// `MAP_NORESERVE`). Async-signal-safe.
///
/// # Errors
/// The kernel's errno.
///
/// # Safety
/// - With `MAP_FIXED`, nothing uses the memory that was mapped at `at` before.
pub unsafe fn map_memory(
    at: usize,
    len: usize,
    access: std::ffi::c_int,
    flags: std::ffi::c_int,
) -> Result<usize, i32> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: with `MAP_FIXED`, nothing uses the memory at `at`, as this function's contract requires.
    let at = unsafe { kernel!(libc::SYS_mmap, at, len, access, flags, usize::MAX, 0) };
    at.map(|at| at as usize)
}

/// A descriptor that slat has opened for itself. Dropping this value closes the descriptor. Async-signal-safe.
#[derive(Debug)]
pub struct Opened(std::ffi::c_int);

impl Opened {
    /// Opens a file with `flags` and `O_CLOEXEC`. `None`: the kernel refuses to open it.
    pub fn new(path: &std::ffi::CStr, flags: std::ffi::c_int) -> Option<Self> {
        let flags = flags | libc::O_CLOEXEC;
        // SAFETY: the path ends with 0, and the call opens a descriptor that no other code owns.
        unsafe {
            Self::by(kernel!(
                libc::SYS_openat,
                libc::AT_FDCWD,
                path.as_ptr(),
                flags
            ))
        }
    }

    /// The flag of a memfd that can be executed as a program (`MFD_EXEC` of `include/uapi/linux/memfd.h`, Linux 6.3).
    /// If `vm.memfd_noexec` is set, a memfd without this flag cannot be executed.
    pub const EXECUTED: usize = 0x10;
    /// The flag of a memfd that cannot be executed as a program, but whose mappings can be executed
    /// (`MFD_NOEXEC_SEAL`). The kernel creates such a memfd whatever `vm.memfd_noexec` is.
    pub const NOT_EXECUTED: usize = 0x08;

    /// Creates a memfd of a `kind`: [`EXECUTED`](Self::EXECUTED) or [`NOT_EXECUTED`](Self::NOT_EXECUTED).
    pub fn memfd(name: &std::ffi::CStr, kind: usize) -> Option<Self> {
        // SAFETY: the name ends with 0, and the call opens a descriptor that no other code owns.
        unsafe {
            Self::by(match kernel!(libc::SYS_memfd_create, name.as_ptr(), kind) {
                Err(libc::EINVAL) => kernel!(libc::SYS_memfd_create, name.as_ptr(), 0),
                made => made,
            })
        }
    }

    /// Writes `bytes` at `offset` of a file. `None`: the kernel refuses to write all bytes (for example, because of the
    /// limit of file sizes).
    pub fn write_at(&self, bytes: &[u8], offset: usize) -> Option<()> {
        // SAFETY: the slice is live memory.
        unsafe { self.write_from(bytes.as_ptr() as usize, bytes.len(), offset) }
    }

    /// Writes to the file like [`write_at`](Self::write_at), but takes the bytes from the `len` bytes of memory at the
    /// address `from`.
    ///
    /// # Safety
    /// - The memory is mapped and readable.
    pub unsafe fn write_from(
        &self,
        mut from: usize,
        mut len: usize,
        mut offset: usize,
    ) -> Option<()> {
        while len > 0 {
            let written = limited(|| {
                // SAFETY: the memory is mapped and readable, as this function's contract requires.
                unsafe { kernel!(libc::SYS_pwrite64, self.fd(), from, len, offset) }
                    .map_err(std::io::Error::from_raw_os_error)
            });
            let written = written.ok()? as usize;
            (from, len, offset) = (from + written, len - written, offset + written);
        }
        Some(())
    }

    /// Takes ownership of the descriptor that a system call has opened. `None`: the call has failed.
    ///
    /// # Safety
    /// - `answer` is the result of a call that opens a descriptor. No other code owns that descriptor.
    pub unsafe fn by(answer: Result<isize, i32>) -> Option<Self> {
        answer.ok().map(|fd| Opened(fd as std::ffi::c_int))
    }

    /// Moves the descriptor above those of the program, as far as the process's limit allows.
    pub fn moved_up(self) -> Self {
        Opened(slat_host::procfs::moved_up(self.into_fd()))
    }

    /// Gives up the ownership of the descriptor.
    pub fn into_fd(self) -> std::ffi::c_int {
        std::mem::ManuallyDrop::new(self).0
    }

    /// Returns the descriptor, which is open as long as this value lives.
    pub fn fd(&self) -> std::ffi::c_int {
        self.0
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: this value owns the descriptor.
        let _ = unsafe { kernel!(libc::SYS_close, self.0) };
    }
}

/// A C library function that slat looks up by its name, for work that system calls cannot do.
#[derive(Debug)]
pub struct Next {
    name: &'static std::ffi::CStr,
    found: std::sync::atomic::AtomicUsize,
}

impl Next {
    /// Describes the function `name`. The first call of [`get`](Self::get) looks up its address.
    pub const fn new(name: &'static std::ffi::CStr) -> Self {
        Next {
            name,
            found: std::sync::atomic::AtomicUsize::new(0),
        }
    }

    /// Returns the function's address, if the C library has it.
    pub fn get(&self) -> Option<usize> {
        use std::sync::atomic::Ordering::Relaxed;
        let mut address = self.found.load(Relaxed);
        if address == 0 {
            // SAFETY: the name ends with NUL.
            address = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) } as usize;
            self.found.store(address, Relaxed);
        }
        (address != 0).then_some(address)
    }
}
