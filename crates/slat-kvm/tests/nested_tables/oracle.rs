//! Which outcomes an access of the nested guest may have (AMD64 volume 2, 5.3 to 5.5, 15.16 and 15.25),
//! written down a second time.
//!
//! A processor may use what an entry was at any moment since the last flush that concerns it, together with what
//! another entry was at another moment. So every combination of the values that entries had since then is tried.
//! Flushes are often, and each leaves one value: then there is one outcome.
//!
//! An entry that an intercepted page fault has dropped is not treated as one that was flushed. INVLPGA is treated as a
//! flush of the nested tables for that address, too: stricter than the manual, which need not drop what a processor
//! keeps of guest-physical addresses.

use crate::layout::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Execute,
}

/// What an access comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// It reaches the page with this number of the hypervisor's.
    Page(u64),
    /// It reaches this address of the hypervisor's, which is no memory, or not to be written.
    Mmio(u64),
    /// The guest has a page fault, with this error code.
    PageFault(u64),
    /// The hypervisor has a nested page fault: EXITINFO1 and EXITINFO2.
    NestedFault(u64, u64),
}

/// An access, and how the guest runs that makes it.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub address: u64,
    pub kind: Kind,
    pub user: bool,
    pub write_protect: bool,
}

/// A moment: entries are stored to and flushed at different ones.
pub type Time = u64;

/// What the tables were, and are.
#[derive(Default)]
pub struct Tables {
    /// The values of each entry and since when it had them, without A and D. The last one is in memory.
    values: HashMap<u64, Vec<(Time, u64)>>,
    /// Of each memslot of the pool, whether it is there, and whether it is read-only.
    pub slots: [Option<bool>; (POOL_PAGES / SLOT_PAGES) as usize],
}

/// Since when entries were not flushed, for an access.
#[derive(Clone, Copy, Debug)]
pub struct Since {
    pub guest: Time,
    pub nested: Time,
}

impl Tables {
    /// Notes a store to the entry at `at`.
    pub fn store(&mut self, now: Time, at: u64, value: u64) {
        let values = self.values.entry(at).or_default();
        let value = value & !(A | D);
        if values.last().is_none_or(|(_, last)| *last != value) {
            values.push((now, value));
        }
    }

    /// Forgets what was flushed everywhere before `time`.
    pub fn forget(&mut self, time: Time) {
        for values in self.values.values_mut() {
            let old = values.partition_point(|(since, _)| *since <= time);
            values.drain(..old.saturating_sub(1));
        }
    }

    /// Returns whether the page of `gpa` is memory of the hypervisor's, and whether that is read-only.
    pub fn memory(&self, gpa: u64) -> Option<bool> {
        match gpa {
            0..SYSTEM_BYTES => Some(false),
            _ if gpa - POOL < POOL_PAGES * PAGE => {
                self.slots[((gpa - POOL) / (SLOT_PAGES * PAGE)) as usize]
            }
            _ => None,
        }
    }

    /// Returns the values that the entry at `gpa` may be taken to have.
    fn entries(&self, gpa: u64, since: Time) -> impl Iterator<Item = u64> {
        let is_there = self.memory(gpa).is_some();
        let known = self.values.get(&gpa).map_or(&[][..], |values| {
            let old = values.partition_point(|(from, _)| *from <= since);
            &values[old.saturating_sub(1)..]
        });
        // What is not in memory maps nothing.
        let absent = (known.is_empty() || !is_there).then_some(0);
        known.iter().map(|(_, value)| *value).chain(absent)
    }

    /// Returns all that `access` may come to, and the entries that it may mark.
    pub fn outcomes(&self, access: &Access, since: Since) -> (BTreeSet<Outcome>, Marks) {
        let mut search = Search {
            tables: self,
            access,
            since,
            outcomes: BTreeSet::new(),
            marks: Marks::new(),
        };
        search.guest(GUEST_ROOT, 4, P | RW | US);
        (search.outcomes, search.marks)
    }
}

/// The entries that an access uses, and the flags that it sets in them if it comes to a page: A, and D in those that
/// map what it writes to. The tables of the guest's count as written to (15.25.5).
pub type Marks = BTreeMap<u64, u64>;

struct Search<'a> {
    tables: &'a Tables,
    access: &'a Access,
    since: Since,
    outcomes: BTreeSet<Outcome>,
    marks: Marks,
}

/// EXITINFO1: the fault was at the page itself, or at a table of the guest's.
const AT_PAGE: u64 = 1 << 32;
const AT_TABLE: u64 = 1 << 33;

/// What an entry means.
enum Meaning {
    Absent,
    Reserved,
    Table(u64),
    Page(u64),
}

/// Returns what `entry` of `level` means for `address`. `nested`: in a nested table, where bit 8 of upper
/// entries is reserved.
fn meaning(entry: u64, level: u32, address: u64, nested: bool) -> Meaning {
    let offset = (1u64 << (12 + 9 * (level - 1))) - 1;
    let is_page = level == 1 || entry & PS != 0;
    let reserved = match (level, is_page) {
        (4, true) => PS,
        (2 | 3, true) => offset & ADDRESS & !0x1000,
        (3 | 4, false) if nested => G,
        _ => 0,
    };
    match entry {
        _ if entry & P == 0 => Meaning::Absent,
        _ if entry & reserved != 0 => Meaning::Reserved,
        _ if is_page => Meaning::Page(entry & ADDRESS & !offset | address & offset),
        _ => Meaning::Table(entry & ADDRESS),
    }
}

/// Returns what the rights of a path are after `entry`: those that all have, and NX if one has it.
fn and(rights: u64, entry: u64) -> u64 {
    rights & entry & (RW | US) | (rights | entry) & NX
}

/// Returns the bits of an error code that tell of the access.
fn code(kind: Kind, user: bool) -> u64 {
    let kind = match kind {
        Kind::Read => 0,
        Kind::Write => 2,
        Kind::Execute => 16,
    };
    kind | if user { 4 } else { 0 }
}

/// Returns the flag of an entry that maps what an access writes to.
fn dirty(kind: Kind) -> u64 {
    if kind == Kind::Write { D } else { 0 }
}

impl Search<'_> {
    fn mark(&mut self, at: u64, flags: u64) {
        *self.marks.entry(at).or_default() |= flags;
    }

    /// Walks the guest's tables from that of `level` at `table`, an address of the guest's.
    fn guest(&mut self, table: u64, level: u32, rights: u64) {
        let Access {
            address,
            kind,
            user,
            write_protect,
        } = *self.access;
        let at = table + 8 * (address >> (12 + 9 * (level - 1)) & 511);
        // The entry's flags may have to be set.
        for found in self.nested(at, Kind::Write, AT_TABLE, NESTED_ROOT, 4, P | RW | US) {
            for entry in self
                .tables
                .entries(found, self.since.guest)
                .collect::<Vec<_>>()
            {
                self.mark(found, A);
                let fault = match meaning(entry, level, address, false) {
                    Meaning::Table(next) => {
                        self.guest(next, level - 1, and(rights, entry));
                        continue;
                    }
                    Meaning::Absent => 0,
                    Meaning::Reserved => 1 | 8,
                    Meaning::Page(page) => {
                        let rights = and(rights, entry);
                        let is_forbidden = user && rights & US == 0
                            || kind == Kind::Execute && rights & NX != 0
                            || kind == Kind::Write && rights & RW == 0 && (user || write_protect);
                        if !is_forbidden {
                            self.mark(found, dirty(kind));
                            self.page(page);
                            continue;
                        }
                        1
                    }
                };
                let code = fault | code(kind, user);
                self.outcomes.insert(Outcome::PageFault(code));
            }
        }
    }

    /// The guest's tables lead to its address `gpa`.
    fn page(&mut self, gpa: u64) {
        let kind = self.access.kind;
        for found in self.nested(gpa, kind, AT_PAGE, NESTED_ROOT, 4, P | RW | US) {
            let is_memory = match self.tables.memory(found) {
                None => false,
                Some(is_read_only) => kind != Kind::Write || !is_read_only,
            };
            self.outcomes.insert(match is_memory {
                true => Outcome::Page(found / PAGE),
                false => Outcome::Mmio(found),
            });
        }
    }

    /// Walks the nested tables for `gpa`, from that of `level` at `table`, as a user. Returns the
    /// addresses that they lead to.
    fn nested(
        &mut self,
        gpa: u64,
        kind: Kind,
        place: u64,
        table: u64,
        level: u32,
        rights: u64,
    ) -> BTreeSet<u64> {
        let at = table + 8 * (gpa >> (12 + 9 * (level - 1)) & 511);
        let mut found = BTreeSet::new();
        for entry in self
            .tables
            .entries(at, self.since.nested)
            .collect::<Vec<_>>()
        {
            self.mark(at, A);
            let fault = match meaning(entry, level, gpa, true) {
                Meaning::Table(next) => {
                    let rights = and(rights, entry);
                    found.extend(self.nested(gpa, kind, place, next, level - 1, rights));
                    continue;
                }
                Meaning::Absent => 0,
                Meaning::Reserved => 1 | 8,
                Meaning::Page(page) => {
                    let rights = and(rights, entry);
                    let is_forbidden = rights & US == 0
                        || kind == Kind::Execute && rights & NX != 0
                        || kind == Kind::Write && rights & RW == 0;
                    if !is_forbidden {
                        self.mark(at, dirty(kind));
                        found.insert(page);
                        continue;
                    }
                    1
                }
            };
            let info = place | fault | code(kind, true);
            self.outcomes.insert(Outcome::NestedFault(info, gpa));
        }
        found
    }
}
