//! Parts of the code that `float` emits: operands, and checks of the results.

use super::helpers::helper;
use super::translator::Translator;
use super::vectors::{Vector, numbers_of};
use crate::simd::Function;
use crate::simd::float::Format;
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::types::{F64, I8X16, I32, I64X2};
use cranelift_codegen::ir::{InstBuilder, Type, Value};

/// Which results of the host's unit are known to equal Arm's.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Usual {
    /// Finite results. For operations with this value, no result is both tiny and inexact.
    Finite,
    /// Finite results larger than the least normal number. If an operand is zero, the result is exact, and any finite
    /// result is right.
    Normal,
}

/// The shape of a function's operands and result: one number, or lanes of whole registers.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) ty: Type,
    /// The number of lanes of the vector that are computed.
    pub(super) lanes: u32,
    pub(super) size: u8,
}

impl Shape {
    pub(super) fn of(function: &Function) -> Option<Self> {
        let (scalar, vector) = numbers_of(function.size)?;
        let lanes = u32::from(function.bytes) >> function.size;
        Some(Self {
            ty: if lanes == 1 { scalar } else { vector },
            lanes,
            size: function.size,
        })
    }

    pub(super) fn scalar(size: u8) -> Option<Self> {
        let (ty, _) = numbers_of(size)?;
        Some(Self { ty, lanes: 1, size })
    }

    pub(super) fn is_scalar(self) -> bool {
        self.lanes == 1
    }
}

impl Translator<'_> {
    /// Returns an operand as a scalar or a vector of numbers, as `shape` says.
    pub(super) fn numbers(&mut self, vector: Vector, shape: Shape) -> Value {
        if shape.is_scalar() {
            return self.number_of(vector, shape.ty);
        }
        let whole = match shape.lanes << shape.size {
            16 => self.whole(vector),
            // Clear the upper half: computing with its contents would set flags.
            _ => {
                let low = self.half(vector, 0);
                let lanes = self.v.b.ins().scalar_to_vector(I64X2, low);
                self.v.cast(lanes, I8X16)
            }
        };
        self.v.cast(whole, shape.ty)
    }

    /// Returns a constant number in all lanes.
    pub(super) fn all_lanes(&mut self, bits: u64, shape: Shape) -> Value {
        let number = match shape.size {
            3 => self.v.b.ins().f64const(f64::from_bits(bits)),
            _ => self.v.b.ins().f32const(f32::from_bits(bits as u32)),
        };
        match shape.is_scalar() {
            true => number,
            false => self.v.b.ins().splat(shape.ty, number),
        }
    }

    /// Returns whether a comparison holds for all lanes that are computed.
    pub(super) fn all(&mut self, truth: Value, shape: Shape) -> Value {
        if shape.is_scalar() {
            return truth;
        }
        let bits = self.v.b.ins().vhigh_bits(I32, truth);
        let mask = (1 << shape.lanes) - 1;
        let bits = self.v.b.ins().band_imm(bits, mask);
        self.v.b.ins().icmp_imm(IntCC::Equal, bits, mask)
    }

    /// Returns `result` if `usual` or the condition from `rarely` holds, and else calls the interpreter's function for
    /// the result.
    pub(super) fn or_computed(
        &mut self,
        function: &Function,
        operands: [Vector; 3],
        (result, usual): (Value, Value),
        rarely: impl FnOnce(&mut Self) -> Option<Value>,
    ) -> Value {
        let ty = self.v.b.func.dfg.value_type(result);
        let (done, unusual) = (self.v.b.create_block(), self.v.b.create_block());
        let found = self.v.b.append_block_param(done, ty);
        self.v.b.set_cold_block(unusual);
        (self.v.b.ins()).brif(usual, done, &[result.into()], unusual, &[]);
        self.v.b.seal_block(unusual);
        self.v.b.switch_to_block(unusual);
        if let Some(is_right) = rarely(self) {
            let wrong = self.v.b.create_block();
            self.v.b.set_cold_block(wrong);
            (self.v.b.ins()).brif(is_right, done, &[result.into()], wrong, &[]);
            self.v.b.seal_block(wrong);
            self.v.b.switch_to_block(wrong);
        }
        self.call_function(function, operands);
        let computed = self.result(ty);
        self.v.b.ins().jump(done, &[computed.into()]);
        self.v.b.seal_block(done);
        self.v.b.switch_to_block(done);
        found
    }

    /// Returns a result as a vector.
    pub(super) fn numbers_vector(&mut self, result: Value, shape: Shape) -> Option<Vector> {
        match shape.is_scalar() {
            true => Some(Vector::Number(result)),
            false => self.cut(result, (shape.lanes << shape.size) as u8),
        }
    }

    /// Returns lanes as a vector of bytes. A scalar stays as it is.
    pub(super) fn as_bits(&mut self, result: Value, shape: Shape) -> Value {
        match shape.is_scalar() {
            true => result,
            false => self.v.cast(result, I8X16),
        }
    }

    /// Returns whether the absolute value of each lane compares as `cc` with the number that has these bits.
    pub(super) fn magnitudes(
        &mut self,
        numbers: Value,
        cc: FloatCC,
        bits: u64,
        shape: Shape,
    ) -> Value {
        let magnitudes = self.v.b.ins().fabs(numbers);
        let limit = self.all_lanes(bits, shape);
        self.v.b.ins().fcmp(cc, magnitudes, limit)
    }

    pub(super) fn is_usual(&mut self, result: Value, usual: Usual, shape: Shape) -> Value {
        let format = Format::of(shape.size);
        let finite = self.magnitudes(result, FloatCC::LessThan, format.infinity(false), shape);
        let holds = match usual {
            Usual::Finite => finite,
            Usual::Normal => {
                let least = 1 << format.fraction;
                let normal = self.magnitudes(result, FloatCC::GreaterThan, least, shape);
                self.v.b.ins().band(finite, normal)
            }
        };
        self.all(holds, shape)
    }

    /// Returns whether each lane is finite, and either larger than the least normal number or the result of a zero
    /// operand.
    pub(super) fn is_exact(&mut self, result: Value, operands: [Value; 2], shape: Shape) -> Value {
        let format = Format::of(shape.size);
        let zero = self.all_lanes(0, shape);
        let [a, b] = operands.map(|operand| self.v.b.ins().fcmp(FloatCC::Equal, operand, zero));
        let is_zero = self.v.b.ins().bor(a, b);
        let normal = self.magnitudes(result, FloatCC::GreaterThan, 1 << format.fraction, shape);
        let finite = self.magnitudes(result, FloatCC::LessThan, format.infinity(false), shape);
        let either = self.v.b.ins().bor(is_zero, normal);
        let holds = self.v.b.ins().band(either, finite);
        self.all(holds, shape)
    }

    pub(super) fn number_constant(&mut self, number: f64, shape: Shape) -> Value {
        match shape.ty {
            F64 => self.v.b.ins().f64const(number),
            _ => self.v.b.ins().f32const(number as f32),
        }
    }

    /// Emits a call of the interpreter's function. Its result is in the frame.
    pub(super) fn call_function(&mut self, function: &Function, operands: [Vector; 3]) {
        self.give(&operands);
        let function = self.keep(*function);
        self.v.call(helper!(compute), &[function], 0);
    }
}
