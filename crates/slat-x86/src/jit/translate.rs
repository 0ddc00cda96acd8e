//! From guest code to Cranelift's intermediate language.
//!
//! A region is one function. While it runs, the general registers and the record of the flags (`flags::Lazy`) are its variables; all
//! else is in the [`Cpu`]. It leaves through one block that writes them back. Every place where it leaves is between two
//! instructions: an access that the TLB does not have calls a helper, and if that cannot do it, the region leaves before the
//! instruction, of which nothing has happened.
//!
//! This file has the function as a whole: its blocks, its state, and how it is left. An instruction that `instructions` does not
//! translate calls the interpreter's handler: the region writes all state back before the call, and reads it again afterwards.

use super::Source;
use super::condition::Flags;
use super::helpers::{self, Status};
use crate::Cpu;
use crate::lower;
use crate::op::{MEM, NONE, Op};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I16, I32, I64};
use cranelift_codegen::ir::{
    AbiParam, Block, BlockCall, InstBuilder, JumpTableData, MemFlags, SigRef, Signature, Type,
    Value,
};
use cranelift_codegen::isa::CallConv;
use cranelift_frontend::{FunctionBuilder, Variable};
use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, OpAccess,
};
use std::collections::HashMap;
use std::mem::offset_of;

/// The types of the operand sizes.
pub(super) const TYPES: [Type; 4] = [I8, I16, I32, I64];

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
            // Also what is only written: on some paths, or in part, the old value stays.
            registers.used |= bit;
            if !matches!(used.access(), OpAccess::Read | OpAccess::CondRead) {
                registers.written |= bit;
            }
        }
    }
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
    /// What set the flags that the next instruction finds.
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

    pub(super) fn cpu(&mut self) -> Value {
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
    pub(super) fn cold(&mut self) -> Block {
        let block = self.b.create_block();
        self.b.set_cold_block(block);
        block
    }

    /// Leaves with `status`, at `rip`, after `done` instructions of this block.
    fn leave_with(&mut self, status: Value, rip: Value, done: i64) {
        // The record is made on this path only.
        let flags = self.flags.clone();
        self.record_flags();
        self.flags = flags;
        self.b.def_var(self.leave_status, status);
        self.b.def_var(self.leave_rip, rip);
        let op = self.constant(self.op as i64);
        self.b.def_var(self.leave_op, op);
        let executed = self.b.use_var(self.executed);
        let executed = self.b.ins().iadd_imm(executed, done);
        self.b.def_var(self.executed, executed);
        self.b.ins().jump(self.leave, &[]);
    }

    /// Leaves after the current instruction, which is done: the CPU continues at `rip`.
    pub(super) fn leave_for(&mut self, rip: Value) {
        let status = self.constant(Status::Continue as i64);
        self.leave_with(status, rip, self.before + 1);
    }

    /// Leaves before the current instruction with the status that a helper returned.
    pub(super) fn leave_before(&mut self, status: Value) {
        let rip = self.constant(self.rip as i64);
        self.leave_with(status, rip, self.before);
    }

    /// Leaves the current instruction to the interpreter.
    pub(super) fn leave_to_interpreter(&mut self) {
        let status = self.constant(Status::Interpret as i64);
        self.leave_before(status);
    }

    /// Continues at `rip`, after the current instruction: in the region if it has a block there, else leaves.
    pub(super) fn goto(&mut self, rip: u64) {
        let Some(&block) = self.blocks.get(&rip) else {
            let to = self.constant(rip as i64);
            self.leave_for(to);
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
            self.leave_for(to);
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
                self.leave_to_interpreter();
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
        self.leave_for(next);
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
    pub(super) fn narrow(&mut self, value: Value, size: u8) -> Value {
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
    pub(super) fn set(&mut self, r: u8, size: u8, value: Value) {
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

    pub(super) fn immediate(&mut self, size: u8, value: u64) -> Value {
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
    pub(super) fn operand(&mut self, op: &Op, k: usize, size: u8) -> Value {
        match op.r[k] {
            MEM => {
                let lin = self.lin(op);
                self.load(lin, size)
            }
            NONE => self.immediate(size, op.imm),
            r => self.get(r, size),
        }
    }
}
