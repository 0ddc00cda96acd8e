//! Translates guest code to Cranelift's intermediate language.
//!
//! A region becomes one function of the host, with the blocks of its [`Plan`].

use super::context::Context;
use super::frame::{Frame, TARGET_BITS, TARGETS, Target, target_index};
use super::helpers::helper;
use super::plan::{Plan, Step};
use super::translator::{Kept, Now, Point, Translator};
use super::truth::Truth;
use super::uses::{FLAGS, Flow, Interpret};
use super::values::Values;
use crate::meaning::execute;
use crate::tier::Next;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I64};
use cranelift_codegen::ir::{AbiParam, InstBuilder, MemFlags, Signature, SourceLoc, Value};
use cranelift_codegen::isa::CallConv;
use cranelift_frontend::FunctionBuilder;
use std::collections::{BTreeMap, HashMap};
use std::mem::offset_of;
use std::vec::Vec;

/// A region's return value: the program counter is set, and the processor may continue at this address in compiled
/// code.
pub(super) const CONTINUE: u64 = 0;
/// A region's return value: the interpreter must execute the instruction at the program counter.
pub(super) const INTERPRET: u64 = 1;
/// A region's return value: like [`INTERPRET`], but the current flags are in the frame of compiled code, not in the
/// state of the CPU.
pub(super) const INTERPRET_WITH_FLAGS: u64 = 2;

/// The result of a translation, besides the code.
pub(super) struct Translated {
    pub(super) points: Vec<Point>,
    /// The functions to which the code has pointers; they must live as long as the code.
    pub(super) functions: Vec<Kept>,
}

/// Returns the signature of a region's function (`slat_jit::enter`).
pub(super) fn signature() -> Signature {
    let mut signature = Signature::new(CallConv::Winch);
    signature.returns.push(AbiParam::new(I64));
    signature
}

/// Translates a region to a function.
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
                has_saved_flags: false,
                vectors: Default::default(),
            },
            heads,
            returns: plan.returns.clone(),
            points: Vec::new(),
            leaves: HashMap::new(),
            functions: Vec::new(),
        };
        if plan.computes_floats {
            translator.begin_floats();
        }
        translator.read_state(plan.registers);
        let first = translator.heads[&pc];
        translator.v.b.ins().jump(first, &[]);
        translator
    }

    /// Emits the code of a block.
    fn block(&mut self, start: u64, steps: &[Step], dirty: u64) {
        // Compiled code does not count instructions that the interpreter executes, because the interpreter counts them.
        let is_compiled = |step: &&Step| step.flow != Flow::Interpret;
        let count = steps.iter().filter(is_compiled).count() as i64;
        self.v.b.switch_to_block(self.heads[&start]);
        self.v.b.set_srcloc(SourceLoc::default());
        self.now = Now {
            pc: start,
            rest: count,
            dirty,
            flags: None,
            has_saved_flags: false,
            vectors: Default::default(),
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
                self.checkpoint(step.uses.reads_state);
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

    /// Emits an exit from compiled code at the current instruction, with return value `number`. `more` counted
    /// instructions were not executed.
    fn leave_here(&mut self, number: u64, more: i64) {
        self.write_back();
        let pc = self.v.constant(self.now.pc as i64);
        self.write_pc(pc);
        self.write_budget(more);
        self.return_number(number);
    }

    /// Emits a jump to an address of guest code: within the region, or out of it.
    fn go(&mut self, target: u64) {
        self.settle_flags();
        match self.heads.get(&target) {
            Some(head) => {
                self.v.b.ins().jump(*head, &[]);
            }
            None => self.exit(target),
        }
    }

    /// Emits a conditional jump: to `target` if `jumps` is true, else to `following`.
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

    /// Emits an exit from the region to a constant address.
    fn exit(&mut self, target: u64) {
        self.write_back();
        let targets = self.v.field(offset_of!(Frame, targets));
        let distance = (target_index(target) << TARGET_BITS) as i64;
        let entry = self.v.b.ins().iadd_imm(targets, distance);
        let target = self.v.constant(target as i64);
        self.chain(target, entry);
    }

    /// Emits a jump to an address that the guest has computed.
    fn go_indirectly(&mut self, target: Value) {
        let b = &mut self.v.b;
        // In an address without a tag, the upper byte is a copy of bit 55. Others need the helper.
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
        // Emits code that computes the same index as the function `target_index`.
        let [low, high] = [2, 14].map(|by| b.ins().ushr_imm(pc, by));
        let index = b.ins().bxor(low, high);
        let index = b.ins().band_imm(index, TARGETS as i64 - 1);
        let distance = b.ins().ishl_imm(index, i64::from(TARGET_BITS));
        let targets = self.v.field(offset_of!(Frame, targets));
        let entry = self.v.b.ins().iadd(targets, distance);
        self.chain(pc, entry);
    }

    /// Emits the exit to guest address `pc`: continues in the region of target `entry` if that is valid for `pc`, else
    /// leaves compiled code. All registers were written back.
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

    /// Adds the blocks that leave at [checkpoints](super::plan), and ends the function.
    fn finish(mut self) -> Translated {
        for (number, block) in std::mem::take(&mut self.leaves) {
            self.v.b.switch_to_block(block);
            let Point {
                pc,
                uncounted,
                has_flags,
            } = self.points[number];
            let budget = self.v.field(offset_of!(Frame, budget));
            let budget = self.v.b.ins().iadd_imm(budget, uncounted);
            self.v.set_field(offset_of!(Frame, budget), budget);
            let pc = self.v.constant(pc as i64);
            self.write_pc(pc);
            self.return_number(match has_flags {
                true => INTERPRET_WITH_FLAGS,
                false => INTERPRET,
            });
        }
        self.v.b.seal_all_blocks();
        self.v.b.finalize();
        Translated {
            points: self.points,
            functions: self.functions,
        }
    }
}
