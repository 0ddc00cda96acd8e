//! Vector functions that are emitted instead of called: the moves and the bits of whole registers, which copies of
//! memory and comparisons of strings consist of.

use super::translate::Translator;
use crate::bits::ones;
use crate::simd::compute::Bitwise;
use crate::simd::{Function, Op};
use crate::tier::Tier;
use cranelift_codegen::ir::{InstBuilder, Value};

impl Translator<'_> {
    /// Emits code for a function whose operands and result are vectors, as two halves each. `None`: there is no such
    /// code, so compiled code calls the function.
    pub(super) fn vector_function(
        &mut self,
        function: &Function,
        [a, b, c]: [[Value; 2]; 3],
    ) -> Option<[Value; 2]> {
        let size = function.size;
        let zero = self.number(0);
        let result = match function.op {
            Op::Element if !function.is_signed => {
                let bit = u32::from(function.immediate) << (3 + size);
                let half = a[(bit / 64) as usize];
                let shifted = self.v.b.ins().ushr_imm(half, i64::from(bit % 64));
                return Some([self.v.zero_extend(shifted, 8 << size), zero]);
            }
            Op::Insert => {
                let bit = u32::from(function.immediate) << (3 + size);
                let mut result = c;
                let half = &mut result[(bit / 64) as usize];
                let lane = self.v.zero_extend(a[0], 8 << size);
                let lane = self.v.b.ins().ishl_imm(lane, i64::from(bit % 64));
                let others = !(ones(8 << size) << (bit % 64));
                let kept = self.v.b.ins().band_imm(*half, others as i64);
                *half = self.v.b.ins().bor(kept, lane);
                return Some(result);
            }
            Op::Bitwise(op) => [0, 1].map(|half| self.bits(op, a[half], b[half], c[half])),
            Op::Duplicate => {
                let lane = self.v.zero_extend(a[0], 8 << size);
                // The lane, times a number with a one at the beginning of each lane.
                let factor = u64::MAX / ones(8 << size);
                let repeated = match size {
                    3 => lane,
                    _ => self.v.b.ins().imul_imm(lane, factor as i64),
                };
                [repeated; 2]
            }
            _ => return None,
        };
        match function.bytes {
            16 => Some(result),
            8 => Some([result[0], zero]),
            _ => None,
        }
    }

    fn bits(&mut self, op: Bitwise, a: Value, b: Value, c: Value) -> Value {
        let v = self.v.b.ins();
        match op {
            Bitwise::And => v.band(a, b),
            Bitwise::Bic => v.band_not(a, b),
            Bitwise::Orr => v.bor(a, b),
            Bitwise::Orn => v.bor_not(a, b),
            Bitwise::Eor => v.bxor(a, b),
            Bitwise::Not => v.bnot(a),
            Bitwise::Select => v.bitselect(c, a, b),
            Bitwise::InsertIf { ones: true } => v.bitselect(b, a, c),
            Bitwise::InsertIf { ones: false } => v.bitselect(b, c, a),
        }
    }
}
