//! The state of a translation: the values of registers and flags, and the checkpoints.
//!
//! The registers that a region uses are Cranelift variables. Compiled code loads them from the state at the beginning
//! of the region, and writes them back where [`Plan`](super::plan::Plan) says.
//!
//! The flags are four variables, each in the form of a field of [`SavedFlags`]. This form costs almost nothing to
//! compute, so a loop that sets flags without using them loses little. A checkpoint saves the variables as they are.

use super::context::Context;
use super::frame::{Frame, SavedFlags};
use super::helpers::helper;
use super::truth::Truth;
use super::uses::{FLAGS, SP};
use super::values::Values;
use super::vectors::Known;
use crate::simd::Function;
use crate::state::State;
use cranelift_codegen::ir::types::{I8, I64};
use cranelift_codegen::ir::{Block, InstBuilder, MemFlags, SourceLoc, Type, Value};
use cranelift_frontend::Variable;
use std::boxed::Box;
use std::collections::{BTreeMap, HashMap};
use std::mem::offset_of;
use std::vec::Vec;

/// A checkpoint ([`plan`](super::plan)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) pc: u64,
    /// The number of instructions from the [checkpoint](super::plan) to the end of the block. They were counted at the
    /// beginning of the block.
    pub(super) uncounted: i64,
    /// Whether the frame, and not the state, has the flags.
    pub(super) has_flags: bool,
}

/// A function to which compiled code has a pointer.
pub(super) struct Kept(Box<Function>);

/// The translator's knowledge at the guest instruction that it is translating.
pub(super) struct Now {
    /// The guest address of the current instruction.
    pub(super) pc: u64,
    /// The number of counted instructions from the current instruction to the end of the block.
    pub(super) rest: i64,
    /// The registers whose current values are not in the state: one bit for each.
    pub(super) dirty: u64,
    /// The values of the flags, if the block has set the flags.
    pub(super) flags: Option<[Truth; 4]>,
    /// Whether the last [checkpoint](super::plan) has saved the current flags to the frame.
    pub(super) has_saved_flags: bool,
    /// The values of vector registers that the block can reuse.
    pub(super) vectors: [Known; 32],
}

pub(super) struct Translator<'a> {
    pub(super) v: Values<'a>,
    pub(super) context: Context,
    /// The variables of the registers, by register number. `flags` has the variables of the flags.
    pub(super) registers: Vec<Variable>,
    pub(super) flags: [Variable; 4],
    pub(super) budget: Variable,
    /// The addresses of the state and of the TLB.
    pub(super) state: Value,
    pub(super) tlb: Value,
    pub(super) now: Now,
    pub(super) heads: BTreeMap<u64, Block>,
    /// The addresses in the region to which called functions return ([`Plan::returns`](super::plan::Plan::returns)).
    pub(super) returns: Vec<u64>,
    pub(super) points: Vec<Point>,
    /// The blocks that leave at a [checkpoint](super::plan), by the checkpoint's index in `points`.
    pub(super) leaves: HashMap<usize, Block>,
    pub(super) functions: Vec<Kept>,
}

fn numbers(registers: u64) -> impl Iterator<Item = u32> {
    (0..FLAGS).filter(move |r| registers >> r & 1 != 0)
}

/// Returns the offset of register `r` in the state.
fn offset_of_register(r: u32) -> i32 {
    let offset = match r {
        SP => offset_of!(State, sp),
        r => offset_of!(State, x) + 8 * r as usize,
    };
    offset as i32
}

impl Translator<'_> {
    /// Emits loads of all registers that the region uses.
    pub(super) fn read_state(&mut self, used: u64) {
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

    /// Returns flags in the form of their variables ([`SavedFlags`]).
    fn flag_values(&mut self, [n, z, c, v]: [Truth; 4]) -> [Value; 4] {
        [
            n.negative(&mut self.v),
            z.zero(&mut self.v),
            c.value(&mut self.v),
            v.negative(&mut self.v),
        ]
    }

    fn define_flags(&mut self, flags: [Truth; 4]) {
        let values = self.flag_values(flags);
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

    /// Emits a call that prepares the host's floating-point unit, unless it was prepared since compiled code was
    /// entered.
    pub(super) fn begin_floats(&mut self) {
        let begun = self.v.field(offset_of!(Frame, floats));
        let (begin, on) = (self.v.b.create_block(), self.v.b.create_block());
        self.v.b.set_cold_block(begin);
        self.v.b.ins().brif(begun, on, &[], begin, &[]);
        self.v.b.seal_block(begin);
        self.v.b.switch_to_block(begin);
        self.v.call(helper!(begin_floats), &[], 0);
        self.v.b.ins().jump(on, &[]);
        self.v.b.seal_block(on);
        self.v.b.switch_to_block(on);
    }

    /// Loads a helper's result from the frame: as many bytes as `ty` has.
    pub(super) fn result(&mut self, ty: Type) -> Value {
        let (frame, at) = (self.v.frame(), offset_of!(Frame, result) as i32);
        (self.v.b.ins()).load(ty, MemFlags::trusted(), frame, at)
    }

    /// Keeps a function alive as long as the code, and returns its address.
    pub(super) fn keep(&mut self, function: Function) -> Value {
        let known = self.functions.iter().position(|known| *known.0 == function);
        let at = known.unwrap_or_else(|| {
            self.functions.push(Kept(Box::new(function)));
            self.functions.len() - 1
        });
        let address: *const Function = &*self.functions[at].0;
        self.v.constant(address as i64)
    }

    /// Emits stores of the dirty registers and flags to the state. They stay marked as dirty.
    pub(super) fn write_back(&mut self) {
        self.write_registers();
        let trusted = MemFlags::trusted();
        if self.now.dirty >> FLAGS & 1 != 0 {
            for (n, flag) in self.current_flags().into_iter().enumerate() {
                let value = flag.value(&mut self.v);
                let at = (offset_of!(State, flags) + n) as i32;
                self.v.b.ins().store(trusted, value, self.state, at);
            }
        }
    }

    /// Emits stores of the dirty registers to the state, but not of the flags.
    pub(super) fn write_registers(&mut self) {
        for r in numbers(self.now.dirty) {
            let value = self.register(r);
            let at = offset_of_register(r);
            (self.v.b.ins()).store(MemFlags::trusted(), value, self.state, at);
        }
    }

    /// Emits stores of the flags to the frame, unless the frame has the current flags already.
    pub(super) fn save_flags(&mut self) {
        if std::mem::replace(&mut self.now.has_saved_flags, true) {
            return;
        }
        let flags = self.current_flags();
        let values = self.flag_values(flags);
        let fields = [
            offset_of!(SavedFlags, n),
            offset_of!(SavedFlags, z),
            offset_of!(SavedFlags, c),
            offset_of!(SavedFlags, v),
        ];
        let frame = self.v.frame();
        for (value, field) in values.into_iter().zip(fields) {
            let at = (offset_of!(Frame, flags) + field) as i32;
            (self.v.b.ins()).store(MemFlags::trusted(), value, frame, at);
        }
    }

    pub(super) fn write_pc(&mut self, pc: Value) {
        let at = offset_of!(State, pc) as i32;
        (self.v.b.ins()).store(MemFlags::trusted(), pc, self.state, at);
    }

    /// Emits a store of the budget to the frame: the number of instructions that may still be executed. `more` counted
    /// instructions were not executed, and are added.
    pub(super) fn write_budget(&mut self, more: i64) {
        let mut budget = self.v.b.use_var(self.budget);
        if more != 0 {
            budget = self.v.b.ins().iadd_imm(budget, more);
        }
        self.v.set_field(offset_of!(Frame, budget), budget);
    }

    /// Emits a [checkpoint](super::plan) before the current instruction. If `reads_state`, the instruction reads
    /// registers in the state itself, so the flags are written to the state, too, instead of the frame.
    pub(super) fn checkpoint(&mut self, reads_state: bool) {
        if reads_state {
            self.write_back();
            self.now.dirty = 0;
        } else {
            self.write_registers();
            self.now.dirty &= 1 << FLAGS;
        }
        let has_flags = self.now.dirty != 0;
        if has_flags {
            self.save_flags();
        }
        self.write_budget(0);
        self.points.push(Point {
            pc: self.now.pc,
            uncounted: self.now.rest,
            has_flags,
        });
        let number = self.points.len() - 1;
        self.v.b.set_srcloc(SourceLoc::new(number as u32));
    }

    /// Returns the block that leaves to the interpreter at the last [checkpoint](super::plan).
    pub(super) fn leave(&mut self) -> Block {
        let number = self.points.len() - 1;
        *self.leaves.entry(number).or_insert_with(|| {
            let block = self.v.b.create_block();
            self.v.b.set_cold_block(block);
            block
        })
    }

    /// Leaves to the interpreter at the last [checkpoint](super::plan) if a value is not 0.
    pub(super) fn leave_if(&mut self, wrong: Value) {
        let leave = self.leave();
        let on = self.v.b.create_block();
        self.v.b.ins().brif(wrong, leave, &[], on, &[]);
        self.v.b.seal_block(on);
        self.v.b.switch_to_block(on);
    }

    pub(super) fn return_number(&mut self, number: u64) {
        let number = self.v.constant(number as i64);
        self.v.b.ins().return_(&[number]);
    }

    /// Assigns the flags that the block has set to the variables of the region.
    pub(super) fn settle_flags(&mut self) {
        if let Some(flags) = self.now.flags.take() {
            self.define_flags(flags);
        }
    }
}
