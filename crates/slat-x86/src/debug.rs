//! Debug exceptions: breakpoints, watchpoints and single steps, for the guest (DR0–DR7, TF) and for a debugger outside
//! the guest (SDM volume 3, "Debug Registers" and "Debug Exceptions").
//!
//! If nobody debugs the guest, this costs nothing. A page with a data watchpoint is never in the software TLB, so
//! accesses to the page miss and call [`Cpu::watch`]. All other debug features set [`Cpu::slow`], and are handled
//! between blocks. An instruction that accesses watched bytes is abandoned, and executed again in a block of its own,
//! so that its trap can be taken directly after it.
//!
//! Faults (instruction breakpoints, general detect) are raised like any other fault. Traps are collected in
//! [`Events::debug`](crate::Events::debug) as DR6 bits, and taken before the next instruction that is not in the shadow
//! of MOV SS.

use crate::flow::Break;
use crate::machine::Exit;
use crate::probe::{Probe, Probes};
use crate::state::{Exception, State, control, flags};
use crate::watch::{DR6_BD, DR6_BS, DR6_HITS, DR6_ONES, DR7_GD, kind};
use crate::{Cpu, vector};

impl Cpu {
    /// Whether the current instruction will cause a debug trap at its end, not counting watchpoints.
    pub(crate) fn traps(&self) -> bool {
        self.watch.steps || self.probes.steps
    }

    /// Whether a repeated string instruction must stop after the current iteration to trap.
    pub(crate) fn traps_after_iteration(&self) -> bool {
        self.traps() || self.watch.hits != 0
    }

    /// Returns the DR6 bits of the I/O breakpoints that an access to `bytes` ports at `port` hits.
    pub(crate) fn port_hits(&self, port: u16, bytes: u8) -> u64 {
        match self.watch.ports {
            true => (self.watch.breakpoints).hits(&[kind::PORT], port.into(), bytes.into()),
            false => 0,
        }
    }

    /// Returns the DR6 bits of the instruction breakpoints at `rip`. Returns 0 if RF is set, or, on Intel CPUs, in the
    /// shadow of MOV SS.
    pub(crate) fn code_hits(&self, rip: u64) -> u64 {
        let shadow = self.state.events.mov_ss_shadow && self.is_intel();
        if !self.watch.code || self.state.rflags & flags::RF != 0 || shadow {
            return 0;
        }
        let lin = self.code_address(rip);
        (self.watch.breakpoints.enabled())
            .filter(|(i, kind, ..)| {
                *kind == kind::EXECUTE && self.watch.breakpoints.addresses[*i] == lin
            })
            .fold(0, |hits, (i, ..)| hits | 1 << i)
    }

    /// Returns the linear address of the next instruction.
    pub fn linear_rip(&self) -> u64 {
        let State { efer, cs, rip, .. } = &self.state;
        match efer & control::EFER_LMA != 0 && cs.long() {
            true => *rip,
            false => cs.base.wrapping_add(*rip) & 0xffff_ffff,
        }
    }

    /// Whether an instruction breakpoint or a code probe is in the `len` bytes at `lin`.
    pub(crate) fn has_code_breakpoint(&self, lin: u64, len: u64) -> bool {
        self.probes.has_code_in(lin, len)
            || (self.watch.breakpoints.enabled()).any(|(i, kind, ..)| {
                let at = self.watch.breakpoints.addresses[i];
                kind == kind::EXECUTE && at.wrapping_sub(lin) < len
            })
    }

    /// Runs `f`. Returns the result of `f`, and the watchpoints that `f` hits as DR6 bits.
    pub(crate) fn collect_hits<T>(&mut self, f: impl FnOnce(&mut Self) -> T) -> (T, u64) {
        let collected = std::mem::replace(&mut self.watch.collects, true);
        let before = std::mem::take(&mut self.watch.hits);
        let result = f(self);
        self.watch.collects = collected;
        let hits = std::mem::replace(&mut self.watch.hits, before);
        (result, hits)
    }

    /// Returns the watchpoint hits and the single step of the current instruction as DR6 bits, for a trap that is taken
    /// later.
    pub(crate) fn traps_of_instruction(&self) -> u64 {
        self.watch.hits | self.probes.step()
    }

    /// Whether an instruction that begins now, or is completed now, will cause a single-step trap at its end.
    pub(crate) fn steps(&self) -> bool {
        self.state.rflags & flags::TF != 0 || self.requests.debugger.single_step
    }

    /// Records watchpoint hits and a single step like [`trap`](Self::trap), but for an instruction that was finished
    /// with the caller's result. Checks again whether the instruction is single-stepped, because the debugger may have
    /// changed its requests meanwhile.
    pub(crate) fn trap_completed(&mut self, hits: u64) {
        let step = if self.steps() { DR6_BS } else { 0 };
        self.trap(hits | step);
    }

    /// Call at the end of an instruction. Records watchpoint hits and a single step, for the next block boundary.
    pub(crate) fn trap(&mut self, hits: u64) {
        if hits != 0 {
            self.state.events.debug |= self.probes.trap(hits);
            self.slow = true;
        }
    }

    /// Raises #DB for an access to a debug register if DR7.GD is set.
    pub(crate) fn general_detect(&mut self) -> Result<(), Break> {
        match self.breakpoints().control & DR7_GD != 0 {
            true => Err(self.raise_debug(DR6_BD)),
            false => Ok(()),
        }
    }

    /// Raises #DB as a fault.
    #[cold]
    pub(crate) fn raise_debug(&mut self, hits: u64) -> Break {
        self.watch.hits = hits;
        self.raise(vector::DB, None)
    }

    /// Changes DR6 and DR7 as the delivery of a #DB to the guest does.
    pub(crate) fn debug_delivered(&mut self, hits: u64) {
        // The new hit bits replace those of earlier exceptions. Other bits stay set until software clears them.
        self.state.dr6 = self.state.dr6 & !DR6_HITS | hits;
        self.state.dr7 &= !DR7_GD;
        self.update_watch();
    }

    /// Handles a #DB with DR6 bits `hits`. If the debugger outside the guest claims the #DB, returns the exit that
    /// reports it. Otherwise makes the #DB an event of the guest.
    pub(crate) fn take_debug(&mut self, hits: u64) -> Option<Exit> {
        if self.requests.debugger.claims_debug() {
            return Some(Exit::Debug {
                vector: vector::DB,
                dr6: DR6_ONES | hits,
            });
        }
        self.debug_delivered(hits);
        let debug = Exception {
            vector: vector::DB,
            error: None,
        };
        self.queue_exception(debug, 0);
        None
    }

    /// Whether [`take_traps`](Self::take_traps) would take a trap.
    pub(crate) fn has_traps(&self) -> bool {
        self.has_debug_trap() || self.probes.hit.is_some()
    }

    /// Whether a debug trap is pending and can be taken before the next instruction.
    fn has_debug_trap(&self) -> bool {
        let events = &self.state.events;
        events.debug != 0 && events.exception.is_none() && !events.mov_ss_shadow
    }

    /// Takes the pending debug traps, unless an exception must be delivered first, or the instruction is in the shadow
    /// of MOV SS. The trap of a probe is taken before all others.
    pub(crate) fn take_traps(&mut self) -> Option<Exit> {
        if let Some(exit) = self.take_probe_hit() {
            return Some(exit);
        }
        if !self.has_debug_trap() {
            return None;
        }
        let hits = std::mem::take(&mut self.state.events.debug);
        self.take_debug(hits)
    }

    /// Replaces all probes. If `steps`, the run also ends after each instruction. Drops a hit that has not ended a run
    /// yet, and cancels [`pass_probe`](Self::pass_probe).
    pub fn set_probes(&mut self, list: Vec<Probe>, steps: bool) {
        self.probes = Probes::new(list, steps);
        self.apply_watch();
        self.slow = true;
    }

    /// Lets the next run execute the instruction at RIP, even if a code probe is at RIP.
    pub fn pass_probe(&mut self) {
        self.probes.passed = Some(self.linear_rip());
    }

    /// Whether the run ends after each instruction, because of [`set_probes`](Self::set_probes).
    pub fn makes_probe_steps(&self) -> bool {
        self.probes.steps
    }

    /// Whether a code probe stops the CPU before the instruction at the linear address `lin`.
    pub(crate) fn is_probed(&self, lin: u64) -> bool {
        self.watch.code && self.probes.passed != Some(lin) && self.probes.has_code_in(lin, 1)
    }

    /// Call after an instruction was executed. From now on, code probes may stop the CPU again, except before another
    /// iteration of the same string instruction.
    pub(crate) fn passed_probe(&mut self) {
        if self.state.rflags & flags::RF == 0 {
            self.probes.passed = None;
        }
    }

    /// Returns the probe hit that ends the run, and clears it.
    pub(crate) fn take_probe_hit(&mut self) -> Option<Exit> {
        self.probes.hit.take().map(Exit::Probe)
    }
}
