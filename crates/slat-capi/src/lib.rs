//! The KVM API for C programs, without `/dev/kvm`.
//!
//! To port a program that uses KVM, rename its calls. `slat_open` replaces opening `/dev/kvm`. `slat_ioctl`,
//! `slat_mmap`, `slat_munmap`, `slat_close` and `slat_dup` replace the C library's functions without the prefix.
//! cbindgen generates `include/slat.h` from this crate (`tests/header.rs`). A program that needs only the engine,
//! without KVM's API, uses another C library, `slat-engine-capi`.
//!
//! | file | contents |
//! |---|---|
//! | [`descriptors`] | descriptors: open, ioctl, close, dup, pread, fallocate |
//! | [`memory`] | mappings: those of descriptors, and changes of guest memory |
//! | [`signals`] | signals that end KVM_RUN |
//!
//! # The border between C and Rust
//! Every function does its work in [`slat_kvm::guarded::guarded`], or in the functions below it, so that no panic
//! leaves the library. A call that panics fails with `EIO`. If it was a call of a VM, all later calls of that VM fail
//! with `EIO`, too.

pub mod descriptors;
pub mod memory;
pub mod signals;

use slat_kvm::guarded::guarded;

/// The result of a call: a value or an errno.
type Answer = Result<isize, i32>;

/// Converts the result of a function of the C library: -1 becomes the errno.
fn answer(value: isize) -> Answer {
    match value {
        -1 => Err(std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO)),
        value => Ok(value),
    }
}
