//! The KVM API for C programs, without `/dev/kvm`.
//!
//! A program that has a KVM backend is ported by renaming its calls. `slat_open` takes the place of opening `/dev/kvm`.
//! `slat_ioctl`, `slat_mmap`, `slat_munmap`, `slat_close` and `slat_dup` take the place of the C library's functions
//! without the prefix. cbindgen makes `include/slat.h` of this crate (`tests/header.rs`). The engine below KVM's API
//! has its own C library, `slat-engine-capi`.
//!
//! | file | idea |
//! |---|---|
//! | [`descriptors`] | descriptors: open, ioctl, close, dup, pread, fallocate |
//! | [`memory`] | mappings: those of descriptors, and changes of guest memory |
//! | [`signals`] | signals that end KVM_RUN |
//!
//! # The border
//! Every function does its work in [`slat_kvm::guarded::guarded`], or in the functions below it, so that no panic
//! leaves the library. A call that panics fails with `EIO`. If it was a call of a VM, all later calls of that VM fail
//! with `EIO`, too.

pub mod descriptors;
pub mod memory;
pub mod signals;

use slat_kvm::guarded::guarded;

/// The result of a call: a value or an errno.
type Answer = Result<isize, i32>;

/// Converts the result of a function of the C library.
fn answer(value: isize) -> Answer {
    match value {
        -1 => Err(std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO)),
        value => Ok(value),
    }
}
