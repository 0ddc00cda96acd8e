//! Vector functions that are emitted instead of called: functions on integers that take one or a few instructions of
//! the host's vector unit, and functions that only move bytes.

use super::translator::Translator;
use super::vectors::{Vector, lanes_of};
use crate::simd::compute::{Bitwise, Narrowing, Permutation, Widening};
use crate::simd::float::Env;
use crate::simd::{Function, Integer, Op};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I8X16, I16, I32, I64};
use cranelift_codegen::ir::{InstBuilder, Type, Value};

const LANE_TYPES: [Type; 4] = [I8, I16, I32, I64];

/// The source of a byte of a result: zero, or a byte of an operand.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Zero,
    Byte { operand: usize, at: u8 },
}

/// Returns the origin of each byte of the result, if the function only moves bytes. To find out, this runs the function
/// on operands whose bytes all differ.
fn origins(function: &Function) -> Option<[Origin; 16]> {
    let moves = match function.op {
        Op::Extract | Op::Duplicate | Op::Reverse { .. } | Op::Permute { .. } => true,
        Op::Narrow { kind, rounds, .. } => {
            kind == Narrowing::Plain && !rounds && function.immediate == 0
        }
        _ => false,
    };
    if !moves {
        return None;
    }
    let label =
        |operand: u8| u128::from_le_bytes(std::array::from_fn(|at| 1 + 16 * operand + at as u8));
    let mut env = Env { fpcr: 0, fpsr: 0 };
    let result = function.compute([0, 1, 2].map(label), &mut env);
    Some(
        result
            .to_le_bytes()
            .map(|label| match label.checked_sub(1) {
                None => Origin::Zero,
                Some(label) => Origin::Byte {
                    operand: usize::from(label / 16),
                    at: label % 16,
                },
            }),
    )
}

impl Translator<'_> {
    /// Emits code for a function on integers. `None`: the caller emits a call of the interpreter's function.
    pub(super) fn integer_function(
        &mut self,
        function: &Function,
        operands: [Vector; 3],
    ) -> Option<Vector> {
        let [a, b, c] = operands;
        let size = function.size;
        if let Some(result) = self.moved(function, operands) {
            return Some(result);
        }
        let result = match function.op {
            Op::Element => return Some(self.element(function, a)),
            Op::Insert => {
                let lane = self.half(a, 0);
                let lane = match size {
                    3 => lane,
                    _ => (self.v.b.ins()).ireduce(LANE_TYPES[usize::from(size)], lane),
                };
                let whole = self.lanes(c, size);
                let whole = (self.v.b.ins()).insertlane(whole, lane, function.immediate);
                return Some(Vector::Whole(self.v.cast(whole, I8X16)));
            }
            Op::Bitwise(op) => {
                let [a, b, c] = self.wholes(operands);
                self.bits(op, a, b, c)
            }
            Op::Lanes(op) => {
                let operands = self.wholes(operands);
                self.integer_lanes(op, function, operands)?
            }
            // A pairwise function with a scalar result adds the two lanes of one register. So these lanes are the
            // operands.
            Op::Pairs(op) if u32::from(function.bytes) >> size == 1 => {
                let operands = self.wholes(operands);
                self.integer_lanes(op, function, operands)?
            }
            Op::Pairs(op) => {
                let operands = self.unzipped(function, operands)?;
                let operands = self.wholes(operands);
                self.integer_lanes(op, function, operands)?
            }
            Op::Widen(op, widening) if size < 3 => {
                let operands = self.wholes(operands);
                self.widened(op, widening, function, operands)?
            }
            Op::Narrow {
                kind: Narrowing::Plain,
                rounds: false,
                ..
            } => {
                let wide = self.lanes(a, size + 1);
                let shifted = (self.v.b.ins()).ushr_imm(wide, i64::from(function.immediate));
                let shifted = Vector::Whole(self.v.cast(shifted, I8X16));
                let narrow = Function {
                    immediate: 0,
                    ..*function
                };
                return self.moved(&narrow, [shifted, b, c]);
            }
            Op::Table => {
                let [a, b] = [a, b].map(|v| self.whole(v));
                self.table(function.immediate, a, b, c)
            }
            _ => return None,
        };
        self.cut(result, function.bytes)
    }

    fn wholes(&mut self, operands: [Vector; 3]) -> [Value; 3] {
        operands.map(|operand| self.whole(operand))
    }

    /// Returns a vector as lanes of 1 << `size` bytes.
    fn lanes(&mut self, vector: Vector, size: u8) -> Value {
        let whole = self.whole(vector);
        self.v.cast(whole, lanes_of(size))
    }

    /// Keeps the first `bytes` bytes, and makes all other bytes zero.
    pub(super) fn cut(&mut self, whole: Value, bytes: u8) -> Option<Vector> {
        match bytes {
            16 => Some(Vector::Whole(whole)),
            8 => {
                let low = self.half(Vector::Whole(whole), 0);
                Some(Vector::Halves([low, self.v.constant(0)]))
            }
            _ => None,
        }
    }

    /// Moves the elements of the first two operands with even indices to the first operand, and the elements with odd
    /// indices to the second operand. Then a function on adjacent pairs becomes a function on lanes.
    pub(super) fn unzipped(
        &mut self,
        function: &Function,
        operands: [Vector; 3],
    ) -> Option<[Vector; 3]> {
        let [evens, odds] = [false, true].map(|second| Function {
            op: Op::Permute {
                kind: Permutation::Unzip,
                second,
            },
            ..*function
        });
        let evens = self.moved(&evens, operands)?;
        let odds = self.moved(&odds, operands)?;
        Some([evens, odds, operands[2]])
    }

    /// Emits code for a function that only moves bytes.
    pub(super) fn moved(&mut self, function: &Function, operands: [Vector; 3]) -> Option<Vector> {
        let origins = origins(function)?;
        let mut used: [Option<usize>; 2] = [None; 2];
        for origin in origins {
            if let Origin::Byte { operand, .. } = origin
                && !used.contains(&Some(operand))
            {
                *used.iter_mut().find(|operand| operand.is_none())? = Some(operand);
            }
        }
        // Where the zeros are in the upper half only, no vector of zeros is needed.
        let is_half = origins[8..].iter().all(|origin| *origin == Origin::Zero);
        let has_zeros =
            origins[..8].contains(&Origin::Zero) || (!is_half && origins.contains(&Origin::Zero));
        let first = self.whole(operands[used[0]?]);
        let second = match used[1] {
            Some(_) if has_zeros => return None,
            Some(operand) => self.whole(operands[operand]),
            None if has_zeros => self.v.bytes([0; 16]),
            None => first,
        };
        let mask = origins.map(|origin| match origin {
            Origin::Zero => 16,
            Origin::Byte { operand, at } => at + if Some(operand) == used[0] { 0 } else { 16 },
        });
        let mask = (self.v.b.func.dfg.immediates).push(mask.as_slice().into());
        let result = self.v.b.ins().shuffle(first, second, mask);
        self.cut(result, if is_half { 8 } else { 16 })
    }

    fn element(&mut self, function: &Function, a: Vector) -> Vector {
        let bits = 8 << function.size;
        let bit = u32::from(function.immediate) << (3 + function.size);
        let zero = self.v.constant(0);
        if bit == 0
            && !function.is_signed
            && let Some(number) = self.known_number(a, function.size)
        {
            return Vector::Number(number);
        }
        let half = self.half(a, (bit / 64) as usize);
        let shifted = match bit % 64 {
            0 => half,
            bit => self.v.b.ins().ushr_imm(half, i64::from(bit)),
        };
        let lane = match function.is_signed {
            true => self.v.sign_extend(shifted, bits),
            false => self.v.zero_extend(shifted, bits),
        };
        Vector::Halves([lane, zero])
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

    /// Emits the computation of lanes of `function`'s size. The operands and the result are vectors of bytes.
    fn integer_lanes(
        &mut self,
        op: Integer,
        function: &Function,
        operands: [Value; 3],
    ) -> Option<Value> {
        let Function {
            size,
            is_signed,
            immediate,
            ..
        } = *function;
        let ty = lanes_of(size);
        let [a, b, c] = operands.map(|operand| self.v.cast(operand, ty));
        let (is_small, has_products) = (size < 3, size > 0);
        let zero = self.v.bytes([0; 16]);
        let zero = self.v.cast(zero, ty);
        let v = &mut self.v;
        let result = match op {
            Integer::Add => v.b.ins().iadd(a, b),
            Integer::Sub => v.b.ins().isub(a, b),
            Integer::Mul if has_products => v.b.ins().imul(a, b),
            Integer::MulAdd | Integer::MulSub if has_products => {
                let product = v.b.ins().imul(a, b);
                match op {
                    Integer::MulAdd => v.b.ins().iadd(c, product),
                    _ => v.b.ins().isub(c, product),
                }
            }
            Integer::Max if is_small && is_signed => v.b.ins().smax(a, b),
            Integer::Max if is_small => v.b.ins().umax(a, b),
            Integer::Min if is_small && is_signed => v.b.ins().smin(a, b),
            Integer::Min if is_small => v.b.ins().umin(a, b),
            Integer::Difference | Integer::DifferenceAdd if is_small => {
                let (most, least) = match is_signed {
                    true => (v.b.ins().smax(a, b), v.b.ins().smin(a, b)),
                    false => (v.b.ins().umax(a, b), v.b.ins().umin(a, b)),
                };
                let difference = v.b.ins().isub(most, least);
                match op {
                    Integer::Difference => difference,
                    _ => v.b.ins().iadd(c, difference),
                }
            }
            Integer::Equal => v.b.ins().icmp(IntCC::Equal, a, b),
            Integer::Test => {
                let both = v.b.ins().band(a, b);
                v.b.ins().icmp(IntCC::NotEqual, both, zero)
            }
            Integer::Greater if is_signed => v.b.ins().icmp(IntCC::SignedGreaterThan, a, b),
            Integer::GreaterEqual if is_signed => {
                v.b.ins().icmp(IntCC::SignedGreaterThanOrEqual, a, b)
            }
            Integer::Greater if is_small => v.b.ins().icmp(IntCC::UnsignedGreaterThan, a, b),
            Integer::GreaterEqual if is_small => {
                v.b.ins().icmp(IntCC::UnsignedGreaterThanOrEqual, a, b)
            }
            Integer::Neg { saturates: false } => v.b.ins().isub(zero, a),
            Integer::Abs { saturates: false } => v.b.ins().iabs(a),
            Integer::Ones if size == 0 => v.b.ins().popcnt(a),
            Integer::ShiftLeft => v.b.ins().ishl_imm(a, i64::from(immediate)),
            Integer::ShiftRight {
                rounds: false,
                adds,
            } => {
                let (count, bits) = (i64::from(immediate), 8 << size);
                let shifted = match is_signed {
                    true => v.b.ins().sshr_imm(a, count.min(bits - 1)),
                    false if count == bits => zero,
                    false => v.b.ins().ushr_imm(a, count),
                };
                match adds {
                    true => v.b.ins().iadd(c, shifted),
                    false => shifted,
                }
            }
            _ => return None,
        };
        Some(v.cast(result, I8X16))
    }

    /// Emits the extension of the operands and the computation of lanes of twice `function`'s size.
    fn widened(
        &mut self,
        op: Integer,
        Widening {
            upper,
            first_is_wide,
        }: Widening,
        function: &Function,
        [a, b, c]: [Value; 3],
    ) -> Option<Value> {
        if function.bytes != 16 {
            return None;
        }
        let ty = lanes_of(function.size);
        let mut extended = |operand| {
            let lanes = self.v.cast(operand, ty);
            let v = self.v.b.ins();
            let wide = match (function.is_signed, upper) {
                (true, false) => v.swiden_low(lanes),
                (true, true) => v.swiden_high(lanes),
                (false, false) => v.uwiden_low(lanes),
                (false, true) => v.uwiden_high(lanes),
            };
            self.v.cast(wide, I8X16)
        };
        let first = if first_is_wide { a } else { extended(a) };
        let second = extended(b);
        let wide = Function {
            size: function.size + 1,
            ..*function
        };
        self.integer_lanes(op, &wide, [first, second, c])
    }

    /// Emits a look-up of bytes in register `number` of a table. Bytes whose index is not in this register come
    /// from `others`.
    fn table(&mut self, number: u8, table: Value, indices: Value, others: Vector) -> Value {
        let indices = match number {
            0 => indices,
            n => {
                let first = self.v.bytes([16 * n; 16]);
                self.v.b.ins().isub(indices, first)
            }
        };
        let found = self.v.b.ins().swizzle(table, indices);
        if self.is_zero_vector(others) {
            return found;
        }
        let others = self.whole(others);
        let end = self.v.bytes([16; 16]);
        let is_there = (self.v.b.ins()).icmp(IntCC::UnsignedLessThan, indices, end);
        self.v.b.ins().bitselect(is_there, found, others)
    }
}
