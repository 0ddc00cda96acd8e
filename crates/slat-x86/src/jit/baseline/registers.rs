//! How values get registers, lose them, and get them back.
//!
//! An instruction asks for the registers of its operands ([`get`](Generator::get), [`take`](Generator::take)) and one
//! for its result ([`free`](Generator::free), [`change`](Generator::change)). These registers stay locked until the
//! instruction is done ([`finish`](Generator::finish)).

use super::encode::{Assembler, Place};
use super::places::{FOR_VALUES, KEPT, RBP, bit};
use super::{Generator, Reg};
use cranelift_codegen::entity::EntityRef;
use cranelift_codegen::ir::{InstructionData, Opcode, Value};

/// Returns the memory operand `by` bytes after the beginning of a slot.
fn place_of_slot(slot: u8, by: i32) -> Place {
    Place::Memory(RBP, by - 8 * (i32::from(slot) + 1))
}

impl Generator<'_> {
    /// Returns the number if a value is a constant.
    pub(super) fn constant(&self, value: Value) -> Option<i64> {
        let inst = self.func.dfg.value_def(value).inst()?;
        match self.func.dfg.insts[inst] {
            InstructionData::UnaryImm {
                opcode: Opcode::Iconst,
                imm,
            } => Some(imm.bits()),
            _ => None,
        }
    }

    /// Saves a value in its slot, unless the slot has the value already.
    pub(super) fn save(&mut self, value: Value) {
        if self.places.saved(value).is_some() || self.constant(value).is_some() {
            return;
        }
        if let Some(register) = self.places.register(value) {
            let slot = self.places.slot(value);
            self.places.state.saved |= 1 << slot;
            self.asm.store(3, place_of_slot(slot, 0), register);
        }
    }

    /// Returns a register without a value, and locks it. If no register is free, saves the value of a register and uses
    /// that register.
    pub(super) fn free(&mut self, is_kept: bool) -> Reg {
        let register = match self.places.spare(is_kept) {
            Some(register) => register,
            None => {
                let register = self.places.victim();
                self.empty(register);
                register
            }
        };
        self.places.lock(register);
        register
    }

    /// Removes a register's value, after saving it in a slot.
    pub(super) fn empty(&mut self, register: Reg) {
        if let Some(value) = self.places.state.registers[usize::from(register.0)] {
            self.save(value);
            self.places.drop_from(register);
        }
    }

    /// Frees and locks a given register. Moves its value to another register, or to a slot.
    pub(super) fn take(&mut self, register: Reg) {
        self.places.lock(register);
        let Some(value) = self.places.state.registers[usize::from(register.0)] else {
            return;
        };
        match self.places.spare(false) {
            Some(other) => {
                self.asm.mov(other, register);
                self.places.drop_from(register);
                self.places.put(other, value);
            }
            None => self.empty(register),
        }
    }

    /// Returns a register that holds a value, and locks it. Loads the value if needed.
    pub(super) fn get(&mut self, value: Value) -> Reg {
        if let Some(register) = self.places.register(value) {
            self.places.lock(register);
            return register;
        }
        let register = self.free(self.is_long(value));
        self.read(value, register);
        self.places.put(register, value);
        register
    }

    /// Loads a value that is in no register into `register`.
    pub(super) fn read(&mut self, value: Value, register: Reg) {
        match (self.constant(value), self.places.saved(value)) {
            (Some(constant), _) => self.asm.constant(register, constant),
            (None, Some(slot)) => (self.asm).zero_extend(3, register, place_of_slot(slot, 0)),
            // There were not enough slots. The code of this function will be dropped.
            (None, None) if !self.places.fits() => {}
            (None, None) => unreachable!("{value} is nowhere"),
        }
    }

    /// Copies a value to register `to`, whose old value is not needed.
    pub(super) fn copy(&mut self, value: Value, to: Reg) {
        match self.places.register(value) {
            Some(register) if register == to => {}
            Some(register) => self.asm.mov(to, register),
            None => self.read(value, to),
        }
    }

    /// Returns a locked register with a copy of a value, for an instruction that replaces the copy by its result. At
    /// the value's last use, returns the value's own register instead of a copy.
    pub(super) fn change(&mut self, value: Value) -> Reg {
        if let Some(register) = self.places.register(value)
            && self.places.left(value) == 1
            && !self.is_cpu(value)
        {
            self.places.lock(register);
            return register;
        }
        let register = self.free(false);
        self.copy(value, register);
        register
    }

    /// Ends the current instruction: counts its uses, and assigns a register to its result.
    pub(super) fn finish(&mut self, result: Value, register: Reg) {
        self.count_uses();
        self.places.drop_from(register);
        if self.places.left(result) > 0 {
            self.places.put(register, result);
        }
        self.places.unlock();
    }

    /// Whether a value is used in another block than the block that computes it.
    pub(super) fn is_long(&self, value: Value) -> bool {
        let known = &self.places.values[value.index()];
        known.made != known.last
    }

    /// Call before a call of a function. Saves the values that are used after the call and are in registers that the
    /// function does not preserve.
    pub(super) fn save_for_call(&mut self) {
        for register in FOR_VALUES {
            if KEPT & bit(register) == 0
                && let Some(value) = self.places.state.registers[usize::from(register.0)]
                && self.places.left(value) > self.uses_of(value)
            {
                self.save(value);
            }
        }
    }

    /// Call at a call of a function. Removes the values from the registers that the function does not preserve.
    pub(super) fn drop_for_call(&mut self) {
        for register in FOR_VALUES {
            if KEPT & bit(register) == 0 {
                self.places.drop_from(register);
            }
        }
    }

    /// Emits moves between registers. Their effect is the same as if all moves were made at the same time.
    pub(super) fn move_all(asm: &mut Assembler, moves: &mut Vec<(Reg, Reg)>) {
        moves.retain(|(to, from)| to != from);
        while !moves.is_empty() {
            // Find a move whose target is not the source of another move. If there is no such move, the remaining moves
            // are cycles.
            let free =
                (0..moves.len()).find(|&k| moves.iter().all(|(_, from)| *from != moves[k].0));
            match free {
                Some(k) => {
                    let (to, from) = moves.swap_remove(k);
                    asm.mov(to, from);
                }
                None => {
                    let (to, from) = moves.swap_remove(0);
                    asm.exchange(to, from);
                    for (_, other) in moves.iter_mut() {
                        if *other == to {
                            *other = from;
                        } else if *other == from {
                            *other = to;
                        }
                    }
                    moves.retain(|(to, from)| to != from);
                }
            }
        }
    }

    /// Pushes a value on the stack, for [`fill`](Self::fill). A constant is not pushed.
    pub(super) fn push(&mut self, value: Value) {
        if self.constant(value).is_some() {
            return;
        }
        match (self.places.register(value), self.places.saved(value)) {
            (Some(register), _) => self.asm.push(register),
            (None, Some(slot)) => self.asm.push_memory(place_of_slot(slot, 0)),
            (None, None) if !self.places.fits() => {}
            (None, None) => unreachable!("{value} is nowhere"),
        }
    }

    /// Writes a value to a slot: a constant, or the value that [`push`](Self::push) has pushed.
    pub(super) fn fill(&mut self, slot: u8, value: Value) {
        let [to, upper] = [0, 4].map(|by| place_of_slot(slot, by));
        match self.constant(value) {
            Some(constant) => {
                let (low, high) = (constant as i32, (constant >> 32) as i32);
                self.asm.store_immediate(2, to, low);
                self.asm.store_immediate(2, upper, high);
            }
            None => self.asm.pop_memory(to),
        }
    }
}
