//! The STLB, the second level of the software TLB: translations of several address spaces, for data and code.
//!
//! After a miss of the first level, the CPU looks into the STLB before the machine walks the guest's tables. The
//! guest's accesses never use an entry of the STLB directly. The STLB knows nothing of decoded code and watchpoints:
//! the CPU looks for these when it enters a page into the first level.
//!
//! A translation belongs to one address space, or is *global*. A global translation is valid in every space of its
//! world. A *world* is the guest itself, or a nested guest (an ASID of SVM). A space has a name (world and PCID) and a
//! number. The space's translations contain the number. To drop them, a flush gives the space a new number, without
//! changing any entry. Global translations contain a number of their world. When all numbers are used up, all entries
//! are dropped.

use super::{ENTRIES, HUGE_BITS, SUPERVISOR, SUPERVISOR_AC, USER};
use crate::machine::{Access, HostPage};
use std::ptr::NonNull;

/// The number of sets. The next constant is the number of entries in a set, as many as fit into a cache line of the
/// host.
const SETS: usize = 2048;
const WAYS: usize = 4;

/// The number of spaces whose translations are kept. The number is greater than twelve, the number of PCIDs that Linux
/// uses at the same time: for each of six processes, one PCID for the kernel and one for the user.
const SPACES: usize = 16;
/// The number of bits of the PCID in the name of a space. The bits above are the world.
pub(crate) const PCID_BITS: u32 = 12;
/// The number of worlds (the guest itself, and its nested guests by ASID). The bits in the name of a space limit it.
pub(crate) const WORLDS: usize = 1 << (u16::BITS - PCID_BITS);
/// The number of different space numbers.
const NUMBERS: u16 = 1 << 14;

/// The parts of a key: bit 63, which is set in a used entry; the flag of a global translation; the bits of the linear
/// page number that can differ in canonical addresses; the table; the number of the space.
const USED: u64 = 1 << 63;
const GLOBAL: u64 = 1 << 62;
const PAGE_BITS: u32 = 45;
const PAGE_SHIFT: u32 = 16;
const TABLE_SHIFT: u32 = 14;

/// The parts of a value: the page's host address; the rights; the logarithm of the size of the guest's page.
const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const EXECUTE: u64 = 1 << 2;
const BITS_SHIFT: u32 = 4;
const BITS_MASK: u64 = 0x3f;

#[derive(Clone, Copy)]
#[repr(C)]
struct Entry {
    /// The key. 0: the entry is empty.
    key: u64,
    value: u64,
}

impl Entry {
    const EMPTY: Entry = Entry { key: 0, value: 0 };

    /// Whether this translation and the page with number `page` are in the same large page of the guest.
    fn is_part_with(&self, page: u64) -> bool {
        let bits = (self.value >> BITS_SHIFT & BITS_MASK) as u32;
        let same = (self.key >> PAGE_SHIFT ^ page) & PAGES;
        self.key != 0 && same >> (bits.clamp(12, HUGE_BITS) - 12) == 0
    }
}

/// The mask of a page number in a key.
const PAGES: u64 = (1 << PAGE_BITS) - 1;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Set([Entry; WAYS]);

/// An address space, and the number that its translations contain.
#[derive(Clone, Copy)]
struct Space {
    is_known: bool,
    name: u16,
    number: u16,
}

impl Space {
    fn is_of(&self, world: usize) -> bool {
        world_of(self.name) == world
    }
}

/// Returns the world (the guest itself, or a nested guest) of the address space called `name`.
fn world_of(name: u16) -> usize {
    usize::from(name >> PCID_BITS)
}

/// Which translations of a page to drop.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    /// For INVLPG: the translations of the current space, and global ones.
    CurrentAndGlobal,
    /// For INVPCID of type 0: the translations of the space with this name, but not global ones.
    Of(u16),
}

/// The second level of the TLB. An STLB of zeroes is empty.
pub(crate) struct Stlb {
    sets: [Set; SETS],
    spaces: [Space; SPACES],
    /// The index of the space whose translations are given up next.
    oldest: usize,
    /// The number of the current space.
    current: u16,
    /// The number of the global translations of the current space's world.
    global: u16,
    /// The number that was given last.
    last: u16,
    /// The number of each world's global translations; 0 if a world has no such number yet.
    globals: [u16; WORLDS],
    /// The index, within a set, of the entry that is replaced next if the set is full.
    next_way: usize,
}

impl Stlb {
    #[inline(always)]
    fn index(page: u64, table: u64) -> usize {
        (page ^ page >> 11 ^ table << 9) as usize & (SETS - 1)
    }

    /// Returns the parts of a key that come from the page number and the table.
    #[inline(always)]
    fn place(table: u64, lin: u64) -> u64 {
        USED | (lin >> 12 & PAGES) << PAGE_SHIFT | table << TABLE_SHIFT
    }

    /// Returns the translation of the page of `lin` for accesses that use `table`. `None`: the STLB has no such
    /// translation that allows `access`.
    #[inline(always)]
    pub(super) fn find(&self, table: u64, lin: u64, access: Access) -> Option<HostPage> {
        let place = Self::place(table, lin);
        let (own, global) = (
            place | u64::from(self.current),
            place | GLOBAL | u64::from(self.global),
        );
        let set = &self.sets[Self::index(lin >> 12, table)].0;
        let found = set.iter().find(|e| e.key == own || e.key == global)?;
        let right = match access {
            Access::Read => READ,
            Access::Write => WRITE,
            Access::Execute => EXECUTE,
        };
        let value = found.value;
        if value & right == 0 {
            return None;
        }
        Some(HostPage {
            base: NonNull::new((value & !0xfff) as *mut u8)?,
            read: value & READ != 0,
            write: value & WRITE != 0,
            execute: value & EXECUTE != 0,
            tracked: None,
            bits: (value >> BITS_SHIFT & BITS_MASK) as u32,
            global: found.key & GLOBAL != 0,
        })
    }

    /// Enters a translation, which the machine has just made for `access`. Stores the right to execute only if `access`
    /// is a fetch.
    pub(super) fn enter(&mut self, table: u64, lin: u64, page: &HostPage, access: Access) {
        let place = Self::place(table, lin);
        let key = match page.global {
            true => place | GLOBAL | u64::from(self.global),
            false => place | u64::from(self.current),
        };
        let right = |has: bool, bit: u64| if has { bit } else { 0 };
        let value = page.base.as_ptr() as u64
            | right(page.read, READ)
            | right(page.write, WRITE)
            | right(page.execute && access == Access::Execute, EXECUTE)
            | (u64::from(page.bits) & BITS_MASK) << BITS_SHIFT;
        let set = &mut self.sets[Self::index(lin >> 12, table)].0;
        let known = set.iter_mut().find(|entry| entry.key == key);
        if let Some(entry) = known {
            // The page has an entry already, from another kind of access (fetch or data). If both entries have the same
            // host page, the new entry gets the rights of both.
            let same = (entry.value ^ value) & !0xfff == 0;
            entry.value = value | right(same, entry.value & EXECUTE);
            return;
        }
        let way = match set.iter().position(|entry| entry.key == 0) {
            Some(free) => free,
            None => {
                self.next_way = self.next_way.wrapping_add(1);
                self.next_way % WAYS
            }
        };
        set[way] = Entry { key, value };
    }

    /// Returns a number that no entry contains.
    fn new_number(&mut self) -> u16 {
        if self.last + 1 >= NUMBERS {
            self.sets.fill(Set([Entry::EMPTY; WAYS]));
            self.forget_spaces();
            self.globals = [0; WORLDS];
            (self.current, self.global, self.last) = (0, 0, 0);
        }
        self.last += 1;
        self.last
    }

    fn forget_spaces(&mut self) {
        for space in &mut self.spaces {
            space.is_known = false;
        }
    }

    fn space_of(&mut self, name: u16) -> Option<&mut Space> {
        (self.spaces.iter_mut()).find(|space| space.is_known && space.name == name)
    }

    /// Makes space `name` the current space. It must belong to another world than the current space. Its earlier
    /// translations stay valid.
    pub(super) fn enter_world(&mut self, name: u16) {
        let world = world_of(name);
        if self.globals[world] == 0 {
            self.globals[world] = self.new_number();
        }
        self.global = self.globals[world];
        self.switch(name, true);
    }

    /// Drops the translations of a world: the guest's own, or those of one ASID. If it is the current world, the caller
    /// must enter the world again.
    pub(super) fn forget_world(&mut self, world: usize) {
        self.globals[world] = 0;
        for space in self.spaces.iter_mut().filter(|space| space.is_of(world)) {
            space.is_known = false;
        }
    }

    /// Drops the translations of the current world, and makes space `name` the current space.
    pub(super) fn flush_world(&mut self, name: u16) {
        self.forget_world(world_of(name));
        self.enter_world(name);
    }

    /// Makes space `name` the current space. It must belong to the current world. If `keeps`, its earlier translations
    /// stay valid.
    pub(super) fn switch(&mut self, name: u16, keeps: bool) {
        if keeps && let Some(space) = self.space_of(name) {
            self.current = space.number;
            return;
        }
        let number = self.new_number();
        self.current = number;
        let new = Space {
            is_known: true,
            name,
            number,
        };
        match self.space_of(name) {
            Some(space) => *space = new,
            None => {
                self.spaces[self.oldest] = new;
                self.oldest = (self.oldest + 1) % SPACES;
            }
        }
    }

    /// Drops the translations of space `name`, which must not be the current space.
    pub(super) fn forget(&mut self, name: u16) {
        if let Some(space) = self.space_of(name) {
            space.is_known = false;
        }
    }

    /// Drops the translations of all spaces, except global ones, and makes space `name` the current space.
    pub(super) fn flush_spaces(&mut self, name: u16) {
        self.forget_spaces();
        self.switch(name, false);
    }

    /// Drops all translations of all worlds, and makes space `name` the current space.
    pub(super) fn flush(&mut self, name: u16) {
        self.globals = [0; WORLDS];
        self.global = self.new_number();
        self.globals[world_of(name)] = self.global;
        self.flush_spaces(name);
    }

    /// Drops the translations of all parts of the guest's large page that contains `lin`, in all spaces.
    pub(super) fn flush_large(&mut self, lin: u64) {
        let page = lin >> 12;
        for entry in self.sets.iter_mut().flat_map(|set| &mut set.0) {
            if entry.is_part_with(page) {
                *entry = Entry::EMPTY;
            }
        }
    }

    /// Drops translations of the page of `lin`.
    pub(super) fn flush_page(&mut self, lin: u64, which: Which) {
        let own = match which {
            Which::CurrentAndGlobal => Some(self.current),
            Which::Of(name) => self.space_of(name).map(|space| space.number),
        };
        for table in [SUPERVISOR, USER, SUPERVISOR_AC].map(|table| (table / ENTRIES) as u64) {
            let place = Self::place(table, lin);
            let own = own.map(|number| place | u64::from(number));
            let global = (which == Which::CurrentAndGlobal)
                .then_some(place | GLOBAL | u64::from(self.global));
            for entry in &mut self.sets[Self::index(lin >> 12, table)].0 {
                if Some(entry.key) == own || Some(entry.key) == global {
                    *entry = Entry::EMPTY;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::{Pages, Zeroed};

    // SAFETY: the type consists of integers and `bool`s, for which zeroes are a valid value.
    unsafe impl Zeroed for Stlb {}

    fn page(global: bool, bits: u32) -> HostPage {
        HostPage {
            base: NonNull::new(0x1000 as *mut u8).unwrap(),
            read: true,
            write: false,
            execute: true,
            tracked: None,
            bits,
            global,
        }
    }

    #[test]
    fn numbers_that_run_out_bring_no_translation_back() {
        let mut stlb = Pages::<Stlb>::zeroed().unwrap();
        stlb.flush(0);
        for n in 0..3 * u64::from(NUMBERS) {
            let lin = n << 12;
            stlb.enter(0, lin, &page(n % 2 == 0, 12), Access::Read);
            assert!(stlb.find(0, lin, Access::Read).is_some());
            match n % 3 {
                0 => stlb.flush(5),
                1 => {
                    stlb.switch(n as u16 & 0xfff, false);
                    stlb.flush_page(lin, Which::CurrentAndGlobal);
                }
                _ => {
                    stlb.flush_spaces(7);
                    stlb.flush_page(lin, Which::CurrentAndGlobal);
                }
            }
            for known in [lin, lin.wrapping_sub(0x1000), 0] {
                assert!(stlb.find(0, known, Access::Read).is_none(), "{n}");
            }
        }
    }

    #[test]
    fn a_fetch_is_allowed_only_where_one_was_translated() {
        let mut stlb = Pages::<Stlb>::zeroed().unwrap();
        stlb.enter(1, 0x5000, &page(false, 12), Access::Read);
        assert!(stlb.find(1, 0x5000, Access::Execute).is_none());
        assert!(stlb.find(1, 0x5000, Access::Write).is_none());
        stlb.enter(1, 0x5000, &page(false, 12), Access::Execute);
        stlb.enter(1, 0x5000, &page(false, 12), Access::Read);
        assert!(stlb.find(1, 0x5000, Access::Execute).is_some());
        assert!(stlb.find(0, 0x5000, Access::Read).is_none(), "privilege");
    }

    /// Worlds do not share translations. Each world has a global and an ordinary translation of the same page. The STLB
    /// must not find them in another world, nor after the world was forgotten.
    #[test]
    fn worlds_share_nothing() {
        let mut stlb = Pages::<Stlb>::zeroed().unwrap();
        let name = |world: u16| world << PCID_BITS | 3;
        let known =
            |stlb: &Stlb| [0x5000, 0x6000].map(|lin| stlb.find(0, lin, Access::Read).is_some());
        for world in [0, 1, 7] {
            stlb.enter_world(name(world));
            assert_eq!(known(&stlb), [false; 2], "{world}");
            stlb.enter(0, 0x5000, &page(true, 12), Access::Read);
            stlb.enter(0, 0x6000, &page(false, 12), Access::Read);
        }
        for world in [0, 7, 1] {
            stlb.enter_world(name(world));
            assert_eq!(known(&stlb), [true; 2], "{world}");
            stlb.switch(world << PCID_BITS | 4, true);
            assert_eq!(known(&stlb), [true, false], "another PCID of {world}");
        }
        stlb.forget_world(7);
        stlb.enter_world(name(7));
        assert_eq!(known(&stlb), [false; 2]);
        stlb.enter_world(name(0));
        assert_eq!(known(&stlb), [true; 2]);
        stlb.flush(name(0));
        for world in [0, 1, 7] {
            stlb.enter_world(name(world));
            assert_eq!(known(&stlb), [false; 2], "{world}");
        }
    }

    #[test]
    fn more_spaces_than_are_remembered_lose_their_translations_only() {
        let mut stlb = Pages::<Stlb>::zeroed().unwrap();
        for pcid in 0..2 * SPACES as u16 {
            stlb.switch(pcid, true);
            assert!(stlb.find(0, 0x5000, Access::Read).is_none());
            stlb.enter(0, 0x5000, &page(false, 12), Access::Read);
        }
        let last = 2 * SPACES as u16 - 1;
        stlb.switch(0, true);
        assert!(stlb.find(0, 0x5000, Access::Read).is_none());
        stlb.switch(last, true);
        assert!(stlb.find(0, 0x5000, Access::Read).is_some());
        stlb.forget(0);
        stlb.flush_page(0x5000, Which::Of(last));
        assert!(stlb.find(0, 0x5000, Access::Read).is_none());
    }

    #[test]
    fn a_large_page_is_dropped_whole() {
        let mut stlb = Pages::<Stlb>::zeroed().unwrap();
        for n in 0..600 {
            stlb.enter(0, n << 12, &page(false, 21), Access::Read);
        }
        stlb.flush_large(0x1000);
        let known = |n: &u64| stlb.find(0, n << 12, Access::Read).is_some();
        assert_eq!((0..600).find(known), Some(512));
    }
}
