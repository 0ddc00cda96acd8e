//! Records where each value is: in a register, in a slot of the stack frame, or in both. Constants need no place,
//! because they are made again for each use.
//!
//! A value gets a register when it is computed. It loses the register when it is no longer used, or when another value
//! needs the register. In the second case the value is saved in a slot. It stays valid there, because values never
//! change.

use super::Reg;
use crate::jit::entries::FRAME;
use cranelift_codegen::entity::EntityRef;
use cranelift_codegen::ir::Value;

pub(super) const RAX: Reg = Reg(0);
pub(super) const RCX: Reg = Reg(1);
pub(super) const RDX: Reg = Reg(2);
const RBX: Reg = Reg(3);
pub(super) const RBP: Reg = Reg(5);
const RSI: Reg = Reg(6);
const RDI: Reg = Reg(7);
const R8: Reg = Reg(8);
const R9: Reg = Reg(9);
/// The register with the address of `Cpu`.
pub(super) const R15: Reg = Reg(15);

/// The registers for the arguments of calls, in order.
pub(super) const ARGUMENTS: [Reg; 6] = [RDI, RSI, RDX, RCX, R8, R9];
/// The registers for values. Those that called functions preserve are last.
pub(super) const FOR_VALUES: [Reg; 13] = [
    RAX,
    RCX,
    RDX,
    RSI,
    RDI,
    R8,
    R9,
    Reg(10),
    Reg(11),
    RBX,
    Reg(12),
    Reg(13),
    Reg(14),
];
/// The registers in `FOR_VALUES` that called functions preserve. Bit n is register n.
pub(super) const KEPT: u16 = 1 << 3 | 1 << 12 | 1 << 13 | 1 << 14;
/// The greatest number of slots of a function. If a function needs more, this tier does not compile it.
const SLOTS: u32 = u128::BITS;
const _: () = assert!(SLOTS * 8 <= FRAME);

const NOWHERE: u8 = u8::MAX;
const NO_SLOT: u8 = u8::MAX;

/// Which values are in registers, and which slots contain values, at one position in the code.
#[derive(Clone, Copy, Default)]
pub(super) struct State {
    pub(super) registers: [Option<Value>; 16],
    /// The slots that contain values: one bit for each slot.
    pub(super) saved: u128,
}

/// How often a value is used, and where it is.
#[derive(Clone, Copy)]
pub(super) struct Known {
    /// The number of the value's uses that are not compiled yet.
    pub(super) left: u32,
    /// The position of the block that computes the value.
    pub(super) made: u32,
    /// The position of the block with the value's last use.
    pub(super) last: u32,
    register: u8,
    slot: u8,
}

impl Known {
    pub(super) const NEW: Known = Known {
        left: 0,
        made: 0,
        last: 0,
        register: NOWHERE,
        slot: NO_SLOT,
    };

    /// Returns the slot assigned to the value.
    pub(super) fn slot(&self) -> Option<u8> {
        (self.slot != NO_SLOT).then_some(self.slot)
    }
}

/// Where a function's values are at the current position in the code.
#[derive(Default)]
pub(super) struct Places {
    pub(super) values: Vec<Known>,
    pub(super) state: State,
    /// The registers that the current instruction uses: one bit for each register.
    locked: u16,
    /// The number of slots that were assigned since the beginning of the segment.
    slots: u32,
    /// The values that were assigned slots in the current late block. The slots are freed after the block.
    given: Vec<Value>,
    /// The index of the register that was emptied last.
    next: usize,
    is_full: bool,
}

pub(super) fn bit(register: Reg) -> u16 {
    1 << register.0
}

impl Places {
    pub(super) fn clear(&mut self, values: usize) {
        self.values.clear();
        self.values.resize(values, Known::NEW);
        self.state = State::default();
        self.given.clear();
        (self.locked, self.slots, self.next) = (0, 0, 0);
        self.is_full = false;
    }

    pub(super) fn known(&mut self, value: Value) -> &mut Known {
        &mut self.values[value.index()]
    }

    pub(super) fn left(&self, value: Value) -> u32 {
        self.values[value.index()].left
    }

    pub(super) fn register(&self, value: Value) -> Option<Reg> {
        let register = self.values[value.index()].register;
        (register != NOWHERE).then_some(Reg(register))
    }

    /// Records that a value is the address of `Cpu`, which is always in R15 and needs no place in a state.
    pub(super) fn is_cpus(&mut self, value: Value) {
        self.known(value).register = R15.0;
    }

    /// Returns the slot in which a value is saved now.
    pub(super) fn saved(&self, value: Value) -> Option<u8> {
        let slot = self.values[value.index()].slot;
        (slot != NO_SLOT && self.state.saved >> slot & 1 != 0).then_some(slot)
    }

    /// Whether there were enough slots for all values so far.
    pub(super) fn fits(&self) -> bool {
        !self.is_full
    }

    /// Replaces the current state by `state`.
    pub(super) fn resume(&mut self, state: State) {
        for value in self.state.registers.into_iter().flatten() {
            self.known(value).register = NOWHERE;
        }
        self.state = state;
        for (register, value) in state.registers.into_iter().enumerate() {
            if let Some(value) = value {
                self.known(value).register = register as u8;
            }
        }
    }

    /// Frees all slots. Call when no slot contains a value. Returns the number of slots that were used.
    pub(super) fn reset_slots(&mut self) -> u32 {
        std::mem::take(&mut self.slots)
    }

    /// Begins a late block: new slots come after the first `slots` slots.
    pub(super) fn begin_apart(&mut self, slots: u32) {
        self.slots = slots;
        self.given.clear();
    }

    /// Whether a slot was assigned to a value since the late block began.
    pub(super) fn has_given(&self) -> bool {
        !self.given.is_empty()
    }

    pub(super) fn end_apart(&mut self) {
        while let Some(value) = self.given.pop() {
            self.known(value).slot = NO_SLOT;
        }
    }

    /// Returns the slot of a value. If the value has no slot yet, assigns a slot.
    pub(super) fn slot(&mut self, value: Value) -> u8 {
        if self.known(value).slot == NO_SLOT {
            if self.slots == SLOTS {
                self.is_full = true;
                self.slots -= 1;
            }
            self.known(value).slot = self.slots as u8;
            self.given.push(value);
            self.slots += 1;
        }
        self.known(value).slot
    }

    /// Puts a value into a register that holds no value.
    pub(super) fn put(&mut self, register: Reg, value: Value) {
        debug_assert!(self.state.registers[usize::from(register.0)].is_none());
        self.state.registers[usize::from(register.0)] = Some(value);
        self.known(value).register = register.0;
    }

    /// Removes a register's value from the register.
    pub(super) fn drop_from(&mut self, register: Reg) {
        if let Some(value) = self.state.registers[usize::from(register.0)].take() {
            self.known(value).register = NOWHERE;
        }
    }

    pub(super) fn lock(&mut self, register: Reg) {
        self.locked |= bit(register);
    }

    pub(super) fn unlock(&mut self) {
        self.locked = 0;
    }

    pub(super) fn is_locked(&self, register: Reg) -> bool {
        self.locked & bit(register) != 0
    }

    /// Frees the register and the slot of a value that is not used any more.
    fn forget(&mut self, value: Value) {
        if let Some(register) = self.register(value) {
            self.drop_from(register);
        }
        let slot = self.known(value).slot;
        if slot != NO_SLOT {
            self.state.saved &= !(1 << slot);
        }
    }

    /// Subtracts one from the number of remaining uses of a value. After the last use, frees the value's register and
    /// slot.
    pub(super) fn used(&mut self, value: Value) {
        let known = self.known(value);
        known.left -= 1;
        if known.left == 0 {
            self.forget(value);
        }
    }

    /// Frees the registers and slots of all values that are not used any more.
    pub(super) fn forget_unused(&mut self) {
        for value in self.state.registers.into_iter().flatten() {
            if self.left(value) == 0 {
                self.forget(value);
            }
        }
    }

    /// Returns a register without a value, if there is one. If `is_kept`, prefers registers that called functions
    /// preserve.
    pub(super) fn spare(&self, is_kept: bool) -> Option<Reg> {
        self.spare_but(is_kept, |_| false)
    }

    /// Returns a register without a value like [`spare`](Self::spare), but only one for which `is_other` returns
    /// `false`.
    pub(super) fn spare_but(&self, is_kept: bool, is_other: impl Fn(Reg) -> bool) -> Option<Reg> {
        let is_free = |&register: &Reg| {
            !self.is_locked(register)
                && self.state.registers[usize::from(register.0)].is_none()
                && !is_other(register)
        };
        match is_kept {
            false => FOR_VALUES.into_iter().find(is_free),
            true => FOR_VALUES.into_iter().rev().find(is_free),
        }
    }

    /// Chooses the register to empty when a value needs a register and none is free.
    pub(super) fn victim(&mut self) -> Reg {
        loop {
            self.next = (self.next + 1) % FOR_VALUES.len();
            let register = FOR_VALUES[self.next];
            if !self.is_locked(register) {
                return register;
            }
        }
    }
}
