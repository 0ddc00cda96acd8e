//! The plan of a region: its blocks, and where registers are written back.
//!
//! Compiled code holds the guest's registers in values of the host function. Where the interpreter may have to
//! continue, they must be in the [`State`](crate::state::State). Such a point is a *checkpoint*: before its
//! instruction, compiled code writes the registers to the state, and the flags to the frame. If a later instruction
//! ends early, the interpreter executes all instructions from the last checkpoint on again. For this reason, after
//! compiled code has changed anything else, such as memory, the next instruction that may end early needs a new
//! checkpoint. A checkpoint is therefore made before the first access of a block, and before the first access after a
//! store or a change of FPSR. A sequence of loads needs one checkpoint only.
//!
//! A register is *dirty* where the state may have an older value. Which registers are dirty at the beginning of a block
//! follows from the blocks that can precede it.

use super::source::Source;
use super::uses::{FLAGS, Flow, Uses, uses};
use crate::decode::decode;
use crate::insn::Insn;
use std::collections::{BTreeMap, BTreeSet};
use std::vec::Vec;

/// The greatest number of return addresses with which compiled code compares the target of an indirect branch.
const RETURNS: usize = 4;

/// An instruction of a block.
pub(super) struct Step {
    pub(super) pc: u64,
    /// `None`: the instruction is UNDEFINED.
    pub(super) insn: Option<Insn>,
    pub(super) flow: Flow,
    /// Whether compiled code makes a [checkpoint](self) before the instruction.
    pub(super) is_checkpoint: bool,
    pub(super) uses: Uses,
}

/// Instructions of a region that are executed one after another.
pub(super) struct Block {
    pub(super) steps: Vec<Step>,
    /// The registers that are dirty at the beginning of the block.
    pub(super) dirty: u64,
}

/// The blocks of a region, by the address of their first instruction.
pub(super) struct Plan {
    pub(super) blocks: BTreeMap<u64, Block>,
    /// The registers that the region uses.
    pub(super) registers: u64,
    /// Whether the host's floating-point unit may compute in the region.
    pub(super) computes_floats: bool,
    /// The addresses in the region to which called functions return.
    pub(super) returns: Vec<u64>,
}

impl Block {
    /// Returns the constant addresses at which execution may continue after the block.
    fn successors(&self) -> impl Iterator<Item = u64> {
        let last = self.steps.last();
        let flow = last.map(|step| (step.flow, step.pc.wrapping_add(4)));
        let pair = match flow {
            Some((Flow::Following, following)) => [Some(following), None],
            Some((Flow::Jump(target), _)) => [Some(target), None],
            Some((Flow::JumpIf(target), following)) => [Some(target), Some(following)],
            Some((Flow::Indirect | Flow::Interpret, _)) | None => [None, None],
        };
        pair.into_iter().flatten()
    }

    /// Returns the registers that are dirty at the end of the block.
    fn dirty_after(&self) -> u64 {
        self.steps.iter().fold(self.dirty, |dirty, step| {
            let before = match step.is_checkpoint {
                true if step.uses.reads_state => 0,
                // A checkpoint saves the flags in the frame, so they stay dirty: the state does not have them.
                true => dirty & 1 << FLAGS,
                false => dirty,
            };
            before | step.uses.writes
        })
    }
}

/// Chooses the checkpoints of a block: the steps before which compiled code writes the guest's registers to the state,
/// so that the interpreter can continue at the step ([`Step::is_checkpoint`]).
fn set_checkpoints(steps: &mut [Step]) {
    let mut has_checkpoint = false;
    for step in steps {
        let uses = step.uses;
        step.is_checkpoint = uses.stops && (!has_checkpoint || uses.is_alone);
        has_checkpoint = (has_checkpoint || step.is_checkpoint) && !uses.changes;
    }
}

impl Plan {
    pub(super) fn new(source: &Source) -> Self {
        let mut steps: Vec<_> = (source.words.iter())
            .map(|(offset, word)| {
                let (pc, insn) = (source.address(*offset), decode(*word));
                let (uses, flow) = uses(insn.as_ref(), pc, source.context);
                Step {
                    pc,
                    insn,
                    flow,
                    is_checkpoint: false,
                    uses,
                }
            })
            .collect();
        let registers =
            (steps.iter()).fold(0, |all, step| all | step.uses.reads | step.uses.writes);
        let computes_floats = steps.iter().any(|step| step.uses.computes_floats);
        let mut begins = BTreeSet::from([source.pc]);
        let returns = |step: &Step| step.uses.returns_to(step.flow, step.pc);
        let mut returns: Vec<_> = steps.iter().filter_map(returns).collect();
        begins.extend(&returns);
        for step in &steps {
            match step.flow {
                Flow::Jump(target) => {
                    begins.insert(target);
                }
                Flow::JumpIf(target) => {
                    begins.extend([target, step.pc.wrapping_add(4)]);
                }
                Flow::Following | Flow::Indirect | Flow::Interpret => {}
            }
        }
        let mut blocks: BTreeMap<u64, Block> = BTreeMap::new();
        let mut current: Option<u64> = None;
        for step in steps.drain(..) {
            let continues = current
                .and_then(|start| blocks.get(&start))
                .and_then(|block| block.steps.last())
                .is_some_and(|last| last.flow == Flow::Following && last.pc + 4 == step.pc);
            let start = match current {
                Some(start) if continues && !begins.contains(&step.pc) => start,
                _ => step.pc,
            };
            current = Some(start);
            let block = blocks.entry(start).or_insert(Block {
                steps: Vec::new(),
                dirty: 0,
            });
            block.steps.push(step);
        }
        for block in blocks.values_mut() {
            set_checkpoints(&mut block.steps);
        }
        returns.retain(|address| blocks.contains_key(address));
        returns.truncate(RETURNS);
        let mut plan = Plan {
            blocks,
            registers,
            computes_floats,
            returns,
        };
        plan.find_dirty();
        plan
    }

    /// Computes which registers are dirty at the beginning of each block.
    fn find_dirty(&mut self) {
        let starts: Vec<_> = self.blocks.keys().copied().collect();
        loop {
            let mut has_changed = false;
            for start in &starts {
                let block = &self.blocks[start];
                let dirty = block.dirty_after();
                let mut successors: Vec<_> = block.successors().collect();
                if block
                    .steps
                    .last()
                    .is_some_and(|step| step.flow == Flow::Indirect)
                {
                    successors.extend(&self.returns);
                }
                for successor in successors {
                    if let Some(block) = self.blocks.get_mut(&successor) {
                        has_changed |= block.dirty | dirty != block.dirty;
                        block.dirty |= dirty;
                    }
                }
            }
            if !has_changed {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::context::Context;
    use super::*;
    use crate::stage1::Accessor;

    #[test]
    fn a_loop_writes_back_what_it_changes_before_its_first_access() {
        // LDR X3, [X1], #8; STR X3, [X0], #8; SUBS X2, X2, #1; B.NE; STR X4, [X5]; STR X6, [X7]; RET.
        let words = [
            0xf840_8423,
            0xf800_8403,
            0xf100_0442,
            0x54ff_ffa1,
            0xf900_00a4,
            0xf900_00e6,
            0xd65f_03c0,
        ];
        let context = Context {
            accessor: Accessor::El0,
            checks_stack: false,
            traps_vectors: false,
            has_usual_floats: true,
            is_direct: true,
        };
        let fetch = |offset: u64| words.get(offset as usize / 4).copied();
        let source = Source::collect(0x7000, context, fetch).unwrap();
        assert_eq!(source.words.len(), words.len());
        let plan = Plan::new(&source);
        let starts: Vec<_> = plan.blocks.keys().copied().collect();
        assert_eq!(starts, [0x7000, 0x7010]);
        let checkpoints = |start: u64| -> Vec<bool> {
            let steps = &plan.blocks[&start].steps;
            steps.iter().map(|step| step.is_checkpoint).collect()
        };
        // The load and the store share a checkpoint: the interpreter may repeat the load. Two stores need two
        // checkpoints: a store must not be repeated.
        assert_eq!(checkpoints(0x7000), [true, false, false, false]);
        assert_eq!(checkpoints(0x7010), [true, true, false]);
        let changed = 1 | 2 | 4 | 8 | 1 << FLAGS;
        assert_eq!(plan.blocks[&0x7000].dirty, changed);
        assert_eq!(plan.blocks[&0x7010].dirty, changed);
    }
}
