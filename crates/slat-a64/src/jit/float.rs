//! Floating-point functions that the host's unit computes.
//!
//! The code of a region computes on the host only if FPCR has the usual mode ([`Context`](super::context::Context)):
//! results are rounded to nearest, and denormals are not flushed. The host then has the same results as Arm, and agrees
//! on which results are inexact. The host's inexact flag remembers that until compiled code is left
//! ([`slat_jit::floats`]). In some cases compiled code calls the interpreter's function ([`Function::compute`])
//! instead: if the result is a NaN, an infinity, or so small that Arm and the host may disagree about underflow, or if
//! an operand raises an exception.
//!
//! Cranelift may move a computation on constants, or on values from before a loop, to an earlier place. The host would
//! then set the inexact flag although the guest has not executed the instruction. So the operands are values that have
//! just been loaded, or results that Cranelift does not move (`Values::is_fixed`).

use super::frame::Frame;
use super::host::{Shape, Usual};
use super::translator::Translator;
use super::truth::Truth;
use super::vectors::Vector;
use crate::simd::arithmetic::Extreme;
use crate::simd::compute::Float;
use crate::simd::float::Rounding;
use crate::simd::{Function, Op};
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::types::{F32, F64, I8X16, I64};
use cranelift_codegen::ir::{InstBuilder, Value};
use std::mem::offset_of;

/// An operation that the host's floating-point unit computes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    Add,
    Sub,
    Mul {
        negates: bool,
    },
    Div,
    Sqrt,
    MulAdd {
        negates_product: bool,
        negates_addend: bool,
    },
}

impl Operation {
    fn of(float: Float) -> Option<Self> {
        Some(match float {
            Float::Add => Operation::Add,
            Float::Sub => Operation::Sub,
            Float::Mul { extended: false } => Operation::Mul { negates: false },
            Float::NegatedMul => Operation::Mul { negates: true },
            Float::Div => Operation::Div,
            Float::Sqrt => Operation::Sqrt,
            Float::MulAdd {
                negates_product,
                negates_addend,
            } if slat_jit::has_fused_multiply_add() => Operation::MulAdd {
                negates_product,
                negates_addend,
            },
            _ => return None,
        })
    }

    /// Returns which results of the operation are right. For a sum or a square root it suffices to be finite: a
    /// denormal sum is exact, and a square root is never denormal.
    fn usual(self) -> Usual {
        match self {
            Operation::Add | Operation::Sub | Operation::Sqrt => Usual::Finite,
            Operation::Mul { .. } | Operation::Div | Operation::MulAdd { .. } => Usual::Normal,
        }
    }
}

impl Translator<'_> {
    /// Emits code for a floating-point function. `None`: the caller emits a call of the interpreter's function.
    pub(super) fn float_function(
        &mut self,
        function: &Function,
        operands: [Vector; 3],
    ) -> Option<Vector> {
        if let Op::Float(Float::Abs | Float::Neg) = function.op {
            return self.sign_changed(function, operands[0]);
        }
        if !self.context.has_usual_floats {
            return None;
        }
        match function.op {
            Op::Float(Float::ToFixed {
                mode: Rounding::Zero,
            }) if function.immediate == 0 => {
                let shape = Shape::of(function).filter(|shape| shape.is_scalar())?;
                self.integer_of(function, operands, shape, 8 << function.size)
            }
            Op::ToGeneral {
                mode: Rounding::Zero,
                bits,
            } if function.immediate == 0 => {
                let shape = Shape::scalar(function.size)?;
                self.integer_of(function, operands, shape, bits.into())
            }
            Op::Float(Float::FromFixed) if function.immediate == 0 => {
                let shape = Shape::of(function).filter(|shape| shape.is_scalar())?;
                let bits = self.half(operands[0], 0);
                Some(self.number_from(function, bits, shape, 8 << function.size))
            }
            Op::FromGeneral { bits } if function.immediate == 0 => {
                let shape = Shape::scalar(function.size)?;
                // Passes the operand through memory, so that Cranelift cannot move the conversion.
                self.give(&[operands[0]]);
                let number = self.v.field(offset_of!(Frame, operands));
                Some(self.number_from(function, number, shape, bits.into()))
            }
            Op::Convert { from } => self.convert(function, operands, from),
            Op::Float(Float::Extreme(which)) => self.extreme(function, operands, which),
            Op::Float(Float::Equal { absolute: false }) => {
                self.compare_lanes(function, operands, FloatCC::Equal)
            }
            Op::Float(Float::Greater { absolute: false }) => {
                self.compare_lanes(function, operands, FloatCC::GreaterThan)
            }
            Op::Float(Float::GreaterEqual { absolute: false }) => {
                self.compare_lanes(function, operands, FloatCC::GreaterThanOrEqual)
            }
            Op::Float(float) => self.compute_on_host(function, operands, Operation::of(float)?),
            Op::FloatPairs(float) => {
                let operation = Operation::of(float)?;
                let operands = match u32::from(function.bytes) >> function.size {
                    1 => operands,
                    _ => self.unzipped(function, operands)?,
                };
                let each = Function {
                    op: Op::Float(float),
                    ..*function
                };
                self.compute_on_host(&each, operands, operation)
            }
            _ => None,
        }
    }

    fn compute_on_host(
        &mut self,
        function: &Function,
        operands: [Vector; 3],
        operation: Operation,
    ) -> Option<Vector> {
        let shape = Shape::of(function)?;
        let a = self.numbers(operands[0], shape);
        let mut second = || self.numbers(operands[1], shape);
        let (b, result) = match operation {
            Operation::Sqrt => (a, self.v.b.ins().sqrt(a)),
            Operation::Add => {
                let b = second();
                (b, self.v.b.ins().fadd(a, b))
            }
            Operation::Sub => {
                let b = second();
                (b, self.v.b.ins().fsub(a, b))
            }
            Operation::Mul { negates } => {
                let b = second();
                let product = self.v.b.ins().fmul(a, b);
                let product = if negates {
                    self.v.b.ins().fneg(product)
                } else {
                    product
                };
                (b, product)
            }
            Operation::Div => {
                let b = second();
                (b, self.v.b.ins().fdiv(a, b))
            }
            Operation::MulAdd {
                negates_product,
                negates_addend,
            } => {
                let b = second();
                let c = self.numbers(operands[2], shape);
                let factor = if negates_product {
                    self.v.b.ins().fneg(a)
                } else {
                    a
                };
                let addend = if negates_addend {
                    self.v.b.ins().fneg(c)
                } else {
                    c
                };
                (b, self.v.b.ins().fma(factor, b, addend))
            }
        };
        let usual = self.is_usual(result, operation.usual(), shape);
        let zeros = match operation {
            _ if operation.usual() == Usual::Finite => None,
            Operation::Div => Some([a, a]),
            _ => Some([a, b]),
        };
        let bits = self.as_bits(result, shape);
        let result = self.or_computed(function, operands, (bits, usual), |t| {
            zeros.map(|zeros| t.is_exact(result, zeros, shape))
        });
        self.numbers_vector(result, shape)
    }

    /// Emits FABS and FNEG, which raise no exceptions.
    fn sign_changed(&mut self, function: &Function, a: Vector) -> Option<Vector> {
        let shape = Shape::of(function)?;
        let numbers = self.numbers(a, shape);
        let result = match function.op {
            Op::Float(Float::Abs) => self.v.b.ins().fabs(numbers),
            _ => self.v.b.ins().fneg(numbers),
        };
        let bits = self.as_bits(result, shape);
        self.numbers_vector(bits, shape)
    }

    /// Emits a conversion to an integer of `bits` bits, rounding towards zero.
    fn integer_of(
        &mut self,
        function: &Function,
        operands: [Vector; 3],
        shape: Shape,
        bits: u32,
    ) -> Option<Vector> {
        let a = self.number_of(operands[0], shape.ty);
        // The host converts to signed 64-bit integers only, so unsigned 64-bit results of 2^63 and more are left to the
        // function.
        let most = bits - u32::from(function.is_signed || bits == 64);
        let limit = self.number_constant(2f64.powi(most as i32), shape);
        let value = match function.is_signed {
            true => self.v.b.ins().fabs(a),
            false => a,
        };
        let mut fits = self.v.b.ins().fcmp(FloatCC::LessThan, value, limit);
        if !function.is_signed {
            let least = self.number_constant(-1.0, shape);
            let is_positive = self.v.b.ins().fcmp(FloatCC::GreaterThan, a, least);
            fits = self.v.b.ins().band(fits, is_positive);
        }
        // Convert 0 instead of a number out of range: the host would report some of these conversions as inexact.
        let zero = self.number_constant(0.0, shape);
        let converted = self.v.b.ins().select(fits, a, zero);
        let integer = self.v.b.ins().fcvt_to_sint_sat(I64, converted);
        let integer = self.v.zero_extend(integer, bits);
        let integer = self.or_computed(function, operands, (integer, fits), |_| None);
        let zero = self.v.constant(0);
        Some(Vector::Halves([integer, zero]))
    }

    /// Emits a conversion from an integer of `bits` bits. The conversion can neither overflow nor underflow.
    fn number_from(
        &mut self,
        function: &Function,
        number: Value,
        shape: Shape,
        bits: u32,
    ) -> Vector {
        Vector::Number(match function.is_signed {
            true => {
                let number = self.v.sign_extend(number, bits);
                self.v.b.ins().fcvt_from_sint(shape.ty, number)
            }
            false if bits < 64 => {
                let number = self.v.zero_extend(number, bits);
                self.v.b.ins().fcvt_from_sint(shape.ty, number)
            }
            false => self.v.b.ins().fcvt_from_uint(shape.ty, number),
        })
    }

    /// Emits a conversion between single and double precision.
    fn convert(&mut self, function: &Function, operands: [Vector; 3], from: u8) -> Option<Vector> {
        let (from, to) = (Shape::scalar(from)?, Shape::scalar(function.size)?);
        let a = self.number_of(operands[0], from.ty);
        let (result, usual) = match (from.ty, to.ty) {
            (F32, F64) => (self.v.b.ins().fpromote(F64, a), Usual::Finite),
            _ => (self.v.b.ins().fdemote(F32, a), Usual::Normal),
        };
        let usual = self.is_usual(result, usual, to);
        let result = self.or_computed(function, operands, (result, usual), |t| {
            let zero = t.number_constant(0.0, from);
            Some(t.v.b.ins().fcmp(FloatCC::Equal, a, zero))
        });
        Some(Vector::Number(result))
    }

    /// Emits FMAX, FMIN, FMAXNM and FMINNM of two scalars.
    fn extreme(
        &mut self,
        function: &Function,
        operands: [Vector; 3],
        which: Extreme,
    ) -> Option<Vector> {
        let shape = Shape::of(function).filter(|shape| shape.is_scalar())?;
        let [a, b] = [operands[0], operands[1]].map(|operand| self.number_of(operand, shape.ty));
        let cc = match which {
            Extreme::Max | Extreme::MaxNumber => FloatCC::GreaterThan,
            Extreme::Min | Extreme::MinNumber => FloatCC::LessThan,
        };
        let first = self.v.b.ins().fcmp(cc, a, b);
        let result = self.v.b.ins().select(first, a, b);
        let differ = self.v.b.ins().fcmp(FloatCC::OrderedNotEqual, a, b);
        let result = self.or_computed(function, operands, (result, differ), |t| {
            // If `a` and `b` are equal and not zero, either is the result. Two zeros may differ in sign, so the
            // function decides.
            let zero = t.number_constant(0.0, shape);
            let equal = t.v.b.ins().fcmp(FloatCC::Equal, a, b);
            let is_zero = t.v.b.ins().fcmp(FloatCC::Equal, a, zero);
            Some(t.v.b.ins().icmp(IntCC::UnsignedGreaterThan, equal, is_zero))
        });
        Some(Vector::Number(result))
    }

    /// Emits FCMEQ, FCMGE and FCMGT of vectors.
    fn compare_lanes(
        &mut self,
        function: &Function,
        operands: [Vector; 3],
        cc: FloatCC,
    ) -> Option<Vector> {
        let shape = Shape::of(function).filter(|shape| !shape.is_scalar())?;
        let [a, b] = [operands[0], operands[1]].map(|operand| self.numbers(operand, shape));
        let ordered = self.v.b.ins().fcmp(FloatCC::Ordered, a, b);
        let usual = self.all(ordered, shape);
        let result = self.v.b.ins().fcmp(cc, a, b);
        let result = self.v.cast(result, I8X16);
        let result = self.or_computed(function, operands, (result, usual), |_| None);
        self.numbers_vector(result, shape)
    }

    /// Emits FCMP and FCMPE. `None`: the caller emits a call of the interpreter's function.
    pub(super) fn compare_on_host(
        &mut self,
        function: &Function,
        operands: [Vector; 3],
    ) -> Option<[Truth; 4]> {
        let Op::Compare {
            conditional: false, ..
        } = function.op
        else {
            return None;
        };
        let shape = Shape::scalar(function.size)?;
        if !self.context.has_usual_floats {
            return None;
        }
        let [a, b] = [operands[0], operands[1]].map(|operand| self.number_of(operand, shape.ty));
        let mut is = |cc| self.v.b.ins().fcmp(cc, a, b);
        let [less, equal, unordered] =
            [FloatCC::LessThan, FloatCC::Equal, FloatCC::Unordered].map(&mut is);
        // If an operand is a NaN, call the interpreter's function, which raises the exception that may be due.
        let (raises, on) = (self.v.b.create_block(), self.v.b.create_block());
        self.v.b.set_cold_block(raises);
        self.v.b.ins().brif(unordered, raises, &[], on, &[]);
        self.v.b.seal_block(raises);
        self.v.b.switch_to_block(raises);
        self.call_function(function, operands);
        self.v.b.ins().jump(on, &[]);
        self.v.b.seal_block(on);
        self.v.b.switch_to_block(on);
        let [less, equal, unordered] = [less, equal, unordered].map(Truth::Is);
        let not_less = less.opposite(&mut self.v);
        Some([less, equal, not_less, unordered])
    }
}
