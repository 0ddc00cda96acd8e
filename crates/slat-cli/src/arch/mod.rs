//! The parts of the command that depend on the architecture, which is the same for the host and its guests. No other
//! module depends on it.
//!
//! | module | idea |
//! |---|---|
//! | `gdb` | the registers' description for GDB, and a vCPU's state in words |
//! | `host` | the lines of `slat info` and the words of the help that depend on the architecture |
//! | `processors` | the text of `/proc/cpuinfo` that programs on slat see |
//! | `program` | program files: the number in an ELF header, the dynamic linker |
//!
//! This is the only file that tests which architecture it is built for.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;
