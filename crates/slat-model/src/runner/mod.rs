//! Runs operations on an engine and a model side by side, and compares every result.

mod access;
mod cold;
mod logs;

use std::cell::OnceCell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use slat::{
    Change, Config, Format, MmuKind, PAGE_SIZE, Pfn, Platform, Promotion, Region, RegionError,
    Setting, SlotFlags, Translation, Vcpu, Vm,
};

use crate::host::HostMemory;
use crate::machine::Machine;
use crate::model::{GuestModel, capacity};
use crate::ops::Op;
use crate::region::set_region;
use crate::rings::{DirtyPage, RingClient};
use crate::setup::{SPACES, VCPUS, first_space_of};
use crate::tally::Tally;
use crate::tlb::Tlb;
use crate::watched::Watched;
use cold::Cold;

/// The least number of pages of host memory: the longest slot but for giant ones.
const LEAST_PAGES: u64 = 2048;

/// A vCPU with the translations it remembers, as a TLB does.
struct Cpu<P: Platform, F: Format> {
    vcpu: Vcpu<Watched<P>, F>,
    tlb: BTreeMap<u64, Translation>,
    /// The address space that it uses.
    space: usize,
    /// Index of its ring among the runner's.
    ring: usize,
}

impl<P: Platform, F: Format> Cpu<P, F> {
    fn remember(&mut self, gfn: u64, translation: Translation) {
        const MOST: usize = 64;
        if self.tlb.len() == MOST {
            // Any victim will do, as long as each can be chosen.
            let victim = self.tlb.range(gfn..).next().or(self.tlb.first_key_value());
            let victim = *victim.expect("it is full").0;
            self.tlb.remove(&victim);
        }
        self.tlb.insert(gfn, translation);
    }
}

/// An engine and its model, on one thread: one vCPU at a time is in a reader section.
pub struct Runner<M: Machine, F: Format> {
    machine: Arc<M>,
    platform: Arc<Watched<M::Platform>>,
    vm: Arc<Vm<Watched<M::Platform>, F>>,
    /// The model of each address space.
    models: Vec<GuestModel>,
    cpus: Vec<Cpu<M::Platform, F>>,
    policies: BTreeMap<&'static str, &'static str>,
    /// Whether NX huge pages were ever on: leaves may be smaller, and huge ones not executable.
    nx: bool,
    failing: bool,
    /// The most table frames there were after an operation.
    most_frames: u64,
    /// How many shadow pages had been recycled when the operation began.
    recycled: u64,
    tally: Tally,
    /// Frames of the last accesses, whose mappings are looked up after other operations.
    accessed: VecDeque<u64>,
    /// Number of operations so far.
    ops: usize,
    /// Ring entries that were collected and not reset, with their ring.
    collected: Vec<(usize, DirtyPage)>,
    /// All rings so far.
    rings: Vec<RingClient>,
    cold: Cold,
    promotion: Promotion,
}

impl<M: Machine, F: Format> Runner<M, F> {
    /// Makes a VM without memory on a machine of `host_pages` pages; with `rings` its dirty logs are
    /// rings. `config` says how its tables are made.
    pub fn new(host_pages: u64, rings: bool, config: Config) -> Self {
        let tlb = Arc::<Tlb>::default();
        let machine = Arc::new(M::new(host_pages, tlb.clone()));
        assert!(
            (LEAST_PAGES..=host_pages).contains(&machine.pages()),
            "a machine with {} pages of memory, for up to {host_pages}",
            machine.pages()
        );
        let platform = Watched::of(&*machine, tlb);
        let config = config.with_spaces(SPACES);
        let vm = Vm::new(platform.clone(), config).unwrap_or_else(|error| {
            let why = platform.violations();
            panic!(
                "the first allocations: {}",
                why.err().unwrap_or(error.to_string())
            )
        });
        let roots: Vec<_> = (0..SPACES).filter_map(|space| vm.root(space)).collect();
        let tables = machine.platform().clone();
        // SAFETY: the platform's promise; the platform tells the model when frames are freed, and the runner forgets the
        // tables when it is dropped.
        unsafe {
            let entries = move |frame| tables.entries(frame);
            platform.tlb.watch_at::<F>(vm.id(), &roots, entries);
        }
        let mut model = GuestModel::new(capacity::<F>());
        if rings {
            vm.use_dirty_rings();
            model.mode.rings = true;
        }
        let mut runner = Runner {
            machine,
            platform,
            vm,
            models: vec![model; SPACES],
            cpus: Vec::new(),
            policies: BTreeMap::new(),
            nx: false,
            failing: false,
            most_frames: 0,
            recycled: 0,
            tally: Tally::default(),
            accessed: VecDeque::new(),
            ops: 0,
            collected: Vec::new(),
            rings: Vec::new(),
            cold: Cold::new(host_pages),
            promotion: Promotion::default(),
        };
        for i in 0..VCPUS {
            let cpu = runner.new_cpu(i);
            runner.cpus.push(cpu);
        }
        runner
    }

    fn new_cpu(&mut self, i: usize) -> Cpu<M::Platform, F> {
        let space = first_space_of(i);
        let vcpu = self.vm.create_vcpu_in(space);
        let mut vcpu = vcpu.expect("there is memory");
        if self.models[0].mode.rings {
            let client = RingClient::new();
            vcpu.set_dirty_ring(client.ring()).expect("there is memory");
            self.rings.push(client);
        }
        Cpu {
            vcpu,
            tlb: BTreeMap::new(),
            space,
            ring: self.rings.len().wrapping_sub(1),
        }
    }

    /// Returns the number of pages of host memory.
    pub fn host_pages(&self) -> u64 {
        self.machine.pages()
    }

    /// Returns the models, by address space.
    pub fn models(&self) -> &[GuestModel] {
        &self.models
    }

    /// Runs one operation. Panics if engine and model disagree.
    pub fn run(&mut self, op: &Op) {
        self.recycled = self.vm.stats().mmu_recycled;
        self.apply(op);
        if let Some(why) = self.platform.tlb.stale() {
            panic!("after {op:?}: {why}");
        }
        self.ops += 1;
        self.check_usage();
        self.look_up_some_frame();
        self.check_violations();
    }

    /// Compares what the VM says of its tables with the frames that it has of the platform.
    fn check_usage(&mut self) {
        let usage = self.vm.memory_usage();
        let frames = self.platform.live_frames() as u64;
        assert_eq!(usage.table_bytes, frames * PAGE_SIZE, "bytes of tables");
        self.most_frames = self.most_frames.max(frames);
        assert!(
            usage.peak_table_bytes >= self.most_frames * PAGE_SIZE,
            "{usage:?}, {} frames at one time",
            self.most_frames
        );
    }

    fn check_violations(&self) {
        let found = self.platform.violations();
        found.unwrap_or_else(|why| panic!("{why}"));
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::SetRegion { space, region } => self.set_region(*space, region),
            Op::SetRegions { space, changes } => self.set_regions(*space, changes),
            Op::FindSlot { vcpu, gpa } => self.find_slot(*vcpu, *gpa),
            Op::Translate { vcpu, gpa, access } => drop(self.access(*vcpu, *gpa, *access)),
            Op::Prefault { vcpu, gpa, bytes } => self.prefault(*vcpu, *gpa, *bytes),
            Op::Invalidate {
                pages,
                change,
                during,
            } => {
                let vm = self.vm.clone();
                let guard = vm.invalidate(HostMemory::hvas(pages));
                let gone = self.check_backing(pages);
                gone.unwrap_or_else(|why| panic!("during {op:?}: {why}"));
                for (gfn, access) in during {
                    self.access_meanwhile(*gfn, *access, pages);
                }
                self.machine.change(pages, *change);
                for (gfn, access) in during {
                    self.access_meanwhile(*gfn, *access, pages);
                }
                drop(guard);
            }
            Op::DirtyLog { space, id } => self.dirty_log(*space, *id),
            Op::ClearLog {
                space,
                id,
                first,
                pages,
                pattern,
            } => self.clear_log(*space, *id, *first, *pages, *pattern),
            Op::ManualLog {
                manual,
                initially_set,
            } => {
                self.vm.set_manual_dirty_log(*manual, *initially_set);
                for model in &mut self.models {
                    model.mode.manual = *manual;
                    model.mode.initially_set = *manual && *initially_set;
                }
            }
            Op::Collect { vcpu, entries } => self.collect(*vcpu, *entries),
            Op::ResetRings => self.reset_rings(),
            Op::Policy(name, value) => self.set_policy(name, value),
            Op::RecoverNx => self.recover_nx(),
            Op::Age { vcpu, gpa, access } => {
                let everything = HostMemory::hvas(&(0..self.machine.pages()));
                self.vm.age(everything.clone(), true);
                assert_eq!(self.vm.age(everything.clone(), false), 0, "old leaves");
                let used = self.access(*vcpu, *gpa, *access).is_ok();
                let young = self.vm.age(everything, false);
                assert_eq!(young, used as u64, "young leaves after {op:?}");
                if used {
                    self.tally.count("one young leaf");
                }
            }
            Op::Cold => self.cold(),
            Op::Promote(most) => self.promote(*most),
            Op::Quiesce(i) => {
                let cpu = &mut self.cpus[*i];
                cpu.vcpu.enter_unguarded(*i);
                cpu.tlb.clear();
                cpu.vcpu.quiesce();
                cpu.vcpu.leave();
            }
            Op::Replace(i) => {
                let ring = self.cpus[*i].ring;
                self.cpus[*i] = self.new_cpu(*i);
                self.ring_left(ring);
            }
            Op::UseSpace { vcpu, space } => self.use_space(*vcpu, *space),
            Op::FailAllocation(n) => {
                self.platform.fail_allocation(*n, false);
                self.failing = true;
            }
        }
    }

    /// Has a vCPU use another address space in the middle of a reader section, as a processor does, and drops what it remembers of
    /// the first.
    fn use_space(&mut self, i: usize, space: usize) {
        self.enter(i);
        let cpu = &mut self.cpus[i];
        cpu.vcpu.use_space(space);
        cpu.space = space;
        cpu.tlb.clear();
        cpu.vcpu.leave();
        self.tally.count("address space changed");
    }

    /// Call while an invalidation of `pages` is in progress. The error is a leaf that a walker may have cached, and that maps
    /// one of them.
    fn check_backing(&self, pages: &Range<u64>) -> Result<(), String> {
        let frames = OnceCell::new();
        let sorted = || {
            let pages = pages.clone().filter_map(|page| self.machine.page(page));
            let mut frames: Vec<Pfn> = pages.map(|page| page.pfn).collect();
            frames.sort_unstable();
            frames
        };
        self.platform.tlb.check_frames(|first, count| {
            let frames: &Vec<Pfn> = frames.get_or_init(sorted);
            let at = frames.partition_point(|frame| *frame < first);
            frames
                .get(at)
                .is_some_and(|frame| *frame < first.add(count))
        })
    }

    fn is_on(&self, switch: &str, default: bool) -> bool {
        self.policies
            .get(switch)
            .map_or(default, |value| *value == "on")
    }

    fn set_policy(&mut self, name: &'static str, value: &'static str) {
        let setting = Setting::parse(name, value).unwrap();
        self.vm.set_policy(setting);
        let set = self.vm.policy().iter().any(|policy| policy == setting);
        assert!(set, "policy {name}={value}");
        self.policies.insert(name, value);
        self.nx |= self.is_on("nx_huge_pages", false);
        for model in &mut self.models {
            if name == "dirty_log" {
                model.mode.by_dirty_bit = F::SETS_DIRTY && value == "dirty-bit";
            }
        }
    }

    fn set_region(&mut self, space: usize, region: &Region) {
        let old = self
            .models
            .get(space)
            .and_then(|m| m.slots.get(&region.slot));
        let logs = region.flags.has(SlotFlags::LOG_DIRTY_PAGES);
        let begins_or_ends =
            old.is_some_and(|old| old.logs() != logs && old.base << 12 == region.gpa.0);
        // Where tables are shadow pages, the end of a log zaps those in whose place a huge leaf fits.
        let in_place = logs || self.vm.mmu() == MmuKind::Tdp;
        let kept = match old {
            Some(old) if begins_or_ends && in_place => {
                self.mapped(space, old.base..old.base + old.pages)
            }
            _ => Vec::new(),
        };
        let collapses = self.vm.stats().collapses;
        let answer = set_region(&self.vm, space, region);
        if answer == Err(RegionError::OutOfMemory) {
            self.allocation_failed();
            return;
        }
        let errno = answer.as_ref().map_err(RegionError::errno).copied();
        let expected = match self.models.get_mut(space) {
            Some(model) => model.set_region(region),
            None => Err(22),
        };
        assert_eq!(errno, expected, "{region:?}: {answer:?}");
        self.tally.count(match errno {
            Ok(()) => "slot set",
            Err(_) => "slot refused",
        });
        if errno.is_ok() && !kept.is_empty() {
            let split = !self.models[0].mode.initially_set || self.models[0].mode.rings;
            self.check_still_mapped(&kept, split && logs);
            self.tally.count(match logs {
                true => "still mapped when logging began",
                false => "still mapped when logging ended",
            });
        }
        if self.vm.stats().collapses > collapses {
            self.tally.count("huge page recovered");
        }
    }

    fn set_regions(&mut self, space: usize, changes: &[Change]) {
        let before = self.models[space].clone();
        let mut after = before.clone();
        let expected = after.set_regions(changes);
        let kept = before.kept(&after);
        let mut known = Vec::new();
        // Where tables are shadow pages, the end of a log zaps those in whose place a huge leaf fits.
        if self.vm.mmu() == MmuKind::Tdp {
            for gfns in kept {
                known.extend(self.mapped(space, gfns));
            }
        }
        let answer = self.vm.set_memory_regions(space, changes);
        if answer == Err(RegionError::OutOfMemory) {
            self.allocation_failed();
            return;
        }
        let errno = answer.as_ref().map_err(RegionError::errno).copied();
        assert_eq!(errno, expected, "{changes:?}: {answer:?}");
        self.tally.count(match errno {
            Ok(()) => "several slots set",
            Err(_) => "several slots refused",
        });
        self.models[space] = after;
        self.split_kept(space);
        if !known.is_empty() {
            self.check_still_mapped(&known, false);
            self.tally.count("still mapped when several slots were set");
        }
    }

    fn find_slot(&mut self, i: usize, gpa: u64) {
        self.enter(i);
        let found = self.cpus[i].vcpu.slot_at(slat::Gpa(gpa));
        self.cpus[i].vcpu.leave();
        let expected = self.models[self.cpus[i].space].slot_at(gpa >> 12);
        let expected = expected.map(|(id, slot)| slot.region(id));
        assert_eq!(found, expected, "the slot at {gpa:#x}");
        if found.is_some() {
            self.tally.count("slot found");
        }
    }

    fn promote(&mut self, most: usize) {
        let in_place = self.vm.mmu() == MmuKind::Tdp;
        let mut known = Vec::new();
        if in_place {
            for space in 0..SPACES {
                known.extend(self.mapped(space, 0..u64::MAX));
            }
        }
        let before = self.vm.stats();
        let leaves = self.vm.promote(&mut self.promotion, most);
        let did = self.vm.stats().since(&before);
        let expected = if in_place { leaves } else { 0 };
        assert_eq!(did.collapses, expected, "leaves promoted");
        assert!(leaves == 0 || self.is_on("huge_pages", true));
        if leaves > 0 {
            self.tally.count("huge page promoted");
        }
        self.check_still_mapped(&known, false);
        if most == usize::MAX && in_place {
            // From the beginning on, there is no table left that could be.
            self.promotion = Promotion::default();
            self.vm.promote(&mut self.promotion, most);
            assert_eq!(self.promotion, Promotion::default());
            assert_eq!(self.vm.promote(&mut self.promotion, most), 0);
        }
    }

    fn recover_nx(&mut self) {
        let before = self.vm.stats().nx_lpage_splits;
        let taken = self.vm.recover_nx_huge_pages();
        let left = self.vm.stats().nx_lpage_splits;
        assert_eq!(before - left, taken, "the gauge nx_lpage_splits");
        let ratio = self.policies.get("nx_huge_pages_recovery_ratio");
        let ratio = ratio.map_or(60, |ratio| ratio.parse().unwrap());
        let wanted = match (self.is_on("nx_huge_pages", false), ratio) {
            (false, _) => before,
            (true, 0) => 0,
            (true, ratio) => before.div_ceil(ratio),
        };
        // Tables of slots that log stay.
        let mut slots = self.models.iter().flat_map(|m| m.slots.values());
        let logs = slots.any(|slot| slot.logs());
        assert!(
            taken <= wanted && (logs || taken == wanted),
            "{taken} of {before} NX tables were recovered, {wanted} wanted"
        );
        if taken > 0 {
            self.tally.count("NX tables recovered");
        }
    }

    /// Call when the engine returned that memory is out: then an allocation was made to fail.
    fn allocation_failed(&mut self) {
        self.check_violations();
        assert!(
            self.failing && self.platform.stop_failing(),
            "out of memory, though no allocation was made to fail"
        );
        self.failing = false;
        self.tally.count("out of memory");
    }

    /// Audits the engine and the machine, and compares all of the engine's dirty logs.
    pub fn check(&mut self) {
        self.platform.stop_failing();
        self.failing = false;
        self.vm.audit().unwrap_or_else(|e| panic!("{e}"));
        let found = self
            .platform
            .violations()
            .and_then(|()| self.machine.check());
        found.unwrap_or_else(|why| panic!("{why}"));
        for space in 0..SPACES {
            let ids: Vec<_> = self.models[space].slots.keys().copied().collect();
            ids.into_iter().for_each(|id| self.dirty_log(space, id));
        }
        self.tally.count("audit");
    }

    /// Checks that no two pages of host memory have the same frame, and that none has one of a table.
    fn check_frames(&self) -> Result<(), String> {
        let pages = (0..self.machine.pages()).filter_map(|page| self.machine.page(page));
        let mut frames: Vec<Pfn> = pages.map(|page| page.pfn).collect();
        frames.sort_unstable();
        if let Some(twice) = frames.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("two pages of the memory are {:?}", twice[0]));
        }
        let is_guest_memory = |frame| frames.binary_search(&frame).is_ok();
        self.platform.check_frames(is_guest_memory)
    }

    /// Ends the VM; every table frame must have been freed.
    pub fn finish(mut self) -> Tally {
        self.check();
        self.check_frames().unwrap_or_else(|why| panic!("{why}"));
        let (machine, platform) = (self.machine.clone(), self.platform.clone());
        let tally = core::mem::take(&mut self.tally);
        drop(self);
        let found = platform.violations().and_then(|()| machine.check());
        found.unwrap_or_else(|why| panic!("at the end of the VM: {why}"));
        assert_eq!(platform.live_frames(), 0, "table frames were leaked");
        tally
    }
}

impl<M: Machine, F: Format> Drop for Runner<M, F> {
    /// Before the VM is dropped: then no CPU walks its tables any more.
    fn drop(&mut self) {
        self.platform.tlb.forget();
    }
}
