//! The search for a path by which a vCPU may have translated an address.
//!
//! A search goes down the tables. At each level it tries every value that the entry had since the last flush, and keeps
//! the *window* of moments at which the vCPU may have read this value. At such a moment,
//!
//! * the value was in memory, and the path's PCID was the current one;
//! * the entries above had been read at this moment or before, and were still cached: their accessed flags were set,
//!   and no flush of the paging-structure caches had dropped them.
//!
//! Windows are intervals, for this reason: an entry that was read later is not dropped earlier, so the search need only
//! consider the last moment at which the entry above may have been read. So for each choice of values, the window
//! contains exactly the possible moments.

use std::ops::Range;

use slat::guest_walk::{GuestPaging, Mode};
use slat::{Access, Gpa};

use super::entry::{A, D, G, Layout, Meaning, P, Rights, entry_fault, rights_fault};
use super::flushes::{Cached, Flushes, Period};
use super::memory::{Memory, Time, Version};
use super::mmu::Outcome;

/// The goal of a search of the guest's tables.
#[derive(Clone, Copy, Debug)]
pub(super) enum Goal {
    /// A path on which the access has this outcome.
    Outcome(Outcome),
    /// A path on which the access sets the accessed flag in the entry at `gpa`, and the dirty flag if `dirty`.
    Marks { gpa: u64, dirty: bool },
}

/// The translation of an address for one access by a vCPU at the current moment.
pub(super) struct Search<'a> {
    pub memory: &'a Memory,
    pub flushes: &'a Flushes,
    pub now: Time,
    pub gva: u64,
    pub access: Access,
    pub paging: &'a GuestPaging,
    /// The value of CR4.PGE.
    pub globals: bool,
    /// The current PCID.
    pub pcid: u16,
}

/// The kind of path by which a goal was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The current tables lead to the goal.
    Fresh,
    /// A path through a cached entry leads to the goal. The entry references a table whose current contents are used.
    StaleTable,
    /// A cached translation leads to the goal.
    StaleTranslation,
}

impl Search<'_> {
    /// Returns the kind of path by which `goal` can be reached. `None`: no path leads to it.
    pub fn find(&self, goal: Goal) -> Option<Found> {
        let walk = Walk {
            search: self,
            goal: &goal,
            layout: Layout::of(self.paging),
        };
        let current = self.flushes.periods().next()?;
        if walk.begin(current, self.now..self.now + 1).is_some() {
            return Some(Found::Fresh);
        }
        let mut usable = self
            .flushes
            .periods()
            .filter(|period| period.pcid == self.pcid || self.globals);
        usable.find_map(|period| walk.begin(period, period.time.clone()))
    }
}

/// The walks for one goal. The functions return the kind of path that leads to the goal, or `None`.
struct Walk<'a> {
    search: &'a Search<'a>,
    goal: &'a Goal,
    layout: Layout,
}

/// A path down the tables.
#[derive(Clone)]
struct Path {
    /// The PCID under which the vCPU walks the path.
    pcid: u16,
    /// The address of the next table, and its level.
    table: u64,
    level: u32,
    /// The moments at which the vCPU may read the next entry. After the path has reached a leaf, the moments at which
    /// the vCPU may have read the leaf.
    window: Range<Time>,
    rights: Rights,
    /// The first entry whose accessed or dirty flag has to be set.
    unmarked: Option<u64>,
}

impl Walk<'_> {
    /// Tries the paths that begin at the root of `period` and whose first entry is read at a moment in `window`.
    fn begin(&self, period: &Period, window: Range<Time>) -> Option<Found> {
        let registers = &period.registers;
        let table = match self.layout.mode {
            Mode::Pae => {
                let pdpte = registers.pdptes[(self.search.gva >> 30 & 3) as usize];
                if pdpte & P == 0 {
                    return self.fault(window.end > self.search.now, false);
                }
                pdpte
            }
            Mode::Bits32 { .. } => registers.cr3 & 0xffff_ffff,
            Mode::Level4 | Mode::Level5 => registers.cr3,
        };
        self.descend(&Path {
            pcid: period.pcid,
            table: table & 0x000f_ffff_ffff_f000,
            level: self.layout.top(),
            window,
            rights: Rights::ALL,
            unmarked: None,
        })
    }

    /// Ends a path at an entry that cannot be cached. Returns `Some` if the goal is the page fault that this entry
    /// causes. `reads_now` says whether the vCPU may read the entry now.
    fn fault(&self, reads_now: bool, reserved: bool) -> Option<Found> {
        let code = entry_fault(self.search.paging, self.search.access, reserved);
        let is_goal = match self.goal {
            Goal::Outcome(outcome) => *outcome == Outcome::PageFault { code },
            Goal::Marks { .. } => false,
        };
        (reads_now && is_goal).then_some(Found::StaleTable)
    }

    fn descend(&self, path: &Path) -> Option<Found> {
        let gpa = self
            .layout
            .entry_at(path.table, path.level, self.search.gva);
        let memory = self.search.memory;
        let mut versions = memory.versions(gpa, self.layout.entry_size());
        versions.find_map(|version| self.follow(path, gpa, &version))
    }

    /// Continues the path with the entry at `gpa`, which had the value `version`.
    fn follow(&self, path: &Path, gpa: u64, version: &Version) -> Option<Found> {
        let now = self.search.now;
        let (from, until) = (version.from, version.until.min(now + 1));
        let window = path.window.start.max(from)..path.window.end.min(until);
        if window.is_empty() {
            return None;
        }
        let window = self.search.flushes.within(path.pcid, &window)?;
        let reads_now = window.end > now;
        let entry = version.value;
        let meaning = self.layout.meaning(path.level, entry);
        match meaning {
            Meaning::NotPresent => return self.fault(reads_now, false),
            Meaning::Reserved => return self.fault(reads_now, true),
            Meaning::Table(_) | Meaning::Page { .. } => {}
        }
        let mut path = Path {
            rights: path.rights.and(entry),
            window,
            ..path.clone()
        };
        if entry & A == 0 && !version.read_only {
            // An entry without the accessed flag cannot be cached.
            if !reads_now {
                return None;
            }
            path.window.start = now;
            path.unmarked.get_or_insert(gpa);
        }
        if let Goal::Marks { gpa: at, dirty } = self.goal
            && (*at, *dirty) == (gpa, false)
            && reads_now
        {
            return Some(Found::StaleTable);
        }
        match meaning {
            Meaning::Table(table) => self.descend(&self.below(path, table)),
            Meaning::Page { gpa: page, bits } => self.leaf(&path, gpa, version, page, bits),
            Meaning::NotPresent | Meaning::Reserved => None,
        }
    }

    /// Returns the path after an entry that references `table`.
    fn below(&self, path: Path, table: u64) -> Path {
        let shift = self.layout.shift(path.level);
        let read = path.window.end;
        let flushes = self.search.flushes;
        let end = flushes.cached_until(path.pcid, self.search.gva, shift, read);
        Path {
            table,
            level: path.level - 1,
            window: path.window.start..end,
            ..path
        }
    }

    /// Ends the path at the leaf at `gpa`, which had the value `version` and maps `page`.
    fn leaf(
        &self,
        path: &Path,
        gpa: u64,
        version: &Version,
        page: u64,
        bits: u32,
    ) -> Option<Found> {
        let Search {
            memory,
            flushes,
            gva,
            access,
            ..
        } = *self.search;
        let cached = Cached {
            pcid: path.pcid,
            gva,
            bits,
            global: self.search.globals && version.value & G != 0,
        };
        let belongs = path.pcid == self.search.pcid || cached.global;
        if !belongs || path.window.end <= flushes.flushed_at(&cached) {
            return None;
        }
        let reads_now = path.window.end > self.search.now;
        let write = access == Access::Write;
        let fault = rights_fault(self.search.paging, access, path.rights, version.value);
        let clean = write && version.value & D == 0 && !version.read_only;
        let is_goal = match (self.goal, fault) {
            (Goal::Marks { gpa: at, .. }, fault) => {
                *at == gpa && write && reads_now && fault.is_none()
            }
            (Goal::Outcome(goal), Some(code)) => *goal == Outcome::PageFault { code },
            (Goal::Outcome(goal), None) => match path.unmarked.or(clean.then_some(gpa)) {
                // If a flag cannot be set, the walk ends at that entry. A write does not use a cached leaf without the
                // dirty flag.
                Some(unmarked) => {
                    let stopped = memory.access(unmarked, Access::Write);
                    let stops = matches!(stopped, Outcome::BadAddress { .. });
                    reads_now && stops && is_same(goal, &stopped)
                }
                None => {
                    let offset = (1 << bits) - 1;
                    let gpa = page & !offset | gva & offset;
                    is_same(goal, &memory.access(gpa, access))
                }
            },
        };
        is_goal.then_some(match reads_now {
            true => Found::StaleTable,
            false => Found::StaleTranslation,
        })
    }
}

/// Whether two outcomes are equal, if tracking is ignored, and also the offset in a page that cannot be accessed.
pub(super) fn is_same(a: &Outcome, b: &Outcome) -> bool {
    match (a, b) {
        (Outcome::Page { host: a, .. }, Outcome::Page { host: b, .. }) => a == b,
        (Outcome::BadAddress { gpa: Gpa(a) }, Outcome::BadAddress { gpa: Gpa(b) }) => {
            a >> 12 == b >> 12
        }
        _ => a == b,
    }
}
