//! The meaning of page-table entries, and the rights that the entries on a path grant. This module implements the SDM's
//! rules a second time, independently of [`slat::guest_walk`].
//!
//! The rules are in SDM 3A, chapter "Paging": the tables "Format of …" of 32-bit, PAE, 4-level and 5-level paging,
//! "Determination of Access Rights", "Protection Keys", "Page-Fault Exceptions".

use slat::Access;
use slat::guest_walk::{GuestPaging, Mode, error_code};

use super::registers::PHYSICAL_BITS;

pub(super) const P: u64 = 1 << 0;
pub(super) const RW: u64 = 1 << 1;
pub(super) const US: u64 = 1 << 2;
pub(super) const A: u64 = 1 << 5;
pub(super) const D: u64 = 1 << 6;
pub(super) const PS: u64 = 1 << 7;
pub(super) const G: u64 = 1 << 8;
pub(super) const XD: u64 = 1 << 63;

/// The meaning of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    NotPresent,
    /// A reserved bit is set.
    Reserved,
    /// The entry refers to the next table, at this address.
    Table(u64),
    /// The entry maps a page of 2^`bits` bytes.
    Page {
        gpa: u64,
        bits: u32,
    },
}

/// The paging state by which a processor interprets entries. If this state changes, everything is flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub mode: Mode,
    /// The value of EFER.NXE.
    pub has_xd: bool,
    /// Bit 8 of PML4 and PDP entries must be zero, as on AMD (AMD64 volume 2, figures "Long-Mode PML4E" and "PDPE").
    pub reserves_table_global: bool,
}

/// Returns bits `high` to `low`.
const fn bits(high: u32, low: u32) -> u64 {
    (2u64 << high).wrapping_sub(1 << low)
}

impl Layout {
    pub fn of(paging: &GuestPaging) -> Layout {
        Layout {
            mode: paging.mode,
            has_xd: paging.no_execute,
            reserves_table_global: paging.reserves_table_global,
        }
    }

    /// Returns the size of an entry in bytes.
    pub fn entry_size(self) -> usize {
        match self.mode {
            Mode::Bits32 { .. } => 4,
            _ => 8,
        }
    }

    /// Returns the highest level whose entries are in memory. (PAE's PDPTEs are in registers.)
    pub fn top(self) -> u32 {
        match self.mode {
            Mode::Bits32 { .. } | Mode::Pae => 2,
            Mode::Level4 => 4,
            Mode::Level5 => 5,
        }
    }

    /// Returns the lowest bit of an address that selects an entry of `level`.
    pub fn shift(self, level: u32) -> u32 {
        match self.mode {
            Mode::Bits32 { .. } => [12, 22][level as usize - 1],
            _ => [12, 21, 30, 39, 48][level as usize - 1],
        }
    }

    /// Returns the address of the entry for `gva` in the table at `table`.
    pub fn entry_at(self, table: u64, level: u32, gva: u64) -> u64 {
        match self.mode {
            Mode::Bits32 { .. } => table + 4 * (gva >> self.shift(level) & 0x3ff),
            _ => table + 8 * (gva >> self.shift(level) & 0x1ff),
        }
    }

    /// Returns the reserved bits of an 8-byte entry that references a table or maps a 4 KiB page.
    fn reserved(self) -> u64 {
        let address = bits(51, PHYSICAL_BITS);
        let high = if self.mode == Mode::Pae {
            bits(62, 52)
        } else {
            0
        };
        address | high | if self.has_xd { 0 } else { XD }
    }

    /// Returns the meaning of `entry` at `level`.
    pub fn meaning(self, level: u32, entry: u64) -> Meaning {
        if entry & P == 0 {
            return Meaning::NotPresent;
        }
        match self.mode {
            Mode::Bits32 { pse } => meaning_of_4_bytes(pse, level, entry),
            _ => self.meaning_of_8_bytes(level, entry),
        }
    }

    fn meaning_of_8_bytes(self, level: u32, entry: u64) -> Meaning {
        let frame = entry & bits(51, 12);
        let (reserved, meaning) = match (level, entry & PS != 0) {
            (1, _) => (
                0,
                Meaning::Page {
                    gpa: frame,
                    bits: 12,
                },
            ),
            (2, true) => {
                let gpa = entry & bits(51, 21);
                (bits(20, 13), Meaning::Page { gpa, bits: 21 })
            }
            (3, true) => {
                let gpa = entry & bits(51, 30);
                (bits(29, 13), Meaning::Page { gpa, bits: 30 })
            }
            (_, true) => return Meaning::Reserved,
            (3.., false) if self.reserves_table_global => (G, Meaning::Table(frame)),
            (_, false) => (0, Meaning::Table(frame)),
        };
        match entry & (reserved | self.reserved()) {
            0 => meaning,
            _ => Meaning::Reserved,
        }
    }
}

/// Returns the meaning of a 4-byte entry ("Format of a 32-Bit Page-Directory Entry that Maps a 4-MByte Page" and "…
/// References a Page Table").
fn meaning_of_4_bytes(pse: bool, level: u32, entry: u64) -> Meaning {
    let frame = entry & bits(31, 12);
    if level == 1 {
        return Meaning::Page {
            gpa: frame,
            bits: 12,
        };
    }
    if !pse || entry & PS == 0 {
        return Meaning::Table(frame);
    }
    // Bits (M-20):13 of the entry are bits (M-1):32 of the address; bits 21:(M-19) are reserved. M, the width of
    // physical addresses, counts as at most 40.
    let m = PHYSICAL_BITS.min(40);
    if entry & bits(21, m - 19) != 0 {
        return Meaning::Reserved;
    }
    Meaning::Page {
        gpa: entry & bits(31, 22) | (entry & bits(m - 20, 13)) << 19,
        bits: 22,
    }
}

/// Returns whether a present PDPTE has no reserved bit set ("Format of a PAE Page-Directory-Pointer-Table Entry").
/// Otherwise loading it causes a general-protection exception.
pub(super) fn may_load_pdpte(pdpte: u64) -> bool {
    pdpte & P == 0 || pdpte & (bits(63, PHYSICAL_BITS) | bits(8, 5) | bits(2, 1)) == 0
}

/// The rights that all entries on a path grant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rights {
    /// The R/W flag is 1 in all entries.
    pub write: bool,
    /// The U/S flag is 1 in all entries: the address is a user-mode address.
    pub user: bool,
    /// The XD flag is 1 in at least one entry.
    pub no_execute: bool,
}

impl Rights {
    /// The rights before the first entry of a path: all.
    pub const ALL: Rights = Rights {
        write: true,
        user: true,
        no_execute: false,
    };

    /// Returns the rights that remain after `entry`. (In a 4-byte entry there is no XD flag, bit 63.)
    pub fn and(self, entry: u64) -> Rights {
        Rights {
            write: self.write && entry & RW != 0,
            user: self.user && entry & US != 0,
            no_execute: self.no_execute || entry & XD != 0,
        }
    }
}

/// Returns the error code of a page fault for an entry that is not present or has a reserved bit set.
pub(super) fn entry_fault(paging: &GuestPaging, access: Access, reserved: bool) -> u32 {
    let cause = error_code::PRESENT | error_code::RESERVED;
    access_bits(paging, access) | if reserved { cause } else { 0 }
}

/// Returns the error code of the page fault that `access` causes if these rights, or the protection key in `leaf`,
/// forbid it.
pub(super) fn rights_fault(
    paging: &GuestPaging,
    access: Access,
    rights: Rights,
    leaf: u64,
) -> Option<u32> {
    let Rights {
        write,
        user,
        no_execute,
    } = rights;
    let supervisor = !paging.user;
    let forbidden = match access {
        _ if paging.user && !user => true,
        Access::Execute => paging.no_execute && no_execute || supervisor && paging.smep && user,
        _ if supervisor && paging.smap && user => true,
        Access::Read => false,
        Access::Write => !write && (paging.user || paging.write_protect),
    };
    let key = key_forbids(paging, access, user, leaf);
    (forbidden || key).then(|| {
        let key = if key { error_code::PROTECTION_KEY } else { 0 };
        access_bits(paging, access) | error_code::PRESENT | key
    })
}

/// Whether the protection key in `leaf` forbids the access ("Protection Keys"). Keys apply to data accesses to
/// user-mode addresses, in 4-level and 5-level paging.
fn key_forbids(paging: &GuestPaging, access: Access, user: bool, leaf: u64) -> bool {
    let long = matches!(paging.mode, Mode::Level4 | Mode::Level5);
    if !long || !user || access == Access::Execute {
        return false;
    }
    let key = leaf >> 59 & 15;
    let access_disable = paging.pkru >> (2 * key) & 1 != 0;
    let write_disable = paging.pkru >> (2 * key + 1) & 1 != 0;
    let obeys_writes = paging.user || paging.write_protect;
    access_disable || access == Access::Write && write_disable && obeys_writes
}

fn access_bits(paging: &GuestPaging, access: Access) -> u32 {
    let has_xd = !matches!(paging.mode, Mode::Bits32 { .. }) && paging.no_execute;
    let user = if paging.user { error_code::USER } else { 0 };
    user | match access {
        Access::Read => 0,
        Access::Write => error_code::WRITE,
        Access::Execute if has_xd || paging.smep => error_code::FETCH,
        Access::Execute => 0,
    }
}
