//! `KVM_RUN`: runs the guest until an exit, and stores the exit for the client.
//!
//! The architecture's folder prepares each entry into the guest and handles the CPU's exits. File `accesses` serves
//! memory accesses without an exit to the client, and has the code that memory and port accesses share.

mod accesses;

use crate::arch::{self, Executor, Exit, MOST_FRAMES, VcpuMachine};
use crate::entered::Entered;
use crate::errno::{Result, fail};
use crate::fields::set_field;
use crate::profile::{self, Origin};
use crate::signals::Masked;
use crate::thread::{self, bits};
use crate::ticker;
use crate::trace;
use crate::vcpu::{Inner, VcpuObject};
use kvm_bindings::*;
use slat::Attention;
use slat_trace::{DirtyRingExit, point};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Whether every signal handler of the client calls [`crate::signal_arrived`]. If not, `KVM_RUN` polls
/// `immediate_exit`, because a handler that only sets `immediate_exit` does not wake the vCPU.
static SIGNALS_ARE_WATCHED: AtomicBool = AtomicBool::new(false);

/// Promises that every signal handler of this process calls [`crate::signal_arrived`].
pub fn watch_signals() {
    SIGNALS_ARE_WATCHED.store(true, Ordering::Relaxed);
}

/// The time limit of each sleep. A sleep without a time limit would continue after a signal handler, because the kernel
/// restarts it.
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// The next step of the run loop after an exit of the CPU.
pub(crate) enum Next {
    /// The run loop runs the guest again, without a return to the client.
    Again,
    /// Return to the client: the exit is in `kvm_run`.
    Return,
}

impl VcpuObject {
    /// Carries out `KVM_RUN`: executes the guest until an exit.
    ///
    /// # Errors
    /// `EINTR` for a signal or `immediate_exit`. `EFAULT` if the client's memory that backs guest memory is unmapped,
    /// or if there is no private memory for a private page (then with `KVM_EXIT_MEMORY_FAULT`). `ENOMEM` if there is no
    /// memory for a second-level table; the next run continues where this run ended. `EINVAL` for bad values in
    /// `kvm_run`. `EAGAIN` after waiting for INIT and SIPI. `EIO` in a forked child and after a call that panicked.
    pub fn run(&self) -> Result<()> {
        let mut inner = self.lock()?;
        let inner = &mut *inner;
        let attention = self.common().attention.clone();
        let _guards = thread::begin(&attention);
        let _traced = slat_trace::run_vcpu(self.vm.number, self.common().id);
        // SAFETY: the call takes no pointer and cannot fail.
        let thread = unsafe { libc::pthread_self() } as usize;
        self.common().runner.store(thread, Ordering::Relaxed);
        let masked = inner.signal_mask.map(Masked::enter);
        let _polling = (masked.is_some() || !SIGNALS_ARE_WATCHED.load(Ordering::Relaxed))
            .then(|| self.common().client.poll());
        set_field!(self.page, 0, flags);
        if self.is_called_to_port() {
            self.visit_port(inner, masked.as_ref());
        }
        let result = self.prepare(inner, masked.as_ref()).and_then(|ready| {
            if !ready {
                return Ok(());
            }
            if self.page.immediate_exit() && !inner.is_unfinished() {
                return fail(libc::EINTR);
            }
            inner.has_run = true;
            inner.machine.begin_to_run();
            let mut entered = Entered::enter(inner);
            let result = self.complete_and_run(&mut entered, masked.as_ref());
            entered.machine.stop_running();
            result
        });
        self.common().runner.store(0, Ordering::Relaxed);
        self.publish(inner);
        trace::returns(self.page.exit_reason(), &result);
        result
    }

    /// Finishes the instruction that the last run began, then executes the guest until an exit.
    fn complete_and_run(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<()> {
        self.begin_run(inner);
        if let Next::Return = self.complete(inner, masked)? {
            return Ok(());
        }
        if self.page.immediate_exit() {
            return fail(libc::EINTR);
        }
        if masked.is_some_and(Masked::signal_waits) {
            self.common().attention.raise(bits::SIGNAL);
        }
        self.loop_until_exit(inner, masked)
    }

    fn loop_until_exit(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<()> {
        self.page.set_exit_reason(KVM_EXIT_UNKNOWN);
        inner.machine.write_clocks();
        inner.begin_requested();
        loop {
            // The attention word is read before the instruction is completed. If a bit that is raised meanwhile ended
            // this run, the instruction could be half done.
            let is_called = self.common().attention.flag().load(Ordering::SeqCst) != 0;
            if let Next::Return = self.complete(inner, masked)? {
                return Ok(());
            }
            if is_called {
                self.attend(inner, masked)?;
            }
            if !self.update_guest(inner) {
                return Ok(());
            }
            if self.ring_is_full() || !self.deliver_events(inner, masked)? {
                return Ok(());
            }
            inner.enters_guest();
            let exit = self.execute(inner, |cpu, machine, attention| {
                Some(cpu.run(machine, attention))
            });
            inner.left_guest();
            if let Next::Return = self.follow(inner, exit, masked)? {
                return Ok(());
            }
        }
    }

    /// Finishes the instruction that caused the last exit, with the data that the client has provided. `Next::Return`:
    /// the instruction causes another exit, which is in `kvm_run` now.
    ///
    /// KVM promises (api.rst, 5) that after a run with `immediate_exit` no instruction is half done. So this method is
    /// called before signals, requests and interrupts are handled, and executes no other instruction. [`Executor::run`]
    /// also finishes the instruction before it executes another instruction. So if no event prevents `Executor::run`
    /// from following at once, this method does nothing.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run), if the instruction has to wait for memory that the host does not have yet.
    /// Then the next run finishes the instruction.
    fn complete(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<Next> {
        while inner.cpu.is_unfinished() && self.is_called_away(masked) {
            if self.ring_is_full() {
                return Ok(Next::Return);
            }
            // Flushes did not wait for this vCPU while it was outside, so its translations may be invalid.
            self.serve_requests(inner)?;
            let exit = self.execute(inner, |cpu, machine, attention| {
                cpu.complete(machine, attention)
            });
            if let Next::Return = self.follow(inner, exit, masked)? {
                return Ok(Next::Return);
            }
        }
        match self.has_late_exit(inner) {
            true => Ok(Next::Return),
            false => Ok(Next::Again),
        }
    }

    /// Handles `exit`, the exit after which the CPU stopped executing. If `exit` is `None`, there was no exit, and the
    /// guest continues.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run).
    fn follow(
        &self,
        inner: &mut Inner,
        exit: Option<Exit>,
        masked: Option<&Masked>,
    ) -> Result<Next> {
        match exit {
            None => Ok(Next::Again),
            Some(exit) => self.handle(inner, exit, masked),
        }
    }

    /// Whether an event must be handled, or may end this run, before the guest's next instruction.
    fn is_called_away(&self, masked: Option<&Masked>) -> bool {
        self.page.immediate_exit()
            || masked.is_some()
            || self.common().attention.flag().load(Ordering::SeqCst) != 0
    }

    /// Executes guest instructions by calling `f`, and counts the exit with which `f` returns.
    fn execute(
        &self,
        inner: &mut Inner,
        f: impl FnOnce(&mut Executor, &mut VcpuMachine, &AtomicU32) -> Option<Exit>,
    ) -> Option<Exit> {
        let Inner {
            cpu,
            machine,
            stopwatch,
            ..
        } = inner;
        machine.begin_execution();
        slat_guard::forget_kick();
        let common = self.common();
        stopwatch.enters(&common.times);
        common.client.executes();
        arch::trace_entry(common.id, &cpu.state);
        let exit = f(cpu, machine, common.attention.flag());
        common.client.rests();
        common.cpu.publish(cpu.counters());
        arch::trace_exit(common.id, &cpu.state, exit.as_ref());
        if let Some(exit) = &exit {
            common.exits.count(exit);
            stopwatch.exits(common.exits.exits.get(), || arch::reason(exit));
        }
        exit
    }

    /// Whether the client has to collect from the dirty ring before the guest continues. If so, sets the exit
    /// `KVM_EXIT_DIRTY_RING_FULL`.
    fn ring_is_full(&self) -> bool {
        let full = self.ring.as_ref().is_some_and(|ring| ring.is_soft_full());
        if full {
            self.page.set_exit_reason(KVM_EXIT_DIRTY_RING_FULL);
            point(|| DirtyRingExit {
                vcpu_id: self.common().id,
            });
        }
        full
    }

    /// Leaves the engine, waits until an attention bit is raised, enters again, and handles the bits.
    pub(crate) fn block(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<()> {
        let exits = &self.common().exits;
        let begin = Instant::now();
        exits.halts.set_blocking(true);
        inner.machine.stop_running();
        let interrupted = inner.outside(|inner| {
            let interrupted = ticker::sleep(&self.common().attention, LONGEST_SLEEP);
            inner.machine.begin_to_run();
            interrupted
        });
        exits.halts.set_blocking(false);
        exits.halts.waited(begin.elapsed());
        if interrupted {
            self.common().attention.raise(bits::SIGNAL);
        }
        self.attend(inner, masked)
    }

    /// Handles all raised attention bits. Waits while a debugger holds the vCPU. An error ends the run.
    pub(crate) fn attend(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<()> {
        if self.is_called_to_port() {
            inner.machine.stop_running();
            inner.outside(|inner| {
                self.visit_port(inner, masked);
                inner.machine.begin_to_run();
            });
        }
        self.serve_requests(inner)?;
        let raised = self.common().attention.take(bits::SIGNAL | bits::POLL);
        let polled = raised & bits::POLL != 0
            && (self.must_leave() || masked.is_some_and(Masked::signal_waits));
        if raised & bits::SIGNAL != 0 || polled {
            self.common().exits.signal_exits.add(1);
            self.page.set_exit_reason(KVM_EXIT_INTR);
            return fail(libc::EINTR);
        }
        Ok(())
    }

    /// Handles the raised attention bits, except bits that make the run return to the client.
    ///
    /// # Errors
    /// `EIO` if the VM is dead.
    fn serve_requests(&self, inner: &mut Inner) -> Result<()> {
        let attention = &self.common().attention;
        let raised = attention.take(
            bits::IRQ
                | bits::TIMER
                | bits::RETRY
                | bits::RING_FULL
                | bits::GUEST_FLUSH
                | bits::SAMPLE,
        );
        self.vm.still_alive()?;
        if raised & bits::SAMPLE != 0 {
            self.sample(inner);
        }
        if raised == bits::SAMPLE {
            inner.cpu.forget_interrupted();
        }
        // `quiesce` clears FLUSH when it acknowledges the flush.
        let by_host = raised & bits::RETRY != 0
            || attention.flag().load(Ordering::SeqCst) & Attention::FLUSH != 0;
        let by_guest = raised & bits::GUEST_FLUSH != 0;
        if by_host || by_guest {
            self.common().exits.tlb_flush.add(1);
        }
        if by_guest {
            self.drop_invalidated(inner);
        }
        if by_host {
            inner.flush_translations();
            inner.as_mut().quiesce();
        }
        if by_host || raised & bits::POLL != 0 {
            inner.machine.write_clocks();
        }
        if raised & bits::TIMER != 0 {
            inner.machine.timer_rang();
        }
        Ok(())
    }

    /// Stores the guest's stack for a profile.
    #[cold]
    fn sample(&self, inner: &mut Inner) {
        let mut stack = [0; MOST_FRAMES];
        let count = inner.machine.stack(&inner.cpu, &mut stack);
        let origin = Origin {
            vm: self.vm.number,
            vcpu: self.common().id,
            is_nested: inner.cpu.is_in_guest_mode(),
        };
        profile::count(origin, &stack[..count]);
    }

    /// Whether the run has to end because a signal handler has set `immediate_exit` without raising an attention bit.
    pub(crate) fn must_leave(&self) -> bool {
        !SIGNALS_ARE_WATCHED.load(Ordering::Relaxed) && self.page.immediate_exit()
    }
}
