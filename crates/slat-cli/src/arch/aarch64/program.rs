//! Facts about program files of this architecture, for the command `slat run`.

use object::elf;

/// The number of this architecture in the header of an ELF file.
pub const MACHINE: elf::Machine = elf::EM_AARCH64;

/// The name of this architecture's programs in error messages, which say that a program is not one of them.
pub const NAME: &str = "an arm64 program";

/// The program that starts the preload library as a program: glibc's dynamic linker. A machine with another C library
/// does not have it.
pub const LINKER: &str = "/lib/ld-linux-aarch64.so.1";
