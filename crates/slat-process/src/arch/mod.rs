//! The code that depends on the processor's architecture. The rest of the crate does not depend on it.
//!
//! Each architecture has a directory, and each directory has the same modules with the same functions. These modules
//! import nothing from the rest of the crate.
//!
//! | module | idea |
//! |---|---|
//! | `caller` | state of the processor as the program has set it, and as compiled code needs it |
//! | `calls` | numbers and arguments of system calls that differ |
//! | `context` | the registers of the code that a signal has interrupted |
//! | `gate` | the instruction that enters the kernel |
//! | `handler` | how the kernel calls slat's signal handlers, and how these call the program's handlers |
//! | `memory` | the size of a page, and whole pages for a variable |
//! | `noted` | where the C library stores a thread's id |
//! | `pointers` | thread pointers |

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
compile_error!("slat-process supports Linux on x86_64 and on little-endian aarch64 only");
