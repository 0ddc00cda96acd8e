//! Translates the paths of a region: follows a path from block to block, and a loop from one iteration to the next.

use super::{Translator, Turn};
use crate::Cpu;
use crate::jit::entries;
use crate::jit::guest::{FirstUse, Guest, numbers, registers};
use cranelift_codegen::ir::types::I64;
use cranelift_codegen::ir::{BlockArg, InstBuilder, Value};
use std::mem::offset_of;

impl Translator<'_> {
    /// Continues at guest address `rip` after the current instruction: in the path or the region if it has a block for
    /// `rip`. Otherwise the code leaves the region.
    pub(in crate::jit) fn goto(&mut self, rip: u64) {
        let rip = self.wrapped(rip);
        let next = self.paths.next(self.now.node, rip);
        let head = self.heads.get(&rip).copied();
        if rip <= self.now.head && (next.is_some() || head.is_some()) {
            // Each iteration of a loop checks `attention`.
            self.leave_if_wanted(rip);
        }
        if let Some(node) = next {
            self.now.node = node;
            self.now.before += 1;
            return self.node();
        }
        let Some(head) = head else {
            let to = self.address(rip as i64);
            return self.leave_for(to);
        };
        let turn = self.turn_at(rip);
        match turn {
            Some(_) => _ = self.write_vectors(),
            None => self.write_registers(),
        }
        match head.flags {
            FirstUse::SetsAll => {}
            FirstUse::Record => self.record_flags(),
            FirstUse::Rflags => self.write_rflags(),
        }
        let count = self.count_done();
        let (block, values) = match turn {
            Some(turn) => (turn.block, self.values_of(turn.registers, count)),
            None => (head.block, Vec::new()),
        };
        self.b.ins().jump(block, &values);
    }

    /// Emits code that leaves the region for `rip` if `attention` is not 0.
    fn leave_if_wanted(&mut self, rip: u64) {
        let wanted = self.attention();
        let (leave, go) = (self.cold(), self.b.create_block());
        self.b.ins().brif(wanted, leave, &[], go, &[]);
        let now = self.now.clone();
        self.b.switch_to_block(leave);
        let to = self.address(rip as i64);
        self.leave_for(to);
        self.resume(go, now);
    }

    /// Returns the beginning of the path's next iteration, if the path is a loop that begins at `rip`.
    fn turn_at(&self, rip: u64) -> Option<Turn> {
        self.turn.filter(|turn| rip == turn.rip)
    }

    /// Whether registers stay in values when the code continues at `rip`.
    pub(in crate::jit) fn keeps_values(&self, rip: u64) -> bool {
        self.turn_at(rip).is_some() || self.paths.next(self.now.node, rip).is_some()
    }

    /// Returns the arguments for an iteration: the registers whose bits are set in `registers`, and the counter of
    /// instructions.
    fn values_of(&mut self, registers: u16, count: Value) -> Vec<BlockArg> {
        let mut values: Vec<BlockArg> = numbers(registers)
            .map(|r| self.register(r).into())
            .collect();
        values.push(count.into());
        values
    }

    /// Begins an iteration of a path that is a loop. The registers that its instructions use stay in values from one
    /// iteration to the next.
    fn begin_turn(&mut self, rip: u64) {
        let (mut used, mut changed) = (0, 0);
        for Guest { insn, .. } in self.paths.turning(self.now.node) {
            for (r, may_write) in registers(&mut self.factory, insn) {
                used |= 1 << r;
                changed |= u16::from(may_write) << r;
            }
        }
        let count = self.field(I64, offset_of!(Cpu, compiled.instructions));
        let values = self.values_of(used, count);
        let block = self.b.create_block();
        self.b.ins().jump(block, &values);
        self.b.switch_to_block(block);
        for r in numbers(used) {
            self.now.gpr[r] = Some(self.b.append_block_param(block, I64));
        }
        self.now.changed = changed;
        self.now.has_changed |= changed != 0;
        self.turn = Some(Turn {
            rip,
            block,
            registers: used,
            count: self.b.append_block_param(block, I64),
        });
    }

    /// Translates the path that begins with node `root`.
    pub(super) fn path(&mut self, root: usize) {
        let rip = self.steps[self.paths.nodes[root].step].rip;
        let head = self.heads[&rip];
        let block = self.paths.nodes[root].block;
        self.b.set_srcloc(entries::begins(block));
        self.begin(head.block, root);
        self.now.step = self.paths.nodes[root].step;
        self.set_checkpoint();
        // If the first block sets all flags before it reads any, the path before it may not have recorded the flags, so
        // the region cannot stop at this checkpoint.
        self.now.has_changed = head.flags == FirstUse::SetsAll;
        self.turn = None;
        if self.paths.nodes[root].turns {
            self.begin_turn(rip);
        }
        self.node();
    }

    /// Translates the current node, and the nodes after it.
    fn node(&mut self) {
        let node = &self.paths.nodes[self.now.node];
        self.now.head = self.steps[node.step].rip;
        let guests = &self.blocks[node.block];
        for (step, guest) in (node.step..).zip(guests) {
            self.now.step = step;
            if self.instruction(&guest.insn) {
                return;
            }
            self.now.before += 1;
        }
        // The block ends without a branch: it has reached the size limit, or an instruction follows that cannot be
        // decoded.
        self.now.before -= 1;
        let last = guests.last().expect("a block begins with an instruction");
        self.goto(last.insn.next_ip());
    }
}
