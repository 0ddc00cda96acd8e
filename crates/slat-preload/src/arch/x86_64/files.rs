//! Constants of program files and library files: the architecture's number in their headers, and the path of the
//! dynamic linker.

use std::ffi::CStr;

/// The architecture's number in an ELF header: `EM_X86_64`.
pub const MACHINE: u16 = 62;
/// The name of a program of this architecture in messages.
pub const PROGRAM: &str = "a 64-bit x86 program";

/// The exclusive upper limit of the addresses that a program can use.
pub const ADDRESSES: u64 = 1 << 47;

/// The dynamic linker of glibc.
pub const LINKER: &CStr = c"/lib64/ld-linux-x86-64.so.2";

/// The first version of glibc's symbols on this architecture. Every glibc still has this version.
pub const FIRST_VERSION: &CStr = c"GLIBC_2.2.5";
