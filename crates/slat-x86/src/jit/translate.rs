//! From guest code to Cranelift's intermediate language.
//!
//! A region is one function. All state is in the [`Cpu`] at the beginning of each block. A block reads the general registers that it
//! uses; what it has changed, registers and the record of the flags (`flags::Lazy`), it writes back at its end, and at checkpoints. So
//! there are no values that live across blocks: to find places for them would be most of the work of compiling, and the host has hardly
//! more registers than the guest. (Paths of several blocks with their state in values were tried, and gained
//! nothing; but then most regions of Cranelift's had one block, because those that compiled code had run were left out.) But a block that
//! jumps to its own beginning keeps its registers in values from turn to turn: a short loop would do little else than write them back.
//!
//! Every place where the region is left is between two instructions. An access that the TLB does not have calls a helper, and if that
//! cannot do it, the region stops at its *checkpoint*: the last instruction before which the CPU had all state, if no instruction since
//! has stored anything. The interpreter executes those again that follow the checkpoint: they have changed values of the function and
//! nothing else, and have read memory, but no MMIO. So state is written back only before the first access after a store: a row of loads
//! costs nothing. (Another CPU may have stored meanwhile: then it is as if the loads were made later.) An instruction that
//! `instructions` does not translate calls the interpreter's handler, and is a checkpoint; then the region reads what the handler has
//! changed.
//!
//! This file has the function as a whole: its blocks, its state, and how it is left. `guest` decodes the instructions, `values` has the
//! registers.

use super::access::LastAccess;
use super::condition::Flags;
use super::cpu::{SET_BITS, SETS, set_of};
use super::guest::{Guest, decode, numbers, registers, sets_flags_first};
use super::helpers::{self, Status};
use super::vector::Vectors;
use super::{Source, Step, Tier};
use crate::Cpu;
use crate::cpu::mode;
use crate::op::MEM;
use cranelift_codegen::ir::types::{I8, I16, I32, I64};
use cranelift_codegen::ir::{
    AbiParam, Block, BlockArg, BlockCall, InstBuilder, JumpTableData, MemFlags, SigRef, Signature,
    SourceLoc, Type, Value,
};
use cranelift_codegen::isa::CallConv;
use cranelift_frontend::FunctionBuilder;
use iced_x86::{FlowControl, Instruction, InstructionInfoFactory};
use std::collections::HashMap;
use std::mem::offset_of;

/// The types of the operand sizes.
pub(super) const TYPES: [Type; 4] = [I8, I16, I32, I64];

/// A block of the region.
#[derive(Clone, Copy)]
struct Head {
    block: Block,
    sets_flags_first: bool,
}

/// The beginning of each turn of a block that is a loop.
#[derive(Clone, Copy)]
struct Turn {
    /// Its parameters: the general registers that the instructions use, and the counter of instructions.
    block: Block,
    /// These registers, as bits.
    registers: u16,
    /// That counter.
    count: Value,
}

/// Builds the function of a region. Returns its instructions, to which its code has pointers.
pub(super) fn translate(builder: FunctionBuilder<'_>, source: &Source, tier: Tier) -> Box<[Step]> {
    let (steps, blocks) = decode(source);
    let steps = steps.into_boxed_slice();
    let mut translator = Translator::new(builder, &steps, source, tier, &blocks);
    for ((rip, _), guests) in source.blocks.iter().zip(&blocks) {
        translator.block(*rip, guests);
    }
    translator.finish();
    steps
}

/// The signature of a region: from the index of the block to a status, or a target (`dispatch`). The convention keeps no registers: see `dispatch`.
pub(super) fn region() -> Signature {
    signature(CallConv::Winch, 1, 1)
}

fn signature(convention: CallConv, parameters: usize, returns: usize) -> Signature {
    let mut signature = Signature::new(convention);
    signature.params = vec![AbiParam::new(I64); parameters];
    signature.returns = vec![AbiParam::new(I64); returns];
    signature
}

pub(super) struct Translator<'a> {
    pub(super) b: FunctionBuilder<'a>,
    steps: &'a [Step],
    factory: InstructionInfoFactory,
    /// The host's name of the CPU, in this block.
    cpu: Option<Value>,
    /// The registers as this block knows them.
    pub(super) gpr: [Option<Value>; 16],
    /// The registers that are not written back, as bits.
    pub(super) changed: u16,
    pub(super) vectors: Vectors,
    /// What set the flags that the next instruction finds.
    pub(super) flags: Flags,
    /// Whether the CPU's record has them.
    pub(super) are_flags_recorded: bool,
    /// Instructions of this block before the current one.
    before: i64,
    heads: HashMap<u64, Head>,
    /// Those of the helpers, by the numbers of arguments besides the CPU and of results.
    signatures: HashMap<(usize, usize), SigRef>,
    /// Those of stubs, by the numbers of vectors and of integers.
    pub(super) stubs: HashMap<(usize, usize), SigRef>,
    /// Leaves for RIP. Its parameter: what the region returns.
    leave: Block,
    /// Stops. Its parameters: the step, the status.
    stop: Block,
    /// The current instruction.
    step: usize,
    /// The CPU has the state before this instruction, unless `has_changed`.
    checkpoint: usize,
    /// Whether code since the checkpoint has changed guest memory or the state in the CPU.
    pub(super) has_changed: bool,
    /// The address of the current block.
    head: u64,
    /// If the current block may jump to itself: where its next turn begins.
    turn: Option<Turn>,
    /// The CPU's.
    pub(super) mode: u8,
    pub(super) tier: Tier,
    /// Bytes of the current instruction's memory operand.
    pub(super) operand_bytes: i64,
    /// The operand size of addresses and of words on the stack.
    pub(super) word: u8,
    /// Whether the host has the guest's MXCSR here.
    pub(super) has_floats: bool,
    pub(super) last_access: Option<LastAccess>,
}

impl<'a> Translator<'a> {
    fn new(
        mut b: FunctionBuilder<'a>,
        steps: &'a [Step],
        source: &Source,
        tier: Tier,
        blocks: &[Vec<Guest>],
    ) -> Self {
        let entry = b.create_block();
        let index = b.append_block_param(entry, I64);
        let [leave, stop] = std::array::from_fn(|_| b.create_block());
        let heads = (source.blocks.iter().zip(blocks))
            .map(|((rip, _), guests)| {
                let head = Head {
                    block: b.create_block(),
                    sets_flags_first: sets_flags_first(guests),
                };
                (*rip, head)
            })
            .collect();
        b.switch_to_block(entry);
        let mut translator = Self {
            b,
            steps,
            factory: InstructionInfoFactory::new(),
            cpu: None,
            gpr: [None; 16],
            changed: 0,
            vectors: Vectors::default(),
            flags: Flags::Recorded,
            are_flags_recorded: true,
            before: 0,
            heads,
            signatures: HashMap::new(),
            stubs: HashMap::new(),
            leave,
            stop,
            step: 0,
            checkpoint: 0,
            has_changed: false,
            head: 0,
            turn: None,
            mode: source.mode,
            tier,
            word: match source.mode & mode::BITS {
                mode::BITS_64 => 3,
                _ => 2,
            },
            operand_bytes: 0,
            has_floats: false,
            last_access: None,
        };
        translator.enter(index, source);
        translator
    }

    /// Continues in the block with this index.
    fn enter(&mut self, index: Value, source: &Source) {
        let index = self.b.ins().ireduce(I32, index);
        // The first block is the default, too: Cranelift wants one.
        let mut targets = (source.blocks.iter().take(1).chain(&source.blocks))
            .map(|(rip, _)| {
                BlockCall::new(self.heads[rip].block, [], &mut self.b.func.dfg.value_lists)
            })
            .collect::<Vec<_>>();
        let default = targets.remove(0);
        let table = JumpTableData::new(default, &targets);
        let table = self.b.create_jump_table(table);
        self.b.ins().br_table(index, table);
    }

    /// Adds the blocks that leave, and ends the function.
    fn finish(mut self) {
        let step = self.b.append_block_param(self.stop, I64);
        let status = self.b.append_block_param(self.stop, I64);
        self.begin(self.stop);
        self.set_field(offset_of!(Cpu, compiled.step), step);
        self.b.ins().return_(&[status]);
        let target = self.b.append_block_param(self.leave, I64);
        self.begin(self.leave);
        self.b.ins().return_(&[target]);
        self.b.seal_all_blocks();
        self.b.finalize();
    }

    /// Returns a value that is not 0 if others want something of the CPU, or have changed code.
    fn attention(&mut self) -> Value {
        let word = self.field(I64, offset_of!(Cpu, compiled.attention));
        (self.b.ins()).atomic_load(I32, MemFlags::trusted(), word)
    }

    /// Begins a block that finds all state in the CPU.
    fn begin(&mut self, block: Block) {
        self.b.switch_to_block(block);
        self.cpu = Some(self.b.ins().get_pinned_reg(I64));
        self.gpr = [None; 16];
        self.changed = 0;
        self.forget_vectors();
        self.has_floats = false;
        self.last_access = None;
        self.flags = Flags::Recorded;
        self.are_flags_recorded = true;
    }

    pub(super) fn constant(&mut self, value: i64) -> Value {
        self.b.ins().iconst(I64, value)
    }

    pub(super) fn cpu(&self) -> Value {
        self.cpu.expect("within a block")
    }

    /// Reads a field of the CPU.
    pub(super) fn field(&mut self, ty: Type, offset: usize) -> Value {
        let cpu = self.cpu();
        self.b
            .ins()
            .load(ty, MemFlags::trusted(), cpu, offset as i32)
    }

    /// Writes a field of the CPU.
    pub(super) fn set_field(&mut self, offset: usize, value: Value) {
        let cpu = self.cpu();
        self.b
            .ins()
            .store(MemFlags::trusted(), value, cpu, offset as i32);
    }

    pub(super) fn gpr_offset(r: usize) -> usize {
        offset_of!(Cpu, state.gpr) + 8 * r
    }

    /// Writes back the registers that have changed.
    pub(super) fn write_registers(&mut self) {
        let changed = std::mem::take(&mut self.changed);
        self.has_changed |= self.write_vectors() || changed != 0;
        for r in numbers(changed) {
            if let Some(value) = self.gpr[r] {
                self.set_field(Self::gpr_offset(r), value);
            }
        }
    }

    /// Writes all back.
    pub(super) fn write_back(&mut self) {
        self.write_registers();
        self.record_flags();
    }

    /// Makes the current instruction the checkpoint. Call before anything of it has happened.
    pub(super) fn set_checkpoint(&mut self) {
        self.write_back();
        self.checkpoint = self.step;
        self.has_changed = false;
        self.b.set_srcloc(SourceLoc::new(self.step as u32));
    }

    /// Call before an access, or whatever else may stop the region: makes the current instruction the checkpoint if the one there is
    /// would not do any more.
    pub(super) fn prepare_stop(&mut self) {
        if self.has_changed {
            self.set_checkpoint();
        }
    }

    /// Calls a helper with the CPU and `arguments`.
    pub(super) fn call(
        &mut self,
        helper: usize,
        arguments: &[Value],
        returns: usize,
    ) -> Vec<Value> {
        let kind = (arguments.len(), returns);
        let signature: SigRef = *(self.signatures.entry(kind)).or_insert_with(|| {
            let signature = signature(CallConv::SystemV, 1 + kind.0, kind.1);
            self.b.import_signature(signature)
        });
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

    /// Counts the instructions of this block up to the current one, which is done. Returns the sum.
    fn count_done(&mut self) -> Value {
        let offset = offset_of!(Cpu, counters.instructions_compiled);
        let before = match self.turn {
            Some(turn) => turn.count,
            None => self.field(I64, offset),
        };
        let sum = self.b.ins().iadd_imm(before, self.before + 1);
        self.set_field(offset, sum);
        sum
    }

    /// Leaves after the current instruction, which is done: the CPU continues at `rip`.
    pub(super) fn leave_for(&mut self, rip: Value) {
        self.write_back();
        self.count_done();
        self.leave_to(rip);
    }

    /// Leaves. The CPU has all state, and continues at `rip`.
    fn leave_to(&mut self, rip: Value) {
        self.set_field(offset_of!(Cpu, state.rip), rip);
        // The complement of the address of RIP's set: see `dispatch`.
        let offset = match self.root(rip) {
            (None, rip) => {
                let offset = (set_of(rip as u64) as i64) << SET_BITS;
                self.constant(!offset)
            }
            _ => {
                let page = self.b.ins().ushr_imm(rip, 12);
                let index = self.b.ins().bxor(rip, page);
                let index = self.b.ins().band_imm(index, SETS as i64 - 1);
                let offset = self.b.ins().ishl_imm(index, i64::from(SET_BITS));
                self.b.ins().bnot(offset)
            }
        };
        let targets = self.field(I64, offset_of!(Cpu, compiled.targets));
        let target = self.b.ins().isub(offset, targets);
        self.b.ins().jump(self.leave, &[target.into()]);
    }

    /// Calls one of the helpers that stop the region at the checkpoint if they find nothing. Returns what it finds.
    pub(super) fn call_or_stop(&mut self, helper: usize, arguments: &[Value]) -> Value {
        debug_assert!(!self.has_changed);
        let mut arguments = arguments.to_vec();
        arguments.push(self.address_of(self.checkpoint));
        self.call(helper, &arguments, 1)[0]
    }

    /// Leaves the current instruction to the interpreter.
    pub(super) fn leave_to_interpreter(&mut self) {
        self.set_checkpoint();
        self.stop_for_interpreter();
    }

    /// Has the interpreter continue at the checkpoint.
    pub(super) fn stop_for_interpreter(&mut self) {
        let status = self.constant(Status::Interpret as i64);
        self.stop_with(status);
    }

    /// Stops at the checkpoint.
    fn stop_with(&mut self, status: Value) {
        debug_assert!(!self.has_changed);
        let step = self.address_of(self.checkpoint);
        (self.b.ins()).jump(self.stop, &[step.into(), status.into()]);
    }

    /// Returns the address of a step.
    fn address_of(&mut self, step: usize) -> Value {
        self.constant(&raw const self.steps[step] as i64)
    }

    /// Continues at `rip`, after the current instruction: in the region if it has a block there, else leaves.
    pub(super) fn goto(&mut self, rip: u64) {
        let Some(&head) = self.heads.get(&rip) else {
            let to = self.constant(rip as i64);
            return self.leave_for(to);
        };
        self.write_for(rip);
        if !head.sets_flags_first {
            self.record_flags();
        }
        let count = self.count_done();
        let (block, values) = match self.turn_at(rip) {
            Some(turn) => (turn.block, self.values_of(turn.registers, count)),
            None => (head.block, Vec::new()),
        };
        if rip <= self.head {
            // A loop has to see it.
            let wanted = self.attention();
            let (wait, go) = (self.cold(), self.b.create_block());
            self.b.ins().brif(wanted, wait, &[], go, &[]);
            self.b.switch_to_block(wait);
            self.write_back();
            let to = self.constant(rip as i64);
            self.leave_to(to);
            self.b.switch_to_block(go);
        }
        self.b.ins().jump(block, &values);
    }

    /// Returns where the next turn begins if the current block is a loop, and begins at `rip`.
    fn turn_at(&self, rip: u64) -> Option<Turn> {
        self.turn.filter(|_| rip == self.head)
    }

    /// Writes back what the block at `rip` finds in the CPU: all registers, or the vectors alone for the next turn.
    pub(super) fn write_for(&mut self, rip: u64) {
        match self.turn_at(rip) {
            Some(_) => _ = self.write_vectors(),
            None => self.write_registers(),
        }
    }

    /// Returns the parameters of a turn: the registers that are given as bits, and the counter of instructions.
    fn values_of(&mut self, registers: u16, count: Value) -> Vec<BlockArg> {
        let mut values: Vec<BlockArg> = numbers(registers)
            .map(|r| self.register(r).into())
            .collect();
        values.push(count.into());
        values
    }

    /// Begins the loop that a block is: the registers that its instructions use stay in values from turn to turn.
    fn begin_turn(&mut self, guests: &[Guest]) {
        let (mut used, mut changed) = (0, 0);
        for Guest { insn, .. } in guests {
            for (r, may_write) in registers(&mut self.factory, insn) {
                used |= 1 << r;
                changed |= u16::from(may_write) << r;
            }
        }
        let count = self.field(I64, offset_of!(Cpu, counters.instructions_compiled));
        let values = self.values_of(used, count);
        let block = self.b.create_block();
        self.b.ins().jump(block, &values);
        self.b.switch_to_block(block);
        for r in numbers(used) {
            self.gpr[r] = Some(self.b.append_block_param(block, I64));
        }
        self.changed = changed;
        self.has_changed |= changed != 0;
        self.turn = Some(Turn {
            block,
            registers: used,
            count: self.b.append_block_param(block, I64),
        });
    }

    /// Translates a basic block.
    fn block(&mut self, rip: u64, guests: &[Guest]) {
        let head = self.heads[&rip];
        self.begin(head.block);
        self.before = 0;
        self.head = rip;
        self.step = guests[0].step;
        self.set_checkpoint();
        // The record of the flags may be an old one.
        self.has_changed = head.sets_flags_first;
        // The last instruction tells whether it is a loop.
        let last = guests.last().expect("a block begins with an instruction");
        self.turn = None;
        if last.insn.near_branch_target() == rip {
            self.begin_turn(guests);
        }
        for guest in guests {
            self.step = guest.step;
            if self.instruction(&guest.insn) {
                return;
            }
            self.before += 1;
        }
        // The block's limit, or something that cannot be decoded.
        self.before -= 1;
        self.goto(last.insn.next_ip());
    }

    /// Translates an instruction. Returns whether it ends the block.
    fn instruction(&mut self, insn: &Instruction) -> bool {
        let op = &self.steps[self.step].op;
        self.operand_bytes = insn.memory_size().size() as i64;
        if insn.flow_control() != FlowControl::Next {
            self.branch(insn, op);
            return true;
        }
        let translated = (op.address_size == 1 << self.word || !op.r.contains(&MEM))
            && self.inline(insn, op).is_some();
        if !translated {
            self.handler(insn);
        }
        false
    }

    /// Has the interpreter's handler execute the current instruction.
    fn handler(&mut self, insn: &Instruction) {
        self.set_checkpoint();
        let step = self.address_of(self.step);
        let status = self.call(helpers::handler as *const () as usize, &[step], 1)[0];
        let (stop, on) = (self.cold(), self.b.create_block());
        self.b.ins().brif(status, stop, &[], on, &[]);
        self.b.switch_to_block(stop);
        self.stop_with(status);
        self.b.switch_to_block(on);
        self.has_changed = true;
        self.has_floats = false;
        self.last_access = None;
        self.flags = Flags::Recorded;
        for (r, may_write) in registers(&mut self.factory, insn) {
            if may_write {
                self.gpr[r] = None;
            }
        }
        self.forget_vectors();
    }

    pub(super) fn is_64(&self) -> bool {
        self.word == 3
    }
}
