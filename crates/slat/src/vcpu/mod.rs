//! A CPU as the engine sees it: its reader ([`crate::sync::quiesce`]), the frames for tables that it has allocated in
//! advance, the slots that it used recently ([`recent_slots`]), and the tables that it walked recently
//! ([`paging_structure_cache`]).

mod create;
mod fault;
mod guest;
mod hardware;
mod paging_structure_cache;
mod plan;
mod prefetch;
mod presence;
mod recent_slots;
mod section;
mod slot_facts;
mod streams;
mod translate;
mod walker;

pub use create::CreateVcpuError;
pub use guest::{HostWords, VirtualPage, VirtualStop};
pub use hardware::AfterPageFault;
pub use section::Entered;
pub use translate::{Stop, Translation};

use alloc::sync::Arc;
use core::ptr::NonNull;

use self::paging_structure_cache::TableRegion;
use crate::addr::{Access, Gfn, Gpa, Level, PageIndex, Pfn};
use crate::format::{Format, Leaf, can_shadow};
use crate::heap::OutOfMemory;
use crate::mmu::Mmu;
use crate::platform::Platform;
use crate::slots::{Memslot, Region, SlotSet};
use crate::stats::{Counters, Stats};
use crate::sync::InSection;
use crate::sync::quiesce::{Attention, Reader};
use crate::table::{
    Cursor, Flushed, Found, FrameCache, Key, Path, Reached, Root, lookup_in, lookup_page,
};
use crate::vm::{DirtyRing, Space, Vm};
use presence::Presence;
use recent_slots::RecentSlots;
use streams::Streams;

/// A vCPU. Only one thread at a time uses it.
///
/// Flushes wait for a vCPU while it is [entered](Self::enter): it must call [`quiesce`](Self::quiesce) soon after
/// [`Attention::FLUSH`] is set in its attention word. The vCPU of a hardware CPU is entered only while it handles an
/// exit ([`hardware_fault`](Self::hardware_fault) enters and leaves). That of a software CPU is entered while it runs
/// guest code:
///
/// ```
/// # use slat_model::{HostMemory, SimPlatform};
/// # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
/// # use slat::{Config, Ept, Region, Vm};
/// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
/// # vm.set_memory_region(0, &Region::new(0, Gpa(0), 0x20_0000, backing))?;
/// use slat::{Access, Gpa, Stop};
///
/// let mut vcpu = vm.create_vcpu()?;
/// let mut vcpu = vcpu.enter(0);
/// let page = loop {
///     match vcpu.translate(Gpa(0x1000), Access::Read) {
///         Err(Stop::Retry) => vcpu.quiesce(),
///         result => break result?,
///     }
/// };
/// // The page may be used until `quiesce`, or until `vcpu` is dropped.
/// # let _ = page;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Vcpu<P: Platform, F: Format> {
    vm: Arc<Vm<P, F>>,
    /// The vCPU's reader, which is one of `vm.readers`, and its paging-structure cache.
    presence: Presence,
    /// The number of the vCPU's address space, to which `context`, `recent`, `roots`, `flags_in` and the tables in
    /// `presence` belong.
    space: usize,
    /// The root from which the vCPU's walks by guest-physical addresses start.
    context: Root,
    token: usize,
    frames: FrameCache,
    /// The last flush that this vCPU has done itself.
    flushed: Flushed,
    recent: RecentSlots,
    streams: Streams,
    /// The roots from which walks by guest-virtual addresses start.
    roots: guest::Roots,
    flags_in: Option<guest::FlagsIn>,
    ring: Option<Arc<DirtyRing>>,
    /// The values of the reader's counters when this vCPU got the reader, which earlier vCPUs may have used.
    counted_before: Stats,
}

/// The parts of an entered vCPU that a fault uses, as separate references.
pub(crate) struct Parts<'v, P: Platform, F: Format> {
    pub(crate) vm: &'v Vm<P, F>,
    pub(crate) tables: &'v Mmu<P, F>,
    pub(crate) slots: &'v SlotSet,
    pub(crate) ring: Option<&'v DirtyRing>,
    /// A cursor that continues the walk that the caller has paused.
    pub(crate) cursor: Cursor<'v, P, F>,
    /// The resources for an install, including the frames that were allocated in advance.
    pub(crate) path: Path<'v>,
    pub(crate) counters: &'v Counters,
}

/// The position at which a walk of a vCPU has ended. A function of the vCPU may keep it while it leaves the reader
/// section and enters a new one.
#[derive(Clone, Copy)]
pub(crate) struct PausedWalk {
    reached: Reached,
    /// The value of [`Vcpu::missed`] when the walk was paused.
    missed: u64,
}

impl PausedWalk {
    #[inline(always)]
    fn key(&self) -> Key {
        self.reached.key
    }
}

// SAFETY: the pointers point into `vm`, which is `Send + Sync`, and which the vCPU keeps alive; only one thread at a
// time uses the reader and the data that it protects, through `&mut self`.
unsafe impl<P: Platform, F: Format> Send for Vcpu<P, F> {}

/// The counters of a vCPU ([`Vcpu::watch_stats`]). They may be read at any time. After the vCPU was dropped, they may
/// include the counts of a later vCPU.
pub struct VcpuStats {
    /// The vCPU's reader, which exists as long as the VM.
    reader: NonNull<Reader>,
    counted_before: Stats,
    _vm: Arc<dyn Send + Sync>,
}

// SAFETY: the reader lives as long as the VM, and its counters are atomics.
unsafe impl Send for VcpuStats {}
// SAFETY: the reader lives as long as the VM, and its counters are atomics.
unsafe impl Sync for VcpuStats {}

impl VcpuStats {
    /// Returns the counts of the vCPU so far.
    pub fn get(&self) -> Stats {
        // SAFETY: readers live as long as the VM, which `_vm` keeps alive.
        let reader = unsafe { self.reader.as_ref() };
        reader.counters.snapshot().since(&self.counted_before)
    }
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    pub(crate) fn counters(&self) -> &Counters {
        &self.presence.reader().counters
    }

    /// Returns the VM to which the vCPU belongs.
    pub fn vm(&self) -> &Arc<Vm<P, F>> {
        &self.vm
    }

    /// Returns the key of a walk by guest-physical addresses to `gfn`: the root from which it starts, and the index.
    #[inline(always)]
    pub(crate) fn key(&self, gfn: Gfn) -> Key {
        Key {
            context: self.context,
            index: gfn.into(),
        }
    }

    pub(crate) fn space(&self) -> &Space<P, F> {
        &self.vm.spaces[self.space]
    }

    pub(crate) fn space_index(&self) -> usize {
        self.space
    }

    /// Returns the tables of the vCPU's address space. The reference is valid until the vCPU leaves its section.
    #[inline]
    pub(crate) fn tables(&self) -> &Mmu<P, F> {
        self.space().mmu.get(self.presence.section())
    }

    /// Returns the current slots of the vCPU's address space. The reference is valid until the vCPU leaves its section.
    #[inline]
    pub(crate) fn slots(&self) -> &SlotSet {
        self.space().slots.current(self.presence.section())
    }

    pub(crate) fn is_entered(&self) -> bool {
        self.presence.is_entered()
    }

    /// Returns a token that proves that the vCPU is in its reader section.
    #[inline]
    fn section(&self) -> InSection<'_> {
        self.presence.section()
    }

    /// Whether a walk to `gpa` may begin: the vCPU is entered, and the tables translate `gpa`.
    #[inline(always)]
    pub(crate) fn may_walk(&self, gpa: Gpa) -> bool {
        gpa < self.presence.walkable
    }

    /// Returns the leaf at level 1 for `gpa`, if its table is in the paging-structure cache and the leaf is ready for
    /// `access` ([`Found::ready`]): it allows it, and the access need not set an accessed or dirty bit.
    #[inline(always)]
    pub(crate) fn cached_leaf(&self, gpa: Gpa, access: Access) -> Option<Leaf> {
        let region = TableRegion::of_gpa(gpa, F::GRANULE);
        let found = self.find_cached(region, F::GRANULE.gfn(gpa).into())?;
        found.ready::<F>(access)
    }

    /// Finds the entry of level 1 for `index`, if the table for `region` is in the paging-structure cache. While the
    /// vCPU is in no reader section, the cache is empty.
    #[inline(always)]
    fn find_cached(&self, region: TableRegion, index: PageIndex) -> Option<Found<'_>> {
        let table = self.presence.tables.get(region)?;
        // SAFETY: a walk of this vCPU has reached the table, and has put the table into the cache. Since then the
        // reader has stayed in one section and has passed no quiescent point, because a quiescent point empties the
        // cache (`Presence`) and needs `&mut self`.
        Some(unsafe { lookup_in::<P, F>(&*self.vm.platform, table, index) })
    }

    /// Walks from the root to `gpa` ([`lookup_page`]). `None`: the vCPU is not entered, or the tables do not translate
    /// `gpa`.
    #[inline(always)]
    pub(crate) fn walk(&self, gpa: Gpa) -> Option<Result<Found<'_>, Found<'_>>> {
        if !self.may_walk(gpa) {
            return None;
        }
        // SAFETY: the key has the root of this vCPU's tree; a vCPU that may walk is in a section, and only methods that
        // take `&mut self` end the section.
        Some(unsafe { lookup_page::<P, F>(&*self.vm.platform, self.key(F::GRANULE.gfn(gpa))) })
    }

    /// Puts `table`, if there is one, in the paging-structure cache.
    ///
    /// # Safety
    /// - `table` is the result of [`Found::to_remember`] for the entry of level 1 that [`Vcpu::walk`] has found for
    ///   `gpa`, and the vCPU has passed no quiescent point since this walk.
    #[inline(always)]
    pub(crate) unsafe fn remember(&mut self, gpa: Gpa, table: Option<Pfn>) {
        if let Some(table) = table {
            let region = TableRegion::of_gpa(gpa, F::GRANULE);
            self.presence.tables.put(region, table);
        }
    }

    /// Drops the table for `gpa` from the paging-structure cache. Call before a fault at `gpa`.
    pub(crate) fn forget(&mut self, gpa: Gpa) {
        self.presence
            .tables
            .forget(TableRegion::of_gpa(gpa, F::GRANULE));
    }

    /// Makes a [`PausedWalk`] of the position `reached` by a walk in the current section.
    #[inline(always)]
    fn pause(&self, reached: Reached) -> PausedWalk {
        let missed = self.missed();
        PausedWalk { reached, missed }
    }

    /// Continues `walk`, stores its new position in `walk`, and returns the entry at which it ends.
    #[inline(always)]
    fn look(&self, walk: &mut PausedWalk) -> Found<'_> {
        let mut cursor = resume(
            &self.vm,
            &self.presence,
            self.tables(),
            (self.context, &self.roots),
            walk,
        );
        let found = cursor.find(Level::PAGE);
        *walk = self.pause(cursor.reached());
        found
    }

    /// Continues `walk`, and stores its new position in `walk`. Returns whether there is a level 1 table on its path
    /// that exists only because of `nx_huge_pages`.
    fn is_nx_split(&self, walk: &mut PausedWalk) -> bool {
        let mut cursor = resume(
            &self.vm,
            &self.presence,
            self.tables(),
            (self.context, &self.roots),
            walk,
        );
        let is_nx_split = cursor.is_nx_split();
        *walk = self.pause(cursor.reached());
        is_nx_split
    }

    /// Returns the parts of the vCPU that a fault uses, to continue `walk`.
    #[inline(always)]
    pub(crate) fn parts(&mut self, walk: &PausedWalk) -> Parts<'_, P, F> {
        let space = &self.vm.spaces[self.space];
        let inside = self.presence.section();
        let tables = space.mmu.get(inside);
        Parts {
            cursor: resume(
                &self.vm,
                &self.presence,
                tables,
                (self.context, &self.roots),
                walk,
            ),
            vm: &self.vm,
            tables,
            slots: space.slots.current(inside),
            ring: self.ring.as_deref(),
            path: Path {
                flushed: self.flushed.clone(),
                ..Path::new(&mut self.frames)
            },
            counters: &self.presence.reader().counters,
        }
    }

    /// Runs `then` on the VM and the vCPU's tables, with a cursor that continues `walk`, and the resources for an
    /// install.
    #[inline]
    pub(crate) fn on_tables<R>(
        &mut self,
        walk: &PausedWalk,
        then: impl FnOnce(&Vm<P, F>, &Mmu<P, F>, Cursor<'_, P, F>, &mut Path<'_>) -> R,
    ) -> R {
        let mut parts = self.parts(walk);
        let result = then(parts.vm, parts.tables, parts.cursor, &mut parts.path);
        parts.counters.path_done(&parts.path);
        result
    }

    pub(crate) fn set_flushed(&mut self, flushed: Flushed) {
        self.flushed = flushed;
    }

    pub(crate) fn ring(&self) -> Option<&Arc<DirtyRing>> {
        self.ring.as_ref()
    }

    /// Gives this vCPU the dirty ring that records its writes to logged slots ([`Vm::use_dirty_rings`]). No other vCPU
    /// may push to the ring. The vCPU keeps the ring until it gets another one or is dropped. After that the VM does
    /// not reset the ring any more, and write-protects the pages whose ring entries were not reset.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the vCPU keeps its old ring.
    ///
    /// # Panics
    /// If the vCPU is entered: in a reader section ([`Vcpu::enter`]).
    pub fn set_dirty_ring(&mut self, ring: Arc<DirtyRing>) -> Result<(), OutOfMemory> {
        assert!(
            !self.is_entered(),
            "Vcpu::set_dirty_ring inside enter/leave"
        );
        self.vm.add_ring(ring.clone())?;
        if let Some(old) = self.ring.replace(ring) {
            self.vm.remove_ring(&old);
        }
        Ok(())
    }

    /// Allocates the memory that a fault at `gpa` may need. If the fault could make the number of shadow pages exceed
    /// its limit, leaves the reader section to zap the oldest shadow pages.
    ///
    /// # Errors
    /// [`Stop::OutOfMemory`].
    #[inline]
    fn make_room(&mut self, gpa: Gpa) -> Result<(), Stop> {
        let prepared = self.prepare_for(FrameCache::FAULT);
        prepared.map_err(|_| Stop::OutOfMemory { gpa })?;
        self.recycle();
        Ok(())
    }

    /// If a fault could make the number of shadow pages exceed its limit, leaves the reader section to zap the oldest
    /// shadow pages.
    #[inline]
    fn recycle(&mut self) {
        let excess = self.vm.budget.excess();
        if excess > 0 {
            self.outside(|vcpu| vcpu.vm().recycle(vcpu.space(), excess));
        }
    }

    fn prepare_for(&mut self, tables: usize) -> Result<(), OutOfMemory> {
        let space = &self.vm.spaces[self.space];
        let mmu = space.mmu.get(self.presence.section());
        mmu.prepare(&mut self.frames, tables)
    }

    /// Allocates frames for a fault and up to `tables` tables in advance. Has no effect while there are enough frames
    /// for a fault; ignores a lack of memory.
    pub(crate) fn fill_frames_for(&mut self, tables: usize) {
        if !self.frames.serves_a_fault() {
            // The frames of one fault include one level 1 table, so `tables - 1` more are needed.
            let frames = (tables + FrameCache::FAULT - 1).min(FrameCache::BATCH);
            let _ = self.prepare_for(frames);
        }
    }

    /// Frees all frames that were allocated in advance except those that a fault needs.
    pub(crate) fn trim_frames(&mut self) {
        self.frames.keep(&*self.vm.platform, FrameCache::FAULT);
    }

    /// Returns the word that a software CPU reads at every block boundary. Any thread may set bits in the word at any
    /// time, also through a clone of the returned value.
    pub fn attention(&self) -> &Attention {
        self.presence.reader().attention()
    }

    /// Counts a read of an entry of the guest's own tables for this vCPU ([`crate::guest_walk::GuestTables::read`]).
    #[inline]
    pub fn count_guest_pte_read(&self) {
        self.counters().guest_pte_reads.add(1);
    }

    /// Returns the counts of this vCPU.
    pub fn stats(&self) -> Stats {
        self.counters().snapshot().since(&self.counted_before)
    }

    /// Returns an object by which any thread can read the counts of this vCPU, also while the vCPU runs.
    pub fn watch_stats(&self) -> VcpuStats {
        VcpuStats {
            reader: self.presence.reader,
            counted_before: self.counted_before,
            _vm: self.vm.clone(),
        }
    }

    /// Makes the vCPU use address space `space` from the next translation on. May be called inside and outside a reader
    /// section. Acknowledges no flush.
    ///
    /// Translations that the vCPU got before belong to the old address space. The caller must drop them before the
    /// guest executes again.
    ///
    /// ```
    /// # use slat_model::{HostMemory, SimPlatform};
    /// # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
    /// # use slat::{Access, Config, Ept, Gpa, Region, Stop, Vm};
    /// let vm = Vm::<_, Ept>::new(platform, Config::default().with_spaces(2))?;
    /// vm.set_memory_region(1, &Region::new(0, Gpa(0), 0x1000, backing))?;
    ///
    /// let mut vcpu = vm.create_vcpu()?;
    /// let mut vcpu = vcpu.enter(0);
    /// assert!(matches!(vcpu.translate(Gpa(0), Access::Read), Err(Stop::Mmio { .. })));
    /// vcpu.use_space(1);
    /// assert!(vcpu.translate(Gpa(0), Access::Read).is_ok());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Panics
    /// If the VM has no such address space.
    pub fn use_space(&mut self, space: usize) {
        self.context = self.vm.spaces[space].root();
        if space != self.space {
            self.moves(Some(self.space), Some(space));
        }
        self.space = space;
        self.presence.tables.clear();
        self.recent.clear();
        self.roots = guest::Roots::default();
        self.flags_in = None;
        self.streams = Streams::default();
    }

    /// Calls [`Vm::vcpu_moves`], if there is more than one address space.
    fn moves(&self, from: Option<usize>, to: Option<usize>) {
        if !self.vm.has_several_spaces() {
            return;
        }
        if self.is_entered() {
            let own = (self.section(), self.counters());
            return self.vm.vcpu_moves(from, to, own);
        }
        let section = self.vm.section();
        let own = (section.inside(), section.counters());
        self.vm.vcpu_moves(from, to, own);
    }

    /// Returns the memslot that contains `gpa`, by the same look-up as in a fault. `None`: no slot contains it. For
    /// clients that need the backing of guest memory but no translation.
    ///
    /// # Panics
    /// If the vCPU is not entered ([`Vcpu::enter`]).
    // Always inlined, so that a caller does not compute the fields of the result that it does not use.
    #[inline(always)]
    pub fn slot_at(&mut self, gpa: Gpa) -> Option<Region> {
        assert!(self.is_entered(), "Vcpu::slot_at outside enter/leave");
        let slot = self.find_slot(F::GRANULE.gfn(gpa)).1?;
        Some(Region {
            slot: slot.id(),
            flags: slot.flags(),
            gpa: F::GRANULE.gpa(slot.base()),
            size: slot.pages() << F::GRANULE.shift(),
            backing: slot.backing(),
            private: slot.private(),
            rights: slot.rights(),
            memory: slot.memory(),
        })
    }

    /// Returns the current slots, and the slot that contains `gfn`. Checks the recently used slots first.
    #[inline(always)]
    pub(crate) fn find_slot(&mut self, gfn: Gfn) -> (&SlotSet, Option<&Memslot>) {
        let slots = &self.vm.spaces[self.space].slots;
        let set = slots.current(self.presence.section());
        let counters = &self.presence.reader().counters;
        // SAFETY: `recent` belongs to the slots of this address space, and `set` is their current set, whose slots are
        // alive as long as this reader is in its section.
        let (slot, saved) = unsafe { self.recent.find(set, gfn) };
        match saved {
            true => counters.slot_lookups_saved.add(1),
            false => counters.slot_lookups.add(1),
        }
        (set, slot)
    }
}

/// Returns a cursor that continues `walk` in the vCPU's current section: from its position, or, if a flush has taken
/// place since it was paused, from its root. If the root is one of `roots`, and the MMU has zapped a root since these
/// were found, the cursor starts at the root `physical` instead. It then finds no shadow leaf, and the fault makes a
/// new root.
#[inline(always)]
fn resume<'v, P: Platform, F: Format>(
    vm: &'v Vm<P, F>,
    presence: &'v Presence,
    tables: &'v Mmu<P, F>,
    (physical, roots): (Root, &guest::Roots),
    walk: &PausedWalk,
) -> Cursor<'v, P, F> {
    let mut reached = walk.reached;
    if walk.missed != presence.missed {
        reached = Reached::nothing::<F>(reached.key);
    }
    if can_shadow::<F>() && reached.key.context != physical && !roots.are_in(tables) {
        reached = Reached::nothing::<F>(Key {
            context: physical,
            ..reached.key
        });
    }
    // SAFETY: the borrow of `tables` shows that the vCPU is in a section as long as the result is used. The root is the
    // permanent root of these tables, or a root of `roots`, of which none was zapped since they were found. The vCPU
    // has paused the walk, and has missed no flush since.
    unsafe { Cursor::new(&vm.platform, reached) }
}

impl<P: Platform, F: Format> Drop for Vcpu<P, F> {
    /// Gives up the dirty ring. If ring entries are not reset, this may wait as [`Vm::reset_dirty_rings`] does.
    fn drop(&mut self) {
        self.leave();
        self.moves(Some(self.space), None);
        if let Some(ring) = self.ring.take() {
            self.vm.remove_ring(&ring);
        }
        self.frames.release(&*self.vm.platform);
        self.vm.readers.release(self.presence.reader());
    }
}
