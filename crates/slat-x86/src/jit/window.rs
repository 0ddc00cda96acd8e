//! The fields of a CPU that are near R15.
//!
//! R15 is [`BASE`] bytes beyond the [`Cpu`], so that what compiled code uses most is at most 128 bytes from it:
//! an instruction has one byte for such a distance and four for others, and most instructions of compiled code
//! read or write a field. Code that a guest runs through once does not stay in a host's first-level cache, so
//! its size is its time.

use crate::Cpu;
use std::mem::offset_of;

/// How far beyond the CPU R15 is.
pub(super) const BASE: usize = offset_of!(Cpu, compiled.instructions) + 128;

const _: () = assert!(offset_of!(Cpu, state.gpr) > offset_of!(Cpu, lazy));
const _: () = assert!(offset_of!(Cpu, state.rflags) < BASE + 128);

/// Returns how far from R15 a field of the CPU with this offset is.
pub(super) const fn from_base(offset: usize) -> i32 {
    offset as i32 - BASE as i32
}
