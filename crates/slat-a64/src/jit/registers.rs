//! Reads and writes of vector registers in compiled code.
//!
//! The state always has the registers' values: a write stores to the state at once, and a read loads the type that its
//! user needs. Within a block, compiled code also reuses values that Cranelift does not move ([`is_fixed`]), so that a
//! chain of additions need not wait for memory.
//!
//! [`is_fixed`]: super::values::Values::is_fixed

use super::frame::Frame;
use super::translator::Translator;
use super::vectors::{Known, Vector, numbers_of};
use crate::state::State;
use cranelift_codegen::ir::types::{F32, F32X4, F64, F64X2, I8X16, I32, I64, I64X2};
use cranelift_codegen::ir::{InstBuilder, MemFlags, Type, Value};
use std::mem::offset_of;

fn offset_of_register(r: u8) -> i32 {
    (offset_of!(State, v) + 16 * usize::from(r & 31)) as i32
}

impl Translator<'_> {
    fn load_register(&mut self, r: u8, ty: Type, offset: i32) -> Value {
        let at = offset_of_register(r) + offset;
        (self.v.b.ins()).load(ty, MemFlags::trusted(), self.state, at)
    }

    fn store_register(&mut self, r: u8, value: Value, offset: i32) {
        let at = offset_of_register(r) + offset;
        (self.v.b.ins()).store(MemFlags::trusted(), value, self.state, at);
    }

    /// Writes a vector register.
    pub(super) fn set_vector(&mut self, r: u8, vector: Vector) {
        let known = &mut self.now.vectors[usize::from(r & 31)];
        *known = Known::default();
        match vector {
            Vector::Number(value) if self.v.is_fixed(value) => known.number = Some(value),
            Vector::Whole(value) if self.v.is_fixed(value) => known.whole = Some(value),
            _ => {}
        }
        match vector {
            Vector::Halves([low, high]) if self.v.known(high).is_none() => {
                self.store_register(r, low, 0);
                self.store_register(r, high, 8);
            }
            Vector::Number(value) if self.v.b.func.dfg.value_type(value) == F64 => {
                let zero = self.v.constant(0);
                self.store_register(r, value, 0);
                self.store_register(r, zero, 8);
            }
            // One store of 16 bytes, because the host can forward one store, but not two, to a load.
            _ => {
                let whole = self.whole(vector);
                self.store_register(r, whole, 0);
            }
        }
    }

    /// Returns half `half` of a vector as an integer.
    pub(super) fn half(&mut self, vector: Vector, half: usize) -> Value {
        match vector {
            Vector::Register(r) => self.load_register(r, I64, 8 * half as i32),
            Vector::Halves(halves) => halves[half],
            Vector::Whole(value) => {
                let halves = self.v.cast(value, I64X2);
                self.v.b.ins().extractlane(halves, half as u8)
            }
            Vector::Number(_) if half > 0 => self.v.constant(0),
            Vector::Number(value) => match self.v.b.func.dfg.value_type(value) {
                F64 => self.v.cast(value, I64),
                _ => {
                    let bits = self.v.cast(value, I32);
                    self.v.b.ins().uextend(I64, bits)
                }
            },
        }
    }

    /// Returns all 16 bytes of a vector.
    pub(super) fn whole(&mut self, vector: Vector) -> Value {
        match vector {
            Vector::Register(r) => match self.now.vectors[usize::from(r & 31)].whole {
                Some(value) => value,
                None => {
                    let value = self.load_register(r, I8X16, 0);
                    self.now.vectors[usize::from(r & 31)].whole = Some(value);
                    value
                }
            },
            Vector::Halves([low, high]) => match [low, high].map(|half| self.v.known(half)) {
                [Some(low), Some(high)] => {
                    let bytes = u128::from(low) | u128::from(high) << 64;
                    self.v.bytes(bytes.to_le_bytes())
                }
                [_, known] => {
                    let halves = self.v.b.ins().scalar_to_vector(I64X2, low);
                    let halves = match known {
                        Some(0) => halves,
                        _ => self.v.b.ins().insertlane(halves, high, 1),
                    };
                    self.v.cast(halves, I8X16)
                }
            },
            Vector::Whole(value) => value,
            Vector::Number(value) => {
                let ty = match self.v.b.func.dfg.value_type(value) {
                    F64 => F64X2,
                    _ => F32X4,
                };
                let zero = self.v.bytes([0; 16]);
                let zero = self.v.cast(zero, ty);
                let whole = self.v.b.ins().insertlane(zero, value, 0);
                self.v.cast(whole, I8X16)
            }
        }
    }

    /// Returns the floating-point number in lane 0 of a vector.
    pub(super) fn number_of(&mut self, vector: Vector, ty: Type) -> Value {
        let is_of_type = |this: &Self, value: &Value| this.v.b.func.dfg.value_type(*value) == ty;
        match vector {
            Vector::Number(value) if is_of_type(self, &value) => value,
            Vector::Register(r) => {
                let known = self.now.vectors[usize::from(r & 31)];
                if let Some(value) = known.number.filter(|value| is_of_type(self, value)) {
                    return value;
                }
                let value = match known.whole {
                    Some(whole) => self.number_of(Vector::Whole(whole), ty),
                    None => self.load_register(r, ty, 0),
                };
                self.now.vectors[usize::from(r & 31)].number = Some(value);
                value
            }
            Vector::Whole(value) => {
                let lanes = if ty == F64 { F64X2 } else { F32X4 };
                let lanes = self.v.cast(value, lanes);
                self.v.b.ins().extractlane(lanes, 0)
            }
            vector => {
                let bits = self.half(vector, 0);
                match (ty == F64, self.v.known(bits)) {
                    (true, Some(bits)) => self.v.b.ins().f64const(f64::from_bits(bits)),
                    (false, Some(bits)) => self.v.b.ins().f32const(f32::from_bits(bits as u32)),
                    (true, None) => self.v.cast(bits, F64),
                    (false, None) => {
                        let bits = self.v.b.ins().ireduce(I32, bits);
                        self.v.cast(bits, F32)
                    }
                }
            }
        }
    }

    /// Returns the value that the block has for the floating-point number of 1 << `size` bytes in lane 0 of a vector.
    /// `None`: the block has no such value, so the number would have to be loaded from the state.
    pub(super) fn known_number(&self, vector: Vector, size: u8) -> Option<Value> {
        let number = match vector {
            Vector::Number(value) => Some(value),
            Vector::Register(r) => self.now.vectors[usize::from(r & 31)].number,
            _ => None,
        };
        let (ty, _) = numbers_of(size)?;
        number.filter(|value| self.v.b.func.dfg.value_type(*value) == ty)
    }

    /// Stores the operands of a helper in the frame.
    pub(super) fn give(&mut self, operands: &[Vector]) {
        for (n, vector) in operands.iter().enumerate() {
            let at = offset_of!(Frame, operands) + 16 * n;
            match *vector {
                // Load without remembering the value: this code may be on a path that is not always executed.
                Vector::Register(r) => {
                    let whole = self.load_register(r, I8X16, 0);
                    self.v.set_field(at, whole);
                }
                Vector::Halves(halves) => {
                    for (half, value) in halves.into_iter().enumerate() {
                        self.v.set_field(at + 8 * half, value);
                    }
                }
                // For a scalar, the function ignores the other bytes of the operand.
                Vector::Whole(value) | Vector::Number(value) => self.v.set_field(at, value),
            }
        }
    }

    /// Whether all bits of a vector are known to be zeros.
    pub(super) fn is_zero_vector(&self, vector: Vector) -> bool {
        match vector {
            Vector::Halves(halves) => halves.iter().all(|half| self.v.known(*half) == Some(0)),
            _ => false,
        }
    }
}
