//! The parts that depend on the architecture: the cycle counter, and the tracepoints that only guests of this
//! architecture have. Each architecture has a file.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("slat-trace supports Linux on x86_64 and aarch64 only");
