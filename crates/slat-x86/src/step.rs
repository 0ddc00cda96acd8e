//! Executes single instructions, and blocks that contain breakpoints.

use crate::executor::Executor;
use crate::machine::{Exit, ProbeHit};
use crate::state::flags;
use crate::watch::DR6_BS;

impl Executor {
    /// Executes the block at RIP; if a breakpoint is in the block, only the instruction at RIP.
    pub(crate) fn execute_between_breakpoints(&mut self) -> Option<Exit> {
        match self.find_block() {
            Ok(found) => {
                // SAFETY: a block lives until all blocks are freed, which happens in `find_block` only; nothing changes
                // the block while it runs.
                let block = unsafe { found.as_ref() };
                match self.has_code_breakpoint(block.key.lin, block.len()) {
                    true => self.single_step(),
                    false => self.execute(block),
                }
            }
            // The block cannot be fetched. A breakpoint at RIP has precedence over the fault of the fetch.
            Err(_) => self.single_step(),
        }
    }

    /// Executes one instruction, with the effects of TF, RF, shadows, breakpoints and data of MMIO reads.
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
        // A block with KVM's prefix: the instruction is after the prefix, so look for breakpoints at its own address.
        let hits = if prefix == 0 {
            0
        } else {
            self.code_hits(start)
        };
        if hits != 0 {
            self.state.rip = start;
            return self.take_debug(hits);
        }
        self.step(start, |executor| executor.execute(block))
    }

    /// Calls `execute`, which executes the instruction at RIP `start`. Adds the effects of TF, RF, shadows and data of
    /// MMIO reads.
    pub(crate) fn step(
        &mut self,
        start: u64,
        execute: impl FnOnce(&mut Self) -> Option<Exit>,
    ) -> Option<Exit> {
        let probe_steps = self.probes.step();
        let resumed = self.state.rflags & flags::RF;
        // Clear RF before the instruction, because the instruction may set RF for the next instruction: IRET, or a
        // string instruction that is not done.
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
            // The instruction was abandoned. It will be executed again, with the same RF and in the same shadows.
            self.state.rflags |= resumed;
            self.state.events.sti_shadow |= shadow;
            self.state.events.mov_ss_shadow |= mov_ss;
            return exit;
        }
        self.drop_answers();
        self.passed_probe();
        self.trap(hits);
        self.trap(probe_steps);
        // After MOV SS, there is no single-step trap.
        if steps && !self.state.events.mov_ss_shadow {
            self.trap(DR6_BS);
        } else if probe_steps == 0 {
            return exit;
        }
        // A pending trap ends the halt before it begins, so the run does not end with `Exit::Hlt`.
        exit.filter(|exit| *exit != Exit::Hlt)
    }
}
