//! Accesses of compiled code to guest memory. Inline are a look at where the last access was, which often is near, or else at the TLB,
//! and the access itself, which is guarded. Everything else calls a helper.

use super::Tier;
use super::helpers::{self, OrStop};
use super::translate::{TYPES, Translator};
use crate::Cpu;
use crate::op::Op;
use crate::tlb;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I32, I64};
use cranelift_codegen::ir::{InstBuilder, InstructionData, MemFlags, Opcode, TrapCode, Value};
use iced_x86::Mnemonic;
use std::mem::offset_of;

const PAGE_SIZE: u64 = 4096;
/// How an access to guest memory is marked: if it fails, the region stops there (`access_failed`).
pub(super) const GUARDED: TrapCode = TrapCode::unwrap_user(1);

/// What an access wants of its page. What may be stored to may be loaded from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Load,
    Store,
}

impl Kind {
    /// Returns where an entry of the TLB has the page that it may be made to.
    fn tag(self) -> usize {
        match self {
            Kind::Load => tlb::READ,
            Kind::Store => tlb::WRITE,
        }
    }

    fn helper(self) -> OrStop {
        match self {
            Kind::Load => helpers::PLACE_TO_LOAD,
            Kind::Store => helpers::PLACE_TO_STORE,
        }
    }
}

/// Where an access is made: so many bytes from a host address.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) host: Value,
    pub(super) offset: i32,
}

/// The last access, if nothing has happened since that may have changed the TLB: it was made `distance` bytes from the address `lin`, and
/// as far from `host`.
#[derive(Clone, Copy)]
pub(super) struct LastAccess {
    lin: Value,
    host: Value,
    distance: i64,
    bytes: i64,
    kind: Kind,
}

/// What the last access tells of an access.
enum Near {
    Unknown,
    /// It is made so far from where the last one's distance counts from, if the value is not 0.
    If(Value, LastAccess, i64),
    Certain(Place),
}

/// What an address is computed from: it is a fixed distance from a value, or from 0.
struct Origin {
    base: Option<Value>,
    distance: i64,
    /// Whether it is the lower half of that.
    is_half: bool,
}

impl Translator<'_> {
    /// Returns where an access is made: as far from the last one as it is in memory, if that is the same page, or else where the TLB says,
    /// or a helper.
    fn place(&mut self, lin: Value, size: u8, kind: Kind) -> Place {
        self.prepare_stop();
        let (lin, host, distance) = match self.near(lin, size, kind) {
            Near::Certain(place) => return place,
            Near::If(is_same, last, distance) => {
                let host = self.known_or(is_same, last.host, |translator| {
                    let lin = translator.again(lin);
                    let found = translator.ask(lin, size, kind);
                    translator.b.ins().iadd_imm(found, -distance)
                });
                (last.lin, host, distance)
            }
            Near::Unknown => {
                let (is_there, addend) = self.look_up(lin, size, kind);
                let addend = self.known_or(is_there, addend, |translator| {
                    let found = translator.ask(lin, size, kind);
                    translator.b.ins().isub(found, lin)
                });
                let host = match self.constant_of(lin) {
                    Some(lin) => self.moved(addend, lin),
                    None => self.b.ins().iadd(addend, lin),
                };
                (lin, host, 0)
            }
        };
        self.now.last_access = Some(LastAccess {
            lin,
            host,
            distance,
            bytes: 1 << size,
            kind,
        });
        Place {
            host,
            offset: distance as i32,
        }
    }

    /// Returns `known` if `is_known` is not 0, and else, which is rare, what `find` finds.
    fn known_or(
        &mut self,
        is_known: Value,
        known: Value,
        find: impl FnOnce(&mut Self) -> Value,
    ) -> Value {
        let (miss, on) = (self.cold(), self.b.create_block());
        let value = self.b.append_block_param(on, I64);
        (self.b.ins()).brif(is_known, on, &[known.into()], miss, &[]);
        self.b.switch_to_block(miss);
        let found = find(self);
        self.b.ins().jump(on, &[found.into()]);
        self.b.switch_to_block(on);
        value
    }

    /// Asks a helper for the host address of an access.
    fn ask(&mut self, lin: Value, size: u8, kind: Kind) -> Value {
        let bytes = self.constant(1 << size);
        self.call_or_stop(kind.helper(), &[lin, bytes])
    }

    /// Looks `lin` up in the TLB. Returns whether it is there, and the distance of its host address then.
    fn look_up(&mut self, lin: Value, size: u8, kind: Kind) -> (Value, Value) {
        let shift = 12 - tlb::ENTRY_BITS;
        let mask = (tlb::ENTRIES as i64 - 1) << tlb::ENTRY_BITS;
        let last = self.moved(lin, (1 << size) - 1);
        let table = self.field(I64, offset_of!(Cpu, compiled.table));
        let (entry, offset, wanted) = match (self.constant_of(lin), self.constant_of(last)) {
            (Some(lin), Some(last)) => (
                table,
                (lin >> shift & mask) as i32,
                self.constant(last | 0xfff),
            ),
            _ => {
                let at = self.b.ins().ushr_imm(lin, i64::from(shift));
                let at = self.b.ins().band_imm(at, mask);
                let entry = self.b.ins().iadd(table, at);
                (entry, 0, self.b.ins().bor_imm(last, 0xfff))
            }
        };
        let trusted = MemFlags::trusted();
        let addend = (self.b.ins()).load(I64, trusted, entry, offset + tlb::ADDEND as i32);
        // `found` is loaded last, and the second operand: the baseline tier's comparison reads it from memory, without a load of its own.
        let found = (self.b.ins()).load(I64, trusted, entry, offset + kind.tag() as i32);
        (self.b.ins().icmp(IntCC::Equal, wanted, found), addend)
    }

    /// Says what the last access tells of one at `lin`. Only the last one tells anything: another one before it was perhaps looked up
    /// by the helper, which may have waited, and what was known of other pages is nothing then.
    fn near(&mut self, lin: Value, size: u8, kind: Kind) -> Near {
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
            || distance.unsigned_abs() >= PAGE_SIZE / 4
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
        // What both accesses reach has to be in one page. If the last one was in two, `host` was a copy.
        let (first, end) = (distance.min(last.distance), end.max(last_end));
        let first_lin = self.moved(last.lin, first);
        let most = PAGE_SIZE as i64 - (end - first);
        match self.constant_of(first_lin) {
            Some(at) if at & (PAGE_SIZE as i64 - 1) <= most => Near::Certain(place),
            Some(_) => Near::Unknown,
            None => {
                let at = self.b.ins().band_imm(first_lin, PAGE_SIZE as i64 - 1);
                let is_same = (self.b.ins()).icmp_imm(IntCC::UnsignedLessThanOrEqual, at, most);
                Near::If(is_same, last, distance)
            }
        }
    }

    /// Returns what an address is computed from. Those in code of 32 bits are lower halves.
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

    /// Returns the value whose lower half another one has: extended, or not if only lower halves matter.
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

    /// Computes an address again: where it is used alone, it is not computed elsewhere then.
    fn again(&mut self, lin: Value) -> Value {
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

    /// Returns the value that an address is a fixed distance from, if it is not fixed itself, and the distance.
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

    /// Returns the address `by` bytes after another one: one sum, if that is a sum itself.
    pub(super) fn moved(&mut self, lin: Value, by: i64) -> Value {
        match self.root(lin) {
            _ if by == 0 => lin,
            (None, at) => self.constant(at.wrapping_add(by)),
            (Some(base), at) if at.wrapping_add(by) == 0 => base,
            (Some(base), at) => self.b.ins().iadd_imm(base, at.wrapping_add(by)),
        }
    }

    /// Returns the flags of an access to guest memory.
    pub(super) fn guarded() -> MemFlags {
        MemFlags::new().with_trap_code(Some(GUARDED))
    }

    /// Returns where to load from.
    pub(super) fn place_to_load(&mut self, lin: Value, size: u8) -> Place {
        self.place(lin, size, Kind::Load)
    }

    /// Returns where to store at.
    pub(super) fn place_to_store(&mut self, lin: Value, size: u8) -> Place {
        self.place(lin, size, Kind::Store)
    }

    /// Loads from guest memory.
    pub(super) fn load(&mut self, lin: Value, size: u8) -> Value {
        let Place { host, offset } = self.place_to_load(lin, size);
        let flags = Self::guarded();
        if self.tier == Tier::Baseline || size > 2 {
            let ty = TYPES[usize::from(size)];
            return self.b.ins().load(ty, flags, host, offset);
        }
        // The host extends it for nothing.
        let value = match size {
            0 => self.b.ins().uload8(I64, flags, host, offset),
            1 => self.b.ins().uload16(I64, flags, host, offset),
            _ => self.b.ins().uload32(flags, host, offset),
        };
        self.narrow(value, size)
    }

    /// Stores to guest memory. Nothing of the instruction has happened before.
    pub(super) fn store(&mut self, lin: Value, size: u8, value: Value) {
        let place = self.place_to_store(lin, size);
        self.store_at(place, value);
    }

    fn store_at(&mut self, Place { host, offset }: Place, value: Value) {
        (self.b.ins()).store(Self::guarded(), value, host, offset);
        self.now.has_changed = true;
    }

    /// Reads, changes and writes guest memory: atomically if the instruction is locked. `change` gets the old value and returns the new
    /// one; its code may run more than once. Returns both.
    pub(super) fn update(
        &mut self,
        lin: Value,
        op: &Op,
        change: impl FnOnce(&mut Self, Value) -> Value,
    ) -> (Value, Value) {
        let is_locked = op.lock || op.mnemonic == Mnemonic::Xchg;
        if is_locked && op.size > 0 {
            // Across cache lines it is a bus lock, which the interpreter notes.
            let in_line = self.b.ins().band_imm(lin, 63);
            let last = 64 - (1 << op.size);
            let crosses = (self.b.ins()).icmp_imm(IntCC::UnsignedGreaterThan, in_line, last);
            self.interpret_if(crosses);
        }
        let place = self.place_to_store(lin, op.size);
        let Place { host, offset } = place;
        let ty = TYPES[usize::from(op.size)];
        let old = (self.b.ins()).load(ty, Self::guarded(), host, offset);
        if !is_locked {
            let new = change(self, old);
            self.store_at(place, new);
            return (old, new);
        }
        let host = self.moved(host, offset.into());
        let (attempt, done) = (self.b.create_block(), self.b.create_block());
        self.b.ins().jump(attempt, &[old.into()]);
        self.b.switch_to_block(attempt);
        let old = self.b.append_block_param(attempt, ty);
        let new = change(self, old);
        let seen = (self.b.ins()).atomic_cas(Self::guarded(), host, old, new);
        let same = self.b.ins().icmp(IntCC::Equal, seen, old);
        (self.b.ins()).brif(same, done, &[], attempt, &[seen.into()]);
        self.b.switch_to_block(done);
        self.now.has_changed = true;
        (old, new)
    }
}
