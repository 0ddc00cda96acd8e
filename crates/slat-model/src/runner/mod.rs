//! Runs operations on an engine and on a model, and compares every result.

mod access;
mod cold;
mod contents;
mod family;
mod logs;
mod snapshots;
mod walker;

pub use family::Family;

use std::cell::OnceCell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use slat::{
    AttributesError, Change, Config, Format, Gfn, Hva, MemoryAttributes, MmuKind, Pfn, Platform,
    Promotion, Region, RegionError, Setting, SlotFlags, Translation, Vcpu, Vm,
};

use crate::host::HostMemory;
use crate::machine::{Invalidate, Machine};
use crate::model::{GuestModel, Method, capacity};
use crate::ops::Op;
use crate::region::set_region;
use crate::rings::{DirtyPage, RingClient};
use crate::setup::{SPACES, VCPUS, first_space_of};
use crate::tally::Tally;
use crate::tlb::Tlb;
use crate::watched::Watched;
use cold::Cold;
use contents::Contents;
use snapshots::Saving;

/// A vCPU, with the translations that it remembers, like a TLB.
struct Cpu<P: Platform, F: Format> {
    vcpu: Vcpu<Watched<P>, F>,
    tlb: BTreeMap<u64, Translation>,
    /// The address space that the vCPU uses.
    space: usize,
    /// The index of the vCPU's ring in the runner's list of rings.
    ring: usize,
}

impl<P: Platform, F: Format> Cpu<P, F> {
    fn remember(&mut self, gfn: u64, translation: Translation) {
        const MOST: usize = 64;
        if self.tlb.len() == MOST {
            // A full TLB drops one entry, which may be any entry.
            let victim = self.tlb.range(gfn..).next().or(self.tlb.first_key_value());
            let victim = *victim.expect("it is full").0;
            self.tlb.remove(&victim);
        }
        self.tlb.insert(gfn, translation);
    }
}

/// An engine and its model. All operations run on one thread, so at most one vCPU at a time is in a reader section.
pub struct Runner<M: Machine, F: Format> {
    machine: Arc<M>,
    platform: Arc<Watched<M::Platform>>,
    vm: Arc<Vm<Watched<M::Platform>, F>>,
    /// The model of the entries that hardware walkers may have cached from the VM's tables.
    walkers: Arc<Tlb>,
    /// The model of each address space.
    models: Vec<GuestModel>,
    cpus: Vec<Cpu<M::Platform, F>>,
    policies: BTreeMap<&'static str, &'static str>,
    /// Whether NX huge pages were ever on. If so, leaves may be smaller than otherwise, and huge leaves may be not
    /// executable.
    nx: bool,
    /// The maximum number of table frames after any operation so far.
    most_frames: u64,
    /// The number of shadow pages that were recycled before the operation began.
    recycled: u64,
    tally: Tally,
    /// The last accessed frames, whose mappings are looked up after other operations.
    accessed: VecDeque<u64>,
    /// The number of operations so far.
    ops: usize,
    /// The ring entries that were collected and not yet reset, each with the index of its ring.
    collected: Vec<(usize, DirtyPage)>,
    /// All rings of this VM so far.
    rings: Vec<RingClient>,
    cold: Cold,
    promotion: Promotion,
    memory: Contents,
    saving: Option<Saving<M, F>>,
}

impl<M: Machine, F: Format> Runner<M, F> {
    /// Makes a VM without memslots on a machine of `host_pages` pages. If `rings`, its dirty logs are rings. `config`
    /// determines how its tables are made.
    pub fn new(host_pages: u64, rings: bool, config: Config) -> Self {
        let tlb = Arc::<Tlb>::default();
        let machine = Arc::new(M::new(host_pages, tlb.clone()));
        // The size of the longest slot, except for giant slots.
        let least = 4 * F::GRANULE.entries() as u64;
        assert!(
            (least..=host_pages).contains(&machine.pages()),
            "a machine with {} pages of memory, for up to {host_pages}",
            machine.pages()
        );
        let platform = Watched::of(&*machine, tlb.clone());
        let config = config.with_spaces(SPACES);
        let vm = Vm::new(platform.clone(), config).unwrap_or_else(|error| {
            let why = platform.violations();
            panic!(
                "the first allocations: {}",
                why.err().unwrap_or(error.to_string())
            )
        });
        let mut model = GuestModel::new(F::GRANULE, capacity::<F>());
        if rings {
            vm.use_dirty_rings();
            model.mode.rings = true;
        }
        Self::of(machine, platform, vm, tlb, vec![model; SPACES])
    }

    /// Makes the runner of `vm`, with new vCPUs. `models` describes the VM's memory.
    fn of(
        machine: Arc<M>,
        platform: Arc<Watched<M::Platform>>,
        vm: Arc<Vm<Watched<M::Platform>, F>>,
        walkers: Arc<Tlb>,
        models: Vec<GuestModel>,
    ) -> Self {
        let roots: Vec<_> = (0..SPACES).filter_map(|space| vm.root(space)).collect();
        let tables = machine.platform().clone();
        // SAFETY: the platform fulfils the contract of `Platform`. The platform tells the TLB model when frames are
        // freed, and a dropped runner makes the model forget the tables.
        unsafe {
            let entries = move |frame| tables.entries(frame);
            walkers.watch_at::<F>(vm.id(), &roots, entries);
        }
        let seen = machine.as_seen_by(vm.id(), invalidate(&vm, walkers.clone()));
        let machine = seen.map_or(machine, Arc::new);
        let cold = Cold::new(F::GRANULE, machine.pages());
        let mut runner = Runner {
            machine,
            platform,
            vm,
            walkers,
            models,
            cpus: Vec::new(),
            policies: BTreeMap::new(),
            nx: false,
            most_frames: 0,
            recycled: 0,
            tally: Tally::default(),
            accessed: VecDeque::new(),
            ops: 0,
            collected: Vec::new(),
            rings: Vec::new(),
            cold,
            promotion: Promotion::default(),
            memory: Contents::new(),
            saving: None,
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

    /// Returns the address of a page of host memory.
    fn hva(page: u64) -> Hva {
        F::GRANULE.add_pages(HostMemory::BASE, page)
    }

    /// Returns the addresses of pages of host memory.
    fn hvas(pages: &Range<u64>) -> Range<Hva> {
        Self::hva(pages.start)..Self::hva(pages.end)
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
        if let Some(why) = self.platform.stale() {
            panic!("after {op:?}: {why}");
        }
        self.check_saved([], String::new);
        self.ops += 1;
        self.check_usage();
        self.look_up_some_frames();
        self.check_violations();
    }

    /// Compares the memory usage that the VM reports with the number of frames that it has from the platform.
    fn check_usage(&mut self) {
        let usage = self.vm.memory_usage();
        let frames = self.platform.live_frames_of(self.vm.id()) as u64;
        assert_eq!(
            usage.table_bytes,
            frames * F::GRANULE.bytes(),
            "bytes of tables"
        );
        self.most_frames = self.most_frames.max(frames);
        assert!(
            usage.peak_table_bytes >= self.most_frames * F::GRANULE.bytes(),
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
            Op::Walk { vcpu, gpa } => self.walk_for_write(*vcpu, *gpa),
            Op::Prefault { vcpu, gpa, bytes } => self.prefault(*vcpu, *gpa, *bytes),
            Op::Convert {
                gfn,
                pages,
                private,
            } => self.convert(*gfn..gfn.saturating_add(*pages), *private),
            Op::Invalidate {
                pages,
                change,
                during,
            } => {
                let vm = self.vm.clone();
                let guard = vm.invalidate(Self::hvas(pages));
                let gone = self.check_backing(pages);
                gone.unwrap_or_else(|why| panic!("during {op:?}: {why}"));
                self.tally_kept("page kept before it was taken away");
                self.check_saved(pages.clone(), || "invalidated".into());
                for (gfn, access) in during {
                    self.access_meanwhile(*gfn, *access, pages);
                }
                self.change_host(pages, *change);
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
                let everything = Self::hvas(&(0..self.machine.pages()));
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
            }
            Op::BeginSnapshot => self.begin_snapshot(),
            Op::KeepNext(most) => self.keep_next(*most),
            Op::EndSnapshot { whole } => self.end_snapshot(*whole),
            Op::Fork | Op::Turn(_) | Op::End => unreachable!("operations on several VMs"),
        }
    }

    /// Makes a vCPU use another address space in the middle of a reader section, as a processor may. Drops the vCPU's
    /// translations of the old address space.
    fn use_space(&mut self, i: usize, space: usize) {
        self.enter(i);
        let cpu = &mut self.cpus[i];
        cpu.vcpu.use_space(space);
        cpu.space = space;
        cpu.tlb.clear();
        cpu.vcpu.leave();
        self.tally.count("address space changed");
    }

    /// Checks that no leaf that a page walker may have cached maps one of `pages`. The error describes such a leaf.
    /// Call during an invalidation of `pages`.
    fn check_backing(&self, pages: &Range<u64>) -> Result<(), String> {
        let frames = OnceCell::new();
        let sorted = || {
            let pages = pages.clone().filter_map(|page| self.machine.page(page));
            let mut frames: Vec<Pfn> = pages.map(|page| page.pfn).collect();
            frames.sort_unstable();
            frames
        };
        self.walkers.check_frames(|first, count| {
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
                model.mode.method = match value {
                    "dirty-bit" if F::SETS_DIRTY => Method::DirtyBits,
                    "buffer" if F::SETS_DIRTY => Method::Buffers,
                    _ => Method::Protection,
                };
            }
        }
    }

    fn set_region(&mut self, space: usize, region: &Region) {
        let old = self
            .models
            .get(space)
            .and_then(|m| m.slots.get(&region.slot).copied());
        let logs = region.flags.has(SlotFlags::LOG_DIRTY_PAGES);
        let begins_or_ends =
            old.is_some_and(|old| old.logs() != logs && old.region(region.slot).gpa == region.gpa);
        // If the tables are shadow pages, the end of dirty logging zaps tables that a huge leaf could replace.
        let in_place = logs || self.vm.mmu() == MmuKind::Tdp;
        let kept = match old {
            Some(old) if begins_or_ends && in_place => {
                self.mapped(space, old.base..old.base + old.pages)
            }
            _ => Vec::new(),
        };
        let deleted = old.filter(|_| region.size == 0);
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
        if let Some(slot) = deleted.filter(|_| errno.is_ok()) {
            let pages = (slot.base..slot.base + slot.pages).map(|gfn| slot.host_page(gfn));
            self.check_saved(pages, || format!("in slot {}, deleted", region.slot));
        }
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
        // If the tables are shadow pages, the end of dirty logging zaps tables that a huge leaf could replace.
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
        for slot in before.slots.values() {
            let gone = (slot.base..slot.base + slot.pages).filter(|gfn| {
                let new = after.slot_at(*gfn);
                new.is_none_or(|(_, new)| new.host_page(*gfn) != slot.host_page(*gfn))
            });
            let pages = gone.map(|gfn| slot.host_page(gfn)).collect::<Vec<_>>();
            if errno.is_ok() {
                self.check_saved(pages, || format!("in {slot:?}, changed"));
            }
        }
        self.models[space] = after;
        self.split_kept(space);
        if !known.is_empty() {
            self.check_still_mapped(&known, false);
            self.tally.count("still mapped when several slots were set");
        }
    }

    fn convert(&mut self, gfns: Range<u64>, private: bool) {
        let mut known = Vec::new();
        if !self.platform.is_failing() {
            for space in 0..SPACES {
                known.extend(self.mapped(space, 0..gfns.start));
                known.extend(self.mapped(space, gfns.end..u64::MAX));
            }
        }
        let attributes = match private {
            true => MemoryAttributes::PRIVATE,
            false => MemoryAttributes::NONE,
        };
        let range = Gfn(gfns.start)..Gfn(gfns.end);
        let answer = self.vm.set_memory_attributes(range, attributes);
        if answer == Err(AttributesError::OutOfMemory) {
            self.allocation_failed();
            return;
        }
        let errno = answer.map_err(|error| error.errno());
        for model in &mut self.models {
            assert_eq!(errno, model.convert(&gfns, private), "frames {gfns:x?}");
        }
        self.tally.count(match errno {
            Ok(()) => "frames converted",
            Err(_) => "conversion refused",
        });
        // Checks that the pages which were not converted are still mapped.
        self.check_still_mapped(&known, false);
    }

    fn find_slot(&mut self, i: usize, gpa: u64) {
        self.enter(i);
        let found = self.cpus[i].vcpu.slot_at(slat::Gpa(gpa));
        self.cpus[i].vcpu.leave();
        let expected = self.models[self.cpus[i].space].slot_at(gpa >> F::GRANULE.shift());
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
            // A new promotion of the whole memory must find no table that a huge leaf can replace.
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
        // The search for NX tables to zap leaves out slots that log.
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

    /// Checks that a test has made an allocation fail. Call when the engine has returned that there is no memory.
    fn allocation_failed(&mut self) {
        self.check_violations();
        assert!(
            self.platform.stop_failing(),
            "out of memory, though no allocation was made to fail"
        );
        self.tally.count("out of memory");
    }

    /// Audits the engine and the machine, and compares all dirty logs with the model.
    pub fn check(&mut self) {
        self.platform.stop_failing();
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
        self.check_slots();
        self.check_contents();
        self.tally.count("audit");
    }

    /// Compares the engine's memslots with the model's.
    fn check_slots(&self) {
        for (space, model) in self.models.iter().enumerate() {
            let mut slots: Vec<_> = model
                .slots
                .iter()
                .map(|(id, slot)| slot.region(*id))
                .collect();
            slots.sort_unstable_by_key(|slot| slot.gpa.0);
            let mut from = Gfn(0);
            for slot in slots {
                let found = self.vm.memslot_from(space, from);
                assert_eq!(
                    found,
                    Some(slot),
                    "the memslot after {from:?} in space {space}"
                );
                from = Gfn((slot.gpa.0 + slot.size) >> F::GRANULE.shift());
            }
            assert_eq!(self.vm.memslot_from(space, from), None, "space {space}");
        }
    }

    /// Checks that no two pages of host memory have the same frame, and that no page has the frame of a table.
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

    /// Ends the VM, and checks that every table frame was freed. Returns the tally.
    pub fn finish(mut self) -> Tally {
        self.end_snapshot(true);
        self.check();
        self.check_frames().unwrap_or_else(|why| panic!("{why}"));
        let (machine, platform) = (self.machine.clone(), self.platform.clone());
        let vm = self.vm.id();
        let tally = core::mem::take(&mut self.tally);
        drop(self);
        let found = platform.violations().and_then(|()| machine.check());
        found.unwrap_or_else(|why| panic!("at the end of the VM: {why}"));
        assert_eq!(platform.live_frames_of(vm), 0, "table frames were leaked");
        tally
    }
}

/// Returns the function that a platform calls to change the backing of a page of `vm`. `walkers` is the model of the
/// TLBs that walk the VM's tables.
fn invalidate<P: Platform, F: Format>(
    vm: &Arc<Vm<Watched<P>, F>>,
    walkers: Arc<Tlb>,
) -> Invalidate {
    let vm = Arc::downgrade(vm);
    Arc::new(move |page, frame, change| {
        let vm = vm.upgrade().expect("one of its vCPUs asks");
        let page = vm.platform().outer(page);
        let guard = vm.invalidate_exact(page..F::GRANULE.add_pages(page, 1));
        let gone = walkers.check_frames(|first, count| (first..first.add(count)).contains(&frame));
        gone.unwrap_or_else(|why| panic!("before {frame:?} is copied: {why}"));
        change();
        drop(guard);
    })
}

impl<M: Machine, F: Format> Drop for Runner<M, F> {
    /// Tells the TLB models that no CPU walks the tables from now on, before the VM is dropped.
    fn drop(&mut self) {
        self.walkers.forget();
        self.platform.remove_clone(self.vm.id());
    }
}
