//! What depends on the architecture of the host, which is the guests' architecture, too. The rest of the command is
//! neutral.
//!
//! | module | idea |
//! |---|---|
//! | `gdb` | the registers' description for GDB, and a vCPU's state in words |
//! | `host` | the lines of `slat info`, and words of the help, that not all architectures have |
//! | `processors` | the text of `/proc/cpuinfo` for programs on slat |
//! | `program` | programs as files: the machine's number, the dynamic linker |
//!
//! This is the only file that asks for the architecture.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;
