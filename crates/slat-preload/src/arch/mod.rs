//! The parts of this crate that depend on the processor's architecture. The rest of the crate does not depend on it.
//!
//! Each architecture has a directory. All directories have the same modules with the same functions, and import
//! nothing from the rest of the crate. Where assembly calls a function of the rest, the assembly is in a macro, and
//! the rest passes that function to the macro.
//!
//! | module | idea |
//! |---|---|
//! | `calls` | system calls that not all architectures have, and the order of arguments |
//! | `pointer_calls` | system calls by which a loaded program sets its thread pointer |
//! | `files` | programs and libraries as files: numbers, names |
//! | `entries` | the first instructions of functions that replace the C library's |
//! | `frame` | the program's state at a dispatched call: the kernel's frame, the handler's entry, the return |
//! | `code` | where code enters the kernel |
//! | `sites` | how a call site is rewritten |
//! | `site_entry` | the entry into slat from a rewritten call site |
//! | `start` | the start of a process |
//! | `threads` | threads of slat's C library on which the program's threads run |
//! | `carried` | the library's copy before the dynamic linker has linked it |

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(not(any(
    target_arch = "x86_64",
    all(target_arch = "aarch64", target_endian = "little")
)))]
compile_error!("slat-preload supports Linux on x86_64 and on little-endian aarch64 only");
