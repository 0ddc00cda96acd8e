//! The CPU's use of compiled code: requests compilation of hot code, and runs compiled regions.

use crate::block::Block;
use crate::code::ANY_PAGE;
use crate::compiled::{SET_BITS, Target, set_of};
use crate::executor::Executor;
use crate::flow::Break;
use crate::heap::{self, OutOfMemory};
use crate::jit::dispatch::dispatch;
use crate::jit::helpers::Status;
use crate::jit::{Client, Compile, Compiler};
use crate::key::Key;
use crate::machine::Exit;
use crate::mode;
use crate::region::{Entrance, Kind, Region, Source, Step, Tier, WARM};
use iced_x86::{Decoder, DecoderOptions, FlowControl};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// After the compilation of a block was requested, the number of entries of the block between two checks for the
/// result.
const LOOK: u32 = 64;
/// The greatest number of blocks of a region. The next constant is the greatest number of bytes of its guest code.
const BLOCKS: usize = 24;
const BYTES: usize = 1024;

impl Executor {
    /// Sets the compiler that compiles this CPU's code from then on.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn set_compiler(
        &mut self,
        compiler: Arc<Compiler>,
        compile: Compile,
    ) -> Result<(), OutOfMemory> {
        self.client = Some(Client::try_new(compiler, compile)?);
        Ok(())
    }

    /// Whether blocks are compiled before they run for the first time, as in tests.
    pub(crate) fn compiles_at_once(&self) -> bool {
        (self.client.as_ref()).is_some_and(|client| client.compile != Compile::Hot)
    }

    /// Call when a block has been entered often. Requests compilation of the block, or installs the result.
    #[cold]
    #[inline(never)]
    pub(crate) fn warmed(&mut self, found: NonNull<Block>) {
        // SAFETY: a block lives until all blocks are freed. If this function frees them, it does so at its end.
        let block = unsafe { found.as_ref() };
        let Some(client) = &self.client else {
            block.heat.set(u32::MAX);
            return;
        };
        let tier = match client.compile {
            Compile::Hot => Tier::Baseline,
            Compile::AtOnce(tier) => tier,
        };
        block.heat.set(LOOK);
        if !self.adopt(found, tier) {
            self.submit(block, tier);
            self.take_compiled();
        }
    }

    /// Call when `attention` ends a run. Sampling hot regions needs this at least every few milliseconds.
    pub(crate) fn note_interrupted(&mut self) {
        self.interrupted = Some(self.state.rip);
    }

    /// Call when a block with compiled code is about to run, and `attention` has ended the last run at this block. That
    /// makes the block a *sample* of the code that takes much time. At the second sample of a region, requests its
    /// compilation by Cranelift. The compilation takes less time than has passed between the two samples.
    #[cold]
    #[inline(never)]
    pub(crate) fn sampled(&mut self, found: NonNull<Block>) {
        self.interrupted = None;
        let found = self.interrupted_in(found);
        // SAFETY: a block lives until all blocks are freed, which does not happen in this function before the last use
        // of `block`.
        let block = unsafe { found.as_ref() };
        let is_second = |Entrance { region, .. }: &Entrance| {
            region.tier != Tier::Full && region.is_sampled.swap(true, Ordering::Relaxed)
        };
        let may_improve =
            (self.client.as_ref()).is_some_and(|client| client.compile == Compile::Hot);
        if may_improve
            && block.entrance.as_ref().is_some_and(is_second)
            && !self.adopt(found, Tier::Full)
        {
            self.submit(block, Tier::Full);
        }
        self.take_compiled();
    }

    /// Returns the block whose region was running when `attention` ended the run. `next` is the block that runs next,
    /// which may belong to another region: a region without loops ends before `attention` is checked. If `next` were
    /// always sampled, code without loops would never be sampled.
    fn interrupted_in(&mut self, next: NonNull<Block>) -> NonNull<Block> {
        // SAFETY: a block lives until all blocks are freed, which this function does not do.
        let next_block = unsafe { next.as_ref() };
        let region = |block: &Block| {
            block
                .entrance
                .as_ref()
                .map(|entrance| &raw const *entrance.region)
        };
        let key = Key::new(
            next_block.key.base(),
            self.compiled.ran,
            next_block.key.mode,
        );
        let Some(ran) = self.blocks.kept(&key) else {
            return next;
        };
        // SAFETY: a block lives until all blocks are freed, which this function does not do.
        let ran_block = unsafe { ran.as_ref() };
        if let Some(mut place) = ran_block.first
            && region(ran_block).is_some()
            && region(ran_block) != region(next_block)
            // SAFETY: the snapshot is alive as long as the block, and no other reference to it exists while no block is
            // running.
            && self.look_again(unsafe { place.page.as_mut() }, key.lin)
        {
            return ran;
        }
        next
    }

    /// Requests compilation of a block and of the blocks around it, unless that was requested before.
    fn submit(&self, block: &Block, tier: Tier) {
        let Some(client) = &self.client else {
            return;
        };
        if block.is_current(self.code.clock.stamp)
            && block.asked.get() < Some(tier)
            && client.compiler.has_room(tier)
            && let Ok((source, page)) = self.collect(block, tier)
            && !source.blocks.is_empty()
        {
            client.submit(source, page, tier);
        }
    }

    /// Installs the results of finished compilations, which may free all blocks. Call while no block is running.
    fn take_compiled(&mut self) {
        let Some(client) = &self.client else {
            return;
        };
        let done = client.compiler.take(client.number);
        if done.is_refused {
            // The region was refused for lack of memory. Drop all blocks to free memory: hot code will be compiled
            // again, and code that no longer runs will not.
            return self.forget_blocks();
        }
        for (region, page) in done.regions {
            self.install(&region, page);
        }
    }

    /// If code for `block` was already compiled, earlier or for another CPU, attaches it to `block` and to the other
    /// blocks of its region. The code must be of `tier` or better, and memory must hold the guest code from which it
    /// was compiled. Returns whether there was such code. Call while no block is running.
    pub(crate) fn adopt(&mut self, block: NonNull<Block>, tier: Tier) -> bool {
        // SAFETY: a block lives until all blocks are freed. `block` is not used after the blocks of the region begin to
        // change.
        let block = unsafe { block.as_ref() };
        let Some(client) = &self.client else {
            return false;
        };
        if !block.is_current(self.code.clock.stamp) {
            return false;
        }
        let (key, bytes) = (&block.key, block.parts().0);
        // Look for Cranelift's code first, because it is better.
        let good = [Tier::Full, Tier::Baseline]
            .into_iter()
            .find_map(|made_by| {
                let (kind, page) = Kind::of(key, made_by);
                let place = key.rip.wrapping_sub(page);
                let region = client.known(kind, place, bytes)?;
                (region.tier >= tier && block.holds(&region)).then_some((region, page))
            });
        let Some((region, page)) = good else {
            return false;
        };
        self.counters.regions_shared += 1;
        self.install(&region, page);
        true
    }

    /// Attaches a region's code to the kept blocks that it contains. `page` is the address to which the region's
    /// offsets are relative.
    fn install(&mut self, region: &Arc<Region>, page: u64) {
        self.counters.regions += 1;
        let mut is_instead = false;
        for (code, (place, _)) in region.entered() {
            let key = region.source.key(page, *place);
            let entrance = Entrance {
                region: region.clone(),
                code,
            };
            is_instead |= self.blocks.attach(&key, entrance);
        }
        if is_instead {
            self.forget_targets();
        }
    }

    /// Collects the blocks of a region: `block`, and the kept blocks in its page that can follow it. Also returns the
    /// address to which the offsets of the region's blocks are relative.
    fn collect(&self, block: &Block, tier: Tier) -> Result<(Source, u64), OutOfMemory> {
        let (kind, page) = Kind::of(&block.key, tier);
        let mut source = Source {
            kind,
            stack: match self.stack_mask() {
                0xffff => 1,
                0xffff_ffff => 2,
                _ => 3,
            },
            blocks: heap::vec(BLOCKS)?,
        };
        let mut bytes = 0;
        // The list never holds more than the first block and two successors of each block.
        let mut wanted = heap::vec(1 + 2 * BLOCKS)?;
        wanted.push(block.key.rip);
        let mut next = 0;
        while let Some(&rip) = wanted.get(next) {
            next += 1;
            let place = rip.wrapping_sub(page);
            let known = source.blocks.iter().any(|(start, _)| *start == place);
            let key = source.key(page, place);
            let is_there = key.lin >> 12 == block.key.lin >> 12;
            if known || source.blocks.len() >= BLOCKS || bytes >= BYTES || !is_there {
                continue;
            }
            let Some(found) = self.blocks.kept(&key) else {
                continue;
            };
            // SAFETY: a kept block is alive, and no thread changes it while no block is running.
            let found = unsafe { found.as_ref() };
            let (code, after) = found.parts();
            // Leave out a block that has rarely run, because it would only make the region larger. A block with
            // compiled code counts as warm, even if the interpreter has never run it.
            let is_warm = found.heat.get() <= WARM - WARM / 8
                || found.asked.get().is_some()
                || found.entrance.is_some()
                || self.compiles_at_once();
            // Leave out a block that already has a region: the new region will continue in that region. Without this
            // rule, each block was compiled twice when a guest booted.
            let is_known = tier == Tier::Baseline
                && rip != block.key.rip
                && found.entrance.is_some()
                && !self.compiles_at_once();
            if is_known {
                continue;
            }
            // Leave out the block unless memory still holds its code. If the block has not run for a while, its code
            // has not been compared with memory for that time.
            if !is_warm || !after.is_empty() || !block.holds_beside(key.lin, code) {
                continue;
            }
            let width = mode::width(block.key.mode);
            let mut decoder = Decoder::with_ip(width, code, rip, DecoderOptions::NONE);
            let mut last = decoder.decode();
            if last.is_invalid() {
                continue;
            }
            let mut copy = heap::vec(code.len())?;
            copy.extend_from_slice(code);
            source.blocks.push((place, copy));
            bytes += code.len();
            // Cranelift's regions can be entered only at their first block.
            if tier == Tier::Baseline || rip == block.key.rip {
                found.asked.set(Some(tier).max(found.asked.get()));
            }
            while decoder.can_decode() {
                last = decoder.decode();
            }
            let (target, after) = (last.near_branch_target(), last.next_ip());
            match last.flow_control() {
                FlowControl::ConditionalBranch => wanted.extend([target, after]),
                FlowControl::Call => wanted.extend([after, target]),
                FlowControl::Next | FlowControl::IndirectCall => wanted.push(after),
                FlowControl::UnconditionalBranch => wanted.push(target),
                _ => {}
            }
        }
        Ok((source, page))
    }

    /// Enters the compiled code of a current block into the targets, so that regions can continue in it. Returns the
    /// code's address.
    fn make_known(&mut self, block: &Block) -> Option<*const u8> {
        let code = block.entrance.as_ref()?.code;
        let page = block.first.as_ref()?.page.as_ptr();
        let rip = block.key.rip;
        let wanted = std::mem::replace(&mut self.compiled.wanted, ptr::null());
        let set = match wanted.is_null() {
            true => set_of(rip),
            false => (wanted as usize - self.compiled.targets as usize) >> SET_BITS,
        };
        let edition = self.compiled.edition;
        let [newer, older] = &mut self.fixed.targets.0[set];
        if newer.rip != rip {
            *older = *newer;
        }
        *newer = Target {
            rip,
            page,
            code,
            edition,
        };
        Some(code)
    }

    /// Makes sure that all valid targets were stored for the CPU's present mode and code segment. A target is found by
    /// RIP alone, which is not enough if segments have bases: so drops all targets if the base of CS has changed. While
    /// regions run, mode and base do not change.
    fn tell_targets_apart(&mut self) {
        if mode::has_segments(self.mode) && self.code_base != self.state.cs.base {
            self.code_base = self.state.cs.base;
            self.forget_targets();
        }
        self.compiled.edition = self.compiled.edition & !0xff | u32::from(self.mode);
    }

    /// Runs the region of a block, and the regions that follow. The call may free the block.
    pub(crate) fn run_compiled(&mut self, block: NonNull<Block>) -> Option<Exit> {
        self.tell_targets_apart();
        self.compiled.ran = 0;
        // SAFETY: a block lives until all blocks are freed, which does not happen before `block` is last used here.
        let code = self.make_known(unsafe { block.as_ref() })?;
        self.counters.blocks += 1;
        self.code.page = ANY_PAGE;
        // SAFETY: `code` is an entry of a region that the compiler made for this CPU. The region, and those that follow
        // it, access the CPU, their own stack frame, and guest memory by guarded accesses.
        let status = unsafe { dispatch(ptr::from_mut(&mut self.cpu), code) };
        self.end_floats();
        let status = Status::of(status).unwrap_or_else(|| {
            // `status` is the host address of a guarded access that failed.
            let step = self.blocks.step_at(status as usize);
            self.compiled.step = step.expect("a region that runs belongs to a block").cast();
            Status::Interpret
        });
        let stopped = (status != Status::Continue).then(|| {
            // SAFETY: the region has stored the address of one of its steps. A block still owns the region, so the step
            // is alive.
            let step = unsafe { *self.compiled.step.cast::<Step>() }.at(self.state.rip);
            self.state.rip = step.rip;
            self.compiled.instructions += u64::from(step.before);
            step
        });
        self.counters.instructions = self.instructions();
        self.counters.instructions_compiled = self.compiled.instructions;
        self.stopped(&stopped?, status)
    }

    /// Continues in the interpreter after compiled code has stopped at the instruction at RIP.
    fn stopped(&mut self, step: &Step, status: Status) -> Option<Exit> {
        match status {
            Status::Interpret if self.code.walk_changed => {
                self.code.rip = step.rip;
                self.compiled.why = self.finish_fetched(&step.op, Break::Retry);
                self.compiled.rip = self.state.rip;
                self.stopped(step, Status::Broke)
            }
            Status::Broke => {
                let why = self.compiled.why;
                if matches!(why, Break::Jump) {
                    self.state.rip = self.compiled.rip;
                }
                self.code.rip = step.rip;
                let len = usize::from(step.op.len).min(step.bytes.len());
                self.executed_alone(&step.op, &step.bytes[..len], why)
            }
            Status::Interpret => {
                // SAFETY: `attention` was set for this run, and is valid during the run.
                let attention = unsafe { &*self.compiled.attention };
                // A kick by the caller may have interrupted the access. Repeating the access now would wait again, and
                // no further kick would end that wait.
                if attention.load(Ordering::Relaxed) != 0 {
                    self.devices.met = None;
                    return None;
                }
                // The instruction makes the access again, perhaps at another address. So clear what this attempt has
                // recorded.
                self.raised.noncanonical = false;
                let exit = match self.find_block() {
                    // SAFETY: a block lives until all blocks are freed, which happens only in `find_block`, and nothing
                    // changes the block while it runs.
                    Ok(block) => self.execute(unsafe { block.as_ref() }),
                    Err(why) => self.fetch_failed(why),
                };
                self.devices.met = None;
                exit
            }
            Status::After => {
                self.counters.instructions += 1;
                self.state.rip = self.next_rip(&step.op);
                None
            }
            Status::Continue => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CodePages;
    use crate::pool::Pool;

    fn source(rip: u64) -> Source {
        // The code is `inc eax` and a `jmp` to the next block.
        Source {
            kind: Kind {
                mode: 2,
                is_movable: false,
                base: 0,
            },
            stack: 3,
            blocks: vec![(rip, b"\xff\xc0\xeb\x00".to_vec())],
        }
    }

    #[test]
    fn a_cpu_whose_region_was_refused_forgets_its_blocks_and_their_memory_is_used_again() {
        let compiler = Compiler::with(2 * 4096).unwrap();
        let mut cpu = Executor::try_new(CodePages::try_new().unwrap()).unwrap();
        let at_once = Compile::AtOnce(Tier::Full);
        cpu.set_compiler(compiler.clone(), at_once).unwrap();
        let number = cpu.client.as_ref().unwrap().number;
        let submit = |cpu: &Executor, n: u64| {
            let client = cpu.client.as_ref().unwrap();
            client.submit(source(0x1000 * n), 0, Tier::Full);
        };
        (0..3).for_each(|n| submit(&cpu, n));
        let done = compiler.take(number);
        assert!(done.is_refused);
        assert_eq!(done.regions.len(), 2);
        drop(done);
        (0..3).for_each(|n| submit(&cpu, n));
        let mut pool = Pool::default();
        // SAFETY: the pool lives longer than the uses of the block.
        let block = unsafe { Block::with_room(&mut pool, 1).unwrap() };
        cpu.warmed(block);
        let done = compiler.take(number);
        assert!(!done.is_refused && done.regions.is_empty());
        submit(&cpu, 0);
        assert_eq!(compiler.take(number).regions.len(), 1);
        let client = cpu.client.take().unwrap();
        drop(cpu);
        client.submit(source(0), 0, Tier::Full);
        assert_eq!(compiler.take(number).regions.len(), 1);
        drop(client);
        assert!(compiler.take(number).regions.is_empty(), "the CPU is gone");
    }
}
