//! General registers, immediates and operands as Cranelift values.

use super::translate::{TYPES, Translator};
use crate::op::{MEM, NONE, Op};
use cranelift_codegen::ir::types::I64;
use cranelift_codegen::ir::{InstBuilder, InstructionData, Opcode, Type, Value};

impl Translator<'_> {
    /// Returns all 64 bits of a general register.
    pub(super) fn register(&mut self, r: usize) -> Value {
        match self.now.gpr[r] {
            Some(value) => value,
            None => {
                let value = self.field(I64, Self::gpr_offset(r));
                self.now.gpr[r] = Some(value);
                value
            }
        }
    }

    /// Reads a general register with an operand size.
    pub(super) fn get(&mut self, r: u8, size: u8) -> Value {
        let value = self.register(usize::from(r & 15));
        let value = match r >> 4 {
            0 => value,
            _ => self.b.ins().ushr_imm(value, 8),
        };
        self.narrow(value, size)
    }

    /// Truncates a 64-bit value to an operand size.
    pub(super) fn narrow(&mut self, value: Value, size: u8) -> Value {
        match size {
            3 => value,
            size => self.b.ins().ireduce(TYPES[usize::from(size)], value),
        }
    }

    /// Zero-extends a value to 64 bits.
    pub(super) fn wide(&mut self, value: Value) -> Value {
        let dfg = &self.b.func.dfg;
        if dfg.value_type(value) == I64 {
            return value;
        }
        let inst = dfg.value_def(value).inst();
        match inst.map(|inst| dfg.insts[inst]) {
            // Extend a constant at compile time; otherwise Cranelift would load the extended constant from memory.
            Some(InstructionData::UnaryImm {
                opcode: Opcode::Iconst,
                imm,
            }) => self.constant(imm.bits()),
            Some(InstructionData::Unary {
                opcode: Opcode::Ireduce,
                arg,
            }) if self.is_extended(arg, dfg.value_type(value)) => arg,
            _ => self.b.ins().uextend(I64, value),
        }
    }

    /// Whether a 64-bit value was zero-extended from `ty` or from a smaller type.
    fn is_extended(&self, value: Value, ty: Type) -> bool {
        let dfg = &self.b.func.dfg;
        let bits = match dfg.value_def(value).inst().map(|inst| dfg.insts[inst]) {
            Some(InstructionData::Unary {
                opcode: Opcode::Uextend,
                arg,
            }) => dfg.value_type(arg).bits(),
            Some(InstructionData::Load { opcode, .. }) => match opcode {
                Opcode::Uload8 => 8,
                Opcode::Uload16 => 16,
                Opcode::Uload32 => 32,
                _ => return false,
            },
            _ => return false,
        };
        dfg.value_type(value) == I64 && bits <= ty.bits()
    }

    /// Writes a general register with an operand size. Writing 4 bytes clears the upper half of the register; writing 1
    /// or 2 bytes leaves the rest unchanged.
    pub(super) fn set(&mut self, r: u8, size: u8, value: Value) {
        let number = usize::from(r & 15);
        self.now.changed |= 1 << number;
        let value = self.wide(value);
        let value = if size >= 2 {
            value
        } else {
            let shift = i64::from(r >> 4) * 8;
            let mask = (if size == 0 { 0xff } else { 0xffff }) << shift;
            let old = self.register(number);
            let old = self.b.ins().band_imm(old, !mask);
            let value = match shift {
                0 => value,
                shift => self.b.ins().ishl_imm(value, shift),
            };
            self.b.ins().bor(old, value)
        };
        self.now.gpr[number] = Some(value);
    }

    pub(super) fn immediate(&mut self, size: u8, value: u64) -> Value {
        let bits = 8 << size;
        let value = (value as i64) << (64 - bits) >> (64 - bits);
        match size {
            3 => self.constant(value),
            size => {
                let ty = TYPES[usize::from(size)];
                // Cranelift requires that the bits above the type's are 0.
                let value = value & ((1i64 << bits) - 1);
                self.b.ins().iconst(ty, value)
            }
        }
    }

    /// Reads operand `k`: a register, memory or an immediate.
    pub(super) fn operand(&mut self, op: &Op, k: usize, size: u8) -> Value {
        match op.r[k] {
            MEM => {
                let lin = self.lin(op);
                self.load(lin, size)
            }
            NONE => self.immediate(size, op.imm),
            r => self.get(r, size),
        }
    }
}
