//! From guest code to Cranelift's intermediate language.
//!
//! A region is one function. While it runs, the general registers and the record of the flags (`flags::Lazy`) are its variables; all
//! else is in the [`Cpu`]. It leaves through one block that writes them back. Every place where it leaves is between two
//! instructions: an access that the TLB does not have calls a helper, and if that cannot do it, the region leaves before the
//! instruction, of which nothing has happened.
//!
//! What has no translation of its own here calls the interpreter's handler, with all state written back before and read again after.

use super::Source;
use super::condition::Flags;
use super::helpers::{self, Status};
use crate::Cpu;
use crate::exec::control::condition_number;
use crate::lower;
use crate::op::{MEM, NONE, Op};
use crate::tlb;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I16, I32, I64};
use cranelift_codegen::ir::{
    AbiParam, Block, BlockCall, InstBuilder, JumpTableData, MemFlags, SigRef, Signature, TrapCode,
    Type, Value,
};
use cranelift_codegen::isa::CallConv;
use cranelift_frontend::{FunctionBuilder, Variable};
use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess,
    OpKind,
};
use std::collections::HashMap;
use std::mem::offset_of;

/// The types of the operand sizes.
pub(super) const TYPES: [Type; 4] = [I8, I16, I32, I64];

/// How an access to guest memory is marked: the signal handler may skip it.
const GUARDED: TrapCode = TrapCode::unwrap_user(1);

/// One guest instruction.
struct Guest {
    insn: Instruction,
    /// Index of its operation.
    op: usize,
}

/// Decodes the region's blocks: its operations with their addresses, and which instructions each block has.
fn decode(source: &Source) -> (Vec<(u64, Op)>, Vec<Vec<Guest>>) {
    let mut ops = Vec::new();
    let mut blocks = Vec::new();
    let mut lowered = Vec::new();
    for (rip, bytes) in &source.blocks {
        let mut decoder = Decoder::with_ip(64, bytes, *rip, DecoderOptions::NONE);
        let mut block = Vec::new();
        while decoder.can_decode() {
            let start = decoder.position();
            let insn = decoder.decode();
            if insn.is_invalid() {
                break;
            }
            let code = &bytes[start..decoder.position()];
            lowered.clear();
            lower::lower(&insn, code, source.mode, 0, insn.len() as u8, &mut lowered);
            block.push(Guest {
                insn,
                op: ops.len(),
            });
            ops.push((insn.ip(), lowered[0]));
        }
        blocks.push(block);
    }
    (ops, blocks)
}

/// Which general registers the region reads or writes.
#[derive(Clone, Copy, Default)]
struct Registers {
    used: u16,
    written: u16,
}

fn registers(blocks: &[Vec<Guest>]) -> Registers {
    let mut factory = InstructionInfoFactory::new();
    let mut registers = Registers::default();
    for guest in blocks.iter().flatten() {
        for used in factory.info(&guest.insn).used_registers() {
            if !used.register().is_gpr() {
                continue;
            }
            let bit = 1 << used.register().full_register().number();
            registers.used |= bit;
            if !matches!(used.access(), OpAccess::Read | OpAccess::CondRead) {
                registers.written |= bit;
            }
        }
    }
    // A register that is written in part, or on some paths only, is read, too.
    registers
}

/// Builds the function of a region. Returns its operations, to which its code has pointers.
pub(super) fn translate(builder: FunctionBuilder<'_>, source: &Source) -> Box<[(u64, Op)]> {
    let (ops, blocks) = decode(source);
    let ops = ops.into_boxed_slice();
    let mut translator = Translator::new(builder, &ops, registers(&blocks), source);
    for ((rip, _), guests) in source.blocks.iter().zip(&blocks) {
        translator.block(*rip, guests);
    }
    translator.finish();
    ops
}

/// The signature of a region, and of the helpers that return only a status.
pub(super) fn signature(parameters: usize, returns: usize) -> Signature {
    let mut signature = Signature::new(CallConv::SystemV);
    signature.params = vec![AbiParam::new(I64); parameters];
    signature.returns = vec![AbiParam::new(I64); returns];
    signature
}

pub(super) struct Translator<'a> {
    pub(super) b: FunctionBuilder<'a>,
    ops: &'a [(u64, Op)],
    registers: Registers,
    gpr: [Variable; 16],
    /// The record of the flags: kind, operands, result.
    pub(super) lazy: [Variable; 4],
    /// What is known of the flags at this place.
    pub(super) flags: Flags,
    /// Instructions executed, without those of this block.
    executed: Variable,
    /// Instructions of this block before the current one.
    before: i64,
    blocks: HashMap<u64, Block>,
    /// Writes all back and returns.
    leave: Block,
    leave_rip: Variable,
    leave_status: Variable,
    leave_op: Variable,
    /// The operation and address of the current instruction.
    op: usize,
    rip: u64,
    /// The address of the current block.
    head: u64,
}

impl<'a> Translator<'a> {
    fn new(
        mut b: FunctionBuilder<'a>,
        ops: &'a [(u64, Op)],
        registers: Registers,
        source: &Source,
    ) -> Self {
        let gpr = std::array::from_fn(|_| b.declare_var(I64));
        let lazy = [I8, I64, I64, I64].map(|ty| b.declare_var(ty));
        let [executed, leave_rip, leave_status, leave_op] =
            std::array::from_fn(|_| b.declare_var(I64));
        let entry = b.create_block();
        let index = b.append_block_param(entry, I64);
        let leave = b.create_block();
        let blocks = (source.blocks.iter())
            .map(|(rip, _)| (*rip, b.create_block()))
            .collect::<HashMap<_, _>>();
        b.switch_to_block(entry);
        let mut translator = Self {
            b,
            ops,
            registers,
            gpr,
            lazy,
            flags: Flags::Recorded,
            executed,
            before: 0,
            blocks,
            leave,
            leave_rip,
            leave_status,
            leave_op,
            op: 0,
            rip: 0,
            head: 0,
        };
        translator.read_state();
        let zero = translator.constant(0);
        translator.b.def_var(executed, zero);
        translator.enter(index, source);
        translator
    }

    /// Continues in the block with this index.
    fn enter(&mut self, index: Value, source: &Source) {
        let index = self.b.ins().ireduce(I32, index);
        // The first block is the default, too: Cranelift wants one.
        let mut targets = (source.blocks.iter().take(1).chain(&source.blocks))
            .map(|(rip, _)| BlockCall::new(self.blocks[rip], [], &mut self.b.func.dfg.value_lists))
            .collect::<Vec<_>>();
        let default = targets.remove(0);
        let table = JumpTableData::new(default, &targets);
        let table = self.b.create_jump_table(table);
        self.b.ins().br_table(index, table);
    }

    /// Adds the block that leaves, and ends the function.
    fn finish(mut self) {
        self.b.switch_to_block(self.leave);
        self.write_state();
        let rip = self.b.use_var(self.leave_rip);
        self.set_field(offset_of!(Cpu, state.rip), rip);
        let executed = self.b.use_var(self.executed);
        let counters = [
            offset_of!(Cpu, counters.instructions),
            offset_of!(Cpu, counters.instructions_compiled),
        ];
        for offset in counters {
            let before = self.field(I64, offset);
            let sum = self.b.ins().iadd(before, executed);
            self.set_field(offset, sum);
        }
        let op = self.b.use_var(self.leave_op);
        self.set_field(offset_of!(Cpu, compiled.op), op);
        let status = self.b.use_var(self.leave_status);
        self.b.ins().return_(&[status]);
        self.b.seal_all_blocks();
        self.b.finalize();
    }

    pub(super) fn constant(&mut self, value: i64) -> Value {
        self.b.ins().iconst(I64, value)
    }

    fn cpu(&mut self) -> Value {
        self.b.ins().get_pinned_reg(I64)
    }

    /// Reads a field of the CPU.
    pub(super) fn field(&mut self, ty: Type, offset: usize) -> Value {
        let cpu = self.cpu();
        self.b
            .ins()
            .load(ty, MemFlags::trusted(), cpu, offset as i32)
    }

    /// Writes a field of the CPU.
    fn set_field(&mut self, offset: usize, value: Value) {
        let cpu = self.cpu();
        self.b
            .ins()
            .store(MemFlags::trusted(), value, cpu, offset as i32);
    }

    fn gpr_offset(r: usize) -> usize {
        offset_of!(Cpu, state.gpr) + 8 * r
    }

    const LAZY: [usize; 4] = [
        offset_of!(Cpu, lazy.kind),
        offset_of!(Cpu, lazy.a),
        offset_of!(Cpu, lazy.b),
        offset_of!(Cpu, lazy.result),
    ];

    /// Reads the registers and the record of the flags.
    fn read_state(&mut self) {
        let used = self.registers.used;
        for r in (0..16).filter(|r| used >> r & 1 != 0) {
            let value = self.field(I64, Self::gpr_offset(r));
            self.b.def_var(self.gpr[r], value);
        }
        for (k, offset) in Self::LAZY.into_iter().enumerate() {
            let value = self.field(if k == 0 { I8 } else { I64 }, offset);
            self.b.def_var(self.lazy[k], value);
        }
        self.flags = Flags::Recorded;
    }

    /// Writes the registers and the record of the flags, which is up to date.
    fn write_state(&mut self) {
        let written = self.registers.written;
        for r in (0..16).filter(|r| written >> r & 1 != 0) {
            let value = self.b.use_var(self.gpr[r]);
            self.set_field(Self::gpr_offset(r), value);
        }
        self.write_lazy();
    }

    /// Writes the record of the flags, which is up to date.
    pub(super) fn write_lazy(&mut self) {
        for (k, offset) in Self::LAZY.into_iter().enumerate() {
            let value = self.b.use_var(self.lazy[k]);
            self.set_field(offset, value);
        }
    }

    /// Calls a helper with the CPU and `arguments`.
    pub(super) fn call(
        &mut self,
        helper: usize,
        arguments: &[Value],
        returns: usize,
    ) -> Vec<Value> {
        let signature = signature(1 + arguments.len(), returns);
        let signature: SigRef = self.b.import_signature(signature);
        let function = self.constant(helper as i64);
        let cpu = self.cpu();
        let all: Vec<Value> = std::iter::once(cpu)
            .chain(arguments.iter().copied())
            .collect();
        let call = self.b.ins().call_indirect(signature, function, &all);
        self.b.inst_results(call).to_vec()
    }

    /// Begins a block that is rarely executed.
    fn cold(&mut self) -> Block {
        let block = self.b.create_block();
        self.b.set_cold_block(block);
        block
    }

    /// Leaves with `status`, at `rip`, after `done` instructions of this block.
    fn leave(&mut self, status: Status, rip: Value, done: i64) {
        let flags = self.flags.clone();
        self.record_flags();
        self.flags = flags;
        let status = self.constant(status as i64);
        self.leave_as(status, rip, done);
    }

    fn leave_as(&mut self, status: Value, rip: Value, done: i64) {
        self.b.def_var(self.leave_status, status);
        self.b.def_var(self.leave_rip, rip);
        let op = self.constant(self.op as i64);
        self.b.def_var(self.leave_op, op);
        let executed = self.b.use_var(self.executed);
        let executed = self.b.ins().iadd_imm(executed, done);
        self.b.def_var(self.executed, executed);
        self.b.ins().jump(self.leave, &[]);
    }

    /// Leaves before the current instruction with the status that a helper returned.
    fn leave_before(&mut self, status: Value) {
        let flags = self.flags.clone();
        self.record_flags();
        self.flags = flags;
        let rip = self.constant(self.rip as i64);
        self.leave_as(status, rip, self.before);
    }

    /// Continues at `rip`, after the current instruction: in the region if it has a block there, else leaves.
    fn goto(&mut self, rip: u64) {
        let Some(&block) = self.blocks.get(&rip) else {
            let to = self.constant(rip as i64);
            self.leave(Status::Continue, to, self.before + 1);
            return;
        };
        let flags = self.flags.clone();
        if rip <= self.head {
            // A loop has to see what others want of the CPU.
            let attention = self.field(I64, offset_of!(Cpu, compiled.attention));
            let attention = self
                .b
                .ins()
                .atomic_load(I32, MemFlags::trusted(), attention);
            let version = self.field(I64, offset_of!(Cpu, compiled.version));
            let version = self.b.ins().atomic_load(I64, MemFlags::trusted(), version);
            let heeded = self.field(I64, offset_of!(Cpu, code.heeded));
            let news = self.b.ins().bxor(version, heeded);
            let attention = self.b.ins().uextend(I64, attention);
            let wanted = self.b.ins().bor(news, attention);
            let (wait, go) = (self.cold(), self.b.create_block());
            self.b.ins().brif(wanted, wait, &[], go, &[]);
            self.b.switch_to_block(wait);
            let to = self.constant(rip as i64);
            self.leave(Status::Continue, to, self.before + 1);
            self.b.switch_to_block(go);
        }
        self.record_flags();
        let executed = self.b.use_var(self.executed);
        let executed = self.b.ins().iadd_imm(executed, self.before + 1);
        self.b.def_var(self.executed, executed);
        self.b.ins().jump(block, &[]);
        self.flags = flags;
    }

    /// Translates a basic block.
    fn block(&mut self, rip: u64, guests: &[Guest]) {
        let block = self.blocks[&rip];
        self.b.switch_to_block(block);
        self.flags = Flags::Recorded;
        self.before = 0;
        self.head = rip;
        for guest in guests {
            self.op = guest.op;
            self.rip = guest.insn.ip();
            if self.instruction(&guest.insn) {
                return;
            }
            self.before += 1;
        }
        // The block's limit, or something that cannot be decoded.
        match guests.last() {
            Some(last) => {
                self.before -= 1;
                self.goto(last.insn.next_ip());
            }
            None => {
                self.rip = rip;
                let status = self.constant(Status::Interpret as i64);
                self.leave_before(status);
            }
        }
    }

    /// Translates an instruction. Returns whether it ends the block.
    fn instruction(&mut self, insn: &Instruction) -> bool {
        let op = &self.ops[self.op].1;
        if insn.flow_control() != FlowControl::Next {
            self.branch(insn, op);
            return true;
        }
        let translated = !op.lock
            && (op.address_size == 8 || !op.r.contains(&MEM))
            && self.inline(insn, op).is_some();
        if !translated {
            self.handler(insn);
        }
        false
    }

    /// Has the interpreter's handler execute the current instruction.
    fn handler(&mut self, insn: &Instruction) {
        self.record_flags();
        self.write_state();
        let rip = self.constant(self.rip as i64);
        self.set_field(offset_of!(Cpu, block_rip), rip);
        let op = self.constant(&raw const self.ops[self.op].1 as i64);
        let status = self.call(helpers::handler as *const () as usize, &[op], 1)[0];
        self.read_state();
        let (stop, go) = (self.cold(), self.b.create_block());
        self.b.ins().brif(status, stop, &[], go, &[]);
        self.b.switch_to_block(stop);
        let (after, broke) = (self.cold(), self.cold());
        let is_after = self
            .b
            .ins()
            .icmp_imm(IntCC::Equal, status, Status::After as i64);
        self.b.ins().brif(is_after, after, &[], broke, &[]);
        self.b.switch_to_block(after);
        let next = self.constant(insn.next_ip() as i64);
        self.leave(Status::Continue, next, self.before + 1);
        self.b.switch_to_block(broke);
        self.leave_before(status);
        self.b.switch_to_block(go);
    }

    /// Reads a register in an operand size.
    pub(super) fn get(&mut self, r: u8, size: u8) -> Value {
        let value = self.b.use_var(self.gpr[usize::from(r & 15)]);
        let value = match r >> 4 {
            0 => value,
            _ => self.b.ins().ushr_imm(value, 8),
        };
        self.narrow(value, size)
    }

    /// Returns the low part of a 64-bit value.
    fn narrow(&mut self, value: Value, size: u8) -> Value {
        match size {
            3 => value,
            size => self.b.ins().ireduce(TYPES[usize::from(size)], value),
        }
    }

    /// Returns a value zero-extended to 64 bits.
    pub(super) fn wide(&mut self, value: Value) -> Value {
        match self.b.func.dfg.value_type(value) {
            I64 => value,
            _ => self.b.ins().uextend(I64, value),
        }
    }

    /// Writes a register in an operand size: a doubleword clears the upper half, smaller sizes leave the rest.
    fn set(&mut self, r: u8, size: u8, value: Value) {
        let variable = self.gpr[usize::from(r & 15)];
        let value = self.wide(value);
        let value = if size >= 2 {
            value
        } else {
            let shift = i64::from(r >> 4) * 8;
            let mask = (if size == 0 { 0xff } else { 0xffff }) << shift;
            let old = self.b.use_var(variable);
            let old = self.b.ins().band_imm(old, !mask);
            let value = self.b.ins().ishl_imm(value, shift);
            self.b.ins().bor(old, value)
        };
        self.b.def_var(variable, value);
    }

    /// Returns the offset of the memory operand in its segment.
    fn offset(&mut self, op: &Op) -> Value {
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
    fn lin(&mut self, op: &Op) -> Value {
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
    fn load(&mut self, lin: Value, size: u8) -> Value {
        let ty = TYPES[usize::from(size)];
        let (hit, miss, on) = (self.b.create_block(), self.cold(), self.b.create_block());
        let host = self.b.append_block_param(hit, I64);
        let loaded = self.b.append_block_param(on, ty);
        self.look_up(lin, size, tlb::READ, hit, miss);
        self.b.switch_to_block(hit);
        let value = self.b.ins().load(ty, Self::guarded(), host, 0);
        self.unless_gone(miss, on, &[value]);
        self.b.switch_to_block(miss);
        let value = self.call_for_value(helpers::loads()[usize::from(size)], lin);
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
    fn store(&mut self, lin: Value, size: u8, value: Value) {
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
        let status = self.call(helpers::stores()[usize::from(size)], &[lin, value], 1)[0];
        let (fine, failed) = (self.cold(), self.cold());
        self.b.ins().brif(status, failed, &[], fine, &[]);
        self.b.switch_to_block(failed);
        self.leave_before(status);
        self.b.switch_to_block(fine);
    }

    /// Reads, changes and writes guest memory, not atomically. `change` gets the old value and returns the new one. Returns both.
    fn update(
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
        let value = self.call_for_value(helpers::loads_to_store()[usize::from(size)], lin);
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

    fn immediate(&mut self, size: u8, value: u64) -> Value {
        let bits = 8 << size;
        let value = (value as i64) << (64 - bits) >> (64 - bits);
        match size {
            3 => self.constant(value),
            size => {
                let ty = TYPES[usize::from(size)];
                // Cranelift wants the bits beyond the type to be clear.
                let value = value & ((1i64 << bits) - 1);
                self.b.ins().iconst(ty, value)
            }
        }
    }

    /// Reads operand `k`.
    fn operand(&mut self, op: &Op, k: usize, size: u8) -> Value {
        match op.r[k] {
            MEM => {
                let lin = self.lin(op);
                self.load(lin, size)
            }
            NONE => self.immediate(size, op.imm),
            r => self.get(r, size),
        }
    }

    /// Translates a near branch; leaves before any other instruction that ends a block.
    fn branch(&mut self, insn: &Instruction, op: &Op) {
        let next = insn.next_ip();
        let code = insn.code();
        if code.is_jcc_short_or_near() {
            let taken = self.condition(condition_number(insn.condition_code()));
            let (jump, fall) = (self.b.create_block(), self.b.create_block());
            self.b.ins().brif(taken, jump, &[], fall, &[]);
            self.b.switch_to_block(jump);
            self.goto(op.imm);
            self.b.switch_to_block(fall);
            self.goto(next);
        } else if code.is_jmp_short_or_near() {
            self.goto(op.imm);
        } else if code.is_call_near() && op.size == 3 {
            let back = self.constant(next as i64);
            self.push(back);
            self.goto(op.imm);
        } else if insn.mnemonic() == Mnemonic::Ret && op.size == 3 {
            let rsp = self.get(4, 3);
            let target = self.load(rsp, 3);
            self.check_target(target);
            let rsp = self.b.ins().iadd_imm(rsp, 8 + op.imm as i64);
            self.set(4, 3, rsp);
            self.leave(Status::Continue, target, self.before + 1);
        } else if code.is_jmp_near_indirect() && op.size == 3 && op.address_size == 8 {
            let target = self.operand(op, 0, 3);
            self.check_target(target);
            self.leave(Status::Continue, target, self.before + 1);
        } else if code.is_call_near_indirect() && op.size == 3 && op.address_size == 8 {
            let target = self.operand(op, 0, 3);
            self.check_target(target);
            let back = self.constant(next as i64);
            self.push(back);
            self.leave(Status::Continue, target, self.before + 1);
        } else {
            let bail = self.constant(Status::Interpret as i64);
            self.leave_before(bail);
        }
    }

    /// Leaves the instruction to the interpreter if the target may not be canonical.
    fn check_target(&mut self, target: Value) {
        let high = self.b.ins().sshr_imm(target, 47);
        let high = self.b.ins().iadd_imm(high, 1);
        // 0 and -1 are the upper bits of canonical addresses.
        let strange = self.b.ins().icmp_imm(IntCC::UnsignedGreaterThan, high, 1);
        let (bail, fine) = (self.cold(), self.b.create_block());
        self.b.ins().brif(strange, bail, &[], fine, &[]);
        self.b.switch_to_block(bail);
        let status = self.constant(Status::Interpret as i64);
        self.leave_before(status);
        self.b.switch_to_block(fine);
    }

    fn push(&mut self, value: Value) {
        let rsp = self.get(4, 3);
        let rsp = self.b.ins().iadd_imm(rsp, -8);
        self.store(rsp, 3, value);
        self.set(4, 3, rsp);
    }

    /// Translates an instruction that does not end the block. `None`, with nothing done: there is no translation.
    fn inline(&mut self, insn: &Instruction, op: &Op) -> Option<()> {
        use Mnemonic::*;
        let size = op.size;
        match insn.mnemonic() {
            Nop | Endbr64 | Prefetcht0 | Prefetcht1 | Prefetcht2 | Prefetchnta | Prefetchw => {}
            Mov | Movnti => {
                let general =
                    |k: u32| insn.op_kind(k) != OpKind::Register || insn.op_register(k).is_gpr();
                if !general(0) || !general(1) {
                    return None;
                }
                let value = self.operand(op, 1, size);
                self.write(op, value);
            }
            Movzx | Movsx | Movsxd => {
                let from = match op.r[1] {
                    MEM => insn.memory_size().size(),
                    _ => insn.op1_register().size(),
                };
                let from = from.trailing_zeros() as u8;
                let value = self.operand(op, 1, from);
                let to = TYPES[usize::from(size)];
                let value = match (from == size, insn.mnemonic()) {
                    (true, _) => value,
                    (_, Movzx) => self.b.ins().uextend(to, value),
                    _ => self.b.ins().sextend(to, value),
                };
                self.set(op.r[0], size, value);
            }
            Lea => {
                let value = self.offset(op);
                let value = self.narrow(value, size);
                self.set(op.r[0], size, value);
            }
            Add | Sub | And | Or | Xor | Cmp | Test | Adc | Sbb => self.binary(op),
            Inc | Dec | Neg | Not => self.unary(op),
            Shl | Sal | Shr | Sar | Rol | Ror => return self.shift(op),
            Imul if insn.op_count() > 1 && size > 0 => self.multiply(insn, op),
            Push => {
                let sized = insn.stack_pointer_increment() == -8;
                if !sized || op.r[0] != NONE && op.r[0] != MEM && !insn.op0_register().is_gpr64() {
                    return None;
                }
                let value = self.operand(op, 0, 3);
                self.push(value);
            }
            Pop if insn.op0_kind() == OpKind::Register && insn.op0_register().is_gpr64() => {
                let rsp = self.get(4, 3);
                let value = self.load(rsp, 3);
                let rsp = self.b.ins().iadd_imm(rsp, 8);
                self.set(4, 3, rsp);
                self.set(op.r[0], 3, value);
            }
            Leave
                if insn.stack_pointer_increment() == 0 && insn.code() == iced_x86::Code::Leaveq =>
            {
                let rbp = self.get(5, 3);
                let value = self.load(rbp, 3);
                let rsp = self.b.ins().iadd_imm(rbp, 8);
                self.set(4, 3, rsp);
                self.set(5, 3, value);
            }
            Cdqe => {
                let value = self.get(0, 2);
                let value = self.b.ins().sextend(I64, value);
                self.set(0, 3, value);
            }
            Cwde => {
                let value = self.get(0, 1);
                let value = self.b.ins().sextend(I32, value);
                self.set(0, 2, value);
            }
            Cdq | Cqo => {
                let size = if insn.mnemonic() == Cdq { 2 } else { 3 };
                let value = self.get(0, size);
                let sign = self.b.ins().sshr_imm(value, (8 << size) - 1);
                self.set(2, size, sign);
            }
            Bswap if size >= 2 => {
                let value = self.get(op.r[0], size);
                let value = self.b.ins().bswap(value);
                self.set(op.r[0], size, value);
            }
            Xchg if op.r[0] != MEM && op.r[1] != MEM => {
                let (first, second) = (self.get(op.r[0], size), self.get(op.r[1], size));
                self.set(op.r[0], size, second);
                self.set(op.r[1], size, first);
            }
            _ if insn.condition_code() != iced_x86::ConditionCode::None => {
                let condition = condition_number(insn.condition_code());
                if op.r[0] != MEM && insn.op_count() == 2 {
                    // CMOVcc reads its source whether the condition holds or not.
                    let source = self.operand(op, 1, size);
                    let old = self.get(op.r[0], size);
                    let holds = self.condition(condition);
                    let value = self.b.ins().select(holds, source, old);
                    self.set(op.r[0], size, value);
                } else if insn.op_count() == 1 {
                    let value = self.condition(condition);
                    self.write(op, value);
                } else {
                    return None;
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// Writes the first operand.
    fn write(&mut self, op: &Op, value: Value) {
        match op.r[0] {
            MEM => {
                let lin = self.lin(op);
                self.store(lin, op.size, value);
            }
            r => self.set(r, op.size, value),
        }
    }

    /// Changes the first operand, a register or memory. Returns the old and the new value.
    fn change(
        &mut self,
        op: &Op,
        change: impl FnOnce(&mut Self, Value) -> Value,
    ) -> (Value, Value) {
        match op.r[0] {
            MEM => {
                let lin = self.lin(op);
                self.update(lin, op.size, change)
            }
            r => {
                let old = self.get(r, op.size);
                let new = change(self, old);
                self.set(r, op.size, new);
                (old, new)
            }
        }
    }

    fn binary(&mut self, op: &Op) {
        use Mnemonic::*;
        let size = op.size;
        let mnemonic = op.mnemonic;
        let b = self.operand(op, 1, size);
        let carry = match mnemonic {
            Adc | Sbb => {
                let carry = self.carry();
                Some(match size {
                    0 => carry,
                    _ => self.b.ins().uextend(TYPES[usize::from(size)], carry),
                })
            }
            _ => None,
        };
        let apply = |this: &mut Self, a: Value| {
            let ins = this.b.ins();
            let value = match mnemonic {
                Add | Adc => ins.iadd(a, b),
                Sub | Cmp | Sbb => ins.isub(a, b),
                And | Test => ins.band(a, b),
                Or => ins.bor(a, b),
                _ => ins.bxor(a, b),
            };
            match (mnemonic, carry) {
                (Adc, Some(carry)) => this.b.ins().iadd(value, carry),
                (Sbb, Some(carry)) => this.b.ins().isub(value, carry),
                _ => value,
            }
        };
        let (a, result) = match mnemonic {
            Cmp | Test => {
                let a = self.operand(op, 0, size);
                (a, apply(self, a))
            }
            _ => self.change(op, apply),
        };
        self.flags = match mnemonic {
            Add => Flags::Add { a, b, result },
            Sub | Cmp => Flags::Sub { a, b, result },
            Adc | Sbb => self.with_carry(mnemonic == Adc, a, b, carry, result),
            _ => Flags::Logic { result },
        };
    }

    fn unary(&mut self, op: &Op) {
        use Mnemonic::*;
        let size = op.size;
        let carry = match op.mnemonic {
            Inc | Dec => Some(self.carry()),
            _ => None,
        };
        let (a, result) = self.change(op, |this, a| match op.mnemonic {
            Inc => this.b.ins().iadd_imm(a, 1),
            Dec => this.b.ins().iadd_imm(a, -1),
            Neg => this.b.ins().ineg(a),
            _ => this.b.ins().bnot(a),
        });
        match (op.mnemonic, carry) {
            (Inc, Some(carry)) => self.flags = Flags::Inc { a, carry, result },
            (Dec, Some(carry)) => self.flags = Flags::Dec { a, carry, result },
            (Neg, _) => {
                let zero = self.immediate(size, 0);
                self.flags = Flags::Sub {
                    a: zero,
                    b: a,
                    result,
                };
            }
            _ => {}
        }
    }

    /// Shifts and rotates by an immediate count, and shifts by CL.
    fn shift(&mut self, op: &Op) -> Option<()> {
        use Mnemonic::*;
        let size = op.size;
        let bits: i64 = 8 << size;
        let mnemonic = op.mnemonic;
        if op.r[1] != NONE {
            return None;
        }
        let count = op.imm as i64 & if size == 3 { 63 } else { 31 };
        let rotates = matches!(mnemonic, Rol | Ror);
        if count == 0 || count >= bits {
            return None;
        }
        let (a, result) = self.change(op, |this, a| match mnemonic {
            Shr => this.b.ins().ushr_imm(a, count),
            Sar => this.b.ins().sshr_imm(a, count),
            Rol => this.b.ins().rotl_imm(a, count),
            Ror => this.b.ins().rotr_imm(a, count),
            _ => this.b.ins().ishl_imm(a, count),
        });
        let bit = |this: &mut Self, value: Value, n: i64| {
            let value = this.b.ins().ushr_imm(value, n);
            let value = this.b.ins().band_imm(value, 1);
            match size {
                0 => value,
                _ => this.b.ins().ireduce(I8, value),
            }
        };
        let top = bit(self, result, bits - 1);
        let (carry, overflow) = match mnemonic {
            Shr => {
                let next = bit(self, result, bits - 2);
                (bit(self, a, count - 1), self.b.ins().bxor(top, next))
            }
            Sar => (bit(self, a, count - 1), self.b.ins().iconst(I8, 0)),
            Rol => {
                let carry = bit(self, result, 0);
                (carry, self.b.ins().bxor(carry, top))
            }
            Ror => {
                let next = bit(self, result, bits - 2);
                (top, self.b.ins().bxor(top, next))
            }
            _ => {
                let carry = bit(self, a, bits - count);
                (carry, self.b.ins().bxor(carry, top))
            }
        };
        self.flags = if rotates {
            Flags::Rotated {
                below: Box::new(self.flags.below()),
                carry,
                overflow,
            }
        } else {
            Flags::Given {
                carry,
                overflow,
                aux: None,
                result,
            }
        };
        Some(())
    }

    /// IMUL with two or three operands.
    fn multiply(&mut self, insn: &Instruction, op: &Op) {
        let size = op.size;
        let two = insn.op_count() == 2 && op.r[1] != NONE;
        let b = self.operand(op, 1, size);
        let a = match two {
            true => self.get(op.r[0], size),
            false => self.immediate(size, op.imm),
        };
        let (low, wide) = if size == 3 {
            let low = self.b.ins().imul(a, b);
            let high = self.b.ins().smulhi(a, b);
            let sign = self.b.ins().sshr_imm(low, 63);
            (low, self.b.ins().icmp(IntCC::NotEqual, high, sign))
        } else {
            let (a, b) = (self.b.ins().sextend(I64, a), self.b.ins().sextend(I64, b));
            let product = self.b.ins().imul(a, b);
            let low = self.narrow(product, size);
            let again = self.b.ins().sextend(I64, low);
            (low, self.b.ins().icmp(IntCC::NotEqual, again, product))
        };
        self.set(op.r[0], size, low);
        self.flags = Flags::Given {
            carry: wide,
            overflow: wide,
            aux: None,
            result: low,
        };
    }
}
