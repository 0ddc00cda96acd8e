//! Integers as Cranelift values.

use super::frame::Frame;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I16, I32, I64};
use cranelift_codegen::ir::{
    AbiParam, InstBuilder, InstructionData, MemFlags, Opcode, SigRef, Signature, Type, Value,
};
use cranelift_frontend::FunctionBuilder;
use std::collections::HashMap;
use std::mem::offset_of;
use std::vec::Vec;

/// The function that is built, and values that it uses in many places.
pub(super) struct Values<'a> {
    pub(super) b: FunctionBuilder<'a>,
    /// The signatures of helpers, by their numbers of arguments and results.
    signatures: HashMap<(usize, usize), SigRef>,
}

/// Returns the integer type of `bits` bits. `None`: Cranelift has no such type.
fn type_of(bits: u32) -> Option<Type> {
    match bits {
        8 => Some(I8),
        16 => Some(I16),
        32 => Some(I32),
        _ => None,
    }
}

impl<'a> Values<'a> {
    pub(super) fn new(b: FunctionBuilder<'a>) -> Self {
        Self {
            b,
            signatures: HashMap::new(),
        }
    }

    pub(super) fn constant(&mut self, value: i64) -> Value {
        self.b.ins().iconst(I64, value)
    }

    /// Returns the address of the frame.
    pub(super) fn frame(&mut self) -> Value {
        self.b.ins().get_pinned_reg(I64)
    }

    /// Emits a load of a frame's field.
    pub(super) fn field(&mut self, offset: usize) -> Value {
        let frame = self.frame();
        self.b
            .ins()
            .load(I64, MemFlags::trusted(), frame, offset as i32)
    }

    /// Emits a store to a frame's field.
    pub(super) fn set_field(&mut self, offset: usize, value: Value) {
        let frame = self.frame();
        self.b
            .ins()
            .store(MemFlags::trusted(), value, frame, offset as i32);
    }

    /// Emits a call of the helper at an offset of the table, with the frame and `arguments`.
    pub(super) fn call(
        &mut self,
        helper: usize,
        arguments: &[Value],
        returns: usize,
    ) -> Vec<Value> {
        let kind = (arguments.len(), returns);
        let b = &mut self.b;
        let signature = *(self.signatures.entry(kind)).or_insert_with(|| {
            let mut signature = Signature::new(slat_jit::HELPERS);
            signature.params = [AbiParam::new(I64)].repeat(1 + kind.0);
            signature.returns = [AbiParam::new(I64)].repeat(kind.1);
            b.import_signature(signature)
        });
        let table = self.field(offset_of!(Frame, helpers));
        let function = (self.b.ins()).load(I64, MemFlags::trusted(), table, helper as i32);
        let mut all = [self.frame()].to_vec();
        all.extend(arguments);
        let call = self.b.ins().call_indirect(signature, function, &all);
        self.b.inst_results(call).to_vec()
    }

    pub(super) fn zero_extend(&mut self, value: Value, bits: u32) -> Value {
        match type_of(bits) {
            _ if bits == 64 || self.is_extended(value, bits) => value,
            Some(ty) => {
                let low = self.b.ins().ireduce(ty, value);
                self.b.ins().uextend(I64, low)
            }
            None => self.b.ins().band_imm(value, (1i64 << bits) - 1),
        }
    }

    pub(super) fn sign_extend(&mut self, value: Value, bits: u32) -> Value {
        match type_of(bits) {
            _ if bits == 64 => value,
            Some(ty) => {
                let low = self.b.ins().ireduce(ty, value);
                self.b.ins().sextend(I64, low)
            }
            None => {
                let by = i64::from(64 - bits);
                let shifted = self.b.ins().ishl_imm(value, by);
                self.b.ins().sshr_imm(shifted, by)
            }
        }
    }

    /// Whether all bits of a value above its low `bits` bits are known to be zero.
    fn is_extended(&self, value: Value, bits: u32) -> bool {
        let dfg = &self.b.func.dfg;
        let Some(inst) = dfg.value_def(value).inst() else {
            return false;
        };
        match dfg.insts[inst] {
            InstructionData::Unary {
                opcode: Opcode::Uextend,
                arg,
            } => dfg.value_type(arg).bits() <= bits,
            InstructionData::UnaryImm {
                opcode: Opcode::Iconst,
                imm,
            } => (imm.bits() as u64) >> bits == 0,
            InstructionData::Load { opcode, .. } => match opcode {
                Opcode::Uload8 => true,
                Opcode::Uload16 => bits >= 16,
                Opcode::Uload32 => bits >= 32,
                _ => false,
            },
            _ => false,
        }
    }

    /// Whether the upper half of a value is known to be zero.
    pub(super) fn is_half(&self, value: Value) -> bool {
        self.is_extended(value, 32)
    }

    /// If `value` is the zero-extended lower half of another value, returns that other value.
    pub(super) fn half_of(&self, value: Value) -> Option<Value> {
        let dfg = &self.b.func.dfg;
        let unary = |value: Value, wanted: Opcode| {
            let inst = dfg.value_def(value).inst()?;
            match dfg.insts[inst] {
                InstructionData::Unary { opcode, arg } if opcode == wanted => Some(arg),
                _ => None,
            }
        };
        let low = unary(value, Opcode::Uextend)?;
        let whole = unary(low, Opcode::Ireduce)?;
        (dfg.value_type(low) == I32 && dfg.value_type(whole) == I64).then_some(whole)
    }

    /// Emits a division, rounding towards zero. The quotient of a division by 0 is 0. A quotient that overflows wraps.
    pub(super) fn divide(&mut self, a: Value, b: Value, is_signed: bool) -> Value {
        let (zero, one) = (self.constant(0), self.constant(1));
        let is_zero = self.b.ins().icmp(IntCC::Equal, b, zero);
        if !is_signed {
            let divisor = self.b.ins().select(is_zero, one, b);
            let quotient = self.b.ins().udiv(a, divisor);
            return self.b.ins().select(is_zero, zero, quotient);
        }
        // Negate instead of dividing by -1, because the host's division may trap.
        let minus_one = self.constant(-1);
        let negates = self.b.ins().icmp(IntCC::Equal, b, minus_one);
        let is_special = self.b.ins().bor(is_zero, negates);
        let divisor = self.b.ins().select(is_special, one, b);
        let quotient = self.b.ins().sdiv(a, divisor);
        let negated = self.b.ins().ineg(a);
        let quotient = self.b.ins().select(negates, negated, quotient);
        self.b.ins().select(is_zero, zero, quotient)
    }
}
