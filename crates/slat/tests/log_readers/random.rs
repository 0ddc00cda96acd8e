//! Random operations on a VM with several readers of its dirty logs, and a model of what the readers and the client
//! have to be told.

use std::sync::Arc;

use slat::{Change, DirtyGfn, Format, Gfn, Gpa, Level, LogReader, Region, SlotFlags, Vcpu};
use slat_model::{Rng, SimPlatform};

use super::{
    FRAMES, Gfns, LOGGED, NONE, TestVm, client_log, gfns_of, new_vm, region, with_ring, write,
};

/// How the VM logs.
#[derive(Clone, Copy)]
pub struct Setup {
    pub method: &'static str,
    /// The level of the host's pages.
    pub level: Level,
    pub rings: bool,
    /// Whether the client protects pages by hand; and if so, whether new logs have every page marked.
    pub manual: Option<bool>,
}

impl Setup {
    pub fn with_level(self, level: Level) -> Self {
        Setup { level, ..self }
    }

    pub fn with_method(self, method: &'static str) -> Self {
        Setup { method, ..self }
    }
}

const READERS: usize = 3;
const SLOTS: u32 = 4;

/// Runs random operations from each of `seeds` seeds.
pub fn run<F: Format>(seeds: u64, setup: Setup) {
    for seed in 0..seeds {
        let vm = new_vm::<F>(setup.method, setup.level);
        if setup.rings {
            vm.use_dirty_rings();
        }
        if let Some(initially_set) = setup.manual {
            vm.set_manual_dirty_log(true, initially_set);
        }
        let (vcpu, ring) = with_ring(&vm);
        let mut run = Run {
            vm: &vm,
            setup,
            rng: Rng::new(seed),
            vcpu,
            ring,
            collected: 0,
            slots: [None; SLOTS as usize],
            told: Default::default(),
            client: Client::default(),
        };
        run.steps(&mut [const { None }; READERS], 100);
        drop(run);
        vm.audit().unwrap();
        let platform = vm.platform().clone();
        drop(vm);
        platform.check();
    }
}

/// The model of a reader.
#[derive(Default, Debug)]
struct Told {
    /// The frames that were written since its last epoch.
    pending: Gfns,
    /// The frames of its epoch.
    epoch: Gfns,
}

/// The model of the client: the frames that its bitmaps must contain, and those that they may contain besides.
#[derive(Default)]
struct Client {
    must: Gfns,
    may: Gfns,
}

/// A VM, and the models of its slots, of the readers of its logs, and of its client.
struct Run<'a, F: Format> {
    vm: &'a Arc<TestVm<F>>,
    setup: Setup,
    rng: Rng,
    vcpu: Vcpu<SimPlatform, F>,
    ring: Arc<[DirtyGfn]>,
    /// The number of ring entries that were collected.
    collected: usize,
    slots: [Option<Region>; SLOTS as usize],
    /// `None`: there is no such reader.
    told: [Option<Told>; READERS],
    client: Client,
}

type Readers<F> = [Option<LogReader<SimPlatform, F>>; READERS];

fn gfns(region: &Region) -> std::ops::Range<u64> {
    let base = region.gpa.0 >> 12;
    base..base + (region.size >> 12)
}

fn logs(region: &Region) -> bool {
    region.flags == LOGGED
}

impl<F: Format> Run<'_, F> {
    /// Makes `n` random operations.
    fn steps(&mut self, readers: &mut Readers<F>, n: u64) {
        for _ in 0..n {
            match self.rng.below(20) {
                0..8 => self.write(),
                8 => self.mark(),
                9 | 10 => self.get_log(),
                11 => self.clear_log(),
                12 => self.change_slot(),
                13 => self.split_or_merge(),
                14 => self.come_or_go(readers),
                _ => self.epoch(readers, n / 4),
            }
            self.vm.audit().unwrap();
        }
    }

    fn pick_slot(&mut self) -> Option<(u32, Region)> {
        let id = self.rng.below(SLOTS.into()) as u32;
        Some((id, self.slots[id as usize]?))
    }

    /// Some frames of a slot.
    fn pick_gfns(&mut self) -> Option<std::ops::Range<u64>> {
        let all = gfns(&self.pick_slot()?.1);
        let first = all.start + self.rng.below(all.end - all.start);
        Some(first..all.end.min(first + 1 + self.rng.below(70)))
    }

    fn note(&mut self, gfns: std::ops::Range<u64>) {
        for told in self.told.iter_mut().flatten() {
            told.pending.extend(gfns.clone());
        }
        self.client.must.extend(gfns);
    }

    fn write(&mut self) {
        if let Some(gfns) = self.pick_gfns() {
            self.collect_ring();
            write(&mut self.vcpu, gfns.clone());
            self.note(gfns);
        }
    }

    /// Empties the vCPU's ring.
    fn collect_ring(&mut self) {
        while let Some((slot, page)) = self.ring[self.collected % self.ring.len()].collect() {
            self.collected += 1;
            let slot = self.slots[slot as usize].expect("entries of deleted slots are collected");
            assert!(
                logs(&slot) && page < slot.size >> 12,
                "the client does not log there"
            );
            self.client.must.remove(&(gfns(&slot).start + page));
        }
        self.vm.reset_dirty_rings();
        if self.setup.rings {
            // Each page that was written since the last reset was pushed.
            let slots = self.slots.iter().flatten().filter(|slot| logs(slot));
            let lost = slots
                .flat_map(|slot| self.client.must.range(gfns(slot)))
                .next();
            assert_eq!(lost, None, "a write is in no ring");
        }
    }

    /// A device writes.
    fn mark(&mut self) {
        let Some(gfns) = self.pick_gfns() else {
            return;
        };
        let marked = self.vm.mark_dirty(0, Gfn(gfns.start)..Gfn(gfns.end));
        for told in self.told.iter_mut().flatten() {
            told.pending.extend(gfns.clone());
        }
        if marked.is_ok() {
            self.client.must.extend(gfns);
        } else {
            assert!(self.setup.rings);
        }
    }

    fn get_log(&mut self) {
        let Some((id, slot)) = self.pick_slot() else {
            return;
        };
        let log = client_log(self.vm, id);
        assert_eq!(log.is_ok(), logs(&slot) && !self.setup.rings);
        let Ok(log) = log else {
            return;
        };
        let all = gfns(&slot);
        let log: Gfns = log.into_iter().map(|page| all.start + page).collect();
        let must: Gfns = self.client.must.range(all.clone()).copied().collect();
        assert!(log.is_superset(&must), "lost: {:?}", must.difference(&log));
        let may = |gfn: &&u64| must.contains(*gfn) || self.client.may.contains(*gfn);
        assert_eq!(log.iter().find(|gfn| !may(gfn)), None);
        if self.setup.manual.is_none() {
            self.client_saw(all);
        }
    }

    fn client_saw(&mut self, gfns: std::ops::Range<u64>) {
        self.client.must.retain(|gfn| !gfns.contains(gfn));
        self.client.may.retain(|gfn| !gfns.contains(gfn));
    }

    fn clear_log(&mut self) {
        let Some((id, slot)) = self.pick_slot().filter(|(_, slot)| logs(slot)) else {
            return;
        };
        let all = gfns(&slot);
        let words: Vec<u64> = (0..(all.end - all.start).div_ceil(64))
            .map(|_| self.rng.word())
            .collect();
        let cleared = self
            .vm
            .clear_dirty_log(0, id, 0, all.end - all.start, &words);
        assert_eq!(cleared.is_ok(), !self.setup.rings);
        if cleared.is_ok() {
            for page in (0..all.end - all.start)
                .filter(|page| words[*page as usize / 64] >> (page % 64) & 1 != 0)
            {
                let gfn = all.start + page;
                self.client_saw(gfn..gfn + 1);
                // A dirty bit that is still in a leaf is not cleared.
                if self.setup.method == "dirty-bit" {
                    self.client.may.insert(gfn);
                }
            }
        }
    }

    /// The memory at `gfns` has become other memory.
    fn is_new(&mut self, gfns: std::ops::Range<u64>, flags: SlotFlags) {
        for told in self.told.iter_mut().flatten() {
            told.epoch.retain(|gfn| !gfns.contains(gfn));
            told.pending.extend(gfns.clone());
        }
        self.client_begins(gfns, flags);
    }

    /// The client begins or ends logging of `gfns`.
    fn client_begins(&mut self, gfns: std::ops::Range<u64>, flags: SlotFlags) {
        self.client_saw(gfns.clone());
        if flags == LOGGED {
            match self.setup.manual {
                Some(true) => self.client.must.extend(gfns),
                // What readers have not harvested yet is in the log.
                _ => self.client.may.extend(gfns),
            }
        }
    }

    fn is_gone(&mut self, gfns: std::ops::Range<u64>) {
        for told in self.told.iter_mut().flatten() {
            told.epoch.retain(|gfn| !gfns.contains(gfn));
            told.pending.retain(|gfn| !gfns.contains(gfn));
        }
        self.client_saw(gfns);
    }

    /// Creates, deletes or moves a slot, or changes its flags.
    fn change_slot(&mut self) {
        self.collect_ring();
        let id = self.rng.below(SLOTS.into()) as u32;
        let flags = if self.rng.below(2) == 0 { NONE } else { LOGGED };
        let Some(old) = self.slots[id as usize] else {
            let base = self.rng.below(FRAMES - 1);
            let pages = 1 + self.rng.below((FRAMES - base).min(200));
            let new = region(id, base..base + pages, 0, flags);
            if self.set(&new) {
                self.is_new(gfns(&new), flags);
            }
            return;
        };
        match self.rng.below(3) {
            0 => {
                self.vm.remove_memory_region(0, id).unwrap();
                self.slots[id as usize] = None;
                self.is_gone(gfns(&old));
            }
            1 => {
                let new = old.with_flags(flags);
                assert!(self.set(&new));
                if logs(&old) != logs(&new) {
                    self.client_begins(gfns(&new), flags);
                }
            }
            _ => {
                let pages = old.size >> 12;
                let base = self.rng.below(FRAMES - pages);
                let new = old.with_gpa(Gpa(base << 12));
                if base != gfns(&old).start && self.set(&new) {
                    self.moved(&old, &new);
                }
            }
        }
    }

    /// Sets a slot, unless it overlaps others. Returns whether it did.
    fn set(&mut self, new: &Region) -> bool {
        let overlaps = |other: &Region| {
            let (a, b) = (gfns(other), gfns(new));
            other.slot != new.slot && a.start < b.end && b.start < a.end
        };
        let fails = self.slots.iter().flatten().any(overlaps);
        assert_eq!(self.vm.set_memory_region(0, new).is_err(), fails);
        if !fails {
            self.slots[new.slot as usize] = Some(*new);
        }
        !fails
    }

    /// The frames of an epoch, and the marks of the client, move along with their slot.
    fn moved(&mut self, old: &Region, new: &Region) {
        let (from, to) = (gfns(old), gfns(new));
        let along = |set: &mut Gfns| {
            let (moving, staying): (Gfns, Gfns) = set.iter().partition(|gfn| from.contains(*gfn));
            *set = staying;
            set.extend(moving.into_iter().map(|gfn| gfn - from.start + to.start));
        };
        for told in self.told.iter_mut().flatten() {
            along(&mut told.epoch);
            told.pending.retain(|gfn| !from.contains(gfn));
            told.pending.extend(to.clone());
        }
        along(&mut self.client.must);
        along(&mut self.client.may);
    }

    /// Splits a slot, perhaps with a hole between the parts; or merges two slots.
    fn split_or_merge(&mut self) {
        self.collect_ring();
        let Some((id, old)) = self.pick_slot() else {
            return;
        };
        let all = gfns(&old);
        let free = (0..SLOTS).find(|id| self.slots[*id as usize].is_none());
        if let (Some(free), 2..) = (free, all.end - all.start) {
            let end = all.start + 1 + self.rng.below(all.end - all.start - 1);
            let start = (end + self.rng.below(3)).min(all.end - 1);
            let offset = start - all.start;
            let lower = old.with_size((end - all.start) << 12);
            let upper = Region::new(
                free,
                Gpa(start << 12),
                (all.end - start) << 12,
                old.backing.add_pages(offset),
            )
            .with_flags(old.flags);
            let changes = [Change::Set(upper), Change::Set(lower)];
            self.vm.set_memory_regions(0, &changes).unwrap();
            self.slots[id as usize] = Some(lower);
            self.slots[free as usize] = Some(upper);
            self.is_gone(end..start);
            return;
        }
        let follows = |other: &Region| {
            let is_next = gfns(other).start == all.end && other.flags == old.flags;
            is_next && other.backing == old.backing.add_pages(old.size >> 12)
        };
        if let Some(other) = self.slots.iter().flatten().copied().find(follows) {
            let both = old.with_size(old.size + other.size);
            let changes = [Change::Remove(other.slot), Change::Set(both)];
            self.vm.set_memory_regions(0, &changes).unwrap();
            self.slots[other.slot as usize] = None;
            self.slots[id as usize] = Some(both);
        }
    }

    /// A reader is made, or dropped.
    fn come_or_go(&mut self, readers: &mut Readers<F>) {
        let i = self.rng.below(READERS as u64) as usize;
        if readers[i].take().is_some() {
            self.told[i] = None;
        } else if self.told[i].is_none() {
            readers[i] = Some(self.vm.log_reader().unwrap());
            self.told[i] = Some(Told::default());
        }
    }

    /// A reader has an epoch, during which `n` other operations are made.
    fn epoch(&mut self, readers: &mut Readers<F>, n: u64) {
        let i = self.rng.below(READERS as u64) as usize;
        let Some(mut reader) = readers[i].take() else {
            return;
        };
        let epoch = reader.begin();
        let told = self.told[i].as_mut().expect("the reader lives");
        told.epoch = std::mem::take(&mut told.pending);
        self.compare(i, &gfns_of(&epoch));
        self.steps(readers, n);
        // The reader may be used by another call between.
        epoch.leave_open();
        let epoch = reader.open_epoch().expect("it was left open");
        self.compare(i, &gfns_of(&epoch));
        self.check_ranges(&epoch);
        let told = self.told[i].as_mut().expect("the reader lives");
        let was = std::mem::take(&mut told.epoch);
        match self.rng.below(3) {
            0 => epoch.commit(),
            1 => {
                told.pending.extend(was);
                epoch.abort();
            }
            _ => {
                // The reader dies in its epoch.
                epoch.leave_open();
                drop(reader);
                self.told[i] = None;
                return;
            }
        }
        readers[i] = Some(reader);
    }

    fn compare(&self, i: usize, epoch: &Gfns) {
        let told = self.told[i].as_ref().expect("the reader lives");
        let lost: Vec<_> = told.epoch.difference(epoch).collect();
        assert!(lost.is_empty(), "reader {i} was not told of {lost:x?}");
        let more: Vec<_> = epoch.difference(&told.epoch).collect();
        assert!(more.is_empty(), "reader {i} was told of {more:x?}");
    }

    fn check_ranges(&mut self, epoch: &slat::Epoch<'_, SimPlatform, F>) {
        let (min_gap, max) = (self.rng.below(9), 1 + self.rng.below(80));
        let mut dirty = gfns_of(epoch);
        let mut covered = Gfns::new();
        let mut end = self.rng.below(100);
        dirty.retain(|gfn| *gfn >= end);
        for range in epoch.dirty_ranges_from(0, Gfn(end), min_gap, max) {
            let gfns = range.gfns.start.0..range.gfns.end.0;
            assert!(end <= gfns.start && gfns.end - gfns.start <= max);
            assert!(dirty.contains(&gfns.start) && dirty.contains(&(gfns.end - 1)));
            let slot = self.slots[range.slot as usize].expect("the slot exists");
            assert_eq!(
                range.backing,
                slot.backing.add_pages(gfns.start - (slot.gpa.0 >> 12))
            );
            let clean = gfns.clone().filter(|gfn| !dirty.contains(gfn)).count() as u64;
            assert!(clean == 0 || min_gap > 1);
            end = gfns.end;
            covered.extend(gfns);
        }
        assert!(covered.is_superset(&dirty));
    }
}
