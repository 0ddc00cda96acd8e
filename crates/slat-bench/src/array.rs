//! The rival of slat in the memslots experiment: a memory system that keeps its memslots in one array, as KVM did up to
//! Linux 5.16.
//!
//! The array is sorted by guest frame. Every change copies the whole array, because readers may still use the old one.
//! A look-up by guest frame first checks the memslot that was found last, and then searches by bisection. A look-up by
//! backing address scans the whole array. For a look-up by id there is an index.
//!
//! # Why this is a fair comparison
//! Only the code for memslots belongs to the rival. All other code is slat's own: tables, walks, flushes, the
//! installation of a leaf. The rival uses slat's engine with one memslot that covers all guest memory, so that looking
//! up the engine's own memslot costs nearly nothing. The rival zaps translations by [`slat::Vm::zap`]. So slat and the
//! rival do the same operations on the same tables, and differ only in how they find and change a memslot:
//!
//! * a *fault* costs the rival its own search and then slat's fault, which also looks up the covering memslot. That
//!   look-up is cheap, because slat remembers the memslot. To be fair, when slat is measured, the same look-up is made
//!   once more after each fault ([`crate::experiments::memslots`]);
//! * an *invalidation* costs the rival one scan of the array at its beginning (KVM made a second scan at its end), the
//!   counting of invalidations in progress, as in the engine, and the same zap and flush;
//! * a *change* costs the rival the same checks and one copy. Deleting or moving a memslot also costs the same zap
//!   and flush.
//!
//! Every choice favours the rival. A memslot has 32 bytes (KVM's were larger). A change makes one copy (KVM made two
//! copies to move a memslot). A copy reuses the memory of the array before the last change, so that it causes no page
//! faults. The index by id is not copied. To read the array, an invalidation takes one uncontended lock, and a fault
//! takes none. No change waits for readers.
//!
//! Only one thread at a time uses the rival. Faults and invalidations of several threads would be ordered only by the
//! engine, so the rival itself spends no time on this.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use slat::{
    Access, Ept, Gfn, Gpa, Granule, Hva, MAX_SLOTS, PAGE_SHIFT, PAGE_SIZE, Region, RegionError,
    SlotFlags, Stats, Stop, Translation, Vcpu, Vm,
};

use crate::bare::{self, Bare};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    base: u64,
    pages: u64,
    backing: u64,
    id: u32,
    flags: SlotFlags,
}

// The published comparison accepts an array as a fair rival if its elements have at most this size.
const _: () = assert!(size_of::<Slot>() <= 64);

impl Slot {
    fn holds(&self, gfn: u64) -> bool {
        gfn.wrapping_sub(self.base) < self.pages
    }

    fn end(&self) -> u64 {
        self.base + self.pages
    }

    /// Returns the frames that are backed by `range` of the backing memory.
    fn gfns_backed_by(&self, range: &Range<Hva>) -> Option<Range<Gfn>> {
        let end = self.backing + (self.pages << PAGE_SHIFT);
        if range.end.0 <= self.backing || end <= range.start.0 {
            return None;
        }
        let first = range.start.0.saturating_sub(self.backing) >> PAGE_SHIFT;
        let last = (range.end.0 - self.backing).div_ceil(PAGE_SIZE);
        Some(Gfn(self.base + first)..Gfn(self.base + last.min(self.pages)))
    }
}

/// The memslots at one moment. Readers may use one set while a writer makes the next set.
#[derive(Clone, Default)]
struct Set {
    /// The slots, sorted by `base`. They do not overlap.
    slots: Vec<Slot>,
    generation: u64,
}

impl Set {
    /// Returns the index of the first slot at or after `base`.
    fn place(&self, base: u64) -> usize {
        self.slots.partition_point(|slot| slot.base < base)
    }

    /// Returns the index of the slot that contains `gfn`.
    fn find(&self, gfn: u64) -> Option<usize> {
        let place = self.slots.partition_point(|slot| slot.base <= gfn);
        let place = place.checked_sub(1)?;
        self.slots[place].holds(gfn).then_some(place)
    }

    /// Returns a slot that has a page in `gfns`. Ignores the slot with the id `except`.
    fn overlap(&self, gfns: &Range<u64>, except: u32) -> Option<&Slot> {
        let first = self.slots.partition_point(|slot| slot.end() <= gfns.start);
        self.slots[first..]
            .iter()
            .take_while(|slot| slot.base < gfns.end)
            .find(|slot| slot.id != except)
    }

    /// Returns the frames of every slot that are backed by `range` of the backing memory.
    fn backed_by(&self, range: &Range<Hva>) -> impl Iterator<Item = Range<Gfn>> {
        self.slots
            .iter()
            .filter_map(move |slot| slot.gfns_backed_by(range))
    }

    /// Makes `self` a copy of `old`, without the slot at index `leaves`, and with the new slot `comes` added.
    fn copy_with(&mut self, old: &Set, leaves: Option<usize>, comes: Option<Slot>) {
        self.slots.clear();
        self.slots.reserve(old.slots.len() + 1);
        // All elements between the two indices move together, in one copy.
        let gap = leaves.unwrap_or(old.slots.len());
        let after = leaves.map_or(old.slots.len(), |leaves| leaves + 1);
        let (before, after) = (&old.slots[..gap], &old.slots[after..]);
        match comes {
            Some(slot) if before.last().is_none_or(|last| last.base < slot.base) => {
                let place = after.partition_point(|other| other.base < slot.base);
                self.slots.extend_from_slice(before);
                self.slots.extend_from_slice(&after[..place]);
                self.slots.push(slot);
                self.slots.extend_from_slice(&after[place..]);
            }
            Some(slot) => {
                let place = before.partition_point(|other| other.base < slot.base);
                self.slots.extend_from_slice(&before[..place]);
                self.slots.push(slot);
                self.slots.extend_from_slice(&before[place..]);
                self.slots.extend_from_slice(after);
            }
            None => {
                self.slots.extend_from_slice(before);
                self.slots.extend_from_slice(after);
            }
        }
        self.generation = old.generation + 1;
    }
}

/// State that only changes of memslots use.
#[derive(Default)]
struct Writer {
    /// The first frame of the slot with each id, or [`NOWHERE`].
    base: Vec<u64>,
    /// The array before the last change. The next change reuses its memory.
    spare: Option<Arc<Set>>,
}

const NOWHERE: u64 = u64::MAX;

impl Writer {
    fn put(&mut self, id: u32, slot: Option<&Slot>) {
        let id = id as usize;
        if self.base.len() <= id {
            self.base.resize(id + 1, NOWHERE);
        }
        self.base[id] = slot.map_or(NOWHERE, |slot| slot.base);
    }
}

/// One range that covers the ranges of all invalidations in progress.
struct InProgress {
    count: AtomicU32,
    hull: Mutex<Range<Hva>>,
}

impl InProgress {
    const NONE: Range<Hva> = Hva(u64::MAX)..Hva(0);

    fn begin(&self, range: &Range<Hva>) {
        let mut hull = lock(&self.hull);
        *hull = hull.start.min(range.start)..hull.end.max(range.end);
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    fn covers(&self, hva: Hva) -> bool {
        self.count.load(Ordering::SeqCst) != 0 && lock(&self.hull).contains(&hva)
    }

    fn end(&self) {
        let mut hull = lock(&self.hull);
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            *hull = Self::NONE;
        }
    }
}

/// A VM with its memslots in an array.
pub struct ArrayVm {
    engine: Arc<Vm<Bare, Ept>>,
    current: RwLock<Arc<Set>>,
    /// The generation of `current`.
    generation: AtomicU64,
    writer: Mutex<Writer>,
    in_progress: InProgress,
    /// The number of invalidations that have ended, like the engine's invalidation sequence (KVM:
    /// `mmu_invalidate_seq`). The rival does not need this counter, because one thread makes both the faults and the
    /// invalidations. The counter exists so that the measured times include counting.
    sequence: AtomicU64,
}

/// Locks `mutex`. The lock can be poisoned only by a bug in this file.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ArrayVm {
    /// The number of frames of the covering memslot. All slots in the array must lie within these frames.
    const COVERED: u64 = 1 << 30;

    /// Creates a VM without memslots. Every memslot that is added later must back guest address `gpa` by the address
    /// `gpa + displacement`.
    pub fn new(displacement: u64) -> Arc<Self> {
        Arc::new(Self::empty(displacement))
    }

    fn empty(displacement: u64) -> Self {
        let engine = bare::vm();
        let covering = bare::region(0, 0, Self::COVERED, displacement);
        engine
            .set_memory_region(0, &covering)
            .expect("the only slot");
        ArrayVm {
            engine,
            current: RwLock::default(),
            generation: AtomicU64::new(0),
            writer: Mutex::default(),
            in_progress: InProgress {
                count: AtomicU32::new(0),
                hull: Mutex::new(InProgress::NONE),
            },
            sequence: AtomicU64::new(0),
        }
    }

    /// Makes a VM like [`ArrayVm::new`], but with a memslot for each of `regions`. All memslots are created in a single
    /// change.
    ///
    /// # Errors
    /// The errors of [`ArrayVm::set_memory_region`]. It is also an error if `regions` are not in ascending order.
    pub fn with_slots(displacement: u64, regions: &[Region]) -> Result<Arc<Self>, RegionError> {
        let vm = Self::empty(displacement);
        let mut set = Set::default();
        let mut writer = Writer::default();
        for region in regions {
            let new =
                check(&set, region, None)?.ok_or(RegionError::NothingToDelete(region.slot))?;
            if set.slots.last().is_some_and(|last| last.base > new.base) {
                return Err(RegionError::Misaligned(*region, Granule::Kib4));
            }
            writer.put(region.slot, Some(&new));
            set.slots.push(new);
        }
        set.generation = regions.len() as u64;
        vm.generation.store(set.generation, Ordering::Release);
        Ok(Arc::new(ArrayVm {
            current: RwLock::new(Arc::new(set)),
            writer: Mutex::new(writer),
            ..vm
        }))
    }

    fn current(&self) -> RwLockReadGuard<'_, Arc<Set>> {
        self.current.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the counters of the VM's engine.
    pub fn stats(&self) -> Stats {
        self.engine.stats()
    }

    /// Creates, deletes or moves a memslot, or changes its flags, by the rules of [`slat::Vm::set_memory_region`]. Size
    /// 0 deletes the memslot.
    ///
    /// # Errors
    /// [`RegionError`]. Then nothing has changed.
    pub fn set_memory_region(&self, region: &Region) -> Result<(), RegionError> {
        let mut writer = lock(&self.writer);
        let now = self.current().clone();
        let old = writer.base.get(region.slot as usize).copied();
        let old = old
            .filter(|base| *base != NOWHERE)
            .map(|base| now.place(base));
        let new = check(&now, region, old.map(|place| &now.slots[place]))?;
        if new.is_some() && new == old.map(|place| now.slots[place]) {
            return Ok(());
        }
        let mut copy = writer.spare.take().unwrap_or_default();
        match Arc::get_mut(&mut copy) {
            Some(set) => set.copy_with(&now, old, new),
            None => {
                // A reader still uses the array that was kept for reuse, so a new array is made.
                let mut set = Set::default();
                set.copy_with(&now, old, new);
                copy = Arc::new(set);
            }
        }
        writer.put(region.slot, new.as_ref());
        let generation = copy.generation;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = copy;
        self.generation.store(generation, Ordering::Release);
        if let Some(place) = old {
            let old = now.slots[place];
            if new.is_none_or(|new| new.base != old.base) {
                self.engine.zap(0, Gfn(old.base)..Gfn(old.end()));
            }
        }
        writer.spare = Some(now);
        Ok(())
    }

    /// Begins an invalidation of `range` of the backing. Dropping the returned guard ends the invalidation.
    pub fn invalidate(&self, range: Range<Hva>) -> ArrayInvalidation<'_> {
        self.in_progress.begin(&range);
        let set = self.current();
        let mut used = false;
        for gfns in set.backed_by(&range) {
            used = true;
            self.engine.zap(0, gfns);
        }
        drop(set);
        ArrayInvalidation {
            vm: self,
            range,
            used,
        }
    }

    /// Creates a CPU of this VM. The CPU is outside a reader section.
    pub fn create_vcpu(self: &Arc<Self>) -> ArrayVcpu {
        ArrayVcpu {
            vm: self.clone(),
            engine: self.engine.create_vcpu().expect("memory for a vCPU"),
            set: self.current().clone(),
            recent: 0,
        }
    }
}

/// An invalidation in progress.
#[must_use]
pub struct ArrayInvalidation<'a> {
    vm: &'a ArrayVm,
    range: Range<Hva>,
    /// Whether a slot used the range when the invalidation began. If not, the end of the invalidation has nothing to
    /// do.
    used: bool,
}

impl Drop for ArrayInvalidation<'_> {
    fn drop(&mut self) {
        if self.used || self.vm.current().backed_by(&self.range).next().is_some() {
            self.vm.sequence.fetch_add(1, Ordering::SeqCst);
        }
        self.vm.in_progress.end();
    }
}

/// A CPU of an [`ArrayVm`].
pub struct ArrayVcpu {
    vm: Arc<ArrayVm>,
    engine: Vcpu<Bare, Ept>,
    /// The set of slots that the last look-up used.
    set: Arc<Set>,
    /// The index of the slot that was found last.
    recent: usize,
}

impl ArrayVcpu {
    /// Enters a reader section, like [`slat::Vcpu::enter`].
    pub fn enter(&mut self) {
        self.engine.enter_unguarded(0);
    }

    /// Leaves the reader section, like [`slat::Vcpu::leave`].
    pub fn leave(&mut self) {
        self.engine.leave();
    }

    /// Translates `gpa` after a walk has found no leaf that allows the access. Looks up the slot in the array, and
    /// calls the engine's fault.
    ///
    /// # Errors
    /// [`Stop`].
    #[inline]
    pub fn fault(&mut self, gpa: Gpa, access: Access) -> Result<Translation, Stop> {
        if self.vm.generation.load(Ordering::Acquire) != self.set.generation {
            self.set = self.vm.current().clone();
        }
        let gfn = gpa.0 >> PAGE_SHIFT;
        let recent = self.set.slots.get(self.recent);
        if recent.is_none_or(|slot| !slot.holds(gfn)) {
            self.recent = self.set.find(gfn).ok_or(Stop::Mmio { gpa })?;
        }
        let slot = &self.set.slots[self.recent];
        let hva = Hva(slot.backing + ((gfn - slot.base) << PAGE_SHIFT));
        if self.vm.in_progress.covers(hva) {
            return Err(Stop::Retry);
        }
        self.engine.translate(gpa, access)
    }

    /// Translates `gpa` by a leaf that the tables have. No slot is looked up.
    ///
    /// # Errors
    /// [`Stop`].
    #[inline]
    pub fn walk(&mut self, gpa: Gpa, access: Access) -> Result<Translation, Stop> {
        self.engine.translate(gpa, access)
    }
}

/// Checks the change `region` by KVM's rules. Returns the slot that replaces `old`.
fn check(set: &Set, region: &Region, old: Option<&Slot>) -> Result<Option<Slot>, RegionError> {
    let known = (SlotFlags::LOG_DIRTY_PAGES | SlotFlags::READONLY).0;
    if region.flags.0 & !known != 0 {
        return Err(RegionError::BadFlags(region.flags.0));
    }
    if !(region.size | region.gpa.0 | region.backing.0).is_multiple_of(PAGE_SIZE) {
        return Err(RegionError::Misaligned(*region, Granule::Kib4));
    }
    if region.slot >= MAX_SLOTS {
        return Err(RegionError::SlotTooHigh(region.slot));
    }
    if region.size == 0 {
        return match old {
            Some(_) => Ok(None),
            None => Err(RegionError::NothingToDelete(region.slot)),
        };
    }
    let new = Slot {
        base: region.gpa.0 >> PAGE_SHIFT,
        pages: region.size >> PAGE_SHIFT,
        backing: region.backing.0,
        id: region.slot,
        flags: region.flags,
    };
    let end = new.base.checked_add(new.pages);
    if end.is_none_or(|end| end > ArrayVm::COVERED) {
        return Err(RegionError::TooHigh(*region));
    }
    if let Some(old) = old {
        let readonly = |slot: &Slot| slot.flags.has(SlotFlags::READONLY);
        if (old.backing, old.pages) != (new.backing, new.pages) || readonly(old) != readonly(&new) {
            return Err(RegionError::Resized(new.id));
        }
    }
    match set.overlap(&(new.base..new.end()), new.id) {
        Some(other) => Err(RegionError::Overlap {
            region: *region,
            with: other.id,
        }),
        None => Ok(Some(new)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const DISPLACEMENT: u64 = 1 << 40;

    fn region(id: u32, base: u64, pages: u64) -> Region {
        bare::region(
            id,
            base << PAGE_SHIFT,
            pages,
            DISPLACEMENT + (base << PAGE_SHIFT),
        )
    }

    fn random(seed: &mut u64) -> u64 {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        *seed
    }

    #[test]
    fn after_every_change_the_array_holds_what_a_map_holds() {
        const PAGES: u64 = 400;
        let vm = ArrayVm::new(DISPLACEMENT);
        let slat = bare::vm();
        let mut model: BTreeMap<u32, Region> = BTreeMap::new();
        let mut seed = 88;
        for _ in 0..4000 {
            let id = random(&mut seed) as u32 % 40;
            let base = random(&mut seed) % PAGES;
            let change = match (model.get(&id), random(&mut seed) % 3) {
                (Some(_), 0) => region(id, 0, 0),
                // A change that moves a slot does not change the memory that backs the slot.
                (Some(old), _) => (*old).with_gpa(Gpa(base << PAGE_SHIFT)),
                (None, _) => region(id, base, 1 + random(&mut seed) % 12),
            };
            let answer = vm.set_memory_region(&change);
            assert_eq!(answer, bare::set(&slat, &change), "{change:?}");
            match answer {
                Err(_) => {}
                Ok(()) if change.size == 0 => drop(model.remove(&id)),
                Ok(()) => drop(model.insert(id, change)),
            }
            let set = vm.current();
            assert!(set.slots.is_sorted_by_key(|slot| slot.base));
            let mut there: Vec<_> = set.slots.iter().map(|slot| slot.id).collect();
            there.sort_unstable();
            assert!(there.iter().eq(model.keys()));
            for page in 0..PAGES + 20 {
                let found = set.find(page).map(|place| set.slots[place].id);
                let holds = |r: &&Region| (page << PAGE_SHIFT).wrapping_sub(r.gpa.0) < r.size;
                assert_eq!(found, model.values().find(holds).map(|r| r.slot));
            }
            let range = Hva(DISPLACEMENT + (base << PAGE_SHIFT));
            let range = range..range.add_pages(3);
            let backed: u64 = set.backed_by(&range).map(|g| g.end.0 - g.start.0).sum();
            let expected = model.values().map(|r| {
                let start = r.backing.0.max(range.start.0);
                (r.backing.0 + r.size)
                    .min(range.end.0)
                    .saturating_sub(start)
                    >> PAGE_SHIFT
            });
            assert_eq!(backed, expected.sum::<u64>());
        }
    }

    #[test]
    fn what_is_invalidated_or_has_moved_away_is_in_the_tables_no_more() {
        let vm = ArrayVm::new(DISPLACEMENT);
        vm.set_memory_region(&region(0, 0, 8)).unwrap();
        vm.set_memory_region(&region(1, 8, 8)).unwrap();
        let mut vcpu = vm.create_vcpu();
        vcpu.enter();
        let gpa = |page: u64| Gpa(page << PAGE_SHIFT);
        for page in 0..16 {
            let there = vcpu.fault(gpa(page), Access::Write).unwrap();
            assert_eq!(there.host.0, DISPLACEMENT + gpa(page).0);
        }
        vcpu.leave();
        let hva = Hva(DISPLACEMENT + gpa(3).0);
        drop(vm.invalidate(hva..hva.add_pages(2)));
        assert_eq!(vm.stats().pages_4k, 14);
        let moved = region(1, 8, 8).with_gpa(gpa(100));
        vm.set_memory_region(&moved).unwrap();
        assert_eq!(vm.stats().pages_4k, 6);
        vcpu.enter();
        let gone = vcpu.fault(gpa(9), Access::Write);
        assert_eq!(gone, Err(Stop::Mmio { gpa: gpa(9) }));
    }

    #[test]
    fn a_fault_during_an_invalidation_has_to_come_again() {
        let vm = ArrayVm::with_slots(0, &[bare::region(0, 0, 8, 0)]).unwrap();
        let mut vcpu = vm.create_vcpu();
        let invalidation = vm.invalidate(Hva(0)..Hva(4096));
        vcpu.enter();
        assert_eq!(vcpu.fault(Gpa(0), Access::Read), Err(Stop::Retry));
        drop(invalidation);
        assert!(vcpu.fault(Gpa(0), Access::Read).is_ok());
    }
}
