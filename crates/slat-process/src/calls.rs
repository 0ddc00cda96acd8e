//! The system calls that slat makes on the program's threads while it serves the KVM API, mainly `KVM_RUN`.
//!
//! With the kernel's KVM these threads need only `ioctl`, and VMMs install seccomp filters that allow little else. So a
//! list names each call that slat makes, and who makes the call if a filter forbids it. Most of these calls are then
//! made by the helper thread, which shares memory and descriptors with all threads. Some calls are omitted instead, and
//! the list says what is lost. The other calls must be made by the calling thread itself, so a filter has to allow
//! them. `docs/seccomp.md` has the list for users.
//!
//! For each call, one bit for the whole process says whether it is allowed. If the filter of any thread forbids a call,
//! the helper makes the call for all threads except slat's own threads, to which no filter applies
//! ([`mark_own_thread`]).

use crate::arch::calls as arch;
use crate::enter::is_own_thread;
pub use crate::enter::{mark_own_thread, raw, result};
use crate::helper;
pub use crate::list::{
    Call, Entry, Instead, PROCMAP_QUERY, forbid_opening, is_allowed, is_any_forbidden,
};
use std::ffi::CStr;

/// Makes a system call. If a filter forbids the call, the helper thread makes it, unless this thread is one of slat's
/// own. Returns the value or an errno. The call must not block, and must not concern only the calling thread.
/// Async-signal-safe.
///
/// # Safety
/// - The caller may use and change the memory, mappings and descriptors that the call uses or changes, on any thread of
///   the process.
#[inline]
pub unsafe fn make(call: Call, arguments: [usize; 6]) -> Result<isize, i32> {
    let entry = call.entry();
    debug_assert!((entry.arguments.iter()).all(|(index, value)| arguments[*index] == *value));
    if !is_allowed(call)
        && !is_own_thread()
        && let Some(answer) = helper::ask(entry.number, arguments)
    {
        return result(answer);
    }
    // SAFETY: the caller may use and change all that the call uses and changes, as this function's `# Safety` requires.
    result(unsafe { raw(entry.number, arguments) })
}

/// Whether any of the events in `descriptor` has occurred. Does not wait. `None`: the call has failed.
/// Async-signal-safe.
pub fn is_ready(descriptor: &mut libc::pollfd) -> Option<bool> {
    // SAFETY: the kernel accesses one live structure. The call does not wait.
    let ready = unsafe { make(Call::Poll, arch::poll_now(descriptor)) };
    ready.map(|count| count != 0).ok()
}

/// Removes the file at `path`. Async-signal-safe.
///
/// # Errors
/// The kernel's errno.
pub fn remove(path: &CStr) -> Result<(), i32> {
    // SAFETY: the path ends with 0.
    unsafe { make(Call::Remove, arch::remove(path)) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn a_pipe_is_ready_when_it_holds_something() {
        let mut ends = [0; 2];
        // SAFETY: the call makes a pipe, which only this test uses.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        let mut read = libc::pollfd {
            fd: ends[0],
            events: libc::POLLIN,
            revents: 0,
        };
        assert_eq!(is_ready(&mut read), Some(false));
        // SAFETY: only this test uses the pipe.
        assert_eq!(unsafe { libc::write(ends[1], c"!".as_ptr().cast(), 1) }, 1);
        assert_eq!(is_ready(&mut read), Some(true));
        assert_eq!(read.revents, libc::POLLIN);
        for end in ends {
            // SAFETY: only this test uses the pipe.
            unsafe { libc::close(end) };
        }
    }

    #[test]
    fn a_file_is_removed_once() {
        let path = std::env::temp_dir().join(format!("slat-process-{}", std::process::id()));
        std::fs::write(&path, []).unwrap();
        let name = CString::new(path.as_os_str().as_bytes()).unwrap();
        assert_eq!(remove(&name), Ok(()));
        assert!(!path.exists());
        assert_eq!(remove(&name), Err(libc::ENOENT));
    }

    #[test]
    fn errors_and_values_are_told_apart() {
        // SAFETY: the first call has no arguments, and the second has a descriptor that does not exist.
        unsafe {
            let here = make(Call::ProcessId, [0; 6]);
            assert_eq!(here, Ok(std::process::id() as isize));
            assert_eq!(
                make(Call::Close, [usize::MAX, 0, 0, 0, 0, 0]),
                Err(libc::EBADF)
            );
        }
    }
}
