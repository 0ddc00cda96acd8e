//! Accesses of compiled code to guest memory. If the distance between an address and that of the last access is known,
//! the code first checks whether both are in one page, which is often so. Otherwise it looks the address up in the TLB.
//! Then it makes the access, which is guarded. These steps are inline code. If the check or the look-up fails, the code
//! calls a helper.

use super::Tier;
use super::helpers::{self, OrStop};
use super::kept::{Kind, LastAccess, Place};
use super::near::Near;
use super::translate::{TYPES, Translator};
use crate::Cpu;
use crate::mem::CACHE_LINE;
use crate::op::Op;
use crate::sem::Bits;
use crate::tlb;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::I64;
use cranelift_codegen::ir::{InstBuilder, MemFlags, Value};
use slat_jit::GUARDED;
use std::mem::offset_of;

impl Kind {
    /// Returns the offset, in a TLB entry, of the tag for accesses of this kind.
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

impl Translator<'_> {
    /// Emits code that finds the host address of an access. If the distance to the last access is known, and both are
    /// in one page, the code adds the distance to the last host address. If the distance is not known, the code looks
    /// the address up in the TLB. If neither succeeds, it calls a helper.
    fn place(&mut self, lin: Value, size: u8, kind: Kind) -> Place {
        self.prepare_stop();
        let (lin, host, distance) = match self.near(lin, size, kind) {
            Near::Certain(place) => return place,
            Near::If {
                is_same,
                last,
                distance,
            } => {
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
                (lin, self.add(addend, lin), 0)
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

    /// Emits code that selects `known` if `is_known` is not 0. Otherwise the code selects the result of `find`, which
    /// is computed in a block that is rarely executed.
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

    /// Emits a call of the helper that finds the host address of an access.
    fn ask(&mut self, lin: Value, size: u8, kind: Kind) -> Value {
        let bytes = self.constant(1 << size);
        self.call_or_stop(kind.helper(), &[lin, bytes])
    }

    /// Emits a look-up of `lin` in the TLB. Returns whether the TLB has the page, and if so, the host address minus
    /// `lin`.
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
        // Load `found` last, as the second operand of the comparison: in the baseline tier the comparison then reads
        // `found` from memory itself.
        let found = (self.b.ins()).load(I64, trusted, entry, offset + kind.tag() as i32);
        (self.b.ins().icmp(IntCC::Equal, wanted, found), addend)
    }

    /// Returns the flags of an access to guest memory.
    pub(super) fn guarded() -> MemFlags {
        MemFlags::new().with_trap_code(Some(GUARDED))
    }

    /// Emits code that finds the host address of a load.
    pub(super) fn place_to_load(&mut self, lin: Value, size: u8) -> Place {
        self.place(lin, size, Kind::Load)
    }

    /// Emits code that finds the host address of a store.
    pub(super) fn place_to_store(&mut self, lin: Value, size: u8) -> Place {
        self.place(lin, size, Kind::Store)
    }

    /// Emits a load from guest memory.
    pub(super) fn load(&mut self, lin: Value, size: u8) -> Value {
        let Place { host, offset } = self.place_to_load(lin, size);
        let flags = Self::guarded();
        if self.tier == Tier::Baseline || size > 2 {
            let ty = TYPES[usize::from(size)];
            return self.b.ins().load(ty, flags, host, offset);
        }
        // Extend the value together with the load: the host's load instruction extends at no cost.
        let value = match size {
            0 => self.b.ins().uload8(I64, flags, host, offset),
            1 => self.b.ins().uload16(I64, flags, host, offset),
            _ => self.b.ins().uload32(flags, host, offset),
        };
        self.narrow(value, size)
    }

    /// Emits a store to guest memory. Call before the instruction has any other effect.
    pub(super) fn store(&mut self, lin: Value, size: u8, value: Value) {
        let place = self.place_to_store(lin, size);
        self.store_at(place, value);
    }

    fn store_at(&mut self, Place { host, offset }: Place, value: Value) {
        (self.b.ins()).store(Self::guarded(), value, host, offset);
        self.now.has_changed = true;
    }

    /// Emits code that reads, changes and writes guest memory, atomically if the instruction is locked. `change` emits
    /// the code that computes the new value from the old one; this code may run more than once. Returns both values.
    pub(super) fn update(
        &mut self,
        lin: Value,
        op: &Op,
        change: impl FnOnce(&mut Self, Value) -> Value,
    ) -> (Value, Value) {
        if op.lock && op.size > 0 {
            // A locked access that crosses a cache line is a bus lock, which the interpreter handles.
            let line = CACHE_LINE as i64;
            let in_line = self.b.ins().band_imm(lin, line - 1);
            let last = line - (1 << op.size);
            let crosses = (self.b.ins()).icmp_imm(IntCC::UnsignedGreaterThan, in_line, last);
            self.interpret_if(crosses);
        }
        let place = self.place_to_store(lin, op.size);
        let Place { host, offset } = place;
        let ty = TYPES[usize::from(op.size)];
        let old = (self.b.ins()).load(ty, Self::guarded(), host, offset);
        if !op.lock {
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
