//! The facts that calls need about the program that slat has loaded itself ([`load`](crate::load)): whether there is
//! such a program, and the file that `/proc/self/exe` should show.

use crate::arch::calls::{self, Call};
use crate::paths::text;
use crate::real::error;
use std::ffi::{CStr, CString, c_char};
use std::sync::OnceLock;

/// The environment variable with the path of the program to load.
pub const PROGRAM: &CStr = c"SLAT_PROGRAM";

/// The path of the loaded program's file, which `/proc/self/exe` should show.
static OWN: OnceLock<CString> = OnceLock::new();

/// Stores the path of the program's file. Call once, before the program begins.
pub fn set(file: CString) {
    let _ = OWN.set(file);
}

/// Whether the program was loaded by slat.
pub fn is_loaded() -> bool {
    OWN.get().is_some()
}

/// Returns the path of the program's file if `path` is `/proc/self/exe`, or another name of this link: with
/// `thread-self` or this process's id in place of `self`.
pub fn own_path(path: *const c_char) -> Option<&'static CStr> {
    let own = OWN.get()?;
    let name = text(path)?.to_bytes();
    let name = name.strip_prefix(b"/proc/")?.strip_suffix(b"/exe")?;
    let is_own = matches!(name, b"self" | b"thread-self")
        || std::str::from_utf8(name)
            .ok()?
            .parse()
            .is_ok_and(|pid: u32| pid == std::process::id());
    is_own.then_some(own)
}

/// Returns the system call `number` with `arguments`. If the call's path is `/proc/self/exe`, or another name of this
/// link, the returned call has the path of the program's file instead.
pub fn with_own_path(number: i64, arguments: [usize; 6]) -> Call {
    let follows = |flags: usize| flags & libc::AT_SYMLINK_NOFOLLOW as usize == 0;
    let (newer, mut with_directory) = calls::newer(number, arguments);
    let has_path = match newer {
        libc::SYS_openat | libc::SYS_openat2 | libc::SYS_faccessat => true,
        libc::SYS_newfstatat | libc::SYS_faccessat2 => follows(with_directory[3]),
        libc::SYS_statx => follows(with_directory[2]),
        _ => false,
    };
    let path = with_directory[1] as *const c_char;
    match has_path.then(|| own_path(path)).flatten() {
        Some(own) => {
            with_directory[1] = own.as_ptr() as usize;
            (newer, with_directory)
        }
        None => (number, arguments),
    }
}

/// Implements readlink for `/proc/self/exe` and equal links. `None`: the path is not such a link.
pub fn own_link(path: *const c_char, to: usize, len: usize) -> Option<isize> {
    let own = own_path(path)?.to_bytes();
    if len as isize <= 0 {
        return Some(error(libc::EINVAL));
    }
    let own = &own[..own.len().min(len)];
    // SAFETY: the copy to the program's address is guarded: a bad address is an error.
    let copied = unsafe { slat_guard::copy_out(to as *mut u8, own) };
    Some(match copied {
        Ok(()) => own.len() as isize,
        Err(_) => error(libc::EFAULT),
    })
}
