//! The interpreter: executes instructions one after another.

use crate::decode::decode;
use crate::insn::{Hint, Insn};
use crate::meaning::execute;
use crate::memory::Machine;
use crate::now::{Now, Stop};
use crate::state::State;
use crate::tier::{Exception, Next};
use alloc::vec::Vec;

/// The reason why a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit<F> {
    /// The run has executed as many instructions as the caller allowed.
    Limit,
    /// The processor has executed a hint, which the caller may want to handle.
    Hint(Hint),
    /// The next instruction ended early, and has changed nothing. The program counter is its address.
    Stop(Stop<F>),
    /// Instructions cannot be fetched from the program counter.
    Fetch(F),
    /// The program counter is not a multiple of 4.
    MisalignedFetch,
}

/// Consecutive decoded instructions. The last instruction is a branch, or the block has the greatest number of
/// instructions.
///
/// The caller must find out itself whether the block's memory has changed since it was decoded.
#[derive(Clone, Debug)]
pub struct Block {
    start: u64,
    /// The instructions. `None` is an UNDEFINED instruction.
    instructions: Vec<Option<Insn>>,
}

/// The greatest number of instructions of a block.
const BLOCK: usize = 64;

impl Block {
    /// Decodes the block that begins at an address. Fails if its first instruction cannot be fetched.
    pub fn decode<M: Machine>(
        state: &State,
        machine: &mut M,
        start: u64,
    ) -> Result<Self, M::Fault> {
        let mut instructions = Vec::new();
        while instructions.len() < BLOCK {
            let address = start.wrapping_add(4 * instructions.len() as u64);
            let word = match machine.fetch(state, address) {
                Ok(word) => word,
                Err(fault) if instructions.is_empty() => return Err(fault),
                Err(_) => break,
            };
            let insn = decode(word);
            instructions.push(insn);
            if insn.is_none_or(|insn| insn.ends_block()) {
                break;
            }
        }
        Ok(Self {
            start,
            instructions,
        })
    }

    /// Returns the address of the first instruction.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Returns the number of instructions.
    pub fn instructions(&self) -> usize {
        self.instructions.len()
    }
}

impl Insn {
    fn ends_block(&self) -> bool {
        matches!(
            self,
            Insn::Branch { .. }
                | Insn::BranchIf { .. }
                | Insn::CompareBranch { .. }
                | Insn::TestBranch { .. }
                | Insn::BranchRegister { .. }
                | Insn::Eret
                | Insn::Call { .. }
                | Insn::Hint(_)
                | Insn::Barrier(_)
                | Insn::SetPstate { .. }
                | Insn::WriteSystem { .. }
                | Insn::SystemInstruction { .. }
        )
    }
}

/// The continuation after the execution of one instruction: the next instruction of its block (`On`), an instruction of
/// another block (`Elsewhere`), or the end of the run (`Out`).
pub(crate) enum Went<F> {
    On,
    Elsewhere,
    Out(Exit<F>),
}

/// Executes a decoded instruction, whose address is the program counter.
#[inline(always)]
pub(crate) fn one<M: Machine>(
    state: &mut State,
    machine: &mut M,
    insn: &Option<Insn>,
) -> Went<M::Fault> {
    let Some(insn) = insn else {
        return Went::Out(Exit::Stop(Exception::Undefined.into()));
    };
    let pc = state.pc;
    let following = pc.wrapping_add(4);
    let mut now = Now { state, machine, pc };
    let (next, went) = match execute(&mut now, insn) {
        Ok(Next::Following) => (following, Went::On),
        Ok(Next::Jump(target)) => (target, Went::Elsewhere),
        Ok(Next::JumpIf(jumps, target)) => {
            (if jumps { target } else { following }, Went::Elsewhere)
        }
        Ok(Next::Indirect(target)) => (now.state.branch_target(target), Went::Elsewhere),
        Ok(Next::Hint(hint)) => (following, Went::Out(Exit::Hint(hint))),
        Ok(Next::Synchronize) => (following, Went::Elsewhere),
        Err(stop) => return Went::Out(Exit::Stop(stop)),
    };
    state.pc = next;
    went
}

/// Fetches, decodes and executes one instruction. Returns `None` if execution can continue.
pub fn step<M: Machine>(state: &mut State, machine: &mut M) -> Option<Exit<M::Fault>> {
    if state.pc & 3 != 0 {
        return Some(Exit::MisalignedFetch);
    }
    let word = match machine.fetch(state, state.pc) {
        Ok(word) => word,
        Err(fault) => return Some(Exit::Fetch(fault)),
    };
    if state.pstate().il {
        return Some(Exit::Stop(Exception::Illegal.into()));
    }
    match one(state, machine, &decode(word)) {
        Went::On | Went::Elsewhere => None,
        Went::Out(exit) => Some(exit),
    }
}

/// Executes at most `limit` instructions.
pub fn run<M: Machine>(state: &mut State, machine: &mut M, limit: u64) -> Exit<M::Fault> {
    for _ in 0..limit {
        if let Some(exit) = step(state, machine) {
            return exit;
        }
    }
    Exit::Limit
}

/// Executes a decoded block, which must start at the program counter. If its last instruction jumps back to the start,
/// repeats the block; executes it at most `times` times. Returns `None` if execution can continue at the program
/// counter.
pub fn run_block<M: Machine>(
    state: &mut State,
    machine: &mut M,
    block: &Block,
    times: u64,
) -> Option<Exit<M::Fault>> {
    for _ in 0..times {
        if state.pstate().il {
            return Some(Exit::Stop(Exception::Illegal.into()));
        }
        if state.pc != block.start {
            break;
        }
        for insn in &block.instructions {
            match one(state, machine, insn) {
                Went::On => {}
                Went::Elsewhere => break,
                Went::Out(exit) => return Some(exit),
            }
        }
    }
    None
}
