//! From guest code to Cranelift's intermediate language.
//!
//! A region is one function. The registers that it uses are variables, which are read from the state at its beginning.
//! [`Plan`] says where they are written back.
//!
//! The flags are four variables: a number that is negative if N is set, one that is zero if Z is set, C, and a number
//! that is negative if V is set. So a loop that sets flags and does not use them computes hardly anything for them.

use super::context::Context;
use super::frame::{Frame, TARGET_BITS, TARGETS, Target, target_index};
use super::helpers::helper;
use super::plan::{Plan, Step};
use super::truth::Truth;
use super::uses::{FLAGS, Flow, Interpret, SP};
use super::values::Values;
use crate::meaning::execute;
use crate::simd::Function;
use crate::state::State;
use crate::tier::Next;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I64};
use cranelift_codegen::ir::{AbiParam, Block, InstBuilder, MemFlags, Signature, SourceLoc, Value};
use cranelift_codegen::isa::CallConv;
use cranelift_frontend::{FunctionBuilder, Variable};
use std::boxed::Box;
use std::collections::{BTreeMap, HashMap};
use std::mem::offset_of;
use std::vec::Vec;

/// A region's result: the program counter is set, and execution continues there.
pub(super) const CONTINUE: u64 = 0;
/// A region's result: the interpreter has to execute the instruction at the program counter.
pub(super) const INTERPRET: u64 = 1;

/// A checkpoint ([`plan`](super::plan)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) pc: u64,
    /// The instructions from here to the end of the block, which were counted at the beginning of the block.
    pub(super) uncounted: i64,
}

/// A function to which compiled code has a pointer.
pub(super) struct Kept(Box<Function>);

/// What a region has besides its code.
pub(super) struct Translated {
    pub(super) points: Vec<Point>,
    /// The functions to which the code has pointers.
    pub(super) functions: Vec<Kept>,
}

/// Returns the signature of a region (`slat_jit::enter`).
pub(super) fn signature() -> Signature {
    let mut signature = Signature::new(CallConv::Winch);
    signature.returns.push(AbiParam::new(I64));
    signature
}

/// Builds the function of a region.
pub(super) fn translate(
    builder: FunctionBuilder<'_>,
    plan: &Plan,
    pc: u64,
    context: Context,
) -> Translated {
    let mut translator = Translator::new(builder, plan, pc, context);
    for (start, block) in &plan.blocks {
        translator.block(*start, &block.steps, block.dirty);
    }
    translator.finish()
}

/// The current position.
pub(super) struct Now {
    /// The address of the instruction.
    pub(super) pc: u64,
    /// The instructions from here to the end of the block.
    rest: i64,
    /// The registers whose values the state does not have: a bit for each.
    pub(super) dirty: u64,
    /// The flags, if the block has set them.
    pub(super) flags: Option<[Truth; 4]>,
}

pub(super) struct Translator<'a> {
    pub(super) v: Values<'a>,
    pub(super) context: Context,
    /// The variables of registers by number, and those of the flags.
    registers: Vec<Variable>,
    flags: [Variable; 4],
    budget: Variable,
    /// The address of the state, and of the TLB.
    pub(super) state: Value,
    pub(super) tlb: Value,
    pub(super) now: Now,
    heads: BTreeMap<u64, Block>,
    /// See [`Plan`].
    returns: Vec<u64>,
    points: Vec<Point>,
    /// The blocks that leave at checkpoints, by the number of the checkpoint.
    leaves: HashMap<usize, Block>,
    functions: Vec<Kept>,
}

fn numbers(registers: u64) -> impl Iterator<Item = u32> {
    (0..FLAGS).filter(move |r| registers >> r & 1 != 0)
}

/// Returns the offset of a register in the state.
fn offset_of_register(r: u32) -> i32 {
    let offset = match r {
        SP => offset_of!(State, sp),
        r => offset_of!(State, x) + 8 * r as usize,
    };
    offset as i32
}

impl<'a> Translator<'a> {
    fn new(mut b: FunctionBuilder<'a>, plan: &Plan, pc: u64, context: Context) -> Self {
        let entry = b.create_block();
        b.switch_to_block(entry);
        b.seal_block(entry);
        let registers = (0..FLAGS).map(|_| b.declare_var(I64)).collect();
        let flags = [I64, I64, I8, I64].map(|ty| b.declare_var(ty));
        let budget = b.declare_var(I64);
        let heads: BTreeMap<_, _> = (plan.blocks.keys())
            .map(|start| (*start, b.create_block()))
            .collect();
        let mut v = Values::new(b);
        let [state, tlb] =
            [offset_of!(Frame, state), offset_of!(Frame, tlb)].map(|field| v.field(field));
        let mut translator = Self {
            v,
            context,
            registers,
            flags,
            budget,
            state,
            tlb,
            now: Now {
                pc,
                rest: 0,
                dirty: 0,
                flags: None,
            },
            heads,
            returns: plan.returns.clone(),
            points: Vec::new(),
            leaves: HashMap::new(),
            functions: Vec::new(),
        };
        translator.read_state(plan.registers);
        let first = translator.heads[&pc];
        translator.v.b.ins().jump(first, &[]);
        translator
    }

    /// Reads all registers that the region uses.
    fn read_state(&mut self, used: u64) {
        let trusted = MemFlags::trusted();
        for r in numbers(used) {
            let value = (self.v.b.ins()).load(I64, trusted, self.state, offset_of_register(r));
            self.v.b.def_var(self.registers[r as usize], value);
        }
        if used >> FLAGS & 1 != 0 {
            let [n, z, c, v] = [0, 1, 2, 3].map(|flag| {
                let at = (offset_of!(State, flags) + flag) as i32;
                (self.v.b.ins()).load(I8, trusted, self.state, at)
            });
            let flags = [n, z, c, v].map(Truth::Is);
            self.define_flags(flags);
        }
        let budget = self.v.field(offset_of!(Frame, budget));
        self.v.b.def_var(self.budget, budget);
    }

    fn define_flags(&mut self, [n, z, c, v]: [Truth; 4]) {
        let values = [
            n.negative(&mut self.v),
            z.zero(&mut self.v),
            c.value(&mut self.v),
            v.negative(&mut self.v),
        ];
        for (variable, value) in self.flags.into_iter().zip(values) {
            self.v.b.def_var(variable, value);
        }
    }

    pub(super) fn current_flags(&mut self) -> [Truth; 4] {
        if let Some(flags) = self.now.flags {
            return flags;
        }
        let [n, z, c, v] = self.flags.map(|variable| self.v.b.use_var(variable));
        let negative = |value| Truth::Bit {
            value,
            n: 63,
            set: true,
        };
        let zero = Truth::Zero { value: z, is: true };
        [negative(n), zero, Truth::Is(c), negative(v)]
    }

    pub(super) fn register(&mut self, r: u32) -> Value {
        self.v.b.use_var(self.registers[r as usize])
    }

    pub(super) fn set_register(&mut self, r: u32, value: Value) {
        self.v.b.def_var(self.registers[r as usize], value);
        self.now.dirty |= 1 << r;
    }

    /// Gives a helper its operands.
    pub(super) fn give(&mut self, operands: &[[Value; 2]]) {
        for (n, halves) in operands.iter().enumerate() {
            for (half, value) in halves.iter().enumerate() {
                let at = offset_of!(Frame, operands) + 16 * n + 8 * half;
                self.v.set_field(at, *value);
            }
        }
    }

    /// Returns a helper's result that is a vector.
    pub(super) fn result(&mut self) -> [Value; 2] {
        [0, 8].map(|half| self.v.field(offset_of!(Frame, result) + half))
    }

    /// Keeps a function, and returns its address.
    pub(super) fn keep(&mut self, function: Function) -> Value {
        let known = self.functions.iter().position(|known| *known.0 == function);
        let at = known.unwrap_or_else(|| {
            self.functions.push(Kept(Box::new(function)));
            self.functions.len() - 1
        });
        let address: *const Function = &*self.functions[at].0;
        self.v.constant(address as i64)
    }

    /// Writes the dirty registers to the state. They stay dirty.
    fn write_back(&mut self) {
        let trusted = MemFlags::trusted();
        for r in numbers(self.now.dirty) {
            let value = self.register(r);
            (self.v.b.ins()).store(trusted, value, self.state, offset_of_register(r));
        }
        if self.now.dirty >> FLAGS & 1 != 0 {
            for (n, flag) in self.current_flags().into_iter().enumerate() {
                let value = flag.value(&mut self.v);
                let at = (offset_of!(State, flags) + n) as i32;
                self.v.b.ins().store(trusted, value, self.state, at);
            }
        }
    }

    fn write_pc(&mut self, pc: Value) {
        let at = offset_of!(State, pc) as i32;
        (self.v.b.ins()).store(MemFlags::trusted(), pc, self.state, at);
    }

    /// Writes the number of instructions that may still be executed to the frame: those that were not executed are
    /// `more`.
    fn write_budget(&mut self, more: i64) {
        let mut budget = self.v.b.use_var(self.budget);
        if more != 0 {
            budget = self.v.b.ins().iadd_imm(budget, more);
        }
        self.v.set_field(offset_of!(Frame, budget), budget);
    }

    /// Makes a checkpoint before the current instruction.
    fn checkpoint(&mut self) {
        self.write_back();
        self.now.dirty = 0;
        self.write_budget(0);
        self.points.push(Point {
            pc: self.now.pc,
            uncounted: self.now.rest,
        });
        let number = self.points.len() - 1;
        self.v.b.set_srcloc(SourceLoc::new(number as u32));
    }

    /// Returns the block that leaves to the interpreter at the last checkpoint.
    pub(super) fn leave(&mut self) -> Block {
        let number = self.points.len() - 1;
        *self.leaves.entry(number).or_insert_with(|| {
            let block = self.v.b.create_block();
            self.v.b.set_cold_block(block);
            block
        })
    }

    /// Leaves to the interpreter at the last checkpoint if a value is not 0.
    pub(super) fn leave_if(&mut self, wrong: Value) {
        let leave = self.leave();
        let on = self.v.b.create_block();
        self.v.b.ins().brif(wrong, leave, &[], on, &[]);
        self.v.b.seal_block(on);
        self.v.b.switch_to_block(on);
    }

    fn return_number(&mut self, number: u64) {
        let number = self.v.constant(number as i64);
        self.v.b.ins().return_(&[number]);
    }

    /// Emits a block.
    fn block(&mut self, start: u64, steps: &[Step], dirty: u64) {
        // The interpreter counts what it executes.
        let is_compiled = |step: &&Step| step.flow != Flow::Interpret;
        let count = steps.iter().filter(is_compiled).count() as i64;
        self.v.b.switch_to_block(self.heads[&start]);
        self.v.b.set_srcloc(SourceLoc::default());
        self.now = Now {
            pc: start,
            rest: count,
            dirty,
            flags: None,
        };
        let before = self.v.b.use_var(self.budget);
        let after = self.v.b.ins().iadd_imm(before, -count);
        let is_over = (self.v.b.ins()).icmp_imm(IntCC::SignedLessThan, after, 0);
        let (over, on) = (self.v.b.create_block(), self.v.b.create_block());
        self.v.b.set_cold_block(over);
        self.v.b.ins().brif(is_over, over, &[], on, &[]);
        self.v.b.seal_block(over);
        self.v.b.seal_block(on);
        self.v.b.switch_to_block(over);
        self.leave_here(CONTINUE, 0);
        self.v.b.switch_to_block(on);
        self.v.b.def_var(self.budget, after);
        for step in steps {
            self.now.pc = step.pc;
            if step.is_checkpoint {
                self.checkpoint();
            }
            let Some(next) = step.insn.map(|insn| execute(self, &insn)) else {
                return self.leave_here(INTERPRET, self.now.rest);
            };
            let following = step.pc.wrapping_add(4);
            match next {
                Ok(Next::Following) => {}
                Ok(Next::Jump(target)) => return self.go(target),
                Ok(Next::JumpIf(jumps, target)) => return self.go_if(jumps, target, following),
                Ok(Next::Indirect(target)) => return self.go_indirectly(target),
                Ok(Next::Hint(_) | Next::Synchronize) | Err(Interpret) => {
                    return self.leave_here(INTERPRET, self.now.rest);
                }
            }
            self.now.rest -= 1;
            self.now.pc = following;
        }
        self.go(self.now.pc);
    }

    /// Leaves at the current instruction. `more` of the counted instructions were not executed.
    fn leave_here(&mut self, number: u64, more: i64) {
        self.write_back();
        let pc = self.v.constant(self.now.pc as i64);
        self.write_pc(pc);
        self.write_budget(more);
        self.return_number(number);
    }

    /// Makes the flags of the block those of the region.
    fn settle_flags(&mut self) {
        if let Some(flags) = self.now.flags.take() {
            self.define_flags(flags);
        }
    }

    /// Continues at an address.
    fn go(&mut self, target: u64) {
        self.settle_flags();
        match self.heads.get(&target) {
            Some(head) => {
                self.v.b.ins().jump(*head, &[]);
            }
            None => self.exit(target),
        }
    }

    /// Continues at one of two addresses.
    fn go_if(&mut self, jumps: Truth, target: u64, following: u64) {
        let condition = jumps.condition(&mut self.v);
        self.settle_flags();
        let mut exits = Vec::new();
        let [jump, on] = [target, following].map(|address| match self.heads.get(&address) {
            Some(head) => *head,
            None => {
                let block = self.v.b.create_block();
                exits.push((block, address));
                block
            }
        });
        self.v.b.ins().brif(condition, jump, &[], on, &[]);
        for (block, address) in exits {
            self.v.b.seal_block(block);
            self.v.b.switch_to_block(block);
            self.exit(address);
        }
    }

    /// Leaves the region for an address.
    fn exit(&mut self, target: u64) {
        self.write_back();
        let targets = self.v.field(offset_of!(Frame, targets));
        let distance = (target_index(target) << TARGET_BITS) as i64;
        let entry = self.v.b.ins().iadd_imm(targets, distance);
        let target = self.v.constant(target as i64);
        self.chain(target, entry);
    }

    /// Leaves the region for an address that is computed.
    fn go_indirectly(&mut self, target: Value) {
        let b = &mut self.v.b;
        // Without a tag, the upper bytes are copies of bit 55.
        let shifted = b.ins().ishl_imm(target, 8);
        let untagged = b.ins().sshr_imm(shifted, 8);
        let is_plain = b.ins().icmp(IntCC::Equal, untagged, target);
        let (tagged, on) = (b.create_block(), b.create_block());
        b.set_cold_block(tagged);
        let pc = b.append_block_param(on, I64);
        b.ins().brif(is_plain, on, &[target.into()], tagged, &[]);
        b.seal_block(tagged);
        b.switch_to_block(tagged);
        let found = self.v.call(helper!(branch_target), &[target], 1)[0];
        self.v.b.ins().jump(on, &[found.into()]);
        self.v.b.seal_block(on);
        self.v.b.switch_to_block(on);
        self.settle_flags();
        for address in self.returns.clone() {
            let b = &mut self.v.b;
            let is_here = b.ins().icmp_imm(IntCC::Equal, pc, address as i64);
            let other = b.create_block();
            b.ins().brif(is_here, self.heads[&address], &[], other, &[]);
            b.seal_block(other);
            b.switch_to_block(other);
        }
        self.write_back();
        let b = &mut self.v.b;
        // This is `target_index`.
        let [low, high] = [2, 14].map(|by| b.ins().ushr_imm(pc, by));
        let index = b.ins().bxor(low, high);
        let index = b.ins().band_imm(index, TARGETS as i64 - 1);
        let distance = b.ins().ishl_imm(index, i64::from(TARGET_BITS));
        let targets = self.v.field(offset_of!(Frame, targets));
        let entry = self.v.b.ins().iadd(targets, distance);
        self.chain(pc, entry);
    }

    /// Continues in the region for an address if `entry` is a target for it. All registers were written back.
    fn chain(&mut self, pc: Value, entry: Value) {
        self.write_budget(0);
        let trusted = MemFlags::trusted();
        let edition = self.v.field(offset_of!(Frame, edition));
        let b = &mut self.v.b;
        let known = (b.ins()).load(I64, trusted, entry, offset_of!(Target, pc) as i32);
        let of = (b.ins()).load(I64, trusted, entry, offset_of!(Target, edition) as i32);
        let [pc_differs, edition_differs] =
            [(known, pc), (of, edition)].map(|(found, wanted)| b.ins().bxor(found, wanted));
        let differs = b.ins().bor(pc_differs, edition_differs);
        let (unknown, on) = (b.create_block(), b.create_block());
        b.set_cold_block(unknown);
        b.ins().brif(differs, unknown, &[], on, &[]);
        b.seal_block(unknown);
        b.seal_block(on);
        b.switch_to_block(on);
        let code = (b.ins()).load(I64, trusted, entry, offset_of!(Target, code) as i32);
        b.ins().return_(&[code]);
        b.switch_to_block(unknown);
        self.write_pc(pc);
        self.return_number(CONTINUE);
    }

    /// Adds the blocks that leave, and ends the function.
    fn finish(mut self) -> Translated {
        for (number, block) in std::mem::take(&mut self.leaves) {
            self.v.b.switch_to_block(block);
            let Point { pc, uncounted } = self.points[number];
            let budget = self.v.field(offset_of!(Frame, budget));
            let budget = self.v.b.ins().iadd_imm(budget, uncounted);
            self.v.set_field(offset_of!(Frame, budget), budget);
            let pc = self.v.constant(pc as i64);
            self.write_pc(pc);
            self.return_number(INTERPRET);
        }
        self.v.b.seal_all_blocks();
        self.v.b.finalize();
        Translated {
            points: self.points,
            functions: self.functions,
        }
    }
}
