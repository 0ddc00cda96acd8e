//! The system calls that slat makes on the program's threads while it serves the KVM API, `KVM_RUN` above all.
//!
//! With a real KVM these threads need `ioctl` alone, and VMMs install seccomp filters accordingly. So a list names each
//! call that slat makes, and who makes it if a filter forbids it. It is the helper thread, which shares memory and
//! descriptors with all threads; or no thread, and then the list says what is lost; or the thread itself, because no
//! other thread can. The last kind are the calls that a filter has to allow. `docs/seccomp.md` has the list for people.
//!
//! Whether a call is allowed is one bit for the whole process. If the filter of any thread forbids a call, the helper
//! makes it for all threads except slat's own, which no filter binds ([`mark_own_thread`]).

use crate::enter::is_own_thread;
pub use crate::enter::{mark_own_thread, raw, result};
use crate::helper;
pub use crate::list::{
    Call, Entry, Instead, PROCMAP_QUERY, forbid_opening, is_allowed, is_any_forbidden,
};

/// Makes a call. If a filter forbids it, and the thread is not slat's own, the helper makes it. Returns the value or an
/// errno. The call must not block, and must not concern the calling thread alone. Async-signal-safe.
///
/// # Safety
/// As for the call itself, on any thread of the process.
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
    // SAFETY: the caller's.
    result(unsafe { raw(entry.number, arguments) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_and_values_are_told_apart() {
        // SAFETY: a plain call, and one on no descriptor.
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
