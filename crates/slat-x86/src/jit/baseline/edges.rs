//! Edges between blocks: before a branch, values are moved to the registers and slots in which its target expects them.

use super::places::State;
use super::uses::arguments;
use super::{Generator, Reg, Result, Unknown};
use cranelift_codegen::entity::EntityRef;
use cranelift_codegen::ir::{Block, BlockCall, Value};

/// The moves before a branch or a call. They put values into the registers and slots in which the target expects them.
#[derive(Default)]
pub(super) struct Moves {
    /// Moves of values from registers to stack slots. These moves are made before all others.
    slots: Vec<(u8, Value)>,
    /// Moves from registers to registers. They are made second.
    registers: Vec<(Reg, Reg)>,
    /// Moves from slots, and of constants, to registers. They are made last.
    rest: Vec<(Reg, Value)>,
}

impl Moves {
    fn is_empty(&self) -> bool {
        self.slots.is_empty() && self.registers.is_empty() && self.rest.is_empty()
    }
}

impl Generator<'_> {
    /// Adds a use to each value that the targets of a rare block expect, so that the value stays alive. Returns these
    /// values. The caller removes the uses at the end of the block.
    pub(super) fn hold_targets(&mut self, block: Block) -> Vec<Value> {
        let func = self.func;
        let mut held = Vec::new();
        let Some(inst) = func.layout.last_inst(block) else {
            return held;
        };
        self.each_branch(inst, |generator, call| {
            let to = call.block(&func.dfg.value_lists);
            let Some(entry) = generator.targets[to.index()].entry else {
                return;
            };
            held.extend(entry.registers.into_iter().flatten());
            // The target may also expect values in slots which are now in registers.
            for value in generator.places.state.registers.into_iter().flatten() {
                let slot = generator.places.known(value).slot();
                held.extend(
                    slot.filter(|slot| entry.saved >> slot & 1 != 0)
                        .map(|_| value),
                );
            }
        });
        for &value in &held {
            self.places.known(value).left += 1;
        }
        held
    }

    /// Whether a value is used in the block at `position` or in a later one.
    fn is_used_from(&self, value: Value, position: u32) -> bool {
        self.places.values[value.index()].last >= position
    }

    /// Returns the moves for a branch. If the branch is the first branch to its target block, decides where this block
    /// expects its values.
    fn moves(&mut self, call: &BlockCall) -> Result<Moves> {
        let func = self.func;
        let to = call.block(&func.dfg.value_lists);
        let target = self.targets[to.index()];
        let parameters = func.dfg.block_params(to);
        let values = arguments(func, call);
        match target.entry {
            // The target's code was made already, and its values were kept only for the branches that were known then.
            Some(_) if self.is_nested && self.asm.is_placed(target.label) => Err(Unknown),
            Some(entry) => Ok(self.conform(entry, parameters, values)),
            // For a rare block, `count_block` removes the block's uses. This might release a value that the branch
            // passes as a parameter.
            None if target.is_rare && !parameters.is_empty() => Err(Unknown),
            None => {
                let (entry, moves) =
                    self.decide(target.position, target.branches > 1, parameters, values)?;
                let target = &mut self.targets[to.index()];
                target.entry = Some(entry);
                target.segment = self.segment;
                target.is_nested = self.is_apart;
                let is_rare = target.is_rare;
                if is_rare {
                    self.count_block(to, -1);
                }
                Ok(moves)
            }
        }
    }

    /// Decides where a block expects its values: all values stay where they are now, and each parameter gets a free
    /// register, or a slot if no register is free.
    fn decide(
        &mut self,
        position: u32,
        has_others: bool,
        parameters: &[Value],
        values: impl Iterator<Item = Value>,
    ) -> Result<(State, Moves)> {
        let mut entry = self.places.state;
        for place in &mut entry.registers {
            // Other branches to the block would have to load a constant into the register that the block expects. So
            // the block loads constants itself.
            *place = place.filter(|&value| {
                let is_used = self.places.left(value) > self.uses_of(value);
                let is_common =
                    self.is_used_from(value, position) && self.constant(value).is_none();
                is_used && (is_common || !has_others)
            });
        }
        if self.is_apart && self.places.has_given() {
            return Err(Unknown);
        }
        let mut moves = Moves::default();
        for (&parameter, value) in parameters.iter().zip(values) {
            if self.places.left(parameter) == 0 {
                continue;
            }
            let own = self.places.register(value).filter(|register| {
                !self.is_cpu(value) && entry.registers[usize::from(register.0)].is_none()
            });
            let spare = own.or_else(|| self.spare_in(&entry, self.is_long(parameter)));
            match spare {
                Some(register) => {
                    entry.registers[usize::from(register.0)] = Some(parameter);
                    self.give(&mut moves, register, value);
                }
                None => {
                    let slot = self.places.slot(parameter);
                    entry.saved |= 1 << slot;
                    moves.slots.push((slot, value));
                }
            }
        }
        Ok((entry, moves))
    }

    /// Returns a register that holds no value now, and none when the block is entered.
    fn spare_in(&self, entry: &State, is_kept: bool) -> Option<Reg> {
        self.places.spare_but(is_kept, |register| {
            entry.registers[usize::from(register.0)].is_some()
        })
    }

    /// Adds a move of `value` to register `to`.
    pub(super) fn give(&self, moves: &mut Moves, to: Reg, value: Value) {
        match self.places.register(value) {
            Some(from) if from != to => moves.registers.push((to, from)),
            Some(_) => {}
            None => moves.rest.push((to, value)),
        }
    }

    /// Returns the moves for a branch to a block for which `entry`, the places of its values, was decided before.
    fn conform(
        &mut self,
        entry: State,
        parameters: &[Value],
        values: impl Iterator<Item = Value>,
    ) -> Moves {
        let mut moves = Moves::default();
        let given: Vec<(Value, Value)> = parameters.iter().copied().zip(values).collect();
        for (register, value) in entry.registers.into_iter().enumerate() {
            let Some(value) = value else { continue };
            let register = Reg(register as u8);
            match given.iter().find(|(parameter, _)| *parameter == value) {
                Some(&(_, value)) => self.give(&mut moves, register, value),
                // A value that is in no register and in no slot is not used after this branch.
                None if self.is_somewhere(value) => self.give(&mut moves, register, value),
                None => {}
            }
        }
        for &(parameter, value) in &given {
            let slot = self.places.known(parameter).slot();
            if let Some(slot) = slot
                && entry.saved >> slot & 1 != 0
                && !entry.registers.contains(&Some(parameter))
            {
                moves.slots.push((slot, value));
            }
        }
        // If a value was in a slot at the first branch to the block, the block expects it there. At this branch, the
        // value may be in a register only: then move it to its slot.
        for value in self.places.state.registers.into_iter().flatten() {
            if let Some(slot) = self.places.known(value).slot()
                && entry.saved >> slot & 1 != 0
                && self.places.saved(value).is_none()
                && self.constant(value).is_none()
                && !given.iter().any(|(parameter, _)| *parameter == value)
            {
                moves.slots.push((slot, value));
            }
        }
        moves
    }

    fn is_somewhere(&self, value: Value) -> bool {
        self.places.register(value).is_some()
            || self.places.saved(value).is_some()
            || self.constant(value).is_some()
    }

    /// Emits the moves. Their effect is the same as if all moves were made at the same time.
    pub(super) fn make(&mut self, mut moves: Moves) {
        // First push the values for slots on the stack, and write them to the slots after all other values have been
        // read.
        for &(_, value) in &moves.slots {
            self.push(value);
        }
        Self::move_all(self.asm, &mut moves.registers);
        for (register, value) in moves.rest {
            self.read(value, register);
        }
        for (slot, value) in moves.slots.into_iter().rev() {
            self.fill(slot, value);
        }
    }

    /// Emits a jump at the end of a block.
    pub(super) fn jump(&mut self, call: &BlockCall, next: Option<Block>) -> Result {
        let to = call.block(&self.func.dfg.value_lists);
        let moves = self.moves(call)?;
        self.make(moves);
        self.count_uses();
        self.places.unlock();
        if next != Some(to) {
            let label = self.targets[to.index()].label;
            self.asm.jump(label);
        }
        Ok(())
    }

    /// Emits two branches at the end of a block: to the first target if `condition` holds, else to the second one. The
    /// host's flags are already set.
    pub(super) fn branch(
        &mut self,
        condition: u8,
        calls: [&BlockCall; 2],
        next: Option<Block>,
    ) -> Result {
        let lists = &self.func.dfg.value_lists;
        // If one of the two targets follows in the code, make the conditional branch lead to the other target.
        let (condition, [first, second]) = match next == Some(calls[0].block(lists)) {
            true => (condition ^ 1, [calls[1], calls[0]]),
            false => (condition, calls),
        };
        let to = first.block(lists);
        // The moves of the first branch must not release values that the second branch needs.
        let moves = self.moves(first)?;
        let label = self.targets[to.index()].label;
        if moves.is_empty() {
            self.asm.jump_if(condition, label);
        } else {
            let over = self.asm.label();
            self.asm.jump_if(condition ^ 1, over);
            self.make(moves);
            self.asm.jump(label);
            self.asm.place(over);
        }
        self.jump(second, next)
    }
}
