//! Accesses of compiled code to guest memory. Inline are a look at where the last access was, which often is near, or else at the TLB,
//! and the access itself, which is guarded. Everything else calls a helper.

use super::Tier;
use super::helpers::{self, OrStop};
use super::translate::{TYPES, Translator};
use crate::Cpu;
use crate::op::Op;
use crate::tlb;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::I64;
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

/// The last access, if nothing has happened since that may have changed the TLB.
#[derive(Clone, Copy)]
pub(super) struct LastAccess {
    lin: Value,
    host: Value,
    bytes: i64,
    kind: Kind,
}

/// What the last access tells of an access.
enum Near {
    Unknown,
    /// Its host address, if the first value is not 0.
    If(Value, Value),
    /// Its host address.
    Certain(Value),
}

impl Translator<'_> {
    /// Returns the host address of an access: from that of the last one if it is in the same page, or else from the TLB, or from a helper.
    fn place(&mut self, lin: Value, size: u8, kind: Kind) -> Value {
        self.prepare_stop();
        let (same, host) = match self.near(lin, size, kind) {
            Near::Certain(host) => return host,
            Near::If(same, host) => (same, host),
            Near::Unknown => self.look_up(lin, size, kind),
        };
        let (miss, on) = (self.cold(), self.b.create_block());
        let place = self.b.append_block_param(on, I64);
        self.b.ins().brif(same, on, &[host.into()], miss, &[]);
        self.b.switch_to_block(miss);
        let bytes = self.constant(1 << size);
        let host = self.call_or_stop(kind.helper(), &[lin, bytes]);
        self.b.ins().jump(on, &[host.into()]);
        self.b.switch_to_block(on);
        self.now.last_access = Some(LastAccess {
            lin,
            host: place,
            bytes: 1 << size,
            kind,
        });
        place
    }

    /// Looks `lin` up in the TLB. Returns whether it is there, and its host address then.
    fn look_up(&mut self, lin: Value, size: u8, kind: Kind) -> (Value, Value) {
        let shift = tlb::ENTRY_BITS;
        let at = self.b.ins().ushr_imm(lin, i64::from(12 - shift));
        let at = self
            .b
            .ins()
            .band_imm(at, ((tlb::ENTRIES - 1) << shift) as i64);
        let table = self.field(I64, offset_of!(Cpu, compiled.table));
        let entry = self.b.ins().iadd(table, at);
        let last = match size {
            0 => lin,
            size => self.moved(lin, (1 << size) - 1),
        };
        let wanted = self.b.ins().bor_imm(last, 0xfff);
        let trusted = MemFlags::trusted();
        let addend = self.b.ins().load(I64, trusted, entry, tlb::ADDEND as i32);
        let host = self.b.ins().iadd(addend, lin);
        // `found` is loaded last, and the second operand: the host's comparison can then read it from memory, without a load of its own.
        let found = (self.b.ins()).load(I64, trusted, entry, kind.tag() as i32);
        (self.b.ins().icmp(IntCC::Equal, wanted, found), host)
    }

    /// Says what the last access tells of one at `lin`. Only the last one tells anything: another one before it was perhaps looked up
    /// by the helper, which may have waited, and what was known of other pages is nothing then.
    fn near(&mut self, lin: Value, size: u8, kind: Kind) -> Near {
        let Some(last) = self.now.last_access else {
            return Near::Unknown;
        };
        let ((base, disp), (last_base, last_disp)) = (self.root(lin), self.root(last.lin));
        let (distance, bytes) = (disp.wrapping_sub(last_disp), 1 << size);
        let grants = kind == Kind::Load || last.kind == Kind::Store;
        if base != last_base || !grants || distance.unsigned_abs() >= PAGE_SIZE / 2 {
            return Near::Unknown;
        }
        let host = match distance {
            0 => last.host,
            _ => self.b.ins().iadd_imm(last.host, distance),
        };
        let end = distance + bytes;
        if distance >= 0 && end <= last.bytes {
            return Near::Certain(host);
        }
        // What both accesses reach, from `first` to `end` about the last one's address, has to be in one page. If the last one was in two,
        // `host` was a copy.
        let (first, end) = (distance.min(0), end.max(last.bytes));
        let at = self.b.ins().band_imm(last.lin, PAGE_SIZE as i64 - 1);
        let at = match first {
            0 => at,
            first => self.b.ins().iadd_imm(at, first),
        };
        let most = PAGE_SIZE as i64 - (end - first);
        let same = (self.b.ins()).icmp_imm(IntCC::UnsignedLessThanOrEqual, at, most);
        Near::If(same, host)
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

    /// Returns the host address to load from.
    pub(super) fn place_to_load(&mut self, lin: Value, size: u8) -> Value {
        self.place(lin, size, Kind::Load)
    }

    /// Returns the host address to store at.
    pub(super) fn place_to_store(&mut self, lin: Value, size: u8) -> Value {
        self.place(lin, size, Kind::Store)
    }

    /// Loads from guest memory.
    pub(super) fn load(&mut self, lin: Value, size: u8) -> Value {
        let host = self.place_to_load(lin, size);
        let flags = Self::guarded();
        if self.tier == Tier::Baseline || size > 2 {
            let ty = TYPES[usize::from(size)];
            return self.b.ins().load(ty, flags, host, 0);
        }
        // The host extends it for nothing.
        let value = match size {
            0 => self.b.ins().uload8(I64, flags, host, 0),
            1 => self.b.ins().uload16(I64, flags, host, 0),
            _ => self.b.ins().uload32(flags, host, 0),
        };
        self.narrow(value, size)
    }

    /// Stores to guest memory. Nothing of the instruction has happened before.
    pub(super) fn store(&mut self, lin: Value, size: u8, value: Value) {
        let host = self.place_to_store(lin, size);
        self.store_at(host, value);
    }

    fn store_at(&mut self, host: Value, value: Value) {
        self.b.ins().store(Self::guarded(), value, host, 0);
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
        let host = self.place_to_store(lin, op.size);
        let ty = TYPES[usize::from(op.size)];
        let old = self.b.ins().load(ty, Self::guarded(), host, 0);
        if !is_locked {
            let new = change(self, old);
            self.store_at(host, new);
            return (old, new);
        }
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
