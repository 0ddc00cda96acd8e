//! The forms that a vector has in the compiler.

use super::values::Values;
use cranelift_codegen::ir::immediates::V128Imm;
use cranelift_codegen::ir::types::{F32, F32X4, F64, F64X2, I8X16, I16X8, I32X4, I64X2};
use cranelift_codegen::ir::{
    Endianness, InstBuilder, InstructionData, MemFlags, Opcode, Type, Value, ValueDef,
};

/// A vector of 128 bits.
#[derive(Clone, Copy, Debug)]
pub(super) enum Vector {
    /// The value of a register, not loaded yet: the code that uses it loads it. An instruction reads all its registers
    /// before it writes one.
    Register(u8),
    Halves([Value; 2]),
    /// A value with all 16 bytes of the register.
    Whole(Value),
    /// A floating-point number of single or double precision. All other bytes of the register are zeros.
    Number(Value),
}

/// The values of a register that the block can reuse.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Known {
    pub(super) whole: Option<Value>,
    pub(super) number: Option<Value>,
}

/// Returns the type of a whole register with lanes of 1 << `size` bytes.
pub(super) fn lanes_of(size: u8) -> Type {
    [I8X16, I16X8, I32X4, I64X2][usize::from(size)]
}

/// Returns the type of a floating-point number of 1 << `size` bytes, and that of a whole register of them. `None`: the
/// host does not compute with such numbers.
pub(super) fn numbers_of(size: u8) -> Option<(Type, Type)> {
    match size {
        2 => Some((F32, F32X4)),
        3 => Some((F64, F64X2)),
        _ => None,
    }
}

impl Values<'_> {
    /// Returns the same bits as a value of another type.
    pub(super) fn cast(&mut self, value: Value, ty: Type) -> Value {
        match self.b.func.dfg.value_type(value) == ty {
            true => value,
            false => {
                let flags = MemFlags::new().with_endianness(Endianness::Little);
                self.b.ins().bitcast(ty, flags, value)
            }
        }
    }

    /// Returns the number if a value is a constant.
    pub(super) fn known(&self, value: Value) -> Option<u64> {
        let inst = self.b.func.dfg.value_def(value).inst()?;
        match self.b.func.dfg.insts[inst] {
            InstructionData::UnaryImm {
                opcode: Opcode::Iconst,
                imm,
            } => Some(imm.bits() as u64),
            _ => None,
        }
    }

    /// Returns a constant vector of bytes.
    pub(super) fn bytes(&mut self, bytes: [u8; 16]) -> Value {
        let constant = V128Imm(bytes).into();
        let constant = self.b.func.dfg.constants.insert(constant);
        self.b.ins().vconst(I8X16, constant)
    }

    /// Whether Cranelift computes a value exactly where it is defined: the value comes from a load or is a block
    /// parameter. Cranelift may compute other values earlier, for example before a loop that does not always need them;
    /// the host would then set its inexact flag too early.
    pub(super) fn is_fixed(&self, value: Value) -> bool {
        let dfg = &self.b.func.dfg;
        match dfg.value_def(value) {
            ValueDef::Param(..) => true,
            ValueDef::Result(inst, _) => match dfg.insts[inst] {
                InstructionData::Load { .. } => true,
                InstructionData::Unary { arg, .. } => self.is_fixed(arg),
                _ => false,
            },
            ValueDef::Union(..) => false,
        }
    }
}
