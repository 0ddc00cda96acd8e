//! Translation of guest-virtual addresses, with the shadow MMU: from the guest's own tables to host pages in one walk.
//!
//! 1. The shadow table: no lock, no slot, and no entry of the guest's is read ([`Vcpu::translate_virtual`]).
//! 2. A walk of the guest's tables ([`crate::guest_walk`]), which decides whether the access is allowed, and sets flags. The
//!    tables are reached by guest-physical addresses, which the MMU translates, too ([`Vcpu::translate`]).
//! 3. A fault ([`super::fault`]), with the entries of that walk as its [`Trail`].
//!
//! A shadow leaf cannot grant all that the guest's tables do: a supervisor that ignores the missing right to write
//! (CR0.WP clear) gets its translation from steps 2 and 1 of the physical address, and no shadow leaf.

use core::fmt;
use core::ops::Range;

use super::Vcpu;
use super::fault::{Detour, Fault, Outcome, Want};
use super::translate::{Stop, Translation, translation};
use crate::addr::{Access, Gfn, Gpa, Gva, Hpa, Level, PAGE_SIZE, PageIndex, Pfn};
use crate::format::{Entry, Format};
use crate::frame::ENTRIES;
use crate::guest_walk::{GuestPaging, GuestTables, Mode, PageRights, WalkError, walk_with_path};
use crate::platform::Platform;
use crate::shadow::{Compared, ReadEntries, ShadowMmu};
use crate::table::{ByIndex, Found, Key, Root, Target, lookup_in};
use crate::trail::{PageOf, Role, Seen, Trail, of_mmio_note};

/// Access to host memory that holds the guest's tables, by the addresses that the platform gave to the engine.
pub trait HostWords {
    /// Why host memory cannot be accessed now.
    type Error;

    /// Reads the entry of `size` (4 or 8) bytes at `host`, a multiple of `size`, atomically.
    ///
    /// # Errors
    /// The implementor's; the translation ends with it.
    fn read(&mut self, host: Hpa, size: usize) -> Result<u64, Self::Error>;

    /// Atomically replaces the entry of `size` bytes at `host` by `new` if it still is `old`. Returns whether it did.
    ///
    /// # Errors
    /// The implementor's; the translation ends with it.
    fn compare_exchange(
        &mut self,
        host: Hpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Self::Error>;
}

/// A page of guest-virtual memory, as it is accessed with the privilege of the translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtualPage {
    /// The first byte of the 4 KiB host page.
    pub host: Hpa,
    /// The size of the guest's page that contains it is at most 2^`bits` bytes: INVLPG drops all of that.
    pub bits: u32,
    /// Further reads need no new translation.
    pub read: bool,
    /// Further writes need no new translation.
    pub write: bool,
    /// Further fetches need no new translation.
    pub execute: bool,
    /// Of a translation for a write: the page, at this guest-physical address, holds a table of the guest's. After the store
    /// call [`Vcpu::stored`].
    pub tracked: Option<Gpa>,
}

/// Why a guest-virtual address has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VirtualStop<E> {
    /// The guest gets #PF with this error code ([`crate::guest_walk::error_code`]).
    PageFault {
        /// The error code.
        code: u32,
    },
    /// As for a guest-physical address.
    Stop(Stop),
    /// The guest's tables could not be accessed.
    Memory(E),
}

impl<E> From<Stop> for VirtualStop<E> {
    fn from(stop: Stop) -> Self {
        VirtualStop::Stop(stop)
    }
}

impl<E: fmt::Display> fmt::Display for VirtualStop<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VirtualStop::PageFault { code } => {
                write!(f, "guest access: #PF with error code {code:#x}")
            }
            VirtualStop::Stop(stop) => stop.fmt(f),
            VirtualStop::Memory(error) => write!(f, "guest access: its tables: {error}"),
        }
    }
}

impl<E: fmt::Display + fmt::Debug> core::error::Error for VirtualStop<E> {}

/// The guest's table in which flags were set last, in a slot without a log: further flags need no translation. It is one of those
/// that [`Vcpu::translate`] returns, and void when they are.
#[derive(Clone, Copy)]
pub(super) struct FlagsIn {
    gfn: Gfn,
    /// The table's host page.
    host: Hpa,
    /// Of the slots. A log that begins does not flush a page that was not writable.
    generation: u64,
}

/// The roots of the tables for the guest's address space that was used last.
#[derive(Default)]
pub(super) struct Roots {
    /// What they depend on.
    of: Option<RootsOf>,
    /// By the address bits that choose between four, where there are four: with 32-bit and PAE paging.
    roots: [Option<Root>; 4],
    /// [`ShadowMmu::roots_zapped`](crate::shadow::ShadowMmu) when they were found.
    zapped: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct RootsOf {
    cr3: u64,
    mode: Mode,
    pdptes: Option<[u64; 4]>,
    no_execute: bool,
    physical_bits: u32,
}

impl RootsOf {
    fn new(paging: &GuestPaging) -> Self {
        RootsOf {
            cr3: paging.cr3,
            mode: paging.mode,
            pdptes: paging.pdptes.filter(|_| paging.mode == Mode::Pae),
            no_execute: paging.no_execute,
            physical_bits: paging.physical_bits,
        }
    }
}

/// Returns which of the four roots translates `gva`.
fn root_index(paging: &GuestPaging, gva: u64) -> usize {
    match paging.mode {
        Mode::Bits32 { .. } | Mode::Pae => (gva >> 30 & 3) as usize,
        Mode::Level4 | Mode::Level5 => 0,
    }
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Returns the host page that `gva` translates to for `access`, in the state `paging`: by a walk of the shadow table; and by
    /// one of the guest's tables, which `words` accesses, and a fault if that finds nothing that allows the access. The
    /// translation may be used until [`Vcpu::quiesce`] or [`Vcpu::leave`], or until the guest flushes it.
    ///
    /// # Errors
    /// [`VirtualStop`]. After [`Stop::Retry`] all earlier translations are void.
    ///
    /// # Panics
    /// If the vCPU was not entered, or the VM was not made with [`MmuKind::Shadow`](crate::MmuKind).
    pub fn translate_virtual<W: HostWords>(
        &mut self,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        words: &mut W,
    ) -> Result<VirtualPage, VirtualStop<W::Error>> {
        let root = self.guest_root(gva, paging);
        if let Some(answer) = self.translate_shadowed(gva, access, paging, root) {
            return answer.map_err(VirtualStop::Stop);
        }
        self.translate_by_guest(gva, access, paging, words)
    }

    /// Returns the root for `gva`. `None`: there is no shadow page for the guest's table yet.
    pub(super) fn guest_root(&mut self, gva: u64, paging: &GuestPaging) -> Option<Root> {
        let mmu = self.tables().shadow();
        let zapped = mmu.expect("a VM with the shadow MMU").roots_zapped();
        let of = Some(RootsOf::new(paging));
        if self.roots.of != of || self.roots.zapped != zapped {
            self.presence.tables.clear();
            self.roots = Roots {
                of,
                zapped,
                roots: [None; 4],
            };
        }
        let index = root_index(paging, gva);
        if self.roots.roots[index].is_none() {
            let (gfn, role) = Role::root(paging, gva)?;
            self.roots.roots[index] = self.tables().shadow()?.root_of(gfn, role);
        }
        self.roots.roots[index]
    }

    /// Returns whether a walk may begin with the root of `target`, which was found before the vCPU last left its reader
    /// section. Until it leaves, the answer holds.
    pub(super) fn may_walk_from(&self, target: Target<'_>) -> bool {
        let zapped = |mmu: &ShadowMmu<P, F>| mmu.roots_zapped();
        target.trail::<F>().is_none()
            || self.tables().shadow().map(zapped) == Some(self.roots.zapped)
    }

    /// Returns what the shadow table says of an access to `gva`. `None`: it does not allow the access.
    fn translate_shadowed(
        &mut self,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        root: Option<Root>,
    ) -> Option<Result<VirtualPage, Stop>> {
        let key = Key {
            context: root?,
            index: PageIndex::of_gva(gva),
        };
        let strict = paging.strict();
        let cached = self.presence.tables.get(Gva(gva));
        loop {
            let found = match cached {
                // SAFETY: a walk has found the table, as in `cached_leaf`.
                Some(table) => unsafe { lookup_in(&*self.vm.platform, table, key.index) },
                None => self.tables().lookup(key),
            };
            let rights = |write, user, execute, key| PageRights {
                write,
                user,
                execute,
                key,
            };
            return match found.entry::<F>() {
                Entry::Leaf(leaf) => {
                    let (user, key) = (leaf.privilege.is_user(), leaf.privilege.key());
                    let granted = rights(leaf.write, user, leaf.execute, key);
                    if !granted.allow(&strict, access) {
                        return None;
                    }
                    let write = access == Access::Write;
                    if !found.mark::<F>(write) {
                        continue;
                    }
                    let dirty = leaf.dirty || write;
                    let pfn = leaf.pfn.add(gva >> 12 & (found.level.pages() - 1));
                    let page = VirtualPage {
                        host: pfn.hpa(),
                        bits: self.guest_bits(&found, paging),
                        read: granted.allow(&strict, Access::Read),
                        write: dirty && granted.allow(&strict, Access::Write),
                        execute: granted.allow(&strict, Access::Execute),
                        tracked: None,
                    };
                    if found.level == Level::PAGE {
                        let table = found.table;
                        self.presence.tables.put(Gva(gva), table);
                    }
                    Some(Ok(page))
                }
                Entry::Mmio { generation, note } if self.is_current(generation) => {
                    let (gfn, rights) = of_mmio_note(note);
                    rights.allow(&strict, access).then(|| {
                        self.counters().mmio_cached.add(1);
                        let gpa = Gpa(gfn.gpa().0 + gva % PAGE_SIZE);
                        Err(Stop::Mmio { gpa })
                    })
                }
                _ => None,
            };
        }
    }

    /// Returns log2 of the size of the guest's page that the leaf `found` maps, or a larger number.
    fn guest_bits(&self, found: &Found<'_>, paging: &GuestPaging) -> u32 {
        match found.level {
            Level::PAGE if !self.maps_parts(found.table) => 12,
            Level::MEGA if !self.maps_parts(found.table) && paging.has_long_entries() => 21,
            Level::MEGA if !self.maps_parts(found.table) => 22,
            _ => 30,
        }
    }

    fn maps_parts(&self, table: Pfn) -> bool {
        self.tables().shadow().is_some_and(|mmu| {
            // SAFETY: a walk in this reader section has reached the table.
            unsafe { mmu.maps_parts(table) }
        })
    }

    /// Does what [`Vcpu::translate_virtual`] does if the shadow table did not suffice.
    #[cold]
    fn translate_by_guest<W: HostWords>(
        &mut self,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        words: &mut W,
    ) -> Result<VirtualPage, VirtualStop<W::Error>> {
        self.presence.tables.forget(Gva(gva));
        self.counters().pf_taken.add(1);
        let mut slept = false;
        let result = loop {
            if self.prepare().is_err() {
                break Err(Stop::OutOfMemory { gpa: Gpa(gva) }.into());
            }
            self.make_room(&mut slept);
            match self.attempt_by_guest(gva, access, paging, words, &mut slept) {
                Ok(None) if !slept => {}
                Ok(None) => break Err(Stop::Retry.into()),
                Ok(Some(page)) => break Ok(page),
                Err(stop) => break Err(stop),
            }
        };
        match (slept, &result) {
            // A fault of the guest's does not use what it was told before.
            (true, Ok(_)) => Err(Stop::Retry.into()),
            _ => result,
        }
    }

    /// Walks the guest's tables, and installs what that has found. `None`: something has changed meanwhile.
    fn attempt_by_guest<W: HostWords>(
        &mut self,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        words: &mut W,
        slept: &mut bool,
    ) -> Result<Option<VirtualPage>, VirtualStop<W::Error>> {
        let mut tables = Tables {
            vcpu: self,
            words,
            seen: Seen::default(),
        };
        let walked = walk_with_path(&mut tables, paging, gva, access);
        let seen = tables.seen;
        let (page, path) = match walked {
            Ok(found) => found,
            Err(WalkError::Memory(stop)) => return Err(stop),
            Err(WalkError::PageFault { code }) => {
                self.counters().pf_guest.add(1);
                // SDM 3A, "Operations that Invalidate TLBs and Paging-Structure Caches": a page fault does, too.
                self.follow_address(gva, paging, words, slept);
                return Err(VirtualStop::PageFault { code });
            }
        };
        let gpa = Gpa(page.gpa.0 + gva % PAGE_SIZE);
        let trail = Trail::new(paging, gva, access, &path, gpa.gfn(), seen);
        let strict = paging.strict();
        let Some(mut trail) = trail.filter(|trail| trail.rights.allow(&strict, access)) else {
            let found = self.translate(gpa, access)?;
            return Ok(Some(VirtualPage {
                host: found.host,
                bits: page.bits,
                read: page.read,
                write: page.write && found.write,
                execute: page.execute && found.execute,
                tracked: found.tracked.then_some(page.gpa),
            }));
        };
        let index = root_index(paging, gva);
        let (found, how) = loop {
            let key = Key {
                context: self.roots.roots[index].unwrap_or(self.context),
                index: PageIndex::of_gva(gva),
            };
            let want = Want {
                target: Target {
                    key,
                    trail: Some(&trail),
                },
                gpa,
                access,
                stores: true,
            };
            let mut fault = Fault::new(self, want);
            let attempt = fault.attempt();
            let root = fault.root;
            *slept |= fault.slept;
            if root.is_some() {
                self.roots.roots[index] = root;
            }
            match attempt {
                Ok(found) => break found,
                Err(Detour::Unsynced(level)) => {
                    let mmu = self.tables().shadow();
                    let Some(page) = mmu.and_then(|mmu| mmu.page_on(&trail, level)) else {
                        return Ok(None);
                    };
                    let compared = self.sync(page, 0..ENTRIES, words, slept);
                    let goes_on = compared.is_some_and(|compared| {
                        let (before, after) = compared.changes;
                        trail.was_compared(&page, before, after)
                    });
                    if !goes_on {
                        return Ok(None);
                    }
                }
                Err(Detour::Again) => return Ok(None),
                Err(Detour::Mended) => return Err(Stop::Retry.into()),
                Err(Detour::Stop(stop)) => {
                    if let Stop::Mmio { .. } = stop {
                        self.count_fault(Outcome::Emulated);
                    }
                    return Err(stop.into());
                }
            }
        };
        self.count_fault(match found.tracked {
            true => Outcome::Emulated,
            false => how,
        });
        let made = matches!(how, Outcome::Fixed { fast: false });
        if made && found.level == Level::PAGE && !*slept {
            self.prefetch_guest(gva, &trail, words);
        }
        let granted = PageRights {
            write: found.write,
            execute: found.execute,
            ..trail.rights
        };
        Ok(Some(VirtualPage {
            host: found.host,
            bits: page.bits,
            read: granted.allow(&strict, Access::Read),
            write: granted.allow(&strict, Access::Write),
            execute: granted.allow(&strict, Access::Execute),
            tracked: found.tracked.then_some(page.gpa),
        }))
    }

    /// Returns the host page of the guest's table at `gpa`, to set a flag in it.
    fn reach_flags(&mut self, gpa: Gpa) -> Result<Hpa, Stop> {
        let (gfn, generation) = (gpa.gfn(), self.slots().generation);
        if let Some(last) = self.flags_in
            && (last.gfn, last.generation) == (gfn, generation)
        {
            return Ok(last.host);
        }
        let host = self.reach_table(gpa, Access::Write)?.host;
        let (slots, slot) = self.find_slot(gfn);
        let is_logged = slot.is_none_or(|slot| slot.log().is_some());
        let generation = slots.generation;
        self.flags_in = (!is_logged).then_some(FlagsIn {
            gfn,
            host,
            generation,
        });
        Ok(host)
    }

    /// Returns whether a walk to `gva` reads the guest's table in `gfn`.
    pub(super) fn walks_with<W: HostWords>(
        &mut self,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        words: &mut W,
        gfn: Gfn,
    ) -> bool {
        let mut tables = Tables {
            vcpu: self,
            words,
            seen: Seen::default(),
        };
        // However the walk ends.
        let _ = walk_with_path(&mut tables, paging, gva, access);
        tables.seen.has(gfn)
    }

    /// Translates a guest-physical address for an access to the guest's tables, which is no fault of the guest's.
    pub(super) fn reach_table(&mut self, gpa: Gpa, access: Access) -> Result<Translation, Stop> {
        if let Some(leaf) = self.cached_leaf(gpa, access) {
            return Ok(translation(leaf, Level::PAGE, gpa.gfn()));
        }
        if let Some(Ok(found)) = self.walk(gpa)
            && let Some(leaf) = found.ready::<F>(access)
        {
            let table = found.table;
            // SAFETY: the walk has found the leaf in this table just now.
            unsafe { self.remember(gpa, table) };
            return Ok(translation(leaf, Level::PAGE, gpa.gfn()));
        }
        self.translate_uncounted(gpa, access)
    }

    /// Call after a store of the guest's to `bytes` bytes at `gpa`, in one page, that a translation called tracked, is
    /// complete. Zaps what the MMU has made of the old contents. Returns whether all translations that the CPU remembers are void
    /// now.
    ///
    /// # Panics
    /// If the vCPU was not entered.
    #[must_use = "the CPU must not use translations that are void"]
    pub fn stored(&mut self, gpa: Gpa, bytes: u64) -> bool {
        self.counters().mmu_pte_write.add(1);
        let range = gpa..Gpa(gpa.0 + bytes);
        let Some(mmu) = self.tables().shadow() else {
            return false;
        };
        let mut slept = false;
        if mmu.stored(range.clone()) {
            self.outside(&mut slept, |vcpu| vcpu.vm().follow(vcpu.space(), &range));
        }
        slept
    }

    /// Call when the guest executes INVLPG for `gva`, or INVPCID for that address in the current PCID. The caller drops what
    /// its CPU remembers of the address. Returns whether all other translations that it remembers are void, too.
    ///
    /// # Panics
    /// If the vCPU was not entered.
    #[must_use = "the CPU must not use translations that are void"]
    pub fn invlpg<W: HostWords>(&mut self, gva: u64, paging: &GuestPaging, words: &mut W) -> bool {
        self.counters().invlpg.add(1);
        self.presence.tables.clear();
        let mut slept = false;
        self.follow_address(gva, paging, words, &mut slept);
        slept
    }

    /// Compares what was made of the guest's tables for `gva` with them, if it may differ.
    fn follow_address<W: HostWords>(
        &mut self,
        gva: u64,
        paging: &GuestPaging,
        words: &mut W,
        slept: &mut bool,
    ) {
        let key = Key {
            context: self.context,
            index: PageIndex::of_gva(gva),
        };
        let Some(root) = Role::root(paging, gva) else {
            return;
        };
        let mmu = self.tables().shadow();
        if let Some((page, index)) = mmu.and_then(|mmu| mmu.begin_sync_of(key, root)) {
            self.sync(page, index..index + 1, words, slept);
        }
    }

    /// Call when the guest executes an instruction that flushes its TLB: a load of CR3 (but for one that keeps the TLB), a change
    /// of CR0 or CR4 that flushes, INVPCID of more than an address. Tables of the guest's that it may store to unnoticed are
    /// compared with what was made of them. The caller drops what its CPU remembers.
    ///
    /// # Panics
    /// If the vCPU was not entered.
    pub fn flush_guest<W: HostWords>(&mut self, words: &mut W) {
        /// How many pages are compared at a time.
        const SOME: usize = 32;
        self.presence.tables.clear();
        while self.tables().shadow().is_some_and(|mmu| mmu.has_unsynced()) {
            let mut pages = [None; SOME];
            let mut count = 0;
            let flushed = self.outside(&mut false, |vcpu| {
                vcpu.vm().begin_sync(vcpu.space(), |page| {
                    let free = pages.get_mut(count);
                    count += usize::from(free.is_some());
                    free.map(|free| *free = Some(page)).is_some()
                })
            });
            self.set_flushed(flushed);
            let mut left = false;
            for page in pages.into_iter().flatten() {
                self.sync(page, 0..ENTRIES, words, &mut false);
                left |= self
                    .tables()
                    .shadow()
                    .is_some_and(|mmu| mmu.is_unsynced(&page));
            }
            if count < SOME {
                return;
            }
            if left {
                // Other CPUs store to these tables all the time: the rest would not be reached.
                for page in pages.into_iter().flatten() {
                    self.forget_table(page.gfn);
                }
            }
        }
    }

    /// Compares the entries `indexes` of `page` with the guest's, and zaps those that it does not grant any more. `None`:
    /// there were some.
    fn sync<W: HostWords>(
        &mut self,
        page: PageOf,
        indexes: Range<usize>,
        words: &mut W,
        slept: &mut bool,
    ) -> Option<Compared> {
        let mut entries = [0; ENTRIES];
        let entries = &mut entries[..indexes.len()];
        let Some(changes) = self.read_table(&page, indexes.start, entries, words) else {
            // The guest's table cannot be read now.
            *slept = true;
            self.forget_table(page.gfn);
            return None;
        };
        let read = ReadEntries {
            page,
            indexes,
            entries,
            changes,
            flushed: self.flushed.clone(),
        };
        let compared = self.tables().shadow()?.compare(&read);
        match &compared {
            Some(compared) => self.counters().mmu_unsync.sub(compared.synced.into()),
            None => self.outside(slept, |vcpu| {
                vcpu.vm().zap_ungranted(vcpu.space(), &read);
            }),
        }
        compared
    }

    /// Reads the guest's entries for those of `page` from index `first` on. Returns the number of changes of the table from
    /// before.
    fn read_table<W: HostWords>(
        &mut self,
        page: &PageOf,
        first: usize,
        entries: &mut [u64],
        words: &mut W,
    ) -> Option<u64> {
        let changes = self.tables().shadow()?.changes_of(page.gfn);
        let mut host = self.reach_table(page.gfn.gpa(), Access::Read);
        if host == Err(Stop::Retry) {
            // The first try may have slept while it made the page accessible.
            host = self.reach_table(page.gfn.gpa(), Access::Read);
        }
        let host = host.ok()?.host;
        for (i, entry) in entries.iter_mut().enumerate() {
            let (gpa, size) = page.guest_entry(first + i);
            *entry = words.read(Hpa(host.0 + gpa.offset()), size).ok()?;
        }
        Some(changes)
    }

    /// Zaps what was made of the guest's table in `gfn`.
    pub(super) fn forget_table(&mut self, gfn: Gfn) {
        let gfns = gfn..gfn.add(1);
        self.outside(&mut false, |vcpu| {
            vcpu.vm().forget_tables(vcpu.space(), &gfns);
        });
    }
}

/// The guest's tables, for a walk.
struct Tables<'v, P: Platform, F: Format, W> {
    vcpu: &'v mut Vcpu<P, F>,
    words: &'v mut W,
    seen: Seen,
}

impl<P: Platform, F: Format, W: HostWords> GuestTables for Tables<'_, P, F, W> {
    type Error = VirtualStop<W::Error>;

    fn read(&mut self, gpa: Gpa, size: usize) -> Result<u64, Self::Error> {
        if let Some(mmu) = self.vcpu.tables().shadow() {
            self.seen.reads(gpa, mmu.changes_of(gpa.gfn()));
        }
        match self.vcpu.reach_table(gpa, Access::Read) {
            Ok(found) => {
                self.vcpu.count_guest_pte_read();
                let entry = self.words.read(Hpa(found.host.0 + gpa.offset()), size);
                entry.map_err(VirtualStop::Memory)
            }
            // A table that is not in memory maps nothing.
            Err(Stop::Mmio { .. }) => Ok(0),
            Err(stop) => Err(stop.into()),
        }
    }

    fn compare_exchange(
        &mut self,
        gpa: Gpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Self::Error> {
        match self.vcpu.reach_flags(gpa) {
            Ok(page) => {
                let host = Hpa(page.0 + gpa.offset());
                let done = self.words.compare_exchange(host, size, old, new);
                done.map_err(VirtualStop::Memory)
            }
            // The flags of tables in read-only memory do not change.
            Err(Stop::Mmio { .. }) => Ok(true),
            Err(stop) => Err(stop.into()),
        }
    }
}
