//! The baseline tier: makes machine code from a function in Cranelift's intermediate language, in one pass.
//!
//! The translator returns a function that does what the guest's instructions do. Two tiers can make machine code from
//! it. This tier takes a tenth of Cranelift's time, and its code is somewhat larger and slower. So it compiles warm
//! code, of which there is much. If code stays hot, Cranelift compiles it again.
//!
//! | file | idea |
//! |---|---|
//! | `encode` | the host's instructions as bytes |
//! | `uses` | which values are used, how often, and where last |
//! | `places` | where values are: registers, slots of the frame |
//! | `registers` | how values get registers and lose them |
//! | `select` | the host's instructions for an instruction of the intermediate language |
//! | `fuse` | which instructions are emitted together as one host instruction |
//! | `edges` | the moves of values at branches |
//!
//! Blocks are compiled in the order of the function, except that rarely executed blocks are compiled at the end. The
//! first branch to a block decides where the block expects its values, and every other branch to it moves the values
//! there (`edges`). So after a TLB look-up that hits, values are in the same registers as before; only the code for a
//! miss, which is at the end, saves and restores registers.
//!
//! A value's register is free after the value's last use. So this tier counts the uses of each value. Before code is
//! made, `count` examines all blocks, and ignores instructions whose results are not used. Three rules are needed
//! because blocks are not compiled in the order of execution:
//!
//! - Uses in a rare block count as uses of the branch to it, because the block begins with a copy of the
//!   state at the branch.
//! - If a loop uses a value but does not define it, the value has one more use at the end of the loop.
//! - If there are several branches to a block, the block begins with only those values that are used at its position or
//!   later.
//!
//! This tier knows integers only. For vectors and floating point, the translator emits calls of the interpreter's
//! handlers. If a function contains another instruction that this tier does not know, `generate` returns `None`, and
//! Cranelift compiles the function.

mod edges;
mod encode;
mod fuse;
mod places;
mod registers;
mod select;
mod uses;

use cranelift_codegen::entity::EntityRef;
use cranelift_codegen::ir::{Block, Function, Inst, InstructionData, Value};
use encode::{Assembler, Label};
use places::{Places, R15, State};

/// A register of the host, as its number in instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reg(u8);

/// The properties of a block as the target of branches: its position, its branches, and where it expects its values.
#[derive(Clone, Copy)]
struct Target {
    label: Label,
    /// The number of branches to the block.
    branches: u32,
    /// The index of the block in the function's order of blocks.
    position: u32,
    is_rare: bool,
    /// Where the block expects its values. Known after the first branch to the block was compiled.
    entry: Option<State>,
    /// The index in `Generator::segments` of the segment to which the block belongs.
    segment: u32,
    /// Whether the first branch to the block is in a block that is compiled late.
    is_nested: bool,
}

/// A value that is kept alive until the block at position `until` was compiled.
struct Held {
    until: u32,
    value: Value,
}

/// Allocations of a compilation, which the next one reuses.
#[derive(Default)]
pub(in crate::jit) struct Room {
    asm: Assembler,
    places: Places,
    targets: Vec<Target>,
    held: Vec<Held>,
    guarded: Vec<(u32, u32)>,
}

/// Machine code; the offsets at which it can be entered, one for each such block; and the offsets of its guarded
/// accesses, in ascending order, each with the index of the access's step.
pub(super) struct Code<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) entries: Vec<u32>,
    pub(super) guarded: &'a [(u32, u32)],
}

/// The error for a function with something that this tier cannot compile.
#[derive(Debug)]
struct Unknown;

type Result<T = ()> = std::result::Result<T, Unknown>;

/// Makes machine code from a function. `None`: this tier cannot compile the function.
pub(super) fn generate<'a>(func: &Function, room: &'a mut Room) -> Option<Code<'a>> {
    let Room {
        asm,
        places,
        targets,
        held,
        guarded,
    } = room;
    asm.clear();
    places.clear(func.dfg.num_values());
    targets.clear();
    held.clear();
    guarded.clear();
    let mut generator = Generator {
        func,
        asm,
        places,
        targets,
        held,
        guarded,
        segment: 0,
        segments: vec![0],
        is_apart: false,
        is_nested: false,
        inst: None,
    };
    let entries = generator.run().ok()?;
    if !generator.places.fits() {
        return None;
    }
    Some(Code {
        bytes: &asm.code,
        entries,
        guarded,
    })
}

struct Generator<'a> {
    func: &'a Function,
    asm: &'a mut Assembler,
    places: &'a mut Places,
    targets: &'a mut Vec<Target>,
    held: &'a mut Vec<Held>,
    guarded: &'a mut Vec<(u32, u32)>,
    /// The index of the current block's segment.
    segment: u32,
    /// The number of slots of each segment. A segment is a part of the code at whose beginning no values are in
    /// registers or slots, so that all slots are free.
    segments: Vec<u32>,
    /// Whether the current block is compiled late, after all ordinary blocks.
    is_apart: bool,
    /// Whether the first branch to the current block is in a block that is compiled late.
    is_nested: bool,
    /// The current instruction. The values that it uses are counted as used when the instruction is done.
    inst: Option<Inst>,
}

impl Generator<'_> {
    /// Compiles all blocks. Returns the offsets at which the code can be entered.
    fn run(&mut self) -> Result<Vec<u32>> {
        self.count()?;
        let func = self.func;
        let first = func.layout.entry_block().ok_or(Unknown)?;
        let entries = self.entries(first)?;
        let mut late: Vec<Block> = Vec::new();
        let mut current = func.layout.next_block(first);
        while let Some(block) = current {
            current = func.layout.next_block(block);
            let target = self.targets[block.index()];
            if target.is_rare || target.entry.is_none() {
                late.push(block);
                continue;
            }
            self.release(target.position);
            let after = std::iter::successors(current, |&block| func.layout.next_block(block));
            let next = { after }.find(|block| !self.targets[block.index()].is_rare);
            self.block(block, next)?;
        }
        self.release(u32::MAX);
        self.end_segment();
        for block in late {
            self.late_block(block)?;
        }
        let offsets = { entries.iter() }
            .map(|block| self.asm.offset_of(self.targets[block.index()].label))
            .collect();
        self.asm.link();
        Ok(offsets)
    }

    /// Returns the blocks at which the function can be entered. In the intermediate language, the function begins with
    /// a jump to one of them. This jump gets no code: the caller enters the machine code at the block's offset.
    fn entries(&mut self, first: Block) -> Result<Vec<Block>> {
        let func = self.func;
        let last = func.layout.last_inst(first).ok_or(Unknown)?;
        let InstructionData::BranchTable { table, .. } = func.dfg.insts[last] else {
            return Err(Unknown);
        };
        let table = func.stencil.dfg.jump_tables[table].as_slice();
        let blocks = table.iter().map(|call| call.block(&func.dfg.value_lists));
        let blocks: Vec<Block> = blocks.collect();
        for &block in &blocks {
            self.targets[block.index()].entry = Some(State::default());
        }
        Ok(blocks)
    }

    /// Compiles a late block. At the beginning of the block, values are where they were at the branch to the block.
    fn late_block(&mut self, block: Block) -> Result {
        let target = self.targets[block.index()];
        if target.entry.is_none() {
            // No branch leads to this block.
            return Ok(());
        }
        let slots = self.segments[target.segment as usize];
        self.is_apart = true;
        self.is_nested = target.is_nested;
        // Blocks that begin with this block's state use its slots, too, so they must belong to the same segment.
        self.segment = target.segment;
        self.places.begin_apart(slots);
        if target.is_rare {
            self.count_block(block, 1);
        }
        self.block(block, None)?;
        self.places.end_apart();
        Ok(())
    }

    fn block(&mut self, block: Block, next: Option<Block>) -> Result {
        let func = self.func;
        let target = self.targets[block.index()];
        let Some(entry) = target.entry else {
            return Err(Unknown);
        };
        self.asm.place(target.label);
        self.places.resume(entry);
        // In a rare block, the values that its targets expect must stay alive until the end of the block.
        let held = match target.is_rare {
            true => self.hold_targets(block),
            false => Vec::new(),
        };
        self.places.forget_unused();
        let state = self.places.state;
        self.targets[block.index()].entry = Some(state);
        if !self.is_apart && state.registers.iter().all(Option::is_none) && state.saved == 0 {
            self.end_segment();
        }
        let mut insts = func.layout.block_insts(block);
        while let Some(inst) = insts.next() {
            if self.is_unused(inst) || self.is_fused(inst) {
                continue;
            }
            if let Some(addition) = self.addition(inst) {
                self.add_in_place(addition);
                insts.nth(1);
                continue;
            }
            self.inst = Some(inst);
            self.select(inst, next)?;
            debug_assert!(self.inst.is_none());
        }
        for value in held {
            self.places.known(value).left -= 1;
        }
        Ok(())
    }

    /// Ends a segment: the next one uses the slots anew.
    fn end_segment(&mut self) {
        let slots = self.places.reset_slots();
        if let Some(last) = self.segments.last_mut() {
            *last = slots;
        }
        self.segment = self.segments.len() as u32;
        self.segments.push(0);
    }

    fn is_cpu(&self, value: Value) -> bool {
        self.places.register(value) == Some(R15)
    }
}

#[cfg(test)]
mod tests;
