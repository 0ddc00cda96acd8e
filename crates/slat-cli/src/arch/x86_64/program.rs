//! Facts about program files of this architecture, for the command `slat run`.

use object::elf;

/// The number of this architecture in the header of an ELF file.
pub const MACHINE: elf::Machine = elf::EM_X86_64;

/// The name of this architecture's programs, for error messages about a program of another architecture.
pub const NAME: &str = "an x86-64 program";

/// glibc's dynamic linker, which starts the preload library as a program. A machine with another C library does not
/// have this file.
pub const LINKER: &str = "/lib64/ld-linux-x86-64.so.2";
