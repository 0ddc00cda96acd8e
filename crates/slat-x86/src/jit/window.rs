//! The position of R15 relative to the `Cpu`, near the fields that compiled code uses.
//!
//! R15 is [`BASE`] bytes beyond the beginning of the [`Cpu`], so that the fields that compiled code uses most are at
//! most 128 bytes from R15. An instruction encodes a distance of at most 128 bytes in one byte, and a larger distance
//! in four bytes. Most instructions of compiled code read or write a field, so this makes the code shorter. Code that a
//! guest runs only once is not in the host's first-level cache, so its size determines how long it takes.

use crate::Cpu;
use std::mem::offset_of;

/// The distance from the beginning of the `Cpu` to R15.
pub(super) const BASE: usize = offset_of!(Cpu, compiled.instructions) + 128;

const _: () = assert!(offset_of!(Cpu, state.gpr) > offset_of!(Cpu, lazy));
const _: () = assert!(offset_of!(Cpu, state.rflags) < BASE + 128);

/// Returns the distance from R15 to the field of `Cpu` at this offset.
pub(super) const fn from_base(offset: usize) -> i32 {
    offset as i32 - BASE as i32
}
