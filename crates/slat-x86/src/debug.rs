//! Debug exceptions: breakpoints, watchpoints and single steps, for the guest (DR0–DR7, TF) and for a debugger outside
//! the guest (SDM volume 3, "Debug Registers" and "Debug Exceptions").
//!
//! A guest that is not debugged pays nothing: a page with a data watchpoint is never entered into the software
//! TLB, so its accesses miss and reach [`Cpu::watch`]; everything else sets [`Cpu::slow`] and is handled between
//! blocks. An instruction that touches watched bytes is abandoned and executed again alone, so that its trap is
//! taken right after it.
//!
//! Faults (instruction breakpoints, general detect) are raised like any other. Traps are collected in
//! [`Events::debug`](crate::Events::debug) as DR6 bits and taken before the next instruction, after
//! the shadow of MOV SS.

use crate::machine::{Access, Exit};
use crate::op::Break;
use crate::state::{Exception, State, control, flags};
use crate::{Cpu, ProbeHit, vector};

/// DR6: bits that always read as one.
pub(crate) const DR6_ONES: u64 = 0xffff_0ff0;
/// DR6: which of the four breakpoints were hit.
const DR6_HITS: u64 = 15;
/// DR6: a debug register was accessed while DR7.GD was set.
pub(crate) const DR6_BD: u64 = 1 << 13;
/// DR6: a single step.
pub(crate) const DR6_BS: u64 = 1 << 14;
/// DR6: a switch to a task whose TSS asks for a trap.
pub(crate) const DR6_BT: u64 = 1 << 15;
/// DR7: general detect.
pub(crate) const DR7_GD: u64 = 1 << 13;

/// The requests of a debugger outside the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Debugger {
    /// Every instruction ends the run, as a trap.
    pub single_step: bool,
    /// INT3 ends the run, as a fault.
    pub software_breakpoints: bool,
    /// Breakpoints that replace the guest's own.
    pub breakpoints: Option<Breakpoints>,
}

impl Debugger {
    /// Whether #DB ends the run, also one that the guest caused.
    pub(crate) fn claims_debug(&self) -> bool {
        self.single_step || self.breakpoints.is_some()
    }
}

/// DR0–DR3 and DR7.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Breakpoints {
    /// DR0–DR3.
    pub addresses: [u64; 4],
    /// DR7.
    pub control: u64,
}

/// What a breakpoint watches: its R/W field.
mod kind {
    pub const EXECUTE: u64 = 0;
    pub const WRITE: u64 = 1;
    /// A port access, if CR4.DE is set. Otherwise the field is undefined.
    pub const PORT: u64 = 2;
    pub const READ_WRITE: u64 = 3;
}

impl Breakpoints {
    /// Returns the enabled breakpoints: index, R/W field, first address, bytes.
    fn enabled(&self) -> impl Iterator<Item = (usize, u64, u64, u64)> + '_ {
        (0..4).filter_map(|i| {
            let field = self.control >> (16 + 4 * i);
            let bytes = [1, 2, 8, 4][(field >> 2 & 3) as usize];
            let first = self.addresses[i] & !(bytes - 1);
            (self.control >> (2 * i) & 3 != 0).then_some((i, field & 3, first, bytes))
        })
    }

    fn any(&self, kinds: &[u64]) -> bool {
        self.enabled().any(|(_, kind, ..)| kinds.contains(&kind))
    }

    /// Returns the DR6 bits of the breakpoints of `kinds` that share a byte with the `len` bytes at `at`.
    fn hits(&self, kinds: &[u64], at: u64, len: u64) -> u64 {
        self.enabled()
            .filter(|(_, kind, first, bytes)| {
                let overlaps = at.wrapping_sub(*first) < *bytes || first.wrapping_sub(at) < len;
                kinds.contains(kind) && overlaps
            })
            .fold(0, |hits, (i, ..)| hits | 1 << i)
    }
}

/// The breakpoints in effect, and which kinds there are among them.
#[derive(Default)]
pub(crate) struct Watch {
    breakpoints: Breakpoints,
    pub(crate) code: bool,
    pub(crate) data: bool,
    pub(crate) ports: bool,
    /// The instruction at RIP touches watched bytes: it has to be executed alone.
    pub(crate) alone: bool,
    /// An instruction is executed alone: `hits` collects the watchpoints it hits.
    pub(crate) collects: bool,
    /// DR6 bits of the watchpoints that the instruction has hit.
    pub(crate) hits: u64,
    /// The instruction traps at its end: TF was set at its start, or a debugger single-steps.
    pub(crate) steps: bool,
    /// Addresses at which the INT3 of the debugger's last software breakpoint begins and ends.
    pub(crate) int3: Option<(u64, u64)>,
}

impl Cpu {
    /// Returns the breakpoints in effect: the debugger's, or else the guest's.
    fn breakpoints(&self) -> Breakpoints {
        let State { dr, dr7, .. } = self.state;
        self.debugger.breakpoints.unwrap_or(Breakpoints {
            addresses: dr,
            control: dr7,
        })
    }

    /// Call after a change of debug registers, CR4.DE or the debugger's requests.
    pub(crate) fn update_watch(&mut self) {
        let breakpoints = self.breakpoints();
        let ports = self.state.cr4 & control::CR4_DE != 0 && breakpoints.any(&[kind::PORT]);
        let watch = &mut self.watch;
        watch.ports = ports;
        if watch.breakpoints != breakpoints {
            watch.breakpoints = breakpoints;
            self.apply_watch();
        }
    }

    /// Notes which kinds of breakpoints and probes there are, after a change of them.
    pub(crate) fn apply_watch(&mut self) {
        let Cpu { watch, probes, .. } = self;
        let watched_data = watch.data;
        watch.code = watch.breakpoints.any(&[kind::EXECUTE]) || probes.has_code();
        watch.data = watch.breakpoints.any(&[kind::WRITE, kind::READ_WRITE]) || probes.has_data();
        if watched_data || self.watch.data {
            // The TLB may have pages that are watched now.
            self.flush_other();
        }
    }

    /// Whether the page of `lin` has watched bytes, and must not be entered into the TLB.
    pub(crate) fn is_watched_page(&self, lin: u64) -> bool {
        const DATA: [u64; 2] = [kind::WRITE, kind::READ_WRITE];
        self.watch.data
            && (self.watch.breakpoints.hits(&DATA, lin & !0xfff, 0x1000) != 0
                || self.probes.watch_page(lin))
    }

    /// Checks whether an access that is about to be made hits a watchpoint. Abandons an instruction that touches
    /// watched bytes, unless it is already executed alone; it is then executed again, alone.
    #[cold]
    pub(crate) fn watch(&mut self, lin: u64, len: usize, access: Access) -> Result<(), Break> {
        let kinds: &[u64] = match access {
            Access::Write => &[kind::WRITE, kind::READ_WRITE],
            Access::Read | Access::Execute => &[kind::READ_WRITE],
        };
        let hits = self.watch.breakpoints.hits(kinds, lin, len as u64)
            | self.probes.accessed(lin, len as u64, access);
        if hits == 0 {
            return Ok(());
        }
        if !self.watch.collects {
            self.watch.alone = true;
            self.slow = true;
            return Err(Break::Retry);
        }
        self.watch.hits |= hits;
        Ok(())
    }

    /// Whether the instruction traps at its end, whatever it does.
    pub(crate) fn traps(&self) -> bool {
        self.watch.steps || self.probes.steps
    }

    /// Whether repeated string instructions stop after the current iteration.
    pub(crate) fn traps_after_iteration(&self) -> bool {
        self.traps() || self.watch.hits != 0
    }

    /// Returns the DR6 bits of breakpoints on `bytes` ports at `port`.
    pub(crate) fn port_hits(&self, port: u16, bytes: u8) -> u64 {
        match self.watch.ports {
            true => (self.watch.breakpoints).hits(&[kind::PORT], port.into(), bytes.into()),
            false => 0,
        }
    }

    /// Returns the DR6 bits of the instruction breakpoints at `rip`. RF suppresses them, and on Intel
    /// the shadow of MOV SS.
    fn code_hits(&self, rip: u64) -> u64 {
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

    /// Whether an instruction breakpoint or a code probe is within `len` bytes from `lin`.
    fn has_code_breakpoint(&self, lin: u64, len: u64) -> bool {
        self.probes.has_code_in(lin, len)
            || (self.watch.breakpoints.enabled()).any(|(i, kind, ..)| {
                let at = self.watch.breakpoints.addresses[i];
                kind == kind::EXECUTE && at.wrapping_sub(lin) < len
            })
    }

    /// Runs `f` and returns, besides its result, the watchpoints that it hits as DR6 bits.
    pub(crate) fn collect_hits<T>(&mut self, f: impl FnOnce(&mut Self) -> T) -> (T, u64) {
        let collected = std::mem::replace(&mut self.watch.collects, true);
        let before = std::mem::take(&mut self.watch.hits);
        let result = f(self);
        self.watch.collects = collected;
        let hits = std::mem::replace(&mut self.watch.hits, before);
        (result, hits)
    }

    /// Returns the DR6 bits of the current instruction's hits, for a later trap.
    pub(crate) fn traps_of_instruction(&self) -> u64 {
        self.watch.hits | self.probes.step()
    }

    /// Whether an instruction that begins, or is completed, now traps at its end.
    fn steps(&self) -> bool {
        self.state.rflags & flags::TF != 0 || self.debugger.single_step
    }

    /// Like [`trap`](Self::trap), but for an instruction that the caller's result has finished. Asks again for a single
    /// step: the debugger may have changed its requests meanwhile.
    pub(crate) fn trap_completed(&mut self, hits: u64) {
        let step = if self.steps() { DR6_BS } else { 0 };
        self.trap(hits | step);
    }

    /// Call at the end of an instruction: keeps the watchpoints hit, and a single step, for the next block boundary.
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

    /// Records a #DB that is a fault.
    #[cold]
    pub(crate) fn raise_debug(&mut self, hits: u64) -> Break {
        self.watch.hits = hits;
        self.raise(vector::DB, None)
    }

    /// Changes the debug registers as a #DB of the guest does.
    pub(crate) fn debug_delivered(&mut self, hits: u64) {
        // The hits of earlier exceptions are replaced; other bits stay until software clears them.
        self.state.dr6 = self.state.dr6 & !DR6_HITS | hits;
        self.state.dr7 &= !DR7_GD;
        self.update_watch();
    }

    /// Handles a #DB with DR6 bits `hits`: ends the run if the debugger claims it, otherwise makes it
    /// an event of the guest.
    pub(crate) fn take_debug(&mut self, hits: u64) -> Option<Exit> {
        if self.debugger.claims_debug() {
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

    /// Whether [`take_traps`](Self::take_traps) has a trap to take.
    pub(crate) fn has_traps(&self) -> bool {
        self.has_debug_trap() || self.probes.hit.is_some()
    }

    /// Whether a pending debug trap is taken before the next instruction.
    fn has_debug_trap(&self) -> bool {
        let events = &self.state.events;
        events.debug != 0 && events.exception.is_none() && !events.mov_ss_shadow
    }

    /// Takes the pending debug traps, unless an exception is delivered first or the shadow of MOV SS suppresses them.
    /// Takes a probe's trap first, in any case.
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

    /// Executes the block at RIP, or an instruction alone if there is a breakpoint in the block.
    pub(crate) fn execute_between_breakpoints(&mut self) -> Option<Exit> {
        match self.find_block() {
            Ok(found) => {
                // SAFETY: a block lives until all are freed, which happens in `find_block` only; nothing changes it
                // while it runs.
                let block = unsafe { found.as_ref() };
                match self.has_code_breakpoint(block.key.lin, block.len()) {
                    true => self.single_step(),
                    false => self.execute(block),
                }
            }
            // The breakpoint at RIP is taken before a fault of the fetch.
            Err(_) => self.single_step(),
        }
    }

    /// Executes one instruction, with the effects of TF, RF, shadows, breakpoints and MMIO data.
    pub(crate) fn single_step(&mut self) -> Option<Exit> {
        let lin = self.code_address(self.state.rip);
        if self.is_probed(lin) {
            return Some(Exit::Probe(ProbeHit::Code));
        }
        let hits = self.code_hits(self.state.rip);
        if hits != 0 {
            return self.take_debug(hits);
        }
        let found = match self.single_block() {
            Ok(block) => block,
            Err(why) => return self.fetch_failed(why),
        };
        // SAFETY: the block lives as long as the CPU, and only `single_block` changes it.
        let block = unsafe { found.as_ref() };
        let prefix = block.ops.first().map_or(0, |op| u64::from(op.offset));
        let start = block.key.rip.wrapping_add(prefix);
        // An instruction after KVM's prefix is not at the address of the block: its own breakpoints are looked up here.
        let hits = if prefix == 0 {
            0
        } else {
            self.code_hits(start)
        };
        if hits != 0 {
            self.state.rip = start;
            return self.take_debug(hits);
        }
        self.step(start, |cpu| cpu.execute(block))
    }

    /// Executes the instruction at RIP `start` by `execute`, with the effects of TF, RF, shadows and MMIO data.
    pub(crate) fn step(
        &mut self,
        start: u64,
        execute: impl FnOnce(&mut Self) -> Option<Exit>,
    ) -> Option<Exit> {
        let probe_steps = self.probes.step();
        let resumed = self.state.rflags & flags::RF;
        // The instruction may set RF for the next one: IRET, and a string instruction that is not done.
        self.state.rflags &= !flags::RF;
        let steps = self.steps();
        let events = &mut self.state.events;
        let shadow = std::mem::take(&mut events.sti_shadow);
        let mov_ss = std::mem::take(&mut events.mov_ss_shadow);
        self.rewind_answers();
        (self.watch.steps, self.watch.collects, self.watch.hits) = (steps, true, 0);
        self.watch.alone = false;
        let before = self.counters.instructions;
        let exit = execute(self);
        let executed = self.counters.instructions != before || self.state.rip != start;
        let steps = std::mem::take(&mut self.watch.steps);
        let hits = std::mem::take(&mut self.watch.hits);
        self.watch.collects = false;
        self.slow = true;
        if !executed {
            // The instruction was abandoned: it starts again, under the old shadow.
            self.state.rflags |= resumed;
            self.state.events.sti_shadow |= shadow;
            self.state.events.mov_ss_shadow |= mov_ss;
            return exit;
        }
        self.drop_answers();
        self.passed_probe();
        self.trap(hits);
        self.trap(probe_steps);
        // MOV SS discards its own single step.
        if steps && !self.state.events.mov_ss_shadow {
            self.trap(DR6_BS);
        } else if probe_steps == 0 {
            return exit;
        }
        // A pending trap ends the halt before the halt begins.
        exit.filter(|exit| *exit != Exit::Hlt)
    }
}
