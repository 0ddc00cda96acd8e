//! Translates guest code to Cranelift's intermediate language.
//!
//! A region is one function, which consists of *paths* of blocks (`paths`). At the beginning of each path, all state is
//! in the [`Cpu`]. A path reads the general registers that it uses. At its end, and at checkpoints, it writes back what
//! it has changed: registers, and the record of the flags (`flags::Lazy`). If a path leads back to its own beginning,
//! it keeps its registers in values from one iteration to the next; otherwise a short loop would spend most of its time
//! writing them back. In the baseline tier each block is a path of its own: longer paths would have values that live
//! longer, and assigning registers or slots to these is most of the work of compiling.
//!
//! A region is always left between two instructions. For an access that misses the TLB, the code calls a helper. If the
//! helper cannot make the access, the region stops at its *checkpoint*: the last instruction before which all state was
//! written to the CPU, and since which the path has stored nothing. The interpreter executes the instructions again
//! from the checkpoint on. This is possible because since the checkpoint they have only changed values of the function
//! and read memory, but not MMIO. So state must be written back only before the first access after a store, and a
//! sequence of loads needs no write-back. (If another CPU has stored meanwhile, the loads appear to be made later.) If
//! there is no translation of an instruction, the region calls the interpreter's handler. Such an instruction is also a
//! checkpoint, and after it the region reads the state again that the handler may have changed.
//!
//! This file builds the function as a whole: its blocks, its state, and its exits. Module `walk` follows the paths,
//! `guest` decodes the instructions, and `values` manages the registers.

mod walk;

use super::guest::{FirstUse, Guest, decode, first_use, numbers, registers};
use super::helpers::{self, OrStop, Status};
use super::kept::{Flags, LastAccess, PlainSegment, Vectors};
use super::paths::Paths;
use super::window::{BASE, from_base};
use super::{Source, Step, Tier};
use crate::Cpu;
use crate::compiled::{SET_BITS, SETS, set_of};
use crate::mode;
use cranelift_codegen::ir::types::{I8, I16, I32, I64};
use cranelift_codegen::ir::{
    AbiParam, Block, BlockCall, InstBuilder, JumpTableData, MemFlags, SigRef, Signature, SourceLoc,
    Type, Value,
};
use cranelift_codegen::isa::CallConv;
use cranelift_frontend::FunctionBuilder;
use iced_x86::{FlowControl, Instruction, InstructionInfoFactory};
use std::collections::HashMap;
use std::mem::offset_of;

/// The Cranelift types of the operand sizes, by the logarithm of the size in bytes.
pub(super) const TYPES: [Type; 4] = [I8, I16, I32, I64];

/// A block of the region in which a path begins.
#[derive(Clone, Copy)]
struct Head {
    block: Block,
    flags: FirstUse,
}

/// The beginning of an iteration of a path that is a loop.
#[derive(Clone, Copy)]
struct Turn {
    /// The guest address of the iteration's first instruction.
    rip: u64,
    /// The Cranelift block of the iteration. Its parameters are the general registers that the loop uses, and the
    /// counter of instructions.
    block: Block,
    /// The general registers among the parameters: one bit for each register.
    registers: u16,
    /// The counter of instructions among the parameters.
    count: Value,
}

/// Builds the function of a region. Returns the region's steps, to which the function's code has pointers.
pub(super) fn translate(
    builder: FunctionBuilder<'_>,
    source: &Source,
    page: u64,
    tier: Tier,
) -> Box<[Step]> {
    let blocks = decode(source);
    let (paths, steps) = Paths::new(source, &blocks, tier);
    let mut translator = Translator::new(builder, &steps, source, page, tier, &blocks, &paths);
    for root in paths.roots.iter().flatten() {
        translator.path(*root);
    }
    translator.finish();
    steps
}

/// Returns the signature of a region, which returns a status or the offset of a set of targets (`dispatch`). The
/// calling convention preserves no registers: see `dispatch`. The parameter, the index of a block, is never passed,
/// because a region is entered directly at the beginnings of its paths.
pub(super) fn region() -> Signature {
    signature(CallConv::Winch, 1, 1)
}

fn signature(convention: CallConv, parameters: usize, returns: usize) -> Signature {
    let mut signature = Signature::new(convention);
    signature.params = vec![AbiParam::new(I64); parameters];
    signature.returns = vec![AbiParam::new(I64); returns];
    signature
}

/// The translator's position in a path, and what is known of the CPU's state at this position.
#[derive(Clone)]
pub(super) struct Now {
    pub(super) node: usize,
    /// The guest address of the current block's first instruction.
    head: u64,
    /// The index of the current instruction's step.
    step: usize,
    /// The number of the path's instructions before the current instruction.
    before: i64,
    /// The index of the [checkpoint](self)'s step. If `has_changed` is false, the region can stop at this instruction:
    /// the CPU has all the state before it.
    checkpoint: usize,
    /// Whether code since the [checkpoint](self) has changed guest memory, or the state in the CPU.
    pub(super) has_changed: bool,
    /// The values of the general registers. `None`: the register's value is only in the CPU.
    pub(super) gpr: [Option<Value>; 16],
    /// The general registers that must be written back to the CPU: one bit for each register.
    pub(super) changed: u16,
    pub(super) vectors: Vectors,
    /// The operation that was the last to set the flags.
    pub(super) flags: Flags,
    /// Whether `flags` are in the CPU's record.
    pub(super) are_flags_recorded: bool,
    /// Whether the host's MXCSR certainly has the guest's value at this position.
    pub(super) has_floats: bool,
    pub(super) last_access: Option<LastAccess>,
    /// The address of the code's page, if the path has computed it.
    page: Option<Value>,
    /// For each segment register, its base and limit if the path has found it to be plain.
    pub(super) segments: [Option<PlainSegment>; 6],
}

impl Now {
    /// Returns the state at the beginning of a path with first node `node`: all guest state is in the CPU.
    fn new(node: usize) -> Self {
        Self {
            node,
            head: 0,
            step: 0,
            before: 0,
            checkpoint: 0,
            has_changed: false,
            gpr: [None; 16],
            changed: 0,
            vectors: Vectors::default(),
            flags: Flags::InCpu,
            are_flags_recorded: true,
            has_floats: false,
            last_access: None,
            page: None,
            segments: [None; 6],
        }
    }
}

pub(super) struct Translator<'a> {
    pub(super) b: FunctionBuilder<'a>,
    steps: &'a [Step],
    blocks: &'a [Vec<Guest>],
    pub(super) paths: &'a Paths<'a>,
    factory: InstructionInfoFactory,
    /// The value of R15 in this path, which points near the CPU (`window`).
    base: Option<Value>,
    pub(super) now: Now,
    heads: HashMap<u64, Head>,
    /// The signatures of helpers, by calling convention, number of arguments besides the CPU, and number of results.
    signatures: HashMap<(CallConv, usize, usize), SigRef>,
    /// The signatures of stubs, by the numbers of vectors and of integers.
    pub(super) stubs: HashMap<(usize, usize), SigRef>,
    /// The block that stops the region. Its parameters are the step at which the interpreter continues, and the status.
    stop: Block,
    /// The beginning of an iteration, if the path can lead back to its own beginning.
    turn: Option<Turn>,
    /// Whether the region's code is the same for all pages of guest code. If not, the code is right for guest code in
    /// `page` only.
    is_movable: bool,
    /// The linear address of the page of guest code for which the region is compiled.
    page: u64,
    /// The CPU's decoding mode (`mode`).
    pub(super) mode: u8,
    pub(super) tier: Tier,
    /// The size of the current instruction's memory operand in bytes.
    pub(super) operand_bytes: i64,
    /// Whether the current instruction's memory operand is relative to RIP.
    pub(super) is_relative: bool,
    /// The logarithm of the stack pointer's size in bytes.
    pub(super) stack: u8,
    /// Whether segments have bases and limits: offsets in ES, CS, SS and DS are not linear addresses.
    pub(super) has_segments: bool,
}

impl<'a> Translator<'a> {
    fn new(
        mut b: FunctionBuilder<'a>,
        steps: &'a [Step],
        source: &Source,
        page: u64,
        tier: Tier,
        blocks: &'a [Vec<Guest>],
        paths: &'a Paths<'a>,
    ) -> Self {
        let entry = b.create_block();
        let index = b.append_block_param(entry, I64);
        let stop = b.create_block();
        let mut heads = HashMap::new();
        for (((rip, _), guests), root) in source.blocks.iter().zip(blocks).zip(&paths.roots) {
            if root.is_some() {
                let head = Head {
                    block: b.create_block(),
                    flags: first_use(guests),
                };
                heads.insert(*rip, head);
            }
        }
        b.switch_to_block(entry);
        let mut translator = Self {
            b,
            steps,
            blocks,
            paths,
            factory: InstructionInfoFactory::new(),
            base: None,
            now: Now::new(0),
            heads,
            signatures: HashMap::new(),
            stubs: HashMap::new(),
            stop,
            turn: None,
            is_movable: source.kind.is_movable,
            page,
            mode: source.kind.mode,
            tier,
            stack: source.stack,
            has_segments: mode::has_segments(source.kind.mode),
            operand_bytes: 0,
            is_relative: false,
        };
        translator.enter(index, source);
        translator
    }

    /// Emits a jump, through a table, to the blocks at the beginnings of paths. It is never executed, but without it
    /// Cranelift would drop blocks to which no branch leads.
    fn enter(&mut self, index: Value, source: &Source) {
        let index = self.b.ins().ireduce(I32, index);
        let first = self.heads[&source.blocks[0].0];
        // Cranelift requires a default target: take the first block.
        let mut targets = (source.blocks.iter().take(1).chain(&source.blocks))
            .map(|(rip, _)| {
                let head = self.heads.get(rip).unwrap_or(&first);
                BlockCall::new(head.block, [], &mut self.b.func.dfg.value_lists)
            })
            .collect::<Vec<_>>();
        let default = targets.remove(0);
        let table = JumpTableData::new(default, &targets);
        let table = self.b.create_jump_table(table);
        self.b.ins().br_table(index, table);
    }

    /// Emits the block that stops the region, and ends the function.
    fn finish(mut self) {
        let step = self.b.append_block_param(self.stop, I64);
        let status = self.b.append_block_param(self.stop, I64);
        self.begin(self.stop, 0);
        self.set_field(offset_of!(Cpu, compiled.step), step);
        self.b.ins().return_(&[status]);
        self.b.seal_all_blocks();
        self.b.finalize();
    }

    /// Returns a value that is not 0 if the run must end or other CPUs have changed code.
    fn attention(&mut self) -> Value {
        let word = self.field(I64, offset_of!(Cpu, compiled.attention));
        (self.b.ins()).atomic_load(I32, MemFlags::trusted(), word)
    }

    /// Begins a block in which a path begins: all of the guest's state is in the `Cpu`.
    fn begin(&mut self, block: Block, node: usize) {
        self.b.switch_to_block(block);
        self.base = Some(self.b.ins().get_pinned_reg(I64));
        self.now = Now::new(node);
    }

    /// Continues the translation in `block`, with `now` as the state, as it was at the branch to the block.
    pub(super) fn resume(&mut self, block: Block, now: Now) {
        self.b.switch_to_block(block);
        self.now = now;
        self.mark_checkpoint();
    }

    /// Makes guarded accesses that are emitted from now on stop at the current [checkpoint](self) if they fail.
    fn mark_checkpoint(&mut self) {
        let step = self.now.checkpoint as u32;
        self.b.set_srcloc(SourceLoc::new(step));
    }

    /// Returns the guest address of a place (see `region`), which is in the code's page or near it.
    pub(super) fn address(&mut self, place: i64) -> Value {
        if !self.is_movable {
            return self.constant(place);
        }
        let page = match self.now.page {
            Some(page) => page,
            None => {
                let rip = self.field(I64, offset_of!(Cpu, state.rip));
                self.b.ins().band_imm(rip, !0xfff)
            }
        };
        self.now.page = Some(page);
        self.moved(page, place)
    }

    /// If `address` was made by [`address`](Self::address), or is a constant, returns its place.
    fn place_of(&self, address: Value) -> Option<i64> {
        let (root, place) = self.root(address);
        (root == self.now.page || root.is_none()).then_some(place)
    }

    pub(super) fn constant(&mut self, value: i64) -> Value {
        self.b.ins().iconst(I64, value)
    }

    /// Returns the value of R15, which points near the CPU, in this path.
    fn base(&self) -> Value {
        self.base.expect("within a block")
    }

    /// Emits a load of a field of `Cpu`.
    pub(super) fn field(&mut self, ty: Type, offset: usize) -> Value {
        let base = self.base();
        self.b
            .ins()
            .load(ty, MemFlags::trusted(), base, from_base(offset))
    }

    /// Emits a store to a field of `Cpu`.
    pub(super) fn set_field(&mut self, offset: usize, value: Value) {
        let base = self.base();
        self.b
            .ins()
            .store(MemFlags::trusted(), value, base, from_base(offset));
    }

    pub(super) fn gpr_offset(r: usize) -> usize {
        offset_of!(Cpu, state.gpr) + 8 * r
    }

    /// Emits stores of the changed registers to the CPU.
    pub(super) fn write_registers(&mut self) {
        let changed = std::mem::take(&mut self.now.changed);
        self.now.has_changed |= self.write_vectors() || changed != 0;
        for r in numbers(changed) {
            if let Some(value) = self.now.gpr[r] {
                self.set_field(Self::gpr_offset(r), value);
            }
        }
    }

    /// Emits stores of all changed state to the CPU.
    pub(super) fn write_back(&mut self) {
        self.write_registers();
        self.record_flags();
    }

    /// Makes the current instruction the [checkpoint](self). Call before the instruction has any effect.
    pub(super) fn set_checkpoint(&mut self) {
        self.write_back();
        self.now.checkpoint = self.now.step;
        self.now.has_changed = false;
        self.mark_checkpoint();
    }

    /// Call before an access, or anything else that may stop the region. If the region can no longer stop at the
    /// [checkpoint](self), makes the current instruction the checkpoint.
    pub(super) fn prepare_stop(&mut self) {
        if self.now.has_changed {
            self.set_checkpoint();
        }
    }

    /// Emits a call of a helper. Its arguments are the CPU and `arguments`.
    pub(super) fn call(
        &mut self,
        helper: usize,
        arguments: &[Value],
        returns: usize,
    ) -> Vec<Value> {
        self.call_as(CallConv::SystemV, helper, arguments, returns)
    }

    /// Emits a call of a helper like [`call`](Self::call), but with the calling convention `convention`.
    fn call_as(
        &mut self,
        convention: CallConv,
        helper: usize,
        arguments: &[Value],
        returns: usize,
    ) -> Vec<Value> {
        let kind = (convention, arguments.len(), returns);
        let signature: SigRef = *(self.signatures.entry(kind)).or_insert_with(|| {
            let signature = signature(convention, 1 + kind.1, kind.2);
            self.b.import_signature(signature)
        });
        let function = self.constant(helper as i64);
        let base = self.base();
        let cpu = self.b.ins().iadd_imm(base, -(BASE as i64));
        let all: Vec<Value> = std::iter::once(cpu)
            .chain(arguments.iter().copied())
            .collect();
        let call = self.b.ins().call_indirect(signature, function, &all);
        self.b.inst_results(call).to_vec()
    }

    /// Creates a block that is rarely executed.
    pub(super) fn cold(&mut self) -> Block {
        let block = self.b.create_block();
        self.b.set_cold_block(block);
        block
    }

    /// Emits code that executes the code of `rare` only if `is_done` is 0.
    pub(super) fn unless(&mut self, is_done: Value, rare: impl FnOnce(&mut Self)) {
        let (missing, on) = (self.cold(), self.b.create_block());
        self.b.ins().brif(is_done, on, &[], missing, &[]);
        self.b.switch_to_block(missing);
        rare(self);
        self.b.ins().jump(on, &[]);
        self.b.switch_to_block(on);
    }

    /// Call at the end of the current instruction. Emits code that adds the number of this path's instructions so far
    /// to the count of executed instructions. Returns the sum.
    fn count_done(&mut self) -> Value {
        let offset = offset_of!(Cpu, compiled.instructions);
        let before = match self.turn {
            Some(turn) => turn.count,
            None => self.field(I64, offset),
        };
        let sum = self.b.ins().iadd_imm(before, self.now.before + 1);
        self.set_field(offset, sum);
        sum
    }

    /// Call at the end of the current instruction. Emits code that leaves the region, so that the CPU continues at
    /// `rip`.
    pub(super) fn leave_for(&mut self, rip: Value) {
        self.write_back();
        self.count_done();
        self.leave_to(rip);
    }

    /// Emits code that leaves the region, so that the CPU continues at `rip`. All state must be in the CPU.
    fn leave_to(&mut self, rip: Value) {
        self.set_field(offset_of!(Cpu, state.rip), rip);
        let set = match self.place_of(rip) {
            Some(place) => {
                let set = set_of(self.page.wrapping_add(place as u64));
                self.constant((set as i64) << SET_BITS)
            }
            None => {
                let page = self.b.ins().ushr_imm(rip, 12);
                let index = self.b.ins().bxor(rip, page);
                let index = self.b.ins().band_imm(index, SETS as i64 - 1);
                self.b.ins().ishl_imm(index, i64::from(SET_BITS))
            }
        };
        self.b.ins().return_(&[set]);
    }

    /// Emits a call of a helper, and returns its result. If the helper has no result, the region stops at the
    /// [checkpoint](self).
    pub(super) fn call_or_stop(&mut self, helper: OrStop, arguments: &[Value]) -> Value {
        debug_assert!(!self.now.has_changed);
        let mut arguments = arguments.to_vec();
        arguments.push(self.address_of(self.now.checkpoint));
        self.call_keeping(helper, &arguments)
    }

    /// Emits a call of a helper like [`call_or_stop`](Self::call_or_stop), but does not add the step to the arguments.
    /// Uses the calling convention that is best for the tier.
    pub(super) fn call_keeping(&mut self, helper: OrStop, arguments: &[Value]) -> Value {
        let (convention, helper) = match self.tier {
            Tier::Baseline => (CallConv::SystemV, helper.plain),
            Tier::Full => (CallConv::WindowsFastcall, helper.keeping),
        };
        self.call_as(convention, helper as usize, arguments, 1)[0]
    }

    /// Emits code that stops the region before the current instruction, so that the interpreter executes it.
    pub(super) fn leave_to_interpreter(&mut self) {
        self.set_checkpoint();
        self.stop_for_interpreter();
    }

    /// Emits code that stops the region, so that the interpreter continues at the [checkpoint](self).
    pub(super) fn stop_for_interpreter(&mut self) {
        let status = self.constant(Status::Interpret as i64);
        self.stop_with(status);
    }

    /// Emits code that stops the region at the [checkpoint](self) with this status.
    fn stop_with(&mut self, status: Value) {
        debug_assert!(!self.now.has_changed);
        let step = self.address_of(self.now.checkpoint);
        (self.b.ins()).jump(self.stop, &[step.into(), status.into()]);
    }

    /// Returns the address of the step with this index.
    fn address_of(&mut self, step: usize) -> Value {
        self.constant(&raw const self.steps[step] as i64)
    }

    /// Translates the current instruction. Returns whether it ends the block.
    fn instruction(&mut self, insn: &Instruction) -> bool {
        let op = &self.steps[self.now.step].op;
        self.operand_bytes = insn.memory_size().size() as i64;
        self.is_relative = insn.is_ip_rel_memory_operand();
        if insn.flow_control() != FlowControl::Next {
            self.branch(insn, op);
            return true;
        }
        let translated = self.inline(insn, op).is_some();
        if !translated {
            self.handler(insn);
        }
        false
    }

    /// Emits a call of the interpreter's handler for the current instruction.
    fn handler(&mut self, insn: &Instruction) {
        self.set_checkpoint();
        let step = self.address_of(self.now.step);
        let status = self.call(helpers::handler as *const () as usize, &[step], 1)[0];
        let (stop, on) = (self.cold(), self.b.create_block());
        self.b.ins().brif(status, stop, &[], on, &[]);
        self.b.switch_to_block(stop);
        self.stop_with(status);
        self.b.switch_to_block(on);
        self.now.has_changed = true;
        self.now.has_floats = false;
        self.now.last_access = None;
        self.now.flags = Flags::InCpu;
        for (r, may_write) in registers(&mut self.factory, insn) {
            if may_write {
                self.now.gpr[r] = None;
            }
        }
        self.forget_vectors();
    }

    /// Returns a code address, truncated to RIP's width.
    fn wrapped(&self, rip: u64) -> u64 {
        match self.is_64() {
            true => rip,
            false => rip & 0xffff_ffff,
        }
    }

    pub(super) fn is_64(&self) -> bool {
        self.stack == 3
    }
}
