//! Accesses of compiled code to guest memory: the TLB hit is inline and the access guarded, everything else calls a helper.

use super::helpers;
use super::translate::{TYPES, Translator};
use crate::Cpu;
use crate::op::{NONE, Op};
use crate::tlb;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I32, I64};
use cranelift_codegen::ir::{Block, InstBuilder, MemFlags, TrapCode, Value};
use std::mem::offset_of;

/// How an access to guest memory is marked: the signal handler may skip it.
const GUARDED: TrapCode = TrapCode::unwrap_user(1);

impl Translator<'_> {
    /// Returns the offset of the memory operand in its segment.
    pub(super) fn offset(&mut self, op: &Op) -> Value {
        let mut sum = self.constant(op.disp as i64);
        if op.base != NONE {
            let base = self.get(op.base, 3);
            sum = self.b.ins().iadd(base, sum);
        }
        if op.index != NONE {
            let index = self.get(op.index, 3);
            let index = self.b.ins().ishl_imm(index, i64::from(op.scale));
            sum = self.b.ins().iadd(sum, index);
        }
        match op.address_size {
            4 => self.b.ins().band_imm(sum, 0xffff_ffff),
            _ => sum,
        }
    }

    /// Returns the linear address of the memory operand.
    pub(super) fn lin(&mut self, op: &Op) -> Value {
        let offset = self.offset(op);
        let base = match op.seg {
            4 => offset_of!(Cpu, state.fs.base),
            5 => offset_of!(Cpu, state.gs.base),
            _ => return offset,
        };
        let base = self.field(I64, base);
        self.b.ins().iadd(base, offset)
    }

    /// Looks `lin` up in the TLB, by the tags at `tag`. Continues in the first block with the host address if it is there, in the
    /// second otherwise.
    fn look_up(&mut self, lin: Value, size: u8, tag: usize, hit: Block, miss: Block) {
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
            size => self.b.ins().iadd_imm(lin, (1 << size) - 1),
        };
        let wanted = self.b.ins().bor_imm(last, 0xfff);
        let trusted = MemFlags::trusted();
        let found = self.b.ins().load(I64, trusted, entry, tag as i32);
        let same = self.b.ins().icmp(IntCC::Equal, found, wanted);
        let same_block = self.b.create_block();
        self.b.ins().brif(same, same_block, &[], miss, &[]);
        self.b.switch_to_block(same_block);
        let addend = self.b.ins().load(I64, trusted, entry, tlb::ADDEND as i32);
        let host = self.b.ins().iadd(addend, lin);
        self.b.ins().jump(hit, &[host.into()]);
    }

    /// Returns the flags of an access to guest memory.
    fn guarded() -> MemFlags {
        MemFlags::new().with_trap_code(Some(GUARDED))
    }

    /// Continues in `slow` if the last guarded access was skipped.
    fn unless_gone(&mut self, slow: Block, on: Block, value: &[Value]) {
        let cpu = self.cpu();
        let address = self
            .b
            .ins()
            .iadd_imm(cpu, offset_of!(Cpu, compiled.gone) as i64);
        // Atomic, so that no earlier value is used again.
        let gone = self.b.ins().atomic_load(I32, MemFlags::trusted(), address);
        let value: Vec<_> = value.iter().map(|value| (*value).into()).collect();
        self.b.ins().brif(gone, slow, &[], on, &value);
    }

    /// Loads from guest memory.
    pub(super) fn load(&mut self, lin: Value, size: u8) -> Value {
        let ty = TYPES[usize::from(size)];
        let (hit, miss, on) = (self.b.create_block(), self.cold(), self.b.create_block());
        let host = self.b.append_block_param(hit, I64);
        let loaded = self.b.append_block_param(on, ty);
        self.look_up(lin, size, tlb::READ, hit, miss);
        self.b.switch_to_block(hit);
        let value = self.b.ins().load(ty, Self::guarded(), host, 0);
        self.unless_gone(miss, on, &[value]);
        self.b.switch_to_block(miss);
        let value = self.call_for_value(helpers::load_of(size), lin);
        let value = self.narrow(value, size);
        self.b.ins().jump(on, &[value.into()]);
        self.b.switch_to_block(on);
        loaded
    }

    /// Calls a helper that returns a value and a status; leaves before the instruction if it fails.
    fn call_for_value(&mut self, helper: usize, lin: Value) -> Value {
        let results = self.call(helper, &[lin], 2);
        let (fine, failed) = (self.cold(), self.cold());
        self.b.ins().brif(results[1], failed, &[], fine, &[]);
        self.b.switch_to_block(failed);
        self.leave_before(results[1]);
        self.b.switch_to_block(fine);
        results[0]
    }

    /// Stores to guest memory. Nothing of the instruction has happened before.
    pub(super) fn store(&mut self, lin: Value, size: u8, value: Value) {
        let (hit, miss, on) = (self.b.create_block(), self.cold(), self.b.create_block());
        let host = self.b.append_block_param(hit, I64);
        self.look_up(lin, size, tlb::WRITE, hit, miss);
        self.b.switch_to_block(hit);
        self.b.ins().store(Self::guarded(), value, host, 0);
        self.unless_gone(miss, on, &[]);
        self.b.switch_to_block(miss);
        self.store_slowly(lin, size, value);
        self.b.ins().jump(on, &[]);
        self.b.switch_to_block(on);
    }

    fn store_slowly(&mut self, lin: Value, size: u8, value: Value) {
        let value = self.wide(value);
        let status = self.call(helpers::store_of(size), &[lin, value], 1)[0];
        let (fine, failed) = (self.cold(), self.cold());
        self.b.ins().brif(status, failed, &[], fine, &[]);
        self.b.switch_to_block(failed);
        self.leave_before(status);
        self.b.switch_to_block(fine);
    }

    /// Reads, changes and writes guest memory, not atomically. `change` gets the old value and returns the new one. Returns both.
    pub(super) fn update(
        &mut self,
        lin: Value,
        size: u8,
        change: impl FnOnce(&mut Self, Value) -> Value,
    ) -> (Value, Value) {
        let ty = TYPES[usize::from(size)];
        let (hit, miss, read) = (self.b.create_block(), self.cold(), self.b.create_block());
        let found = self.b.append_block_param(hit, I64);
        let old = self.b.append_block_param(read, ty);
        // 0 if the TLB does not have the page.
        let host = self.b.append_block_param(read, I64);
        self.look_up(lin, size, tlb::WRITE, hit, miss);
        self.b.switch_to_block(hit);
        let value = self.b.ins().load(ty, Self::guarded(), found, 0);
        self.unless_gone(miss, read, &[value, found]);
        self.b.switch_to_block(miss);
        let value = self.call_for_value(helpers::load_to_store_of(size), lin);
        let value = self.narrow(value, size);
        let nowhere = self.constant(0);
        self.b.ins().jump(read, &[value.into(), nowhere.into()]);
        self.b.switch_to_block(read);
        let new = change(self, old);
        let (fast, slow, on) = (self.b.create_block(), self.cold(), self.b.create_block());
        self.b.ins().brif(host, fast, &[], slow, &[]);
        self.b.switch_to_block(fast);
        self.b.ins().store(Self::guarded(), new, host, 0);
        self.unless_gone(slow, on, &[]);
        self.b.switch_to_block(slow);
        self.store_slowly(lin, size, new);
        self.b.ins().jump(on, &[]);
        self.b.switch_to_block(on);
        (old, new)
    }
}
