//! Constants of ELF programs and libraries: the machine type in their headers (`e_machine`), and the path of the
//! dynamic linker.

use std::ffi::CStr;

/// The architecture's number in an ELF header: `EM_AARCH64`.
pub const MACHINE: u16 = 183;
/// The name of a program of this architecture in messages.
pub const PROGRAM: &str = "a 64-bit Arm program";

/// The exclusive upper limit of the addresses that a program can use.
pub const ADDRESSES: u64 = 1 << 48;

/// The dynamic linker of glibc.
pub const LINKER: &CStr = c"/lib/ld-linux-aarch64.so.1";

/// The first version of glibc's symbols on this architecture. Every glibc still has this version.
pub const FIRST_VERSION: &CStr = c"GLIBC_2.17";
