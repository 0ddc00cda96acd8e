//! Translates two kinds of vector instructions: those that reorder elements (interleaving, permutations by a constant,
//! moves of one element), and shifts by a constant. As in `vector`, each half of a 256-bit vector is handled like a
//! 128-bit vector.

use super::translate::Translator;
use super::vector::{sources, type_of};
use crate::op::{MEM, Op};
use crate::simd::{self, Each};
use cranelift_codegen::ir::types::{F32X4, F64X2, I8X16, I16X8, I32X4, I64, I64X2};
use cranelift_codegen::ir::{InstBuilder, Type, Value};
use iced_x86::{EncodingKind, Instruction, Mnemonic, OpKind};

/// If an instruction interleaves elements, returns the logarithm of their size, and whether it takes the upper
/// elements.
fn interleaving(mnemonic: Mnemonic) -> Option<(u8, bool)> {
    let (each, elements) = simd::meaning(mnemonic)?;
    let size = type_of(elements).lane_type().bytes().trailing_zeros() as u8;
    match each {
        Each::InterleaveLow => Some((size, false)),
        Each::InterleaveHigh => Some((size, true)),
        _ => None,
    }
}

/// Returns the order of bytes for a shuffle in which element `n` of the result is element `choose(n)` of the source. An
/// element has `1 << size` bytes.
fn order(size: u8, choose: impl Fn(usize) -> usize) -> [u8; 16] {
    std::array::from_fn(|byte| {
        let within = byte & ((1 << size) - 1);
        (choose(byte >> size) << size | within) as u8
    })
}

/// If an instruction shifts elements, returns their type and the kind of shift.
fn shift(mnemonic: Mnemonic) -> Option<(Type, Each)> {
    let (each, elements) = simd::meaning(mnemonic)?;
    let is_shift = matches!(each, Each::ShiftLeft | Each::ShiftRight | Each::ShiftSigned);
    is_shift.then_some((type_of(elements), each))
}

impl Translator<'_> {
    /// Translates a vector instruction that reorders or shifts elements. Returns `None` without effect if there is no
    /// translation.
    pub(super) fn element_instruction(
        &mut self,
        insn: &Instruction,
        op: &Op,
        halves: usize,
    ) -> Option<()> {
        use Mnemonic::*;
        let vex = insn.encoding() == EncodingKind::VEX;
        let [first, second] = sources(insn);
        let last = insn.op_count().checked_sub(1)?;
        let by_constant = insn.op_kind(last) == OpKind::Immediate8;
        let control = usize::from(op.aux);
        if let Some((size, upper)) = interleaving(insn.mnemonic()) {
            let count = 16 >> size;
            let begin = if upper { count / 2 } else { 0 };
            let mask = order(size, |k| begin + k / 2 + if k & 1 == 0 { 0 } else { count });
            self.shuffle_both(insn, op, [first, second], halves, mask);
        } else if let Some((ty, shift)) = shift(insn.mnemonic())
            && by_constant
        {
            self.shift_elements(insn, op, halves, ty, shift);
        } else {
            match insn.mnemonic() {
                Pshufd | Vpshufd => {
                    let mask = order(2, |k| control >> (2 * k) & 3);
                    let source = self.vector(op, 1, halves, !vex);
                    self.shuffle_each(insn, op, &source, mask);
                }
                Shufps | Vshufps => {
                    let mask = order(2, |k| (control >> (2 * k) & 3) + if k < 2 { 0 } else { 4 });
                    self.shuffle_both(insn, op, [first, second], halves, mask);
                }
                Palignr | Vpalignr if control <= 16 => {
                    let mask = order(0, |k| control + k);
                    self.shuffle_both(insn, op, [second, first], halves, mask);
                }
                Pshufb | Vpshufb => {
                    let masks = self.vector(op, second, halves, !vex);
                    let values = self.vector(op, first, halves, false);
                    let values: Vec<_> = (values.into_iter().zip(masks))
                        .map(|(value, mask)| self.b.ins().x86_pshufb(value, mask))
                        .collect();
                    self.set_vector(insn, op.r[0], &values);
                }
                Movss | Movsd | Vmovss | Vmovsd => self.move_scalar(insn, op),
                Movlps | Movlpd | Movhps | Movhpd | Vmovlps | Vmovlpd | Vmovhps | Vmovhpd => {
                    return self.move_half(insn, op, first);
                }
                Movmskps | Vmovmskps if halves == 1 => self.gather_signs(op, F32X4),
                Movmskpd | Vmovmskpd if halves == 1 => self.gather_signs(op, F64X2),
                Pinsrb | Vpinsrb => self.insert_element(insn, op, I8X16, first),
                Pinsrw | Vpinsrw => self.insert_element(insn, op, I16X8, first),
                Pinsrd | Vpinsrd => self.insert_element(insn, op, I32X4, first),
                Pinsrq | Vpinsrq => self.insert_element(insn, op, I64X2, first),
                Pextrb | Vpextrb => self.extract_element(op, I8X16),
                Pextrw | Vpextrw => self.extract_element(op, I16X8),
                Pextrd | Vpextrd | Extractps | Vextractps => self.extract_element(op, I32X4),
                Pextrq | Vpextrq => self.extract_element(op, I64X2),
                Vextracti128 | Vextractf128 if op.r[0] != MEM => {
                    let value = self.half(op.r[1], control & 1);
                    self.set_vector(insn, op.r[0], &[value]);
                }
                Vinserti128 | Vinsertf128 => {
                    let value = self.vector(op, 2, 1, false)[0];
                    let mut values = [self.half(op.r[1], 0), self.half(op.r[1], 1)];
                    values[control & 1] = value;
                    self.set_vector(insn, op.r[0], &values);
                }
                Vperm2i128 | Vperm2f128 => {
                    let second = self.vector(op, 2, 2, false);
                    let zero = self.zeroes();
                    let values = [control, control >> 4].map(|choice| match choice & 11 {
                        choice @ 0..2 => self.half(op.r[1], choice),
                        choice @ 2..4 => second[choice - 2],
                        _ => zero,
                    });
                    self.set_vector(insn, op.r[0], &values);
                }
                _ => return None,
            }
        }
        Some(())
    }

    fn shuffle(&mut self, a: Value, b: Value, mask: [u8; 16]) -> Value {
        let mask = self.b.func.dfg.immediates.push(mask.as_slice().into());
        self.b.ins().shuffle(a, b, mask)
    }

    /// Fills each half of the result with bytes from the same half of the source, in the order that `mask` gives.
    fn shuffle_each(&mut self, insn: &Instruction, op: &Op, source: &[Value], mask: [u8; 16]) {
        let values: Vec<_> = (source.iter())
            .map(|value| self.shuffle(*value, *value, mask))
            .collect();
        self.set_vector(insn, op.r[0], &values);
    }

    /// Fills each half of the result with bytes from the same halves of two operands. In `mask`, 0 to 15 are bytes of
    /// the first operand, and higher numbers are bytes of the second operand.
    fn shuffle_both(
        &mut self,
        insn: &Instruction,
        op: &Op,
        operands: [usize; 2],
        halves: usize,
        mask: [u8; 16],
    ) {
        let is_aligned = insn.encoding() != EncodingKind::VEX;
        let [a, b] = operands.map(|k| self.vector(op, k, halves, is_aligned));
        let values: Vec<_> = (a.into_iter().zip(b))
            .map(|(a, b)| self.shuffle(a, b, mask))
            .collect();
        self.set_vector(insn, op.r[0], &values);
    }

    fn shift_elements(
        &mut self,
        insn: &Instruction,
        op: &Op,
        halves: usize,
        ty: Type,
        shift: Each,
    ) {
        let from = if insn.encoding() == EncodingKind::VEX {
            1
        } else {
            0
        };
        let bits = ty.lane_bits() as i64;
        let count = i64::from(op.aux);
        let values: Vec<_> = (self.vector(op, from, halves, false).into_iter())
            .map(|value| {
                let value = self.as_elements(value, ty);
                match shift {
                    Each::ShiftSigned => self.b.ins().sshr_imm(value, count.min(bits - 1)),
                    // A shift by the element's width or more results in 0. Cranelift would use the count modulo the
                    // width.
                    _ if count >= bits => self.zeroes(),
                    Each::ShiftLeft => self.b.ins().ishl_imm(value, count),
                    _ => self.b.ins().ushr_imm(value, count),
                }
            })
            .collect();
        self.set_vector(insn, op.r[0], &values);
    }

    /// Translates MOVSS and MOVSD. A load clears the rest of the register; a move between registers leaves it
    /// unchanged.
    fn move_scalar(&mut self, insn: &Instruction, op: &Op) {
        let is_double = matches!(insn.mnemonic(), Mnemonic::Movsd | Mnemonic::Vmovsd);
        let (size, ty) = if is_double { (3, F64X2) } else { (2, F32X4) };
        if op.r[0] == MEM {
            let low = self.low_of(op.r[1]);
            let low = self.narrow(low, size);
            let lin = self.lin(op);
            return self.store(lin, size, low);
        }
        let value = if op.r[1] == MEM {
            let value = self.operand(op, 1, size);
            let value = self.wide(value);
            self.b.ins().scalar_to_vector(I64X2, value)
        } else {
            let (rest, low) = if insn.op_count() == 3 { (1, 2) } else { (0, 1) };
            let [rest, low] = [rest, low].map(|k| {
                let value = self.half(op.r[k], 0);
                self.as_elements(value, ty)
            });
            let low = self.b.ins().extractlane(low, 0);
            self.b.ins().insertlane(rest, low, 0)
        };
        self.set_vector(insn, op.r[0], &[value]);
    }

    /// Translates MOVLPS, MOVHPS and similar moves of 64 bits between memory and half of a register.
    fn move_half(&mut self, insn: &Instruction, op: &Op, rest: usize) -> Option<()> {
        use Mnemonic::*;
        let lane = u8::from(matches!(
            insn.mnemonic(),
            Movhps | Movhpd | Vmovhps | Vmovhpd
        ));
        let register = match op.r[0] {
            MEM => op.r[1],
            _ if op.r.contains(&MEM) => op.r[rest],
            _ => return None,
        };
        let source = if op.r[0] == MEM { 1 } else { rest + 1 };
        if op.r[0] == MEM {
            let value = self.half(register, 0);
            let value = self.as_elements(value, I64X2);
            let value = self.b.ins().extractlane(value, lane);
            let lin = self.lin(op);
            self.store(lin, 3, value);
        } else {
            let value = self.operand(op, source, 3);
            let kept = self.half(register, 0);
            let kept = self.as_elements(kept, I64X2);
            let value = self.b.ins().insertlane(kept, value, lane);
            self.set_vector(insn, op.r[0], &[value]);
        }
        Some(())
    }

    /// Translates the replacement of one element by the low part of a general register, or by memory.
    fn insert_element(&mut self, insn: &Instruction, op: &Op, ty: Type, rest: usize) {
        let size = ty.lane_type().bytes().trailing_zeros() as u8;
        let value = self.operand(op, rest + 1, size);
        let kept = self.half(op.r[rest], 0);
        let kept = self.as_elements(kept, ty);
        let lane = op.imm as u8 & (ty.lane_count() as u8 - 1);
        let value = self.b.ins().insertlane(kept, value, lane);
        self.set_vector(insn, op.r[0], &[value]);
    }

    /// Translates the move of one element to memory or to a general register, whose upper part becomes 0.
    fn extract_element(&mut self, op: &Op, ty: Type) {
        let value = self.half(op.r[1], 0);
        let value = self.as_elements(value, ty);
        let lane = op.imm as u8 & (ty.lane_count() as u8 - 1);
        let value = self.b.ins().extractlane(value, lane);
        if op.r[0] == MEM {
            let size = ty.lane_type().bytes().trailing_zeros() as u8;
            let lin = self.lin(op);
            self.store(lin, size, value);
        } else {
            let value = self.wide(value);
            self.set(op.r[0], 3, value);
        }
    }

    /// Translates MOVMSKPS and MOVMSKPD.
    fn gather_signs(&mut self, op: &Op, ty: Type) {
        let value = self.half(op.r[1], 0);
        let value = self.as_elements(value, ty.as_int());
        let signs = self.b.ins().vhigh_bits(I64, value);
        self.set(op.r[0], 3, signs);
    }
}
