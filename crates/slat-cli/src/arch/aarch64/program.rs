//! What the command must know about program files of this architecture.

use object::elf;

/// The number of this architecture in the header of an ELF file.
pub const MACHINE: elf::Machine = elf::EM_AARCH64;

/// What a program of another architecture is not, in error messages.
pub const NAME: &str = "an arm64 program";

/// The program that starts the preload library as a program: glibc's dynamic linker. A machine with another C library
/// does not have it.
pub const LINKER: &str = "/lib/ld-linux-aarch64.so.1";
