//! The CPU's side of compiled code: makes regions of hot code, and runs them.

use super::dispatch::dispatch;
use super::helpers::Status;
use super::region::{Kind, Region, Source, Step};
use super::{Client, Compile, Compiler, Done, Job, Tier, Workshop, lock};
use crate::Cpu;
use crate::block::{Block, Key};
use crate::cpu::{ANY_PAGE, mode};
use crate::heap::{self, OutOfMemory, Zeroed};
use crate::machine::Exit;
use crate::op::Break;
use crate::snapshot::Snapshot;
use crate::tlb::Entry;
use iced_x86::{Decoder, DecoderOptions, FlowControl};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Entries of a block after which it is compiled.
pub(crate) const WARM: u32 = 512;
/// Entries of a block between two checks for compiled code.
const LOOK: u32 = 64;
/// Blocks and bytes of a region.
const BLOCKS: usize = 24;
const BYTES: usize = 1024;

/// The entry of a block in compiled code.
#[derive(Clone)]
pub(crate) struct Entrance {
    pub(crate) region: Arc<Region>,
    code: *const u8,
}

/// The number of sets in [`Targets`], and by how many bits a set's address is its index shifted left.
pub(super) const SETS: usize = 4096;
pub(super) const SET_BITS: u32 = size_of::<[Target; 2]>().trailing_zeros();
pub(super) const SETS_BYTES: u64 = (SETS as u64) << SET_BITS;

/// Returns the index of the set where a target with this address is looked up first.
pub(super) fn set_of(rip: u64) -> usize {
    (rip ^ rip >> 12) as usize & (SETS - 1)
}

/// An address of compiled code that can be entered. A target is small, because most of them are in the
/// host's farther caches.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct Target {
    /// The address of the guest's code.
    pub(super) rip: u64,
    /// The page of the code. If the page's stamp is not the CPU's, the page is checked first. The page is alive as long
    /// as `edition` is the CPU's.
    pub(super) page: *const Snapshot,
    pub(super) code: *const u8,
    /// [`Compiled::edition`] then. 0: none.
    pub(super) edition: u32,
}

/// The code addresses where regions continue directly in another region. A set is a cache line with two targets, the
/// newer one first. Only code that blocks have now is in it; see [`Cpu::forget_targets`].
#[repr(align(64))]
pub(crate) struct Targets([[Target; 2]; SETS]);

// SAFETY: integers and pointers.
unsafe impl Zeroed for Targets {}

/// The fields of a CPU that compiled code uses besides the architectural state. The last ones are in
/// R15's window (`window`).
#[repr(C)]
pub(crate) struct Compiled {
    /// The instruction at which the region was stopped.
    pub(super) step: *const Step,
    /// Why an instruction ended.
    pub(super) why: Break,
    /// RIP that an instruction has set which ended with [`Break::Jump`].
    pub(super) rip: u64,
    /// Targets with another edition are invalid. The lowest byte is the CPU's mode, so the edition also tells modes
    /// apart. See `tell_targets_apart`.
    pub(super) edition: u32,
    /// The last target of its set that a region looked at, if none in the set was the right one.
    pub(super) wanted: *const Target,
    /// The base of CS for which the present targets of code with segments are valid.
    base: u64,
    pub(super) client: Option<Client>,
    /// Where the running region was entered, when the run was interrupted for something.
    pub(super) ran: u64,
    /// RIP where the last run ended for its caller's attention. Code that runs at such moments is hot.
    pub(crate) interrupted: Option<u64>,
    /// Not 0: the host's MXCSR is the guest's (`float`).
    pub(super) floats: u32,
    /// The host's own MXCSR, while the host has the guest's.
    pub(super) host_mxcsr: u32,
    /// The copy of the bytes that a load in two pages has read.
    pub(crate) copy: [u8; 32],
    /// Results of floating point that nothing uses. This field is only written.
    pub(super) unused: [u8; 16],
    /// The number of instructions that compiled code has executed: those already counted, and those of this run.
    pub(super) instructions: u64,
    pub(super) attention: *const AtomicU32,
    /// The table of the TLB that data accesses use.
    pub(crate) table: *const Entry,
    pub(super) targets: *const [Target; 2],
}

impl Compiled {
    pub(crate) fn new() -> Self {
        Self {
            step: ptr::null(),
            why: Break::Jump,
            rip: 0,
            edition: 1 << 8,
            wanted: ptr::null(),
            base: 0,
            client: None,
            ran: 0,
            interrupted: None,
            floats: 0,
            host_mxcsr: 0,
            copy: [0; 32],
            unused: [0; 16],
            instructions: 0,
            attention: ptr::null(),
            table: ptr::null(),
            targets: ptr::null(),
        }
    }
}

impl Cpu {
    /// Sets the compiler, by which code is compiled from now on.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn set_compiler(
        &mut self,
        compiler: Arc<Compiler>,
        compile: Compile,
    ) -> Result<(), OutOfMemory> {
        compiler.announce();
        let number = compiler.numbers.fetch_add(1, Ordering::Relaxed);
        let mut clients = lock(&compiler.clients);
        clients.try_reserve(1).map_err(|_| OutOfMemory)?;
        clients.push((number, Done::default()));
        drop(clients);
        self.compiled.client = Some(Client {
            compiler,
            number,
            compile,
        });
        Ok(())
    }

    /// Whether blocks are compiled before they run for the first time.
    pub(crate) fn compiles_at_once(&self) -> bool {
        (self.compiled.client.as_ref()).is_some_and(|client| client.compile != Compile::Hot)
    }

    /// Call before the CPU executes.
    pub(crate) fn prepare_compiled(&mut self, attention: &AtomicU32) {
        self.compiled.targets = &raw const self.fixed.targets.0[0];
        self.compiled.attention = attention;
    }

    /// Call when a block has been entered often: requests its compilation, or installs the result.
    #[cold]
    #[inline(never)]
    pub(crate) fn warmed(&mut self, found: NonNull<Block>) {
        // SAFETY: a block lives until all blocks are freed, which is the last thing that this function does, if at all.
        let block = unsafe { found.as_ref() };
        let Some(client) = &self.compiled.client else {
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

    /// Call when a run ends for its caller's attention. The caller interrupts a run every few milliseconds at least.
    pub(crate) fn note_interrupted(&mut self) {
        self.compiled.interrupted = Some(self.state.rip);
    }

    /// Call when a block with compiled code is about to run, if the last run was interrupted there. The block is then a
    /// *sample* of the code that takes the time. At its second sample a region is compiled by Cranelift, which takes
    /// less time than has passed since the last sample.
    #[cold]
    #[inline(never)]
    pub(crate) fn sampled(&mut self, found: NonNull<Block>) {
        self.compiled.interrupted = None;
        let found = self.interrupted_in(found);
        // SAFETY: as in `warmed`.
        let block = unsafe { found.as_ref() };
        let is_second = |Entrance { region, .. }: &Entrance| {
            region.tier != Tier::Full && region.is_sampled.swap(true, Ordering::Relaxed)
        };
        let may_improve =
            (self.compiled.client.as_ref()).is_some_and(|client| client.compile == Compile::Hot);
        if may_improve
            && block.entrance.as_ref().is_some_and(is_second)
            && !self.adopt(found, Tier::Full)
        {
            self.submit(block, Tier::Full);
        }
        self.take_compiled();
    }

    /// Returns the block of the region that ran when the run was interrupted. `next` is the block that runs afterwards.
    /// A region without loops ends before it looks at `attention`, so `next` belongs to another region. If `next` were
    /// the sample, code without loops would never be one.
    fn interrupted_in(&mut self, next: NonNull<Block>) -> NonNull<Block> {
        // SAFETY: as in `warmed`.
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
        let Some(ran) = self.blocks.kept(&key).map(NonNull::from) else {
            return next;
        };
        // SAFETY: as above.
        let ran_block = unsafe { ran.as_ref() };
        if let Some(mut place) = ran_block.first
            && region(ran_block).is_some()
            && region(ran_block) != region(next_block)
            // SAFETY: alive as long as the block; nothing else refers to it while no block is running.
            && self.look_again(unsafe { place.page.as_mut() }, key.lin)
        {
            return ran;
        }
        next
    }

    /// Requests compilation of a block and of those around it, unless that was requested already.
    fn submit(&self, block: &Block, tier: Tier) {
        let Some(client) = &self.compiled.client else {
            return;
        };
        if block.is_current(self.clock.stamp)
            && block.asked.get() < Some(tier)
            && client.compiler.has_room(tier)
            && let Ok((source, page)) = self.collect(block, tier)
            && !source.blocks.is_empty()
        {
            let job = Job {
                source,
                tier,
                client: client.number,
                page,
            };
            match client.compile {
                Compile::Hot => client.compiler.jobs[tier as usize].add(job),
                Compile::AtOnce(_) => client.compiler.finish(job, &mut Workshop::default()),
            }
        }
    }

    /// Installs the finished compilations. Call while no block is running; this may free all blocks.
    fn take_compiled(&mut self) {
        let Some(client) = &self.compiled.client else {
            return;
        };
        let done = client.compiler.take(client.number);
        if done.is_refused {
            // All blocks are forgotten: hot code will be compiled again, the rest stays forgotten.
            return self.forget_blocks();
        }
        for (region, page) in done.regions {
            self.install(&region, page);
        }
    }

    /// Attaches existing code, compiled for another CPU or earlier, to `block` and the other blocks of the code's
    /// region. The code must be of `tier` or a better one, and memory must hold it. Returns whether there was such
    /// code. Call while no block is running.
    pub(crate) fn adopt(&mut self, block: NonNull<Block>, tier: Tier) -> bool {
        // SAFETY: a block lives until all are freed. `block` is not used any more when the blocks of the region change.
        let block = unsafe { block.as_ref() };
        let Some(client) = &self.compiled.client else {
            return false;
        };
        if !block.is_current(self.clock.stamp) {
            return false;
        }
        let (key, bytes) = (&block.key, block.parts().0);
        // Cranelift's first.
        let good = [Tier::Full, Tier::Baseline]
            .into_iter()
            .find_map(|made_by| {
                let (kind, page) = Kind::of(key, made_by);
                let place = key.rip.wrapping_sub(page);
                let region = client.compiler.known.at(kind, place, bytes)?;
                (region.tier >= tier && block.holds(&region)).then_some((region, page))
            });
        let Some((region, page)) = good else {
            return false;
        };
        self.counters.regions_shared += 1;
        self.install(&region, page);
        true
    }

    /// Attaches the code of a region to the region's blocks in a page.
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

    /// Forgets all targets. Call whenever a block may lose its compiled code, a snapshot begins a new edition, or code
    /// may have become stale although the stamp has not changed.
    pub(crate) fn forget_targets(&mut self) {
        self.compiled.edition = self.compiled.edition.wrapping_add(1 << 8);
        if self.compiled.edition >> 8 == 0 {
            // The numbers of long ago come again.
            for target in self.fixed.targets.0.as_flattened_mut() {
                target.edition = 0;
            }
            self.compiled.edition += 1 << 8;
        }
    }

    /// Collects the blocks of a region: `block`, and the kept blocks of its page that may follow it. Also returns the
    /// address from which the places of the region count.
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
        // Each block has at most two successors.
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
            let (code, after) = found.parts();
            // A block that has hardly run is left out: it would make the region larger, and save nothing. But a block
            // whose code was found already compiled counts as warm, although the interpreter has never run it.
            let is_warm = found.heat.get() <= WARM - WARM / 8
                || found.asked.get().is_some()
                || found.entrance.is_some()
                || self.compiles_at_once();
            // If a block has a region, that region is entered there. Without this rule a boot
            // compiled each block twice.
            let is_known = tier == Tier::Baseline
                && rip != block.key.rip
                && found.entrance.is_some()
                && !self.compiles_at_once();
            if is_known {
                continue;
            }
            // Memory must hold the block: if only code of other blocks ran for a while, nobody has checked this one.
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
            // A region of the other tier cannot be entered at each of its blocks.
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

    /// Adds the compiled code of a block, which is current, to the targets, so that regions can continue there.
    /// Returns the code's address.
    fn make_known(&mut self, block: &Block) -> Option<*const u8> {
        let code = block.entrance.as_ref()?.code;
        let page = block.first.as_ref()?.page.as_ptr();
        let rip = block.key.rip;
        let wanted = std::mem::replace(&mut self.compiled.wanted, ptr::null());
        let set = match wanted.is_null() {
            true => set_of(rip),
            false => (wanted as usize - self.compiled.targets as usize) >> SET_BITS,
        };
        let [newer, older] = &mut self.fixed.targets.0[set];
        if newer.rip != rip {
            *older = *newer;
        }
        *newer = Target {
            rip,
            page,
            code,
            edition: self.compiled.edition,
        };
        Some(code)
    }

    /// Makes sure that targets match the CPU's mode and code segment. A target is identified by RIP alone. In
    /// code with segments RIP is not enough, so targets of another base are forgotten. Mode and base do not
    /// change while regions run.
    fn tell_targets_apart(&mut self) {
        if mode::has_segments(self.mode) && self.compiled.base != self.state.cs.base {
            self.compiled.base = self.state.cs.base;
            self.forget_targets();
        }
        self.compiled.edition = self.compiled.edition & !0xff | u32::from(self.mode);
    }

    /// Runs the region of a block, and the regions in which it continues. May free the block.
    pub(crate) fn run_compiled(&mut self, block: NonNull<Block>) -> Option<Exit> {
        self.tell_targets_apart();
        self.compiled.ran = 0;
        // SAFETY: a block lives until all are freed, which happens in `find_block` only.
        let code = self.make_known(unsafe { block.as_ref() })?;
        self.counters.blocks += 1;
        self.code_page = ANY_PAGE;
        // SAFETY: `code` is an entry of a region that the compiler made for this CPU. The region, and those that follow
        // it, access the CPU, their own stack frame, and guest memory by guarded accesses.
        let status = unsafe { dispatch(ptr::from_mut(self), code) };
        self.end_floats();
        let status = Status::of(status).unwrap_or_else(|| {
            // `status` is the address of an access that failed.
            let step = self.blocks.step_at(status as usize);
            self.compiled.step = step.expect("a region that runs belongs to a block");
            Status::Interpret
        });
        let stopped = (status != Status::Continue).then(|| {
            // SAFETY: a step of a region that a block still has.
            let step = unsafe { *self.compiled.step }.at(self.state.rip);
            self.state.rip = step.rip;
            self.compiled.instructions += u64::from(step.before);
            step
        });
        self.counters.instructions = self.instructions();
        self.counters.instructions_compiled = self.compiled.instructions;
        self.stopped(&stopped?, status)
    }

    /// Returns the number of instructions so far, including those of the running region.
    pub(crate) fn instructions(&self) -> u64 {
        let compiled = self.compiled.instructions - self.counters.instructions_compiled;
        self.counters.instructions + compiled
    }

    /// Continues after compiled code has stopped at an instruction, to which RIP points.
    fn stopped(&mut self, step: &Step, status: Status) -> Option<Exit> {
        match status {
            Status::Interpret if self.walk_changed_code => {
                self.block_rip = step.rip;
                self.compiled.why = self.finish_fetched(&step.op, Break::Retry);
                self.compiled.rip = self.state.rip;
                self.stopped(step, Status::Broke)
            }
            Status::Broke => {
                let why = self.compiled.why;
                if matches!(why, Break::Jump) {
                    self.state.rip = self.compiled.rip;
                }
                self.block_rip = step.rip;
                let len = usize::from(step.op.len).min(step.bytes.len());
                self.executed_alone(&step.op, &step.bytes[..len], why)
            }
            Status::Interpret => {
                // SAFETY: set for this run.
                let attention = unsafe { &*self.compiled.attention };
                // If a kick has interrupted the access, repeating the access now would only sleep again.
                if attention.load(Ordering::Relaxed) != 0 {
                    self.devices.met = None;
                    return None;
                }
                // The flag belongs to an access that is made again, perhaps at another address.
                self.fault_noncanonical = false;
                let exit = match self.find_block() {
                    // SAFETY: a block lives until all are freed, which happens in `find_block` only; nothing
                    // changes it while it runs.
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
