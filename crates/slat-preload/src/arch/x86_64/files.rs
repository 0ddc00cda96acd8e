//! Constants of program files and library files: the processor's number in their headers, and the names of the dynamic
//! linker.

use std::ffi::CStr;

/// The architecture's number in an ELF header: `EM_X86_64`.
pub const MACHINE: u16 = 62;
/// The name of a program of this architecture in messages.
pub const PROGRAM: &str = "a 64-bit x86 program";

/// The end of the addresses that a program can use.
pub const ADDRESSES: u64 = 1 << 47;

/// The dynamic linker of glibc.
pub const LINKER: &CStr = c"/lib64/ld-linux-x86-64.so.2";
/// [`LINKER`] with its NUL, as a file's `PT_INTERP` has it.
pub const INTERPRETER: [u8; 28] = *b"/lib64/ld-linux-x86-64.so.2\0";
/// The name by which libraries refer to the dynamic linker, with a NUL.
pub const LINKER_NAME: [u8; 24] = *b"ld-linux-x86-64.so.2\0   ";

/// The first version of glibc's symbols on this architecture. Every glibc still has this version.
pub const FIRST_VERSION: &CStr = c"GLIBC_2.2.5";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_linker_has_one_name() {
        assert_eq!(LINKER.to_bytes_with_nul(), INTERPRETER);
        let name = CStr::from_bytes_until_nul(&LINKER_NAME).unwrap();
        assert!(LINKER.to_bytes().ends_with(name.to_bytes()));
    }
}
