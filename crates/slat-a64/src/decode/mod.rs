//! Decoding of A64 instructions, by the tables of DDI 0487, C4.1.
//!
//! [`decode`] returns `None` for an UNDEFINED word: an unallocated word, or an instruction of an extension that this
//! processor does not have.

mod branch;
mod immediate;
mod memory;
mod register;

use crate::bits::field;
use crate::insn::Insn;
use crate::simd;

/// Decodes one instruction word.
pub(crate) fn decode(word: u32) -> Option<Insn> {
    match field(word, 28, 25) {
        0b1000 | 0b1001 => immediate::decode(word),
        0b1010 | 0b1011 => branch::decode(word),
        0b0101 | 0b1101 => register::decode(word),
        0b0100 | 0b0110 | 0b1100 | 0b1110 => memory::decode(word),
        0b0111 | 0b1111 => simd::decode(word).map(Insn::Simd),

        // The remaining words are reserved (UDF), unallocated, SME or SVE.
        _ => None,
    }
}
