//! Completion: finishes the last instruction of a run that has ended, before anything else is executed.
//!
//! Between two runs the caller may read all state, and continue elsewhere with a copy of it, or discard it. But the
//! registers do not contain the pending work of an unfinished instruction: data that a device has returned, writes that
//! no device has seen, a #VMEXIT that waits for memory, or traps. [`Executor::complete`] moves all pending work into
//! [`State`](crate::State) or to the caller, and executes no other instruction (KVM's API, `immediate_exit`).
//! `attention` and events are handled afterwards.
//!
//! An instruction that waits for data is executed again from its decoded form. Its device reads then return the
//! caller's data, and the addresses of its other operands are translated again, as in KVM.

use crate::executor::Executor;
use crate::flow::Break;
use crate::machine::{Exit, Machine};
use crate::op::{LONGEST_INSTRUCTION, Op};
use crate::reader::Reader;
use crate::sync::AtomicU32;

impl Executor {
    /// Whether the last instruction is unfinished, so that [`complete`](Self::complete) has to be called.
    pub fn is_unfinished(&self) -> bool {
        self.waits_for_memory() || self.has_writes() || self.bus_lock.is_due() || self.has_traps()
    }

    /// Finishes the last instruction, with the data that the caller has provided. Executes no other instruction.
    /// Returns the instruction's next exit, or `None` if the instruction is finished and its results are in
    /// the CPU's `state`.
    ///
    /// Ends with [`Exit::Attention`] if the instruction has to wait for memory and `attention` is not zero.
    pub fn complete(&mut self, machine: &mut dyn Machine, attention: &AtomicU32) -> Option<Exit> {
        if !self.is_unfinished() {
            return None;
        }
        self.entered(machine, attention, |executor| {
            executor.attend(attention);
            executor.finish(attention)
        })
    }

    /// Does the work of [`complete`](Self::complete). Call in a run, after the CPU has acted on other CPUs' changes of
    /// code (`Member::heed`).
    pub(crate) fn finish(&mut self, attention: &AtomicU32) -> Option<Exit> {
        loop {
            if let Some(write) = self.next_mmio_write() {
                return Some(write);
            }
            if self.bus_lock.take() {
                return Some(Exit::BusLock);
            }
            let (exit, retries) = if self.has_answers() {
                self.svm.set_delivering(None);
                (self.finish_read(), self.has_answers())
            } else if self.has_input() {
                let exit = match self.finish_ins() {
                    Ok(()) => None,
                    Err(why) => self.input_failed(why),
                };
                (exit, self.has_input())
            } else if self.svm.is_exit_due() {
                // The #VMEXIT of an INIT or a shutdown that came after the instruction waits for memory.
                (self.exit_guest(), self.svm.is_exit_due())
            } else {
                return self.take_traps();
            };
            if exit.is_some() {
                return exit;
            }
            if retries && self.attend(attention) {
                return Some(Exit::Attention);
            }
        }
    }

    /// Call when the data of a string input could not be stored. Drops the rest of the data if the failure causes an
    /// exception or a #VMEXIT.
    fn input_failed(&mut self, why: Break) -> Option<Exit> {
        if !matches!(why, Break::Retry | Break::Exit) {
            self.devices.port = None;
        }
        self.fetch_failed(why)
    }

    /// Executes the instruction again whose reads the caller has provided data for.
    fn finish_read(&mut self) -> Option<Exit> {
        let reader = self.reader?;
        self.step(reader.rip, |executor| {
            executor.code.rip = reader.rip.wrapping_sub(reader.op.offset.into());
            executor.stop = false;
            let why = match (reader.op.handler)(&mut executor.cpu, &reader.op) {
                Ok(()) => Break::End,
                Err(why) => why,
            };
            let why = executor.finish_fetched(&reader.op, why);
            executor.executed_alone(&reader.op, reader.code(), why)
        })
    }

    /// Call after `op`, whose bytes are `code`, was executed outside its block. Counts `op` if it is done, and does the
    /// work that follows every instruction. The caller has set `block_rip`.
    pub(crate) fn executed_alone(&mut self, op: &Op, code: &[u8], why: Break) -> Option<Exit> {
        use Break::*;
        if matches!(why, Jump | End | ExitAfter | TaskFault) {
            self.counters.instructions += 1;
        }
        self.after_break(op, code, why)
    }

    /// Call when `op`, whose bytes are `code`, ends the run with an MMIO read. Records `op` for
    /// [`finish_read`](Self::finish_read).
    pub(crate) fn keep_reader(&mut self, op: &Op, code: &[u8]) {
        let op = match op.count {
            // Of two fused instructions, the first makes the read. The second is decoded again later, and executed on
            // its own.
            2 => self.first_of_fused(op, code),
            _ => *op,
        };
        let mut bytes = [0; LONGEST_INSTRUCTION];
        let len = code.len().min(op.len.into());
        bytes[..len].copy_from_slice(&code[..len]);
        self.reader = Some(Reader {
            op,
            rip: self.rip_of(&op),
            bytes,
        });
    }

    /// Drops the data of an instruction's reads. Call when the instruction is done, or has ended in an exception.
    pub(crate) fn drop_answers(&mut self) {
        self.cpu.clear_answers();
        self.reader = None;
    }

    /// Drops an access of an earlier run that the caller did not complete, so that the instruction makes the access
    /// again. Also drops an access whose instruction is no longer at RIP.
    pub(crate) fn forget_question(&mut self) {
        let rip = self.state.rip;
        let is_unanswered = self.cpu.forget_question();
        if is_unanswered || self.reader.is_some_and(|reader| reader.rip != rip) {
            self.drop_answers();
        }
    }
}
