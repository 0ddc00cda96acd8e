//! Finds host addresses from the last access. Programs often access the words of a structure, or of the stack, one
//! after another, and these words are usually in one page. If two addresses are computed from the same value, their
//! distance is known at compile time.
//!
//! Only the last access is remembered. Remembering the last four accesses was tried: in RSA's loops only three of eight
//! TLB look-ups remained, but RSA took 7 % longer, because the remembered addresses occupy registers. A shell,
//! checksums and gzip did not become faster.
//!
//! A loop could also keep the page of an access in values from one iteration to the next, and only compare the page.
//! This was tried, too: gzip, checksums and sorting took the same time, within the noise, because the pages occupy
//! registers and other values are spilled.

use super::kept::{Kind, LastAccess, Place};
use super::translate::Translator;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I32, I64};
use cranelift_codegen::ir::{InstBuilder, InstructionData, Opcode, Value};

const PAGE_SIZE: i64 = 4096;

/// How an access relates to the last access.
pub(super) enum Near {
    Unknown,
    /// If `is_same` is not 0, the access is in the page of the last access, `distance` bytes after its `lin`. Then its
    /// host address is `distance` bytes after the last access's `host`.
    If {
        is_same: Value,
        last: LastAccess,
        distance: i64,
    },
    Certain(Place),
}

/// The value from which an address has a constant distance. `base` is `None` if the address is a constant.
struct Origin {
    base: Option<Value>,
    distance: i64,
    /// Whether the address is only the lower half (32 bits) of the sum of value and distance.
    is_half: bool,
}

impl Translator<'_> {
    /// Returns how an access at `lin` relates to the last access.
    pub(super) fn near(&mut self, lin: Value, size: u8, kind: Kind) -> Near {
        let Some(last) = self.now.last_access else {
            return Near::Unknown;
        };
        let (origin, from) = (self.origin(lin), self.origin(last.lin));
        let distance = origin.distance.wrapping_sub(from.distance);
        let distance = match origin.is_half {
            true => i64::from(distance as i32),
            false => distance,
        };
        let grants = kind == Kind::Load || last.kind == Kind::Store;
        if (origin.base, origin.is_half) != (from.base, from.is_half)
            || !grants
            || distance.unsigned_abs() >= PAGE_SIZE as u64 / 4
        {
            return Near::Unknown;
        }
        let (end, last_end) = (distance + (1 << size), last.distance + last.bytes);
        let place = Place {
            host: last.host,
            offset: distance as i32,
        };
        if distance >= last.distance && end <= last_end {
            return Near::Certain(place);
        }
        // All bytes of both accesses must be in one page. If the last access crossed into another page, `host` is the
        // address of a copy of only its bytes.
        let (first, end) = (distance.min(last.distance), end.max(last_end));
        let first_lin = self.moved(last.lin, first);
        let most = PAGE_SIZE - (end - first);
        match self.constant_of(first_lin) {
            Some(at) if at & (PAGE_SIZE - 1) <= most => Near::Certain(place),
            Some(_) => Near::Unknown,
            None => {
                let at = self.b.ins().band_imm(first_lin, PAGE_SIZE - 1);
                let is_same = (self.b.ins()).icmp_imm(IntCC::UnsignedLessThanOrEqual, at, most);
                Near::If {
                    is_same,
                    last,
                    distance,
                }
            }
        }
    }

    /// Returns the origin of an address. In 32-bit code, an address is the lower half of a value. If a distance is
    /// added to such a lower half, the sum may exceed 4 GiB, unlike the lower half of a sum. So a sum of this kind is
    /// an origin of its own.
    fn origin(&self, lin: Value) -> Origin {
        let (base, distance) = self.root(lin);
        let mut origin = Origin {
            base,
            distance,
            is_half: false,
        };
        while let Some(base) = origin.base
            && (origin.is_half || distance == 0)
            && let Some(whole) = self.half_of(base, origin.is_half)
        {
            let (base, distance) = self.root(whole);
            origin = Origin {
                base,
                distance: origin.distance.wrapping_add(distance),
                is_half: true,
            };
        }
        origin
    }

    /// If `value` is the lower half of another value, zero-extended, returns the other value. If `is_half`, also if
    /// `value` is the lower half of another value as a 32-bit value.
    fn half_of(&self, value: Value, is_half: bool) -> Option<Value> {
        let dfg = &self.b.func.dfg;
        match dfg.insts[dfg.value_def(value).inst()?] {
            InstructionData::BinaryImm64 {
                opcode: Opcode::BandImm,
                arg,
                imm,
            } if imm.bits() == 0xffff_ffff => Some(arg),
            InstructionData::Unary {
                opcode: Opcode::Uextend,
                arg,
            } if dfg.value_type(arg) == I32 => Some(arg),
            InstructionData::Unary {
                opcode: Opcode::Ireduce,
                arg,
            } if is_half && dfg.value_type(value) == I32 => Some(arg),
            _ => None,
        }
    }

    /// Emits the computation of an address again, for rare code, so that the frequent code need not keep the address in
    /// a register.
    pub(super) fn again(&mut self, lin: Value) -> Value {
        let Origin {
            base,
            distance,
            is_half,
        } = self.origin(lin);
        let sum = match base {
            None => self.constant(distance),
            Some(base) => self.b.ins().iadd_imm(base, distance),
        };
        match is_half {
            false => sum,
            true if self.size_of(sum) == 3 => self.b.ins().band_imm(sum, 0xffff_ffff),
            true => self.b.ins().uextend(I64, sum),
        }
    }

    /// Returns the value from which an address has a constant distance, and the distance. `None`: the address is a
    /// constant, returned as the distance.
    pub(super) fn root(&self, lin: Value) -> (Option<Value>, i64) {
        let dfg = &self.b.func.dfg;
        let (mut value, mut distance) = (lin, 0i64);
        loop {
            let inst = dfg.value_def(value).inst();
            match inst.map(|inst| dfg.insts[inst]) {
                Some(InstructionData::BinaryImm64 {
                    opcode: Opcode::IaddImm,
                    arg,
                    imm,
                }) => {
                    distance = distance.wrapping_add(imm.bits());
                    value = arg;
                }
                Some(InstructionData::UnaryImm {
                    opcode: Opcode::Iconst,
                    imm,
                }) => return (None, distance.wrapping_add(imm.bits())),
                _ => return (Some(value), distance),
            }
        }
    }

    /// Returns the address `by` bytes after `lin`. If `lin` is a sum of a value and a distance, changes the distance
    /// instead of adding twice.
    pub(super) fn moved(&mut self, lin: Value, by: i64) -> Value {
        match self.root(lin) {
            _ if by == 0 => lin,
            (None, at) => self.constant(at.wrapping_add(by)),
            (Some(base), at) if at.wrapping_add(by) == 0 => base,
            (Some(base), at) => self.b.ins().iadd_imm(base, at.wrapping_add(by)),
        }
    }
}
