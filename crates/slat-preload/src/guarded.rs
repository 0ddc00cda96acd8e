//! The border between C and Rust.

use crate::real::{errno, set_errno};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `work` for a C caller: a panic becomes -1 and `EIO`, a success leaves `errno` as it was.
pub fn guarded(work: impl FnOnce() -> Result<isize, i32>) -> isize {
    let before = errno();
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => {
            set_errno(before);
            value
        }
        Ok(Err(errno)) => {
            set_errno(errno);
            -1
        }
        Err(_) => {
            slat_kvm::report::say(format_args!(
                "internal error, reported above; the call answers EIO"
            ));
            set_errno(libc::EIO);
            -1
        }
    }
}
