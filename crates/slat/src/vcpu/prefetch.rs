//! Mapping more than was asked for: what is resident around a fault, and whole ranges ahead of time.
//!
//! A fault that installed a 4 KiB leaf looks at the aligned window around its page, in both directions
//! and up to the window's end, and maps what is resident and absent: not in a slot that logs
//! (every page would look written), not where the frames have other attributes, not when a huge leaf was
//! installed (there is nothing left to map).
//! What is prefetched starts with the accessed bit clear.
//!
//! Where windows turn out empty (memory that is used for the first time), fewer and fewer faults look
//! at theirs, down to one in 64: asking the host is not free.
//!
//! The adaptive window begins closed. A fault at the page after those that the vCPU mapped last is taken as
//! a sequence: the window opens at 8 pages and doubles, up to a whole table. Any other fault closes
//! it, so that scattered accesses map no page in vain.

use core::ops::Range;

use super::fault::Fault;
use super::plan::{Plan, SlotFacts};
use super::translate::Stop;
use super::{HostWords, Vcpu};
use crate::addr::{Access, Gfn, Gpa, Hpa, Level, PAGE_SHIFT, PageIndex};
use crate::format::{Entry, Format, Leaf};
use crate::frame::ENTRIES;
use crate::guest_walk::PageRights;
use crate::platform::{HostPage, HostRun, Platform};
use crate::policy::Prefetch;
use crate::sync::held;
use crate::table::{ByIndex, Key, Target};
use crate::trail::{Meaning, Trail};
use crate::vm::Sequence;

/// What the adaptive window remembers of one vCPU.
#[derive(Default)]
pub(super) struct Window {
    /// The page after the last one that was mapped.
    next: Gfn,
    /// Pages; 0 is closed.
    size: u64,
    /// Windows found empty in a row.
    empty: u32,
    /// Number of faults that skip their window before the next one that does not.
    pause: u32,
}

impl Window {
    const FIRST: u64 = 8;
    /// log2 of a number that every pause is below.
    const LONGEST_PAUSE: u32 = 6;

    /// Whether this fault looks at its window.
    fn looks(&mut self) -> bool {
        let looks = self.pause == 0;
        self.pause = self.pause.saturating_sub(1);
        looks
    }

    /// Call after a look at a window that installed this many pages.
    fn learn(&mut self, installed: u64) {
        self.empty = match installed {
            0 => (self.empty + 1).min(Self::LONGEST_PAUSE),
            _ => 0,
        };
        self.pause = (1 << self.empty) - 1;
    }

    /// Returns the size of the window for a fault at `gfn`.
    fn after_fault(&mut self, gfn: Gfn) -> u64 {
        self.size = if gfn == self.next {
            (self.size * 2).clamp(Self::FIRST, ENTRIES as u64)
        } else {
            0
        };
        self.size
    }
}

impl<P: Platform, F: Format> Fault<'_, P, F> {
    /// Maps what is resident in the window around the page, which was just mapped as `plan` says.
    pub(super) fn prefetch(&mut self, plan: &Plan<'_>, policy: Prefetch) {
        let (vcpu, gfn) = (&mut *self.vcpu, self.want.gfn());
        let slot = plan.slot;
        let size = match policy {
            Prefetch::Off => 0,
            Prefetch::Window(pages) => Prefetch::window(pages),
            Prefetch::Adaptive => vcpu.window.after_fault(gfn),
        };
        let mut end = gfn.add(1);
        if size > 1 && vcpu.window.looks() {
            let start = Gfn(gfn.0 & !(size - 1));
            let window = start.max(slot.gfns.start)..start.add(size).min(slot.gfns.end);
            let window_end = window.end;
            let (key, trail) = (self.want.target.key, self.want.target.trail::<F>());
            let trail = trail.map(|trail| trail.beside(window.start, trail.rights));
            let at = Target {
                key: Key {
                    index: key.index.before(gfn.0 - window.start.0),
                    ..key
                },
                trail: trail.as_ref(),
            };
            let (_, installed) = vcpu.map_resident(window, at, slot, plan.sequence);
            vcpu.window.learn(installed);
            if installed > 0 {
                end = window_end;
            }
        }
        vcpu.window.next = end;
    }
}

/// Pages that adjacent entries of a guest's table map, next to each other and with equal rights.
#[derive(Clone, Copy)]
struct GuestRun {
    index: PageIndex,
    gfn: Gfn,
    rights: PageRights,
    pages: u64,
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Maps what the guest's entries beside that for `gva` map, which was just mapped by `trail`: those that were used before,
    /// of memory that is resident (KVM: `pte_prefetch`).
    pub(super) fn prefetch_guest<W: HostWords>(&mut self, gva: u64, trail: &Trail, words: &mut W) {
        if trail.leaf_level() > Level::PAGE {
            return;
        }
        let page = PageIndex::of_gva(gva);
        // The adaptive window looks at the order of faults, whatever the addresses are.
        let size = match self.vm().policy.prefetch() {
            Prefetch::Off => return,
            Prefetch::Window(pages) => Prefetch::window(pages),
            Prefetch::Adaptive => self.window.after_fault(page.as_gfn()),
        };
        let at = page.at(Level::PAGE);
        let first = at & !(size.max(1) as usize - 1);
        let mut end = page.add(1);
        if size > 1 && self.window.looks() {
            let installed = self.map_guest_window(page, first..first + size as usize, trail, words);
            self.window.learn(installed);
            if installed > 0 {
                end = page.add((first + size as usize - at) as u64);
            }
        }
        self.window.next = end.as_gfn();
    }

    /// Maps what is resident and absent of the pages that the entries `window` map, of the table that maps `page`. Returns
    /// how many pages were mapped.
    fn map_guest_window<W: HostWords>(
        &mut self,
        page: PageIndex,
        window: Range<usize>,
        trail: &Trail,
        words: &mut W,
    ) -> u64 {
        let sequence = self.vm().in_progress.sequence();
        let (table, role) = trail.page(Level::PAGE);
        let Ok(host) = self.reach_table(table.gpa(), Access::Read) else {
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

    /// Maps what is resident and absent of `run`, beside the page of `trail`. Returns how many pages were mapped.
    fn map_guest_run(&mut self, run: Option<GuestRun>, trail: &Trail, sequence: Sequence) -> u64 {
        let Some(run) = run else {
            return 0;
        };
        let (set, slot) = self.find_slot(run.gfn);
        let Some(slot) = slot.filter(|slot| slot.log().is_none()) else {
            return 0;
        };
        let Some(slot) = SlotFacts::of(slot, run.gfn, &set.private) else {
            return 0;
        };
        let end = run.gfn.add(run.pages).min(slot.gfns.end);
        let trail = trail.beside(run.gfn, run.rights);
        let key = Key {
            context: self.context,
            index: run.index,
        };
        let at = Target {
            key,
            trail: Some(&trail),
        };
        self.map_resident(run.gfn..end, at, &slot, sequence).1
    }

    /// Maps what is resident and absent in `range`, which lies in the slot and in one table of level 1.
    /// Returns the first page of it that is not mapped then (not resident, or fit for a larger leaf),
    /// and how many pages were mapped.
    fn map_resident(
        &mut self,
        range: Range<Gfn>,
        at: Target<'_>,
        slot: &SlotFacts,
        sequence: Sequence,
    ) -> (Gfn, u64) {
        let hva = |gfn: Gfn| slot.hva_base.add_pages(gfn.0 - slot.gfns.start.0);
        let backing = hva(range.start)..hva(range.end);
        let (mut installed, mut unmapped) = (0, range.start);
        self.on_tables(|vm, tables, path| {
            let mut map = |run: HostRun| {
                let page = (run.backing.0 - backing.start.0) >> PAGE_SHIFT;
                let gfn = range.start.add(page);
                let HostPage { pfn, level, .. } = run.first;
                let is_fit = vm.fitting_level(&slot.gfns, gfn, pfn, level) > Level::PAGE;
                let may_be_huge = |trail: &Trail| trail.leaf_level() > Level::PAGE;
                if is_fit && at.trail::<F>().is_none_or(may_be_huge) {
                    return;
                }
                let leaf = Leaf {
                    accessed: false,
                    ..slot.leaf(&run.first, Access::Read)
                };
                let valid = || vm.in_progress.holds(sequence, &backing);
                let key = Key {
                    context: at.key.context,
                    index: at.key.index.add(page),
                };
                let trail = at.trail::<F>().map(|trail| trail.beside(gfn, trail.rights));
                let leaf = trail.map_or(leaf, |trail| leaf.granted(trail.rights));
                let trail = trail.as_ref();
                let target = Target { key, trail };
                if let Some(new) = tables.map_absent(target, run.pages, leaf, path, valid) {
                    installed += new;
                    if gfn == unmapped {
                        unmapped = gfn.add(run.pages);
                    }
                }
            };
            held::assert_none("to ask the host");
            vm.platform.resolve_resident(backing.clone(), &mut map);
        });
        let counters = self.counters();
        counters.pages_4k.add(installed);
        counters.prefetched.add(installed);
        (unmapped, installed)
    }

    /// Maps guest memory ahead of its use, for reading: KVM_PRE_FAULT_MEMORY. As in KVM, no fault of the guest
    /// is counted. Pages that are not resident are made so. Returns the bytes mapped, from `range.start` on, at least
    /// one page. The vCPU may have left its section meanwhile: the attention word tells whether translations that it
    /// remembers are still valid.
    ///
    /// # Errors
    /// [`Stop`], if not even the first page could be mapped.
    ///
    /// # Panics
    /// If the vCPU was not entered.
    pub fn prefault(&mut self, range: Range<Gpa>) -> Result<u64, Stop> {
        let mut at = range.start;
        let mut asked = at.gfn();
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

    /// Maps what is resident in the pages of one level 1 table, or else one leaf. Returns the address after what was
    /// mapped. The platform was asked for the pages before `asked`: those that were not resident are made so, one by one.
    fn prefault_some(&mut self, gpa: Gpa, end: Gpa, asked: &mut Gfn) -> Result<Gpa, Stop> {
        let gfn = gpa.gfn();
        let end = Gfn(end.0.div_ceil(1 << PAGE_SHIFT));
        if gfn < *asked {
            let found = self.tables().lookup(self.key(gfn));
            if let Entry::Leaf(_) = found.entry::<F>() {
                return Ok(gfn.block(found.level).end.gpa());
            }
        } else if let Some(after) = self.prefault_resident(gfn, end, asked) {
            return Ok(after.gpa());
        }
        let level = self.translate_uncounted(gpa, Access::Read)?.level;
        Ok(gfn.block(level).end.gpa())
    }

    /// Maps what is resident from `gfn` to `end`, in one level 1 table and one slot. Returns the first page that is not mapped then,
    /// `None` if that is `gfn`. Raises `asked` if it has asked the platform.
    fn prefault_resident(&mut self, gfn: Gfn, end: Gfn, asked: &mut Gfn) -> Option<Gfn> {
        self.make_room(&mut false);
        let sequence = self.vm().in_progress.sequence();
        let (set, slot) = self.find_slot(gfn);
        let slot = slot.filter(|slot| slot.log().is_none())?;
        let slot = SlotFacts::of(slot, gfn, &set.private)?;
        let end = end.min(slot.gfns.end);
        // One table for each 2 MiB that are left, taken from the platform by the batch.
        let tables = (end.0 - gfn.0).div_ceil(Level::MEGA.pages()) as usize;
        self.fill_frames_for(tables);
        let at = self.key(gfn).into();
        *asked = end.min(gfn.block(Level::MEGA).end);
        let (next, _) = self.map_resident(gfn..*asked, at, &slot, sequence);
        (next > gfn).then_some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_adaptive_window_doubles_in_a_sequence_and_closes_behind_a_jump() {
        let mut window = Window::default();
        let mut sizes = [0; 8];
        for (i, size) in sizes.iter_mut().enumerate() {
            window.next = Gfn(i as u64);
            *size = window.after_fault(Gfn(i as u64));
        }
        assert_eq!(sizes, [8, 16, 32, 64, 128, 256, 512, 512]);
        assert_eq!(window.after_fault(Gfn(1000)), 0);
    }

    #[test]
    fn empty_windows_are_looked_at_less_and_less_until_one_is_not_empty() {
        let mut window = Window::default();
        let mut looks = 0;
        for _ in 0..640 {
            if window.looks() {
                looks += 1;
                window.learn(0);
            }
        }
        assert!((10..20).contains(&looks), "{looks} looks");
        window.pause = 0;
        window.learn(7);
        assert!(window.looks() && window.looks());
    }
}
