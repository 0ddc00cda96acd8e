//! A second implementation of the rules for an access of the nested guest (AMD64 volume 2, 5.3 to 5.5, 15.16 and
//! 15.25). It returns all outcomes that the access may have.
//!
//! A processor may use any value that an entry has had since the last flush that concerns the entry. It may combine
//! that value with any such value of another entry. So the oracle tries every combination of the values that the
//! entries have had since then. Flushes are frequent, and after a flush each entry has one value, so there is one
//! outcome.
//!
//! An intercepted page fault drops entries, but the oracle does not treat that as a flush. It treats INVLPGA as a
//! flush of the nested tables for that address, too. This is stricter than the manual: INVLPGA need not drop
//! guest-physical translations.

use crate::layout::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Execute,
}

/// The outcome of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The access reaches the page with this number in the physical memory of L1, the hypervisor in the guest.
    Page(u64),
    /// The access reaches this physical address of L1, where no memory is, or read-only memory.
    Mmio(u64),
    /// The guest gets a page fault with this error code.
    PageFault(u64),
    /// The hypervisor gets a nested page fault with this EXITINFO1 and EXITINFO2.
    NestedFault(u64, u64),
}

/// An access, and the state of the guest that makes it.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub address: u64,
    pub kind: Kind,
    pub user: bool,
    pub write_protect: bool,
}

/// A time. Stores and flushes happen at different times.
pub type Time = u64;

/// The present and earlier values of the tables' entries.
#[derive(Default)]
pub struct Tables {
    /// The values of each entry, without A and D, each with the time at which it was stored. The last value is the
    /// one in memory.
    values: HashMap<u64, Vec<(Time, u64)>>,
    /// For each memslot of the pool, whether it exists (`Some`), and whether it is read-only.
    pub slots: [Option<bool>; (POOL_PAGES / SLOT_PAGES) as usize],
}

/// The times of the last flushes that concern an access: of the guest's own entries, and of nested entries.
#[derive(Clone, Copy, Debug)]
pub struct Since {
    pub guest: Time,
    pub nested: Time,
}

impl Tables {
    /// Records a store to the entry at `at`.
    pub fn store(&mut self, now: Time, at: u64, value: u64) {
        let values = self.values.entry(at).or_default();
        let value = value & !(A | D);
        if values.last().is_none_or(|(_, last)| *last != value) {
            values.push((now, value));
        }
    }

    /// Removes the values that were replaced before `time`, at which all vCPUs had flushed.
    pub fn forget(&mut self, time: Time) {
        for values in self.values.values_mut() {
            let old = values.partition_point(|(since, _)| *since <= time);
            values.drain(..old.saturating_sub(1));
        }
    }

    /// Returns whether the page of `gpa` is read-only memory of the hypervisor. `None`: the page is not memory.
    pub fn memory(&self, gpa: u64) -> Option<bool> {
        match gpa {
            0..SYSTEM_BYTES => Some(false),
            _ if gpa - POOL < POOL_PAGES * PAGE => {
                self.slots[((gpa - POOL) / (SLOT_PAGES * PAGE)) as usize]
            }
            _ => None,
        }
    }

    /// Returns the values of the entry at `gpa` that a processor may use.
    fn entries(&self, gpa: u64, since: Time) -> impl Iterator<Item = u64> {
        let is_there = self.memory(gpa).is_some();
        let known = self.values.get(&gpa).map_or(&[][..], |values| {
            let old = values.partition_point(|(from, _)| *from <= since);
            &values[old.saturating_sub(1)..]
        });
        // An entry that is not in memory maps nothing.
        let absent = (known.is_empty() || !is_there).then_some(0);
        known.iter().map(|(_, value)| *value).chain(absent)
    }

    /// Returns all outcomes that `access` may have, and the entries in which it may set flags.
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

/// The entries that an access uses, and the flags that it sets in each if it reaches a page. It sets A in all of
/// them, and D in those that map the memory to which it writes. An access to the guest's tables counts as a write to
/// them (15.25.5).
pub type Marks = BTreeMap<u64, u64>;

struct Search<'a> {
    tables: &'a Tables,
    access: &'a Access,
    since: Since,
    outcomes: BTreeSet<Outcome>,
    marks: Marks,
}

/// The bit of EXITINFO1 for a fault at the final page. The next constant is the bit for a fault at a table of the
/// guest.
const AT_PAGE: u64 = 1 << 32;
const AT_TABLE: u64 = 1 << 33;

/// The meaning of an entry.
enum Meaning {
    Absent,
    Reserved,
    Table(u64),
    Page(u64),
}

/// Returns the meaning of `entry` of `level` for `address`. `nested`: the entry is in a nested table, where bit 8 is
/// reserved in entries of the upper levels.
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

/// Returns the rights of a path that continues with `entry`: RW and US if all entries have them, and NX if one entry
/// has it.
fn and(rights: u64, entry: u64) -> u64 {
    rights & entry & (RW | US) | (rights | entry) & NX
}

/// Returns the bits of an error code that describe the access.
fn code(kind: Kind, user: bool) -> u64 {
    let kind = match kind {
        Kind::Read => 0,
        Kind::Write => 2,
        Kind::Execute => 16,
    };
    kind | if user { 4 } else { 0 }
}

/// Returns D for a write, as the flag to set in the entry that maps the page.
fn dirty(kind: Kind) -> u64 {
    if kind == Kind::Write { D } else { 0 }
}

impl Search<'_> {
    fn mark(&mut self, at: u64, flags: u64) {
        *self.marks.entry(at).or_default() |= flags;
    }

    /// Walks the guest's tables, from the table of `level` at the guest's address `table`.
    fn guest(&mut self, table: u64, level: u32, rights: u64) {
        let Access {
            address,
            kind,
            user,
            write_protect,
        } = *self.access;
        let at = table + 8 * (address >> (12 + 9 * (level - 1)) & 511);
        // The processor may have to set flags in the entry, so this counts as a write.
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

    /// Adds the outcomes for the guest-physical address `gpa`, to which the guest's tables lead.
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

    /// Walks the nested tables for `gpa`, from the table of `level` at `table`, as a user access. Returns the
    /// addresses to which they lead.
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
