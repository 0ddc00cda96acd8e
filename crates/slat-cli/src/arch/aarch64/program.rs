//! Programs as files.

use object::elf;

/// The machine's number in an ELF file.
pub const MACHINE: elf::Machine = elf::EM_AARCH64;

/// What a file with another number is not.
pub const NAME: &str = "an arm64 program";

/// The program that starts the preload library as a program: glibc's dynamic linker, which a machine with another C
/// library lacks.
pub const LINKER: &str = "/lib/ld-linux-aarch64.so.1";
