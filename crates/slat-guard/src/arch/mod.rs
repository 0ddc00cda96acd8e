//! The code that depends on the processor's architecture. The rest of the crate is the same for all architectures.
//!
//! Each architecture has a directory, and each directory has the same modules with the same functions.
//!
//! | module | contents |
//! |---|---|
//! | `table` | how a guarded instruction enters the exception table |
//! | `access` | single accesses |
//! | `bulk` | copies, fills, and the comparison of 64 bytes |
//! | `entries` | the code by which a handler returns to the kernel, and the system call that changes the signal mask |

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
pub(crate) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(not(any(
    target_arch = "x86_64",
    all(target_arch = "aarch64", target_endian = "little")
)))]
compile_error!("slat-guard supports Linux on x86_64 and on little-endian aarch64 only");
