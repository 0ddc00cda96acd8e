//! The run loop: executes one block after another, and does pending work between blocks.

use crate::block::Block;
use crate::executor::Executor;
use crate::flow::Break;
use crate::machine::{Exit, Machine};
use crate::op::Op;
use crate::simd::HostFlags;
use crate::snapshot::Snapshot;
use crate::state::flags;
use crate::sync::AtomicU32;
use crate::{CodePages, vector};
use std::sync::atomic::Ordering;

impl Executor {
    /// Runs the guest until the caller has to act.
    ///
    /// Reads `attention` at every block boundary. A value other than zero ends the run with [`Exit::Attention`]. A port
    /// or MMIO access that the caller has completed takes effect before that. Bit [`CodePages::CHANGED`] of `attention`
    /// belongs to this crate: other CPUs set it during the run, and it is clear when this returns.
    pub fn run(&mut self, machine: &mut dyn Machine, attention: &AtomicU32) -> Exit {
        self.entered(machine, attention, |executor| {
            #[cfg(feature = "jit")]
            executor.cpu.prepare_compiled(attention);
            let rip = executor.state.rip;
            executor.bus_lock.begin_run(rip);
            let exit = executor.run_loop(attention);
            let end = executor.state.rip;
            executor.bus_lock.end_run(rip, end, &exit);
            exit
        })
    }

    /// Calls `f`, which executes instructions of the guest. Before the call, updates the data that is derived from the
    /// state, because the VMM may have changed the state. After the call, the whole state is in
    /// [`State`](crate::State).
    pub(crate) fn entered<T>(
        &mut self,
        machine: &mut dyn Machine,
        attention: &AtomicU32,
        f: impl FnOnce(&mut Self) -> T,
    ) -> T {
        /// A guard that detaches the machine when it is dropped, even if `f` panics.
        struct Detach<'a>(&'a mut Executor);
        impl Drop for Detach<'_> {
            fn drop(&mut self) {
                self.0.detach();
            }
        }
        let _host = HostFlags::keep();
        // SAFETY: `attached` detaches the machine before this function returns.
        unsafe { self.attach(machine) };
        let attached = Detach(self);
        let executor = &mut *attached.0;
        executor.pair();
        executor.derive();
        executor.adopt_flags();
        executor.forget_question();
        executor.code.clock.serialize();
        let result = executor.told_by(attention, f);
        executor.flags();
        result
    }

    /// Forgets where `attention` ended the last run. Call if the caller has interrupted the run sooner than a few
    /// milliseconds after it began: the code that ran then need not be hot enough for Cranelift.
    pub fn forget_interrupted(&mut self) {
        #[cfg(feature = "jit")]
        {
            self.interrupted = None;
        }
    }

    /// Calls `f`, which executes instructions. Meanwhile, other CPUs report changes of code by a bit in `attention`.
    fn told_by<T>(&mut self, attention: &AtomicU32, f: impl FnOnce(&mut Self) -> T) -> T {
        /// A guard: when it is dropped, even if `f` panics, other CPUs stop reporting changes of code to this CPU.
        struct Leave<'a>(&'a mut Executor);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                self.0.code.member.leave();
            }
        }
        // SAFETY: `Leave` makes the member leave before the borrow of the word ends.
        unsafe { self.code.member.enter(attention) };
        let leave = Leave(self);
        f(leave.0)
    }

    /// If `attention` says that other CPUs have changed code, acts on the changes. Returns whether another bit of
    /// `attention` is set: then the run must end.
    #[cold]
    #[inline(never)]
    pub(crate) fn attend(&mut self, attention: &AtomicU32) -> bool {
        let asked = attention.load(Ordering::Acquire);
        if asked & CodePages::CHANGED != 0 {
            self.heed_code(attention);
        }
        asked & !CodePages::CHANGED != 0
    }

    fn run_loop(&mut self, attention: &AtomicU32) -> Exit {
        loop {
            if self.slow {
                match self.boundary(attention) {
                    Some(exit) => return exit,
                    // The work may have caused more work, so check again.
                    None if self.slow => continue,
                    None => {}
                }
            }
            if attention.load(Ordering::Relaxed) != 0 && self.attend(attention) {
                #[cfg(feature = "jit")]
                self.note_interrupted();
                return Exit::Attention;
            }
            let found = match self.find_block() {
                Ok(block) => block,
                Err(why) => match self.fetch_failed(why) {
                    Some(exit) => return exit,
                    None => continue,
                },
            };
            // SAFETY: a block lives until all blocks are freed, which happens in `find_block` only; nothing changes the
            // block while it runs.
            let block = unsafe { found.as_ref() };
            #[cfg(feature = "jit")]
            if block.entrance.is_some() && block.is_current(self.code.clock.stamp) {
                if self.interrupted == Some(block.key.rip) {
                    self.sampled(found);
                    continue;
                }
                if let Some(exit) = self.run_compiled(found) {
                    return exit;
                }
                continue;
            }
            #[cfg(feature = "jit")]
            match block.heat.get() {
                0 => {
                    self.warmed(found);
                    continue;
                }
                left => block.heat.set(left - 1),
            }
            if let Some(exit) = self.execute(block) {
                return exit;
            }
        }
    }

    /// Executes the operations of a block.
    #[inline(always)]
    pub(crate) fn execute(&mut self, block: &Block) -> Option<Exit> {
        match block.first {
            Some(_) => self.execute_while(block, |_| true),
            None => self.execute_once(block),
        }
    }

    /// Executes the operations of a block, as long as `holds` returns `true` after each operation.
    #[inline(always)]
    pub(crate) fn execute_while(
        &mut self,
        block: &Block,
        holds: impl Fn(&Op) -> bool,
    ) -> Option<Exit> {
        block.fetch_next();
        self.blocks.begin(block);
        self.code.rip = block.key.rip;
        self.code.page = block.page();
        self.stop = false;
        self.counters.instructions += u64::from(block.count);
        self.counters.blocks += 1;
        for op in block.ops.iter() {
            match (op.handler)(&mut self.cpu, op) {
                Ok(()) if holds(op) => {}
                Ok(()) => return self.broke(block, op, Break::End),
                Err(Break::Jump) => return None,
                Err(why) => return self.broke(block, op, why),
            }
        }
        let last = block.ops.last()?;
        self.state.rip = self.next_rip(last);
        None
    }

    /// Executes a block that is not kept. The caller has checked that its code equals memory.
    #[inline(never)]
    pub(crate) fn execute_once(&mut self, block: &Block) -> Option<Exit> {
        let (at, _) = Snapshot::split(block.key.lin);
        let (code, _) = block.parts();
        // A block that is not kept is in one page, unless it has only one instruction.
        let host = self.code.once.host.wrapping_add(at);
        self.execute_while(block, |op| {
            let end = usize::from(op.offset) + usize::from(op.len);
            let rest = code.get(end..).unwrap_or(&[]);
            // SAFETY: the address is in the page from which the block was read. The access is guarded, so it is allowed
            // even if the page has been unmapped or replaced.
            unsafe { slat_guard::matches(host.wrapping_add(end), rest) }.unwrap_or(false)
        })
    }

    /// Call when operation `op` has ended its block early, because of `why`.
    #[cold]
    #[inline(never)]
    fn broke(&mut self, block: &Block, op: &Op, why: Break) -> Option<Exit> {
        let why = self.finish_fetched(op, why);
        // Do not count the operations that were not executed.
        let rest = u64::from(op.offset)
            + if matches!(why, Break::End | Break::ExitAfter | Break::TaskFault) {
                u64::from(op.len)
            } else {
                0
            };
        let skipped: u64 = block
            .ops
            .iter()
            .filter(|o| u64::from(o.offset) >= rest && o.count != 0)
            .map(|o| u64::from(o.count))
            .sum();
        self.counters.instructions -= skipped.min(block.count.into());
        self.after_break(op, block.op_bytes(op), why)
    }

    /// Does the work that is needed after `op`, whose bytes are `code`, has ended its block because of `why`. The
    /// caller has set `block_rip`.
    pub(crate) fn after_break(&mut self, op: &Op, code: &[u8], why: Break) -> Option<Exit> {
        match why {
            Break::Jump => {}
            Break::End => self.state.rip = self.next_rip(op),
            Break::Retry => self.state.rip = self.rip_of(op),
            Break::VmExit => {
                self.state.rip = self.rip_of(op);
                self.drop_answers();
                self.make_exit_due();
            }
            Break::Exception => {
                self.state.rip = self.rip_of(op);
                if std::mem::take(&mut self.raised.noncanonical) && op.seg == 2 {
                    self.raised.exception.vector = vector::SS;
                }
                return self.take_fault();
            }
            Break::TaskFault => return self.take_fault(),
            Break::Exit => {
                self.state.rip = self.rip_of(op);
                match self.raised.exit {
                    Some(Exit::Mmio { .. }) => self.keep_reader(op, code),
                    // Drop the data of the instruction's reads: the caller may now do something else instead of the
                    // instruction.
                    Some(Exit::Emulation { .. }) => self.drop_answers(),
                    _ => {}
                }
                return self.take_exit(code);
            }
            Break::ExitAfter => {
                self.state.rip = self.next_rip(op);
                self.end_shadow();
                return self.take_exit(&[]);
            }
        }
        None
    }

    fn take_exit(&mut self, code: &[u8]) -> Option<Exit> {
        let mut exit = self.raised.exit.take();
        if let Some(Exit::Emulation { bytes, len, .. }) = &mut exit {
            let n = code.len().min(15);
            bytes[..n].copy_from_slice(&code[..n]);
            *len = n as u8;
        }
        exit
    }

    /// Makes the exception that the last instruction has raised pending, and sets CR2 or DR6 for it.
    fn take_fault(&mut self) -> Option<Exit> {
        self.drop_answers();
        let fault = self.raised.exception;
        match fault.vector {
            vector::DB => {
                let hits = std::mem::take(&mut self.watch.hits);
                return self.take_debug(hits);
            }
            // The guest's own INT3 delivers #BP itself. This INT3 is one of the debugger's, so the debugger claims it.
            vector::BP => {
                return Some(Exit::Debug {
                    vector: vector::BP,
                    dr6: self.state.dr6,
                });
            }
            _ => {}
        }
        self.raised.noncanonical = false;
        let address = self.raised.address;
        self.queue_exception(fault, address);
        None
    }

    /// Call when the block at RIP could not be found or decoded. Raises the exception of the fetch, or ends the run.
    pub(crate) fn fetch_failed(&mut self, why: Break) -> Option<Exit> {
        match why {
            Break::Exception => self.take_fault(),
            Break::Exit => self.take_exit(&[]),
            Break::VmExit => {
                self.make_exit_due();
                None
            }
            _ => None,
        }
    }

    /// Does all work that is pending before the next block: unfinished instructions, events, single steps.
    #[cold]
    #[inline(never)]
    fn boundary(&mut self, attention: &AtomicU32) -> Option<Exit> {
        // First act on changes of code, because events and single steps store to memory, too.
        self.attend(attention);
        if self.is_unfinished()
            && let Some(exit) = self.finish(attention)
        {
            return Some(exit);
        }
        self.svm.set_delivering(None);
        loop {
            if let Some(exit) = self.take_traps() {
                return Some(exit);
            }
            if self.attend(attention) {
                return Some(Exit::Attention);
            }
            if let Some(exit) = self.deliver_events() {
                return Some(exit);
            }
            if self.svm.is_exit_due() {
                return None;
            }
            let window = self.requests.notify_window;
            if window.is_some_and(|window| self.progress.exceeds(window)) {
                return Some(Exit::Notify);
            }
            // If the delivery of an exception has failed, an exception is pending: another one, or the same one to
            // retry. Deliver it before code is fetched, because a fault of the fetch would replace it. If the stack
            // frame of an event has hit a watchpoint, take the trap before the first instruction of the event's
            // handler.
            let events = &self.state.events;
            if self.probes.hit.is_none()
                && events.exception.is_none()
                && (events.debug == 0 || events.mov_ss_shadow)
            {
                break;
            }
        }
        // If the stack is MMIO, pass the event's stack frame to the device before the event's handler runs.
        if let Some(write) = self.next_mmio_write() {
            return Some(write);
        }
        let opens = self.requests.gif_window && !self.state.events.gif_clear;
        if opens || self.requests.interrupt_window && self.can_take_interrupt() {
            return Some(Exit::InterruptWindow);
        }
        let events = &self.state.events;
        let shadow = events.sti_shadow || events.mov_ss_shadow;
        let stepping = self.state.rflags & (flags::TF | flags::RF) != 0
            || self.requests.debugger.single_step
            || self.probes.steps
            || self.watch.alone;
        if shadow || stepping {
            return self.single_step();
        }
        if self.watch.code {
            return self.execute_between_breakpoints();
        }
        // Only these states need a check at each block boundary. Code that begins another such state sets `slow`.
        let events = &self.state.events;
        self.slow = events.interrupt.is_some()
            || events.nmis != 0 && !events.nmi_blocked && !events.gif_clear
            || events.takes_smi();
        None
    }
}
