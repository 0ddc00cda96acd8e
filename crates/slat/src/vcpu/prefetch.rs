//! Maps resident pages around the page of a fault (prefetch), and whole ranges ahead of their use (prefault).
//!
//! A fault that installed a leaf of level 1 may also *look* at a window: an aligned range of pages around its page. It
//! maps the pages of the window that are resident and not mapped. It maps none in a slot that logs (mapped pages would
//! look written), and no frames with other memory attributes. After the install of a huge leaf there is nothing left to
//! map. A prefetched leaf starts with the accessed bit clear.
//!
//! Earlier faults determine which faults look, and how large the adaptive window is ([`super::streams`]). At first,
//! faults do not look. Some faults near each other form a stream: then the window opens, and doubles with each fault of
//! the stream, up to a whole table. So scattered accesses map no page in vain.
//!
//! To ask the host which pages are resident costs as much as several faults, for one page or for a hundred. So a fault
//! asks not only about its window, but about twice as many pages as the longest run in the host's last reply had. The
//! longest run in the new reply serves the next windows, too ([`Resident`]).

use core::ops::Range;

use super::fault::{FILLED, Fault};
use super::slot_facts::SlotFacts;
use super::streams::Resident;
use super::translate::Stop;
use super::{HostWords, PausedWalk, Vcpu};
use crate::addr::{Access, Gfn, Gpa, Hpa, Level, PageIndex};
use crate::format::{Entry, Format, Leaf, can_shadow};
use crate::guest_walk::PageRights;
use crate::platform::{HostPage, HostRun, Platform};
use crate::policy::Prefetch;
use crate::shadow::trail::{Meaning, Target, Trail};
use crate::sync::held;
use crate::table::{Key, Reached};
use crate::vm::Sequence;

impl<P: Platform, F: Format> Fault<'_, P, F> {
    /// If the fault has installed a new leaf of level 1, maps resident pages in the window around its page.
    #[inline]
    pub(super) fn prefetch(&mut self) {
        let policy = self.vcpu.vm().policy.prefetch();
        let slot = self.slot.as_ref().expect(FILLED);
        let small = self.level == Level::PAGE && slot.log.is_none();
        if !self.is_new || !small || policy == Prefetch::Off {
            return;
        }
        let trail = self.trail();
        // If the guest maps small pages, adjacent virtual pages need not be adjacent frames: see
        // `Vcpu::prefetch_guest`.
        if trail.is_some_and(|trail| trail.leaf_level() == Level::PAGE) {
            return;
        }
        let gfn = self.gfn();
        let vcpu = &mut *self.vcpu;
        let Some(window) = vcpu.streams.fault(gfn, policy) else {
            return;
        };
        let window = window.start.max(slot.gfns.start)..window.end.min(slot.gfns.end);
        let trail = trail.map(|trail| trail.beside(window.start, trail.rights));
        let walk = PausedWalk {
            reached: self.walk.reached.before(gfn.0 - window.start.0),
            ..self.walk
        };
        let at = (walk, trail.as_ref());
        let installed = vcpu.map_for_stream(window, at, slot, self.sequence);
        vcpu.streams.looked(installed);
    }
}

/// A run of adjacent entries of a guest table that map consecutive frames with equal rights.
#[derive(Clone, Copy)]
struct GuestRun {
    index: PageIndex,
    gfn: Gfn,
    rights: PageRights,
    pages: u64,
}

/// The result of [`Vcpu::map_resident`] for a range.
struct Mapped {
    /// The first page of the range that is not mapped by then. It is not resident, or a larger leaf can map it.
    end: Gfn,
    /// The number of pages that the call mapped.
    installed: u64,
    /// Whether the platform reported all pages of the range as resident.
    all_resident: bool,
    /// The largest level at which a leaf can map the first page of the range; level 1 if that page is not resident.
    fits: Level,
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Maps pages beside the page of `gva`, which was just mapped by `trail`. Chooses those whose entries in the
    /// guest's level 1 table have the accessed flag set, and whose memory is resident (KVM: `pte_prefetch`).
    pub(super) fn prefetch_guest<W: HostWords>(&mut self, gva: u64, trail: &Trail, words: &mut W) {
        if trail.leaf_level() > Level::PAGE {
            return;
        }
        let page = PageIndex::of_gva(gva);
        let policy = self.vm().policy.prefetch();
        // Here a stream consists of faults at virtual pages near each other.
        if let Some(window) = self.streams.fault(page.as_gfn(), policy) {
            let first = page.at(Level::PAGE) - (page.as_gfn().0 - window.start.0) as usize;
            let last = first + (window.end.0 - window.start.0) as usize;
            let installed = self.map_guest_window(page, first..last, trail, words);
            self.streams.looked(installed);
        }
    }

    /// Maps the pages of the entries `window` of the guest table that maps `page`, as far as they are resident and not
    /// mapped yet. Returns the number of pages mapped.
    fn map_guest_window<W: HostWords>(
        &mut self,
        page: PageIndex,
        window: Range<usize>,
        trail: &Trail,
        words: &mut W,
    ) -> u64 {
        let sequence = self.vm().in_progress.sequence();
        let (table, role) = trail.page(Level::PAGE);
        let Some(host) = self.reach_mapped_table(table.gpa(), Access::Read) else {
            return 0;
        };
        let (mut installed, mut run) = (0, None::<GuestRun>);
        let at = page.at(Level::PAGE);
        for index in window {
            let offset = role.guest_index(index) as u64 * role.entry_size();
            let Ok(entry) = words.read(Hpa(host.host.0 + offset), role.entry_size() as usize)
            else {
                break;
            };
            self.count_guest_pte_read();
            let next = match role.meaning(index, entry) {
                Some(Meaning::Memory(gfn, rights)) if index != at => Some((gfn, rights)),
                _ => None,
            };
            match (&mut run, next) {
                (Some(run), Some((gfn, rights)))
                    if gfn == run.gfn.add(run.pages) && rights == run.rights =>
                {
                    run.pages += 1;
                }
                (_, next) => {
                    installed += self.map_guest_run(run, trail, sequence);
                    run = next.map(|(gfn, rights)| GuestRun {
                        index: page.with_entry(index),
                        gfn,
                        rights,
                        pages: 1,
                    });
                }
            }
        }
        installed + self.map_guest_run(run, trail, sequence)
    }

    /// Finds the slot of `gfn`. `None`: there is no slot, or it has no backing for the frame, or it logs, so that its
    /// pages must not be mapped before an access.
    #[inline]
    fn unlogged_slot(&mut self, gfn: Gfn) -> Option<SlotFacts> {
        let (set, slot) = self.find_slot(gfn);
        let slot = slot.filter(|slot| slot.log().is_none())?;
        SlotFacts::of::<F>(slot, gfn, &set.private)
    }

    /// Maps the pages of `run`, which are beside the page of `trail`, as far as they are resident and not mapped yet.
    /// Returns the number of pages mapped.
    fn map_guest_run(&mut self, run: Option<GuestRun>, trail: &Trail, sequence: Sequence) -> u64 {
        let Some(run) = run else {
            return 0;
        };
        let Some(slot) = self.unlogged_slot(run.gfn) else {
            return 0;
        };
        let end = run.gfn.add(run.pages).min(slot.gfns.end);
        let trail = trail.beside(run.gfn, run.rights);
        if !trail.fits::<F>() {
            return 0;
        }
        let key = Key {
            context: self.context,
            index: run.index,
        };
        let at = (self.pause(Reached::nothing::<F>(key)), Some(&trail));
        self.map_for_stream(run.gfn..end, at, &slot, sequence)
    }

    /// Calls [`Self::map_resident`] with the run of resident pages that the current stream remembers, and updates that
    /// run. Returns the number of pages mapped.
    fn map_for_stream(
        &mut self,
        range: Range<Gfn>,
        at: (PausedWalk, Option<&Trail>),
        slot: &SlotFacts,
        sequence: Sequence,
    ) -> u64 {
        let mut resident = self.streams.current().resident;
        let mapped = self.map_resident(range, at, slot, sequence, &mut resident);
        self.streams.current().resident = resident;
        mapped.installed
    }

    /// Maps the pages of `range` that are resident and not mapped yet, with leaves of level 1. The range is in the slot
    /// and in one table of level 1. If the run `resident` does not contain the whole range, asks the platform which
    /// pages are resident, and stores the longest run of its reply in `resident`.
    fn map_resident(
        &mut self,
        range: Range<Gfn>,
        at: (PausedWalk, Option<&Trail>),
        slot: &SlotFacts,
        sequence: Sequence,
        resident: &mut Option<Resident>,
    ) -> Mapped {
        let known = resident.filter(|known| known.sequence == sequence);
        let asked = slot.around::<F>(&range, known.map_or(1, |known| 2 * known.run.pages));
        let hva = |gfn: Gfn| F::GRANULE.add_pages(slot.hva_base, gfn.0 - slot.gfns.start.0);
        let backing = hva(range.start)..hva(range.end);
        let (mut installed, mut unmapped, mut named) = (0, range.start, 0);
        let mut fits = Level::PAGE;
        let (walk, trail) = at;
        let trail = trail.filter(|_| can_shadow::<F>());
        self.on_tables(&walk, |vm, tables, cursor, path| {
            let mut map = |run: HostRun| {
                let page = F::GRANULE.pages_between(backing.start, run.backing);
                let gfn = range.start.add(page);
                named += run.pages;
                let HostPage { pfn, level, .. } = run.first;
                let level = vm.fitting_level(&slot.gfns, gfn, pfn, level);
                let may_be_huge = |trail: &Trail| trail.leaf_level() > Level::PAGE;
                if level > Level::PAGE && trail.is_none_or(may_be_huge) {
                    if gfn == range.start {
                        fits = level;
                    }
                    return;
                }
                let valid = || vm.in_progress.holds(sequence, &backing);
                let trail = trail.map(|trail| trail.beside(gfn, trail.rights));
                let trail = trail.as_ref();
                let leaf = Leaf {
                    accessed: false,
                    ..slot.leaf(&run.first, Access::Read, trail, vm.is_saving(sequence))
                };
                let mut target = Target::new(cursor.after(page), trail);
                let mapped =
                    tables.map_absent(&mut target, Level::PAGE, run.pages, leaf, path, valid);
                if let Ok(new) = mapped {
                    installed += new;
                    if gfn == unmapped {
                        unmapped = gfn.add(run.pages);
                    }
                }
            };
            if let Some(known) = known.filter(|known| known.run.covers(&backing, F::GRANULE)) {
                return known
                    .run
                    .within(&backing, F::GRANULE)
                    .into_iter()
                    .for_each(map);
            }
            held::assert_none("to ask the host");
            *resident = None;
            let asked = hva(asked.start)..hva(asked.end);
            vm.platform.resolve_resident(vm.id, asked, &mut |run| {
                if let Some(part) = run.within(&backing, F::GRANULE) {
                    map(part);
                    let longest = resident.map_or(0, |longest| longest.run.pages);
                    if longest < run.pages {
                        *resident = Some(Resident { sequence, run });
                    }
                }
            });
        });
        let counters = self.counters();
        counters.pages_4k.add(installed);
        counters.prefetched.add(installed);
        Mapped {
            end: unmapped,
            installed,
            all_resident: named == range.end.0 - range.start.0,
            fits,
        }
    }

    /// Maps guest memory ahead of its use, for reading: KVM_PRE_FAULT_MEMORY. As in KVM, this does not count as faults
    /// of the guest. Makes pages resident that are not yet. Returns the number of bytes mapped from `range.start` on,
    /// at least one page. The vCPU may leave its section during the call: after it, the attention word tells whether
    /// translations that the vCPU remembers are still valid. A hypervisor whose CPU walks the tables calls
    /// [`Self::hardware_prefault`].
    ///
    /// # Errors
    /// [`Stop`], if not even the first page could be mapped.
    ///
    /// # Panics
    /// If the vCPU is not entered ([`Vcpu::enter`]).
    pub fn prefault(&mut self, range: Range<Gpa>) -> Result<u64, Stop> {
        let mut at = range.start;
        let mut asked = F::GRANULE.gfn(at);
        let mut result = Ok(());
        while at < range.end && result.is_ok() {
            match self.prefault_some(at, range.end, &mut asked) {
                Ok(next) => at = next,
                Err(stop) => result = Err(stop),
            }
            self.pass();
        }
        self.trim_frames();
        match result {
            Err(stop) if at == range.start => Err(stop),
            _ => Ok(at.0.min(range.end.0) - range.start.0),
        }
    }

    /// Maps some of the memory from `gpa` on: the resident pages of one level 1 table, or huge pages of one higher
    /// table, or, if there are none, one leaf. Returns the address after the mapped pages. The platform was already
    /// asked about, or to populate, the pages before `asked`. So pages before `asked` that are not mapped yet are
    /// mapped leaf by leaf.
    fn prefault_some(&mut self, gpa: Gpa, end: Gpa, asked: &mut Gfn) -> Result<Gpa, Stop> {
        let gfn = F::GRANULE.gfn(gpa);
        let end = Gfn(end.0.div_ceil(F::GRANULE.bytes()));
        if gfn < *asked {
            let found = self.tables().cursor(gfn).find(Level::PAGE);
            if let Entry::Leaf(_) = found.entry::<F>() {
                return Ok(F::GRANULE.gpa(F::GRANULE.block(gfn, found.level).end));
            }
        } else {
            let mapped = self.prefault_resident(gfn, end);
            let next = if mapped.fits > Level::PAGE {
                self.prefault_huge(gfn, end, mapped.fits, asked)
            } else if mapped.all_resident {
                mapped.end
            } else {
                *asked = end.min(F::GRANULE.block(gfn, Level::MEGA).end);
                self.populate(mapped.end, *asked);
                self.prefault_resident(mapped.end, end).end
            };
            if next > gfn {
                return Ok(F::GRANULE.gpa(next));
            }
        }
        let level = self.translate_uncounted(gpa, Access::Read)?.level;
        Ok(F::GRANULE.gpa(F::GRANULE.block(gfn, level).end))
    }

    /// Makes the platform populate the pages from `gfn` to `end` that are in the slot of `gfn`. The caller passes pages
    /// of one level 1 table.
    fn populate(&mut self, gfn: Gfn, end: Gfn) {
        let (set, slot) = self.find_slot(gfn);
        let Some(slot) = slot.and_then(|slot| SlotFacts::of::<F>(slot, gfn, &set.private)) else {
            return;
        };
        let end = end.min(slot.gfns.end);
        let hva = |gfn: Gfn| F::GRANULE.add_pages(slot.hva_base, gfn.0 - slot.gfns.start.0);
        self.outside(|vcpu| {
            held::assert_none("to populate memory");
            let vm = vcpu.vm();
            vm.platform.populate(vm.id, hva(gfn)..hva(end));
        });
    }

    /// Maps the resident pages from `gfn` to `end`, or to the end of the level 1 table or the slot of `gfn`, with
    /// leaves of level 1.
    fn prefault_resident(&mut self, gfn: Gfn, end: Gfn) -> Mapped {
        let none = Mapped {
            end: gfn,
            installed: 0,
            all_resident: false,
            fits: Level::PAGE,
        };
        self.recycle();
        let sequence = self.vm().in_progress.sequence();
        let Some(slot) = self.unlogged_slot(gfn) else {
            return none;
        };
        let end = end.min(slot.gfns.end);
        // Allocate one level 1 table for each 2 MiB (with pages of 4 KiB) up to `end`, in batches.
        let tables = (end.0 - gfn.0).div_ceil(F::GRANULE.pages(Level::MEGA)) as usize;
        self.fill_frames_for(tables);
        let at = (self.pause(Reached::nothing::<F>(self.key(gfn))), None);
        let end = end.min(F::GRANULE.block(gfn, Level::MEGA).end);
        self.map_resident(gfn..end, at, &slot, sequence, &mut None)
    }

    /// Maps the resident pages from `gfn` to `end`, or to the end of the table or the slot of `gfn`, by leaves of
    /// `level`, the largest level at which a leaf can map `gfn`. Returns the first page that is not mapped then. Raises
    /// `asked` to the end of the pages that it tried to map.
    fn prefault_huge(&mut self, gfn: Gfn, end: Gfn, level: Level, asked: &mut Gfn) -> Gfn {
        let sequence = self.vm().in_progress.sequence();
        let Some(slot) = self.unlogged_slot(gfn) else {
            return gfn;
        };
        if F::GRANULE.align_down(gfn, level) != gfn {
            return gfn;
        }
        let end = (end.min(slot.gfns.end)).min(F::GRANULE.block(gfn, level.above()).end);
        let hva = |gfn: Gfn| F::GRANULE.add_pages(slot.hva_base, gfn.0 - slot.gfns.start.0);
        let backing = hva(gfn)..hva(end);
        let walk = self.pause(Reached::nothing::<F>(self.key(gfn)));
        let (mut tried, mut next, mut installed) = (gfn, gfn, 0);
        held::assert_none("to ask the host");
        self.on_tables(&walk, |vm, tables, cursor, path| {
            vm.platform
                .resolve_resident(vm.id, backing.clone(), &mut |run| {
                    let run = run.within(&backing, F::GRANULE);
                    let Some(HostRun { pages, first, .. }) =
                        run.filter(|run| run.backing == hva(tried))
                    else {
                        return;
                    };
                    let leaves = pages / F::GRANULE.pages(level);
                    let fits = vm.fitting_level(&slot.gfns, tried, first.pfn, first.level) == level;
                    if leaves == 0 || !fits {
                        return;
                    }
                    let start = tried;
                    tried = start.add(leaves * F::GRANULE.pages(level));
                    let backing = hva(start)..hva(tried);
                    let valid = || vm.in_progress.holds(sequence, &backing);
                    let leaf = Leaf {
                        accessed: false,
                        ..vm.leaf_at(
                            slot.leaf(&first, Access::Read, None, vm.is_saving(sequence)),
                            level,
                        )
                    };
                    let mut target = Target::new(cursor.after(start.0 - gfn.0), None);
                    let mapped = tables.map_absent(&mut target, level, leaves, leaf, path, valid);
                    if let Ok(new) = mapped {
                        installed += new;
                        // If fewer than `leaves` were installed, some entries refer to tables, whose pages may not all
                        // be mapped.
                        if new == leaves && next == start {
                            next = tried;
                        }
                    }
                });
        });
        *asked = tried.max(*asked);
        let counters = self.counters();
        counters.leaves_of(level).add(installed);
        counters.prefetched.add(installed);
        next
    }
}
