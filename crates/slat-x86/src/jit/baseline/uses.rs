//! Counts the uses of values: how often each value is used, and where it is used last.
//!
//! Uses are counted before code is made, from the last instruction to the first. So if an instruction's results are not
//! used, the instruction does not count as a use of its operands. While code is made, the remaining uses are counted
//! down; after the last one, a value loses its register.

use super::{Generator, Held, Result, Target};
use cranelift_codegen::entity::EntityRef;
use cranelift_codegen::ir::{
    Block, BlockArg, BlockCall, Function, Inst, InstructionData, Opcode, Value,
};

impl Generator<'_> {
    /// Releases the values that were kept alive for loops that end before position `position`.
    pub(super) fn release(&mut self, position: u32) {
        let mut k = 0;
        while k < self.held.len() {
            if self.held[k].until < position {
                let held = self.held.swap_remove(k);
                self.places.used(held.value);
            } else {
                k += 1;
            }
        }
    }

    /// Finds the positions of blocks, and counts branches and uses.
    pub(super) fn count(&mut self) -> Result {
        let func = self.func;
        let blocks = func.dfg.num_blocks();
        for _ in 0..blocks {
            let label = self.asm.label();
            self.targets.push(Target {
                label,
                branches: 0,
                position: 0,
                is_rare: false,
                entry: None,
                segment: 0,
                is_nested: false,
            });
        }
        for (position, block) in func.layout.blocks().enumerate() {
            let position = position as u32;
            let target = &mut self.targets[block.index()];
            target.position = position;
            for &value in func.dfg.block_params(block) {
                self.places.known(value).made = position;
            }
            for inst in func.layout.block_insts(block) {
                for &value in func.dfg.inst_results(inst) {
                    self.places.known(value).made = position;
                    if func.dfg.insts[inst].opcode() == Opcode::GetPinnedReg {
                        self.places.is_cpus(value);
                    }
                }
            }
        }
        // Go from the last instruction to the first, so that an instruction whose results are not used does not count
        // as a use.
        let mut loops = Vec::new();
        let mut last = func.layout.last_block();
        while let Some(block) = last {
            let position = self.targets[block.index()].position;
            let mut inst = func.layout.last_inst(block);
            while let Some(this) = inst {
                if !self.is_unused(this) {
                    self.each_use(this, |generator, value| {
                        let known = generator.places.known(value);
                        known.left += 1;
                        known.last = known.last.max(position);
                    });
                    self.each_branch(this, |generator, call| {
                        let to = call.block(&func.dfg.value_lists);
                        let target = &mut generator.targets[to.index()];
                        target.branches += 1;
                        if target.position <= position {
                            loops.push((target.position, position));
                        }
                    });
                }
                inst = func.layout.prev_inst(this);
            }
            last = func.layout.prev_block(block);
        }
        for block in func.layout.blocks() {
            let target = &mut self.targets[block.index()];
            // A block with several branches to it is not treated as rare, because the values that it uses would count as
            // used at only one of these branches.
            target.is_rare = func.layout.is_cold(block) && target.branches == 1;
        }
        self.hold_for_loops(loops);
        Ok(())
    }

    /// Keeps values alive until the end of a loop, if they are computed before the loop and used in the loop or later.
    fn hold_for_loops(&mut self, mut loops: Vec<(u32, u32)>) {
        if loops.is_empty() {
            return;
        }
        loops.sort_by_key(|&(_, end)| end);
        let values = 0..self.places.values.len();
        let long = values.map(Value::new).filter(|&value| {
            self.is_long(value) && self.places.left(value) > 0 && !self.is_cpu(value)
        });
        let long: Vec<Value> = long.collect();
        for (begin, end) in loops {
            for &value in &long {
                let known = self.places.known(value);
                if known.made < begin && known.last >= begin {
                    known.left += 1;
                    known.last = known.last.max(end);
                    self.held.push(Held { until: end, value });
                }
            }
        }
    }

    /// Whether an instruction's only effect is results that nothing uses.
    pub(super) fn is_unused(&self, inst: Inst) -> bool {
        let dfg = &self.func.dfg;
        let opcode = dfg.insts[inst].opcode();
        let stays = opcode.is_terminator()
            || opcode.is_branch()
            || opcode.is_call()
            || opcode.can_store()
            || opcode.other_side_effects()
            || dfg.insts[inst]
                .memflags()
                .is_some_and(|flags| flags.trap_code() == Some(slat_jit::GUARDED));
        !stays
            && dfg
                .inst_results(inst)
                .iter()
                .all(|&value| self.places.left(value) == 0)
    }

    /// Calls `f` with each value that an instruction uses, once for each use.
    pub(super) fn each_use(&mut self, inst: Inst, mut f: impl FnMut(&mut Self, Value)) {
        let func = self.func;
        for &value in func.dfg.inst_args(inst) {
            f(self, value);
        }
        self.each_branch(inst, |generator, call| {
            for value in arguments(func, call) {
                f(generator, value);
            }
        });
    }

    /// Calls `f` with each branch of an instruction.
    pub(super) fn each_branch(&mut self, inst: Inst, mut f: impl FnMut(&mut Self, &BlockCall)) {
        let func = self.func;
        match &func.dfg.insts[inst] {
            InstructionData::Jump { destination, .. } => f(self, destination),
            InstructionData::Brif { blocks, .. } => blocks.iter().for_each(|call| f(self, call)),
            InstructionData::BranchTable { table, .. } => {
                let table = &func.stencil.dfg.jump_tables[*table];
                table.all_branches().iter().for_each(|call| f(self, call));
            }
            _ => {}
        }
    }

    /// Returns how many times the current instruction uses a value.
    pub(super) fn uses_of(&mut self, value: Value) -> u32 {
        let mut uses = 0;
        if let Some(inst) = self.inst {
            self.each_use(inst, |_, used| uses += u32::from(used == value));
        }
        uses
    }

    /// Subtracts the uses by the current instruction, which is done.
    pub(super) fn count_uses(&mut self) {
        if let Some(inst) = self.inst.take() {
            self.each_use(inst, |generator, value| generator.places.used(value));
        }
    }

    /// Subtracts the uses by an instruction that was emitted together with the current instruction.
    pub(super) fn count_uses_by(&mut self, inst: Inst) {
        let current = self.inst.replace(inst);
        self.count_uses();
        self.inst = current;
    }

    /// Adds (`by` is 1) or subtracts (`by` is -1) the uses of a whole block.
    pub(super) fn count_block(&mut self, block: Block, by: i32) {
        let func = self.func;
        let position = self.targets[block.index()].position;
        for inst in func.layout.block_insts(block) {
            if self.is_unused(inst) {
                continue;
            }
            self.each_use(inst, |generator, value| {
                // Leave out values that this block computes itself: no other block uses them.
                if generator.places.known(value).made == position {
                    return;
                }
                match by {
                    1 => generator.places.known(value).left += 1,
                    _ => generator.places.used(value),
                }
            });
        }
    }
}

/// Returns the values that a branch passes as the parameters of its target.
pub(super) fn arguments<'a>(
    func: &'a Function,
    call: &BlockCall,
) -> impl Iterator<Item = Value> + use<'a> {
    call.args(&func.dfg.value_lists)
        .filter_map(|argument| match argument {
            BlockArg::Value(value) => Some(value),
            _ => None,
        })
}
