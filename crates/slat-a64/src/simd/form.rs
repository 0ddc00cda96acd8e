//! The fields that the encodings of Advanced SIMD instructions have in common.

use super::compute::{Function, Op};
use super::float::Format;
use super::{Input, Output, Simd};
use crate::bits::{field, flag, register};

/// An Advanced SIMD instruction on scalars or vectors.
#[derive(Clone, Copy)]
pub(super) struct Form {
    pub(super) word: u32,
    pub(super) is_scalar: bool,
}

impl Form {
    /// Whether the instruction uses whole registers (Q, bit 30, of a vector instruction). A scalar counts as half a
    /// register.
    pub(super) fn full(self) -> bool {
        !self.is_scalar && flag(self.word, 30)
    }
    pub(super) fn u(self) -> bool {
        flag(self.word, 29)
    }
    pub(super) fn size(self) -> u8 {
        field(self.word, 23, 22) as u8
    }
    pub(super) fn rd(self) -> Input {
        Input::V(register(self.word, 0))
    }
    pub(super) fn rn(self) -> Input {
        Input::V(register(self.word, 5))
    }
    pub(super) fn rm(self) -> Input {
        Input::V(register(self.word, 16))
    }
    /// Whether lanes of this size are allowed: vectors of doublewords need a whole register.
    pub(super) fn fits(self, size: u8) -> bool {
        self.is_scalar || size < 3 || self.full()
    }
    pub(super) fn function(self, op: Op, size: u8) -> Function {
        let bytes = match (self.is_scalar, self.full()) {
            (true, _) => 1 << size,
            (false, true) => 16,
            (false, false) => 8,
        };
        Function {
            op,
            size,
            bytes,
            is_signed: !self.u(),
            immediate: 0,
        }
    }
    /// Makes an instruction that writes its result to Vd.
    pub(super) fn compute(self, function: Function, inputs: [Input; 3]) -> Option<Simd> {
        let output = Output::V(register(self.word, 0));
        Some(Simd::Compute {
            function,
            inputs,
            output,
        })
    }
}

/// Returns the floating-point number that eight bits of an instruction encode (VFPExpandImm).
pub(super) fn expanded(immediate: u32, size: u8) -> u64 {
    let format = Format::of(size);
    let immediate = u64::from(immediate);
    // The exponent begins with the inverse of bit 6; copies of bit 6 follow.
    let repeated = if immediate & 0x40 != 0 {
        (1 << (format.exponent - 3)) - 1
    } else {
        0
    };
    let top = if immediate & 0x40 != 0 {
        0
    } else {
        1 << (format.exponent - 1)
    };
    let exponent = top | repeated << 2 | immediate >> 4 & 3;
    format.sign(immediate & 0x80 != 0)
        | exponent << format.fraction
        | (immediate & 15) << (format.fraction - 4)
}
