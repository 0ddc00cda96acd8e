//! The border between C callers and slat's Rust code.

use crate::messages;
use crate::thread::Section;
use slat_process::{errno, set_errno};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `work`, which is slat's code, for a C caller. If `work` succeeds, `errno` is unchanged. If `work` fails, sets
/// `errno` and returns -1; after a panic, `errno` is `EIO`.
///
/// The whole call is a [`Section`]. Handlers of the program that were delayed run at the end of the section, when slat
/// holds no lock and has no frame on the stack. These handlers may use slat, or leave by longjmp.
pub fn guarded(work: impl FnOnce() -> Result<isize, i32>) -> isize {
    let before = errno();
    let result = {
        let _section = Section::enter();
        without_panic(work).unwrap_or(Err(libc::EIO))
    };
    match result {
        Ok(value) => {
            set_errno(before);
            value
        }
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// Returns the result of `work`. If `work` panics, prints a message and returns `None`.
pub fn without_panic<R>(work: impl FnOnce() -> R) -> Option<R> {
    let result = catch_unwind(AssertUnwindSafe(work));
    if result.is_err() {
        messages::say(format_args!(
            "internal error, reported above; the call answers EIO"
        ));
    }
    result.ok()
}
