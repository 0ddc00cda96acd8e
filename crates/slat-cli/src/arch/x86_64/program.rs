//! What the command must know about program files of this architecture.

use object::elf;

/// The number of this architecture in the header of an ELF file.
pub const MACHINE: elf::Machine = elf::EM_X86_64;

/// What a program of another architecture is not, in error messages.
pub const NAME: &str = "an x86-64 program";

/// The program that starts the preload library as a program: glibc's dynamic linker. A machine with another C library
/// does not have it.
pub const LINKER: &str = "/lib64/ld-linux-x86-64.so.2";
