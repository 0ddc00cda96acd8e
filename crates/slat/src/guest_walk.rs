//! The walk of the guest's own page tables, for a software CPU and for shadow paging.
//!
//! Intel SDM volume 3A, chapter "Paging": 32-bit, PAE, 4-level and 5-level paging; access rights follow its section
//! "Determination of Access Rights", the error code "Page-Fault Exceptions", accessed and dirty flags "Accessed and
//! Dirty Flags".
//!
//! Other CPUs may change the tables at any time. The walk reads entries one by one, and sets accessed and dirty flags
//! by compare-exchange. If a compare-exchange fails, the walk restarts.

use crate::addr::{Access, Gpa};

/// The guest's paging mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// CR4.PAE clear: two levels of 1024 four-byte entries.
    Bits32 {
        /// CR4.PSE: whether an entry of level 2 can map 4 MiB.
        pse: bool,
    },
    /// CR4.PAE set outside long mode: four page-directory-pointer entries above two levels.
    Pae,
    /// Long mode.
    Level4,
    /// Long mode with CR4.LA57.
    Level5,
}

/// The part of a CPU's state that a walk depends on.
#[derive(Clone, Copy, Debug)]
pub struct GuestPaging {
    /// CR3. The walk ignores the low bits that are not address bits in `mode`.
    pub cr3: u64,
    /// The paging mode.
    pub mode: Mode,
    /// Whether the access is made at CPL 3 (and is not an implicit supervisor access).
    pub user: bool,
    /// CR0.WP: whether a supervisor's writes to read-only pages fault.
    pub write_protect: bool,
    /// EFER.NXE: whether the execute-disable bit of entries counts.
    pub no_execute: bool,
    /// CR4.SMEP: whether a supervisor's fetches from user pages fault.
    pub smep: bool,
    /// CR4.SMAP, unless EFLAGS.AC suspends it for this access: whether a supervisor's data accesses to user pages
    /// fault.
    pub smap: bool,
    /// PKRU if CR4.PKE is set, else 0. It tells which accesses to user pages each protection key forbids.
    pub pkru: u32,
    /// The page-directory-pointer entries of [`Mode::Pae`], if the CPU has loaded them into registers. `None`: they are
    /// in memory, and each walk reads them. Then the shadow MMU translates as the guest's tables do, but installs no
    /// shadow leaves: [`Vcpu::translate_virtual`](crate::Vcpu::translate_virtual) walks the guest's tables each time.
    pub pdptes: Option<[u64; 4]>,
    /// The width of guest-physical addresses in bits (MAXPHYADDR), at most 52.
    pub physical_bits: u32,
    /// Whether bit 8, which is G in entries that map pages, is reserved in entries of levels 3 to 5 that refer to
    /// tables, as on AMD's CPUs. Intel's CPUs ignore the bit in these entries.
    pub reserves_table_global: bool,
}

impl GuestPaging {
    /// Returns whether entries have 8 bytes.
    pub(crate) fn has_long_entries(&self) -> bool {
        !matches!(self.mode, Mode::Bits32 { .. })
    }

    /// Returns the address of the table that `entry` refers to.
    fn table_in(&self, entry: u64) -> Gpa {
        match self.has_long_entries() {
            true => Gpa(entry & FRAME),
            false => Gpa(entry & 0xffff_f000),
        }
    }

    /// Returns the number of levels of tables. For PAE paging, does not count the page-directory-pointer entries.
    pub(crate) fn levels(&self) -> u32 {
        match self.mode {
            Mode::Bits32 { .. } | Mode::Pae => 2,
            Mode::Level4 => 4,
            Mode::Level5 => 5,
        }
    }

    /// Returns how many bits of an address the tables translate. The walk ignores higher bits.
    pub fn translated_bits(&self) -> u32 {
        match self.mode {
            Mode::Bits32 { .. } | Mode::Pae => 32,
            Mode::Level4 => 48,
            Mode::Level5 => 57,
        }
    }

    /// Returns the address of the table with which a walk to `gva` begins. In [`Mode::Pae`] this is the table to which
    /// a page-directory-pointer entry in a register refers (`pdptes`). `None`: that entry is not present or has
    /// reserved bits set, or `pdptes` is `None`.
    pub(crate) fn root_table(&self, gva: u64) -> Option<Gpa> {
        if self.mode != Mode::Pae {
            return Some(Gpa(Shape::of(self).root));
        }
        let pointer = self.pdptes?[(gva >> 30 & 3) as usize];
        maps_page(self, &Shape::of(self), 3, pointer).ok()?;
        Some(self.table_in(pointer))
    }

    /// Returns this paging state with CR0.WP set.
    pub(crate) fn strict(&self) -> GuestPaging {
        GuestPaging {
            write_protect: true,
            ..*self
        }
    }

    /// Returns the paging state for checking the rights of a shadow leaf, with CR0.WP and EFER.NXE set. The engine may
    /// have removed from the leaf the right to write (for the dirty log) or to execute (for the slot's rights). So both
    /// must be checked, even if the guest's own state ignores them.
    pub(crate) fn of_leaf(&self) -> GuestPaging {
        GuestPaging {
            no_execute: true,
            ..self.strict()
        }
    }

    /// Returns those bits of a page fault's error code that depend only on the access: the whole code if the entry is
    /// not present.
    pub fn access_code(&self, access: Access) -> u32 {
        let mut code = 0;
        if self.user {
            code |= error_code::USER;
        }
        match access {
            Access::Read => {}
            Access::Write => code |= error_code::WRITE,
            // SDM: the bit is set for a fetch only if execute-disable (NXE, with 8-byte entries) or SMEP is on.
            Access::Execute if self.reports_fetches() => code |= error_code::FETCH,
            Access::Execute => {}
        }
        code
    }

    /// Returns whether the error codes of page faults distinguish instruction fetches.
    fn reports_fetches(&self) -> bool {
        let has_nx = !matches!(self.mode, Mode::Bits32 { .. });
        has_nx && self.no_execute || self.smep
    }
}

/// The guest memory that a walk accesses.
pub trait GuestTables {
    /// The reason why guest memory cannot be accessed now.
    type Error;
    /// Reads the table entry of `size` (4 or 8) bytes at `gpa`, which is a multiple of `size`.
    ///
    /// # Errors
    /// The implementor's error; it ends the walk.
    fn read(&mut self, gpa: Gpa, size: usize) -> Result<u64, Self::Error>;
    /// Atomically replaces the table entry of `size` bytes at `gpa` by `new`, if the entry is still `old`. Returns
    /// whether the entry was replaced.
    ///
    /// # Errors
    /// The implementor's error; it ends the walk.
    fn compare_exchange(
        &mut self,
        gpa: Gpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Self::Error>;
}

/// The translation of a 4 KiB page of guest-virtual memory, with the rights of the privilege level of the walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestPage {
    /// The guest-physical address of the 4 KiB page.
    pub gpa: Gpa,
    /// The size of the guest's page that contains the 4 KiB page: 2^`bits` bytes.
    pub bits: u32,
    /// Whether data may be read.
    pub read: bool,
    /// Whether data may be written without another walk: the tables grant the right, and the dirty flag is already set.
    pub write: bool,
    /// Whether instructions may be fetched.
    pub execute: bool,
    /// The G flag of the entry that maps the page. It applies if CR4.PGE is set.
    pub global: bool,
}

/// The reason why a walk has found no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkError<E> {
    /// The guest gets #PF with this error code.
    PageFault {
        /// Bits of the error code of the page fault ([`error_code`]).
        code: u32,
    },
    /// The guest's tables could not be accessed.
    Memory(E),
}

/// Bits of a page fault's error code (SDM 3A, figure "Page-Fault Error Code").
pub mod error_code {
    /// All entries were present: a missing right or a reserved bit caused the fault.
    pub const PRESENT: u32 = 1 << 0;
    /// The access was a write.
    pub const WRITE: u32 = 1 << 1;
    /// The access was made at CPL 3.
    pub const USER: u32 = 1 << 2;
    /// A reserved bit is set in an entry.
    pub const RESERVED: u32 = 1 << 3;
    /// The access was an instruction fetch.
    pub const FETCH: u32 = 1 << 4;
    /// The page's protection key forbids the access.
    pub const PROTECTION_KEY: u32 = 1 << 5;
}

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const PAGE_SIZE_BIT: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const NO_EXECUTE: u64 = 1 << 63;
const FRAME: u64 = 0x000f_ffff_ffff_f000;

/// The parameters of the tables of a paging mode.
struct Shape {
    levels: u32,
    /// The number of address bits that select an entry in a table.
    index_bits: u32,
    /// The size of an entry in bytes.
    entry_size: usize,
    /// The guest-physical address of the root table.
    root: u64,
    /// The highest level at which an entry may map a page.
    max_leaf: u32,
}

impl Shape {
    #[inline]
    fn of(paging: &GuestPaging) -> Shape {
        let long = |levels| Shape {
            levels,
            index_bits: 9,
            entry_size: 8,
            root: paging.cr3 & FRAME,
            max_leaf: 3,
        };
        match paging.mode {
            Mode::Bits32 { pse } => Shape {
                levels: 2,
                index_bits: 10,
                entry_size: 4,
                root: paging.cr3 & 0xffff_f000,
                max_leaf: if pse { 2 } else { 1 },
            },
            Mode::Pae => Shape {
                root: paging.cr3 & 0xffff_ffe0,
                max_leaf: 2,
                ..long(3)
            },
            Mode::Level4 => long(4),
            Mode::Level5 => long(5),
        }
    }

    /// Returns the lowest address bit of the index at `level`.
    #[inline]
    fn shift(&self, level: u32) -> u32 {
        12 + self.index_bits * (level - 1)
    }

    /// Returns whether entries of `level` are the four page-directory-pointer entries of PAE, which have neither rights
    /// nor an accessed flag.
    #[inline]
    fn is_pointer(&self, mode: Mode, level: u32) -> bool {
        mode == Mode::Pae && level == 3
    }
}

/// The rights that all entries on a walk's path grant together: a right counts only if every entry grants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRights {
    pub(crate) write: bool,
    pub(crate) user: bool,
    pub(crate) execute: bool,
    /// The protection key of the page.
    pub(crate) key: u8,
}

impl PageRights {
    /// All rights, as if no entry on the path limited a right.
    pub(crate) const ALL: PageRights = PageRights {
        write: true,
        user: true,
        execute: true,
        key: 0,
    };

    /// Returns these rights as limited by `entry`. Page-directory-pointer entries limit no right.
    pub(crate) fn below(self, paging: &GuestPaging, entry: u64) -> Self {
        PageRights {
            write: self.write && entry & WRITABLE != 0,
            user: self.user && entry & USER != 0,
            execute: self.execute && (entry & NO_EXECUTE == 0 || !paging.has_long_entries()),
            key: self.key,
        }
    }

    /// Returns the rights to the page that `leaf` maps. `self` is the rights that the entries above it grant together.
    pub(crate) fn of_page(self, paging: &GuestPaging, leaf: u64) -> Self {
        let has_keys = matches!(paging.mode, Mode::Level4 | Mode::Level5);
        PageRights {
            key: if has_keys { (leaf >> 59 & 15) as u8 } else { 0 },
            ..self.below(paging, leaf)
        }
    }

    /// Whether these rights allow `access` if the CPU is in the state `paging`.
    pub(crate) fn allow(self, paging: &GuestPaging, access: Access) -> bool {
        Rights::of(paging, self).allow(access)
    }
}

/// The entries that a walk read on the way to a page.
pub(crate) struct GuestPath {
    /// Address and value of each entry that has an accessed flag, from the root down. A value is from before the walk
    /// set flags in the entry.
    entries: [(Gpa, u64); 5],
    len: usize,
    rights: PageRights,
}

impl GuestPath {
    /// Returns the address and the value of each entry on the path, from the root down, without a
    /// page-directory-pointer entry of PAE.
    pub(crate) fn entries(&self) -> &[(Gpa, u64)] {
        &self.entries[..self.len]
    }
}

/// Walks the guest's tables for `access` to `gva`. Sets accessed and dirty flags as a processor does. Returns the page
/// and all rights to it, not only the right to `access`.
///
/// # Errors
/// [`WalkError`]. The walk may have set accessed flags before it failed, but no dirty flag.
pub fn walk<T: GuestTables>(
    tables: &mut T,
    paging: &GuestPaging,
    gva: u64,
    access: Access,
) -> Result<GuestPage, WalkError<T::Error>> {
    walk_with_path(tables, paging, gva, access).map(|(page, _)| page)
}

/// Walks the guest's tables like [`walk`], and also returns the entries on the path.
pub(crate) fn walk_with_path<T: GuestTables>(
    tables: &mut T,
    paging: &GuestPaging,
    gva: u64,
    access: Access,
) -> Result<(GuestPage, GuestPath), WalkError<T::Error>> {
    loop {
        if let Some(found) = attempt(tables, paging, gva, access)? {
            return Ok(found);
        }
    }
}

/// Walks once. `None`: another CPU changed an entry after this walk read it and before it set flags in the entry.
fn attempt<T: GuestTables>(
    tables: &mut T,
    paging: &GuestPaging,
    gva: u64,
    access: Access,
) -> Result<Option<(GuestPage, GuestPath)>, WalkError<T::Error>> {
    let shape = Shape::of(paging);
    let fault = |extra: u32| {
        Err(WalkError::PageFault {
            code: extra | paging.access_code(access),
        })
    };
    let mut path = GuestPath {
        entries: [(Gpa(0), 0); 5],
        len: 0,
        rights: PageRights::ALL,
    };
    let mut table = shape.root;
    let mut level = shape.levels;
    let leaf = loop {
        let index = (gva >> shape.shift(level)) & ((1 << shape.index_bits) - 1);
        let index = if shape.is_pointer(paging.mode, level) {
            index & 3
        } else {
            index
        };
        let gpa = Gpa(table + index * shape.entry_size as u64);
        let entry = match paging.pdptes {
            Some(pdptes) if shape.is_pointer(paging.mode, level) => pdptes[index as usize],
            _ => (tables.read(gpa, shape.entry_size)).map_err(WalkError::Memory)?,
        };
        let is_leaf = match maps_page(paging, &shape, level, entry) {
            Ok(is_leaf) => is_leaf,
            Err(code) => return fault(code),
        };
        if !shape.is_pointer(paging.mode, level) {
            path.entries[path.len] = (gpa, entry);
            path.len += 1;
            path.rights = match is_leaf {
                true => path.rights.of_page(paging, entry),
                false => path.rights.below(paging, entry),
            };
        }
        if is_leaf {
            break entry;
        }
        table = paging.table_in(entry).0;
        level -= 1;
    };

    let rights = Rights::of(paging, path.rights);
    if !rights.allow(access) {
        return fault(error_code::PRESENT | rights.key_code(access));
    }
    let write = access == Access::Write;
    for (i, &(gpa, entry)) in path.entries[..path.len].iter().enumerate() {
        let dirty = if write && i + 1 == path.len { DIRTY } else { 0 };
        let marked = entry | ACCESSED | dirty;
        if marked != entry
            && !tables
                .compare_exchange(gpa, shape.entry_size, entry, marked)
                .map_err(WalkError::Memory)?
        {
            return Ok(None);
        }
    }
    let offset = (1u64 << shape.shift(level)) - 1;
    let page = GuestPage {
        bits: shape.shift(level),
        gpa: Gpa((frame(paging, leaf, level) & !offset | gva & offset) & !0xfff),
        read: rights.read,
        write: rights.write && (write || leaf & DIRTY != 0),
        execute: rights.execute,
        global: leaf & GLOBAL != 0,
    };
    Ok(Some((page, path)))
}

/// Returns whether `entry`, of `level`, maps a page (`true`) or refers to a table (`false`). `Err`: the entry is not
/// present or has reserved bits set; contains the bits to add to the error code of the access.
#[inline]
fn maps_page(paging: &GuestPaging, shape: &Shape, level: u32, entry: u64) -> Result<bool, u32> {
    if entry & PRESENT == 0 {
        return Err(0);
    }
    let is_leaf = level == 1 || level <= shape.max_leaf && entry & PAGE_SIZE_BIT != 0;
    match entry & reserved(paging, shape, level, is_leaf) {
        0 => Ok(is_leaf),
        _ => Err(error_code::PRESENT | error_code::RESERVED),
    }
}

/// The meaning of an entry whose accessed flag is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UsedEntry {
    /// The entry refers to the table at this address.
    Table(Gpa),
    /// The entry maps the page at this address, of 2^`bits` bytes.
    Page {
        gpa: Gpa,
        bits: u32,
        /// Whether the entry's dirty flag is set.
        dirty: bool,
    },
}

/// Returns the meaning of `entry`, of `level`, for walks in the state `paging`. `None`: a walk would fault on the
/// entry, or would set its accessed flag.
pub(crate) fn used_entry(paging: &GuestPaging, level: u32, entry: u64) -> Option<UsedEntry> {
    let shape = Shape::of(paging);
    if entry & ACCESSED == 0 {
        return None;
    }
    Some(match maps_page(paging, &shape, level, entry).ok()? {
        false => UsedEntry::Table(paging.table_in(entry)),
        true => {
            let bits = shape.shift(level);
            UsedEntry::Page {
                gpa: Gpa(frame(paging, entry, level) & !((1 << bits) - 1)),
                bits,
                dirty: entry & DIRTY != 0,
            }
        }
    })
}

/// Returns the page address in a leaf of `level`. The result may have bits set below the page size, which the caller
/// clears.
fn frame(paging: &GuestPaging, leaf: u64, level: u32) -> u64 {
    match paging.mode {
        // PSE-36: bits 20:13 of an entry that maps a 4 MiB page are bits 39:32 of the page's address.
        Mode::Bits32 { .. } if level == 2 => leaf & 0xffc0_0000 | (leaf >> 13 & 0xff) << 32,
        Mode::Bits32 { .. } => leaf & 0xffff_f000,
        _ => leaf & FRAME,
    }
}

/// Returns the bits that must be 0 in an entry of `level` (SDM 3A, the reserved bits of each paging mode; AMD64 APM
/// volume 2, sections 5.3 and 5.4).
#[inline]
fn reserved(paging: &GuestPaging, shape: &Shape, level: u32, is_leaf: bool) -> u64 {
    if shape.entry_size == 4 {
        // PSE-36: bits 20:13 of an entry that maps a 4 MiB page are bits 39:32 of the page's address. Those that the
        // machine's addresses do not have are reserved.
        let address_bits = paging.physical_bits.clamp(32, 40);
        return if is_leaf && level == 2 {
            (1 << 22) - (1 << (address_bits - 19))
        } else {
            0
        };
    }
    let mut bits = FRAME & !((1u64 << paging.physical_bits.min(52)) - 1);
    if !paging.no_execute {
        bits |= NO_EXECUTE;
    }
    if paging.mode == Mode::Pae {
        bits |= 0x7ff << 52;
    }
    if shape.is_pointer(paging.mode, level) {
        return bits | 0x1e6 | NO_EXECUTE;
    }
    if level > 1 && is_leaf {
        // In a large page's entry bit 12 is PAT. The other bits between it and the page's address must be clear.
        bits |= ((1u64 << shape.shift(level)) - 1) & !0x1fff;
    }
    if level > shape.max_leaf {
        bits |= PAGE_SIZE_BIT;
    }
    if level > 2 && !is_leaf && paging.reserves_table_global {
        bits |= GLOBAL;
    }
    bits
}

/// The rights that the walk's privilege level has to a page.
struct Rights {
    read: bool,
    write: bool,
    execute: bool,
    /// The rights that the page's protection key removes.
    key: KeyRights,
}

/// The rights that a protection key removes.
#[derive(Clone, Copy, Default)]
struct KeyRights {
    read: bool,
    write: bool,
}

impl KeyRights {
    /// Returns the accesses that the page's protection key forbids (SDM 3A, "Protection Keys"). A key applies to data
    /// accesses to user pages, by users and by supervisors. With one exception: a key that disables only writes does
    /// not forbid a supervisor's writes if CR0.WP is clear.
    #[inline]
    fn of(paging: &GuestPaging, page: PageRights) -> KeyRights {
        let has_keys = matches!(paging.mode, Mode::Level4 | Mode::Level5);
        if paging.pkru == 0 || !has_keys || !page.user {
            return KeyRights::default();
        }
        let rights = paging.pkru >> (2 * page.key);
        let read = rights & 1 != 0;
        let write = rights & 2 != 0 && (paging.user || paging.write_protect);
        KeyRights {
            read,
            write: read || write,
        }
    }
}

impl Rights {
    /// Returns the rights to a page at the privilege level of the walk (SDM 3A, "Determination of Access Rights").
    #[inline]
    fn of(paging: &GuestPaging, page: PageRights) -> Rights {
        let executable = page.execute || !paging.no_execute;
        let key = KeyRights::of(paging, page);
        if paging.user {
            Rights {
                read: page.user && !key.read,
                write: page.user && page.write && !key.write,
                execute: page.user && executable,
                key,
            }
        } else {
            let data = !(page.user && paging.smap);
            Rights {
                read: data && !key.read,
                write: data && (page.write || !paging.write_protect) && !key.write,
                execute: executable && !(page.user && paging.smep),
                key,
            }
        }
    }

    /// Returns the error code bit of a protection key violation, or 0. The bit is reported even if another right is
    /// missing, too.
    fn key_code(&self, access: Access) -> u32 {
        let forbidden = match access {
            Access::Read => self.key.read,
            Access::Write => self.key.write,
            Access::Execute => false,
        };
        if forbidden {
            error_code::PROTECTION_KEY
        } else {
            0
        }
    }

    /// Returns whether the rights include `access`.
    fn allow(&self, access: Access) -> bool {
        match access {
            Access::Read => self.read,
            Access::Write => self.write,
            Access::Execute => self.execute,
        }
    }
}

#[cfg(test)]
mod tests;
