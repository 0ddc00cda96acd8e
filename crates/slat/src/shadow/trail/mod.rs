//! What a fault has read in the guest's tables: the shadow pages that are needed on the path to its leaf, and whether
//! the guest's entries have changed since the fault read them.

mod role;

pub(crate) use role::{Meaning, Note, Role, mmio_note, of_mmio_note};

use core::ops::Range;

use crate::addr::{Access, Gfn, Gpa, Level, PageIndex, Pfn};
use crate::format::{Format, Leaf, MemoryType, Privilege, all_gfns, can_shadow};
use crate::guest_walk::{GuestPaging, GuestPath, PageRights};
use crate::platform::Platform;
use crate::sync::atomic::{AtomicU64, Ordering::*};
use crate::table::{Cursor, Key};

/// The number of levels that a guest's tables can have.
const LEVELS: usize = 5;

/// Counters of changes of guest tables. Several tables share a counter, which is selected by a hash of the table's
/// frame.
///
/// A fault reads the counter of a table before it reads an entry of the table ([`Seen`]). Before it installs the
/// result, it compares the counter again, under the lock of the MMU. The counter is raised under that lock
/// * after a store to a tracked table, before the shadow entries made from the old contents are zapped;
/// * when tracking of the table begins, because earlier stores were not noticed;
/// * when the table is compared with its shadow page;
/// * when the client, or a vCPU in another address space, may have stored to any table;
/// * when the memory of the table's frame was replaced.
///
/// So if the counter is unchanged, the guest's entry still has the value that was read, or the shadow page will be
/// compared with the table later.
pub(crate) struct Changes([AtomicU64; Self::COUNTERS]);

impl Changes {
    const COUNTERS: usize = if cfg!(loom) { 1 } else { 256 };

    pub(crate) fn new() -> Self {
        Changes(core::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Returns the index of the counter for the guest table in frame `gfn`.
    fn number(gfn: Gfn) -> usize {
        gfn.0 as usize % Self::COUNTERS
    }

    fn of(&self, gfn: Gfn) -> &AtomicU64 {
        &self.0[Self::number(gfn)]
    }

    /// Raises the counter of the guest table in frame `gfn`. Call under the lock of the MMU.
    pub(crate) fn raise(&self, gfn: Gfn) {
        let counter = self.of(gfn);
        counter.store(counter.load(Relaxed) + 1, Release);
    }

    pub(crate) fn get(&self, gfn: Gfn) -> u64 {
        self.of(gfn).load(Acquire)
    }

    /// Returns whether the counters of all tables that a walk has read are unchanged. Call under the lock of the MMU.
    pub(crate) fn are_none_since(&self, seen: &Seen) -> bool {
        (seen.tables[..seen.len].iter()).all(|(gfn, count)| self.get(*gfn) == *count)
    }
}

/// The guest tables that a walk has read, each with the value that its counter had before the read.
#[derive(Clone, Copy, Default)]
pub(crate) struct Seen {
    tables: [(Gfn, u64); LEVELS],
    len: usize,
}

impl Seen {
    /// Records that an entry at `gpa` is about to be read, in a table whose counter is `count`. If a walk restarts, it
    /// may read other tables than before. The tables that it has read before the restart are also compared; at worst
    /// this causes a needless further attempt of the fault.
    pub(crate) fn reads(&mut self, gpa: Gpa, count: u64) {
        let gfn = gpa.gfn();
        if self.has(gfn) {
            return;
        }
        if self.len == LEVELS {
            // Only a walk that has restarted reads more than `LEVELS` tables. It does not use the oldest table any
            // more: drop it.
            self.tables.rotate_left(1);
            self.len -= 1;
        }
        self.tables[self.len] = (gfn, count);
        self.len += 1;
    }

    /// Returns whether the table in frame `gfn` was read.
    pub(crate) fn has(&self, gfn: Gfn) -> bool {
        self.tables[..self.len].iter().any(|(seen, _)| *seen == gfn)
    }
}

/// Identifies a shadow page of a guest table. Valid as long as the page with this number is in use for this frame and
/// role.
#[derive(Clone, Copy)]
pub(crate) struct PageOf {
    pub(crate) number: u32,
    pub(crate) gfn: Gfn,
    pub(crate) role: Role,
}

impl PageOf {
    /// Returns the level of the page's table.
    pub(crate) fn level(&self) -> Level {
        self.role.level
    }

    /// Returns the address of the guest's entry that corresponds to entry `index` of the shadow page, and the size of
    /// the guest's entry in bytes.
    pub(crate) fn guest_entry(&self, index: usize) -> (Gpa, usize) {
        let size = self.role.entry_size();
        let offset = self.role.guest_index(index) as u64 * size;
        (Gpa(self.gfn.gpa().0 + offset), size as usize)
    }
}

/// A recorded walk of the guest's tables to a page: the shadow pages on the path to a leaf for this page.
#[derive(Clone, Copy)]
pub(crate) struct Trail {
    /// The frame and the role of the shadow page of each guest table on the path, indexed by level - 1.
    pages: [(Gfn, Role); LEVELS],
    top: Level,
    /// The number of the root at which the walk begins ([`Role::root_number`]).
    pub(crate) number: usize,
    /// The level of the guest's entry that maps the page; a page of 4 MiB is mapped by an entry of level 2.
    leaf: Level,
    /// The 4 KiB guest frame that is accessed.
    pub(crate) gfn: Gfn,
    /// The rights to the page that the guest's tables grant.
    pub(crate) rights: PageRights,
    pub(crate) seen: Seen,
    /// For each level (index: level - 1), whether the fault has compared the shadow page of this level with its guest
    /// table ([`was_compared`](Self::was_compared)) since the walk read the guest's entry that refers to this table.
    pub(crate) compared: [bool; LEVELS],
}

impl Trail {
    /// Makes the trail of a walk to `gva` for `access` that has found `path`, and has set the accessed and dirty flags
    /// of the guest's entries. `None`: no shadow page can be the root of such walks, because the
    /// page-directory-pointer entries of PAE paging are in memory ([`GuestPaging::root_table`]); or an entry means
    /// something else for the walk than for a shadow page (no such entry is known).
    pub(crate) fn new(
        paging: &GuestPaging,
        gva: u64,
        access: Access,
        path: &GuestPath,
        gfn: Gfn,
        seen: Seen,
    ) -> Option<Self> {
        const ACCESSED: u64 = 1 << 5;
        const DIRTY: u64 = 1 << 6;
        let (mut table, mut role) = Role::root(paging, gva)?;
        let top = role.level;
        let mut pages = [(Gfn(0), Role::direct(Level::PAGE)); LEVELS];
        let index = PageIndex::of_gva(gva);
        for &(_, entry) in path.entries() {
            pages[role.level.0 as usize - 1] = (table, role);
            let dirty = if access == Access::Write { DIRTY } else { 0 };
            // Setting the dirty flag in `entry` is harmless if the entry refers to a table, where the flag has no
            // meaning.
            match role.meaning(index.at(role.level), entry | ACCESSED | dirty)? {
                Meaning::Table(lower, below) => (table, role) = (lower, below),
                Meaning::Memory(_, rights) => {
                    return Some(Trail {
                        pages,
                        top,
                        number: Role::root_number(paging, gva),
                        leaf: role.level,
                        gfn,
                        rights,
                        seen,
                        compared: [false; LEVELS],
                    });
                }
            }
        }
        None
    }

    /// Returns whether a leaf of format `F` can map the page with the guest's rights. It cannot if the rights need a
    /// privilege or a protection key, which second-level formats do not have, or if the frame is above those that
    /// tables of the format translate.
    pub(crate) fn fits<F: Format>(&self) -> bool {
        let leaf = Leaf {
            pfn: Pfn(0),
            write: false,
            execute: false,
            may_write: false,
            may_execute: false,
            accessed: false,
            dirty: false,
            memory: MemoryType::WriteBack,
            privilege: Privilege::new(self.rights.user, self.rights.key),
        };
        let held = F::decode_leaf(F::leaf(leaf, Level::PAGE));
        held.privilege == leaf.privilege && self.gfn < all_gfns::<F>().end
    }

    /// Returns the frame and the role of the shadow page at which the walk begins.
    pub(crate) fn root(&self) -> (Gfn, Role) {
        self.pages[self.top.0 as usize - 1]
    }

    /// Returns the level of the shadow page at which the walk begins.
    pub(crate) fn top(&self) -> Level {
        self.top
    }

    /// Returns the largest level that a shadow leaf may have: the level of the guest's leaf.
    pub(crate) fn leaf_level(&self) -> Level {
        self.leaf
    }

    /// Returns the frame and the role of the shadow page of `level` on the path: the shadow page of a guest table, or,
    /// if `level` is below the guest's leaf, a direct page for the pieces of that leaf.
    pub(crate) fn page(&self, level: Level) -> (Gfn, Role) {
        if level >= self.leaf {
            return self.pages[level.0 as usize - 1];
        }
        let above = Level(level.0 + 1);
        let pieces = Role {
            rights: self.rights,
            ..Role::direct(level)
        };
        (self.gfn.align_down(above), pieces)
    }

    /// Returns a range of frames that contains all guest tables on the path.
    pub(crate) fn tables(&self) -> Range<Gfn> {
        let pages = &self.pages[self.leaf.0 as usize - 1..self.top.0 as usize];
        let gfns = pages.iter().map(|(gfn, _)| *gfn);
        let (first, last) = (gfns.clone().min(), gfns.max());
        first.unwrap_or(Gfn(0))..last.map_or(Gfn(0), |gfn| gfn.add(1))
    }

    /// Records that the shadow page `page` was compared with its guest table, which is on this path. The comparison has
    /// raised the table's counter from `before` to `after`. Returns `false` if the counter was not `before` when the
    /// walk read the table: then the trail is not valid any more.
    pub(crate) fn was_compared(&mut self, page: &PageOf, before: u64, after: u64) -> bool {
        let tables = &mut self.seen.tables[..self.seen.len];
        let same = |gfn: &Gfn| Changes::number(*gfn) == Changes::number(page.gfn);
        for (_, count) in tables.iter_mut().filter(|(gfn, _)| same(gfn)) {
            if *count != before {
                return false;
            }
            *count = after;
        }
        self.compared[page.level().0 as usize - 1] = true;
        true
    }

    /// Returns the trail to another page that the same guest table maps: to frame `gfn`, with `rights`.
    pub(crate) fn beside(&self, gfn: Gfn, rights: PageRights) -> Trail {
        Trail {
            gfn,
            rights,
            ..*self
        }
    }
}

/// The position in the tables at which a leaf is to be installed.
pub(crate) struct Target<'t, P: Platform, F: Format> {
    /// The walk of the tables to this position.
    pub(crate) cursor: Cursor<'t, P, F>,
    /// If the position is in shadow pages of guest tables: the walk of the guest's tables.
    trail: Option<&'t Trail>,
}

impl<'t, P: Platform, F: Format> Target<'t, P, F> {
    #[inline(always)]
    pub(crate) fn new(cursor: Cursor<'t, P, F>, trail: Option<&'t Trail>) -> Self {
        Target { cursor, trail }
    }

    #[inline(always)]
    pub(crate) fn key(&self) -> Key {
        self.cursor.key()
    }

    /// Returns the trail through the guest's tables. For a format that cannot shadow guest tables, it is always `None`,
    /// which the compiler then knows.
    #[inline(always)]
    pub(crate) fn trail(&self) -> Option<&'t Trail> {
        if can_shadow::<F>() { self.trail } else { None }
    }

    /// Returns the guest frame that a leaf of level 1 at this position maps.
    #[inline(always)]
    pub(crate) fn gfn(&self) -> Gfn {
        self.trail().map_or(self.key().gfn(), |trail| trail.gfn)
    }
}
