//! Defects that an MMU may have. The oracle must find each of them.

use slat::Gpa;
use slat::guest_walk::{GuestPage, GuestPaging, error_code};

use super::entry::{A, D, US, XD};
use super::mmu::{Outcome, Part, StoreKind};
use super::registers::PHYSICAL_BITS;

/// A defect that a [`CachingMmu`](super::CachingMmu) may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// INVLPG invalidates no translation.
    ForgetsInvlpg,
    /// INVLPG invalidates translations, but nothing in the paging-structure caches.
    KeepsStructuresOverInvlpg,
    /// MOV to CR3 invalidates nothing.
    KeepsOverCr3,
    /// INVPCID of an address invalidates nothing.
    ForgetsInvpcidOfAddress,
    /// INVPCID of a context invalidates nothing.
    ForgetsInvpcidOfContext,
    /// INVPCID of all contexts keeps global translations.
    KeepsGlobalOverInvpcid,
    /// A change of CR4.PGE invalidates nothing.
    KeepsOverPge,
    /// A change of CR4.SMEP invalidates nothing.
    KeepsOverSmep,
    /// A page fault does not invalidate the translation that caused the fault.
    KeepsOverFault,
    /// Cached translations have no PCID, so all PCIDs use them.
    IgnoresPcid,
    /// All cached translations are treated as global.
    MakesAllGlobal,
    /// A cached translation keeps the host page of its first use.
    KeepsHostPages,
    /// The U/S flag of entries is treated as 1.
    IgnoresUser,
    /// The XD flag of entries is treated as 0.
    IgnoresNoExecute,
    /// CR0.WP is treated as 0.
    IgnoresWriteProtect,
    /// CR4.SMEP is treated as 0.
    IgnoresSmep,
    /// CR4.SMAP is treated as 0.
    IgnoresSmap,
    /// PKRU is treated as 0.
    IgnoresKeys,
    /// Reserved address bits are treated as 0.
    IgnoresReserved,
    /// PAE's page-directory-pointer entries are read for each walk.
    ReadsPointers,
    /// Accessed flags are not set.
    SetsNoAccessed,
    /// Dirty flags are not set.
    SetsNoDirty,
    /// Reads set the dirty flag.
    SetsDirtyOnRead,
    /// The accessed flag of the entry next to the leaf is set, too.
    MarksNeighbour,
    /// A cached translation whose leaf lacks the dirty flag is used for writes.
    WritesToClean,
    /// The error code of a page fault on a fetch lacks the I/D bit.
    ForgetsFetchBit,
    /// The error code of a page fault for a reserved bit lacks the RSVD bit.
    ForgetsReservedBit,
    /// The two halves of a 4 MiB page are exchanged.
    WrongHalf,
    /// All addresses of a 2 MiB page reach its first 4 KiB.
    WrongOffset,
    /// The address bits 32 and up of a 4 MiB page are ignored.
    IgnoresHighAddress,
    /// A store to two entries is treated as a store to the first one.
    MergesEntries,
    /// A store to two pages is treated as a store to the first one.
    IgnoresSecondPage,
    /// Stores of the second vCPU are not noticed.
    IgnoresOtherCpu,
    /// Locked stores are not noticed.
    IgnoresLocked,
    /// The MMU does not ask for reports of stores to tables.
    TracksNothing,
    /// Tables are kept when their memslot is deleted or moved.
    KeepsTablesOfSlots,
    /// The first page of a dirty log is missing.
    LosesDirtyPage,
    /// An MMIO exit has the address of the page instead of the byte.
    ForgetsMmioOffset,
}

impl Defect {
    /// All defects.
    pub const ALL: [Defect; 38] = [
        Defect::ForgetsInvlpg,
        Defect::KeepsStructuresOverInvlpg,
        Defect::KeepsOverCr3,
        Defect::ForgetsInvpcidOfAddress,
        Defect::ForgetsInvpcidOfContext,
        Defect::KeepsGlobalOverInvpcid,
        Defect::KeepsOverPge,
        Defect::KeepsOverSmep,
        Defect::KeepsOverFault,
        Defect::IgnoresPcid,
        Defect::MakesAllGlobal,
        Defect::KeepsHostPages,
        Defect::IgnoresUser,
        Defect::IgnoresNoExecute,
        Defect::IgnoresWriteProtect,
        Defect::IgnoresSmep,
        Defect::IgnoresSmap,
        Defect::IgnoresKeys,
        Defect::IgnoresReserved,
        Defect::ReadsPointers,
        Defect::SetsNoAccessed,
        Defect::SetsNoDirty,
        Defect::SetsDirtyOnRead,
        Defect::MarksNeighbour,
        Defect::WritesToClean,
        Defect::ForgetsFetchBit,
        Defect::ForgetsReservedBit,
        Defect::WrongHalf,
        Defect::WrongOffset,
        Defect::IgnoresHighAddress,
        Defect::MergesEntries,
        Defect::IgnoresSecondPage,
        Defect::IgnoresOtherCpu,
        Defect::IgnoresLocked,
        Defect::TracksNothing,
        Defect::KeepsTablesOfSlots,
        Defect::LosesDirtyPage,
        Defect::ForgetsMmioOffset,
    ];
}

/// The defect of an MMU, or `None`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flaw(pub Option<Defect>);

impl Flaw {
    pub fn is(self, defect: Defect) -> bool {
        self.0 == Some(defect)
    }

    /// Returns the paging state that a walk with this defect uses instead of `paging`.
    pub fn paging(self, paging: &GuestPaging) -> GuestPaging {
        let mut seen = *paging;
        match self.0 {
            Some(Defect::IgnoresWriteProtect) => seen.write_protect = false,
            Some(Defect::IgnoresSmep) => seen.smep = false,
            Some(Defect::IgnoresSmap) => seen.smap = false,
            Some(Defect::IgnoresKeys) => seen.pkru = 0,
            Some(Defect::ReadsPointers) => seen.pdptes = None,
            _ => {}
        }
        seen
    }

    /// Returns the value that a walk with this defect finds in place of `entry`.
    pub fn entry(self, entry: u64) -> u64 {
        match self.0 {
            Some(Defect::IgnoresUser) => entry | US,
            Some(Defect::IgnoresNoExecute) => entry & !XD,
            Some(Defect::IgnoresReserved) => entry & !(3 << PHYSICAL_BITS),
            _ => entry,
        }
    }

    /// Returns the flags among `flags` that an MMU with this defect sets.
    pub fn flags(self, flags: u64) -> u64 {
        match self.0 {
            Some(Defect::SetsNoAccessed) => flags & !A,
            Some(Defect::SetsNoDirty) => flags & !D,
            _ => flags,
        }
    }

    /// Returns the page that an MMU with this defect uses instead of `page`.
    pub fn page(self, page: GuestPage) -> GuestPage {
        let Gpa(gpa) = page.gpa;
        let seen = match (self.0, page.bits) {
            (Some(Defect::WrongHalf), 22) => gpa ^ 1 << 21,
            (Some(Defect::WrongOffset), 21) => gpa & !0x1f_ffff,
            (Some(Defect::IgnoresHighAddress), 22) => gpa & 0xffff_ffff,
            _ => gpa,
        };
        GuestPage {
            gpa: Gpa(seen),
            ..page
        }
    }

    /// Returns the outcome that an MMU with this defect reports instead of `outcome`.
    pub fn outcome(self, outcome: Outcome) -> Outcome {
        match (self.0, outcome) {
            (Some(Defect::ForgetsFetchBit), Outcome::PageFault { code }) => Outcome::PageFault {
                code: code & !error_code::FETCH,
            },
            (Some(Defect::ForgetsReservedBit), Outcome::PageFault { code }) => Outcome::PageFault {
                code: code & !error_code::RESERVED,
            },
            (Some(Defect::ForgetsMmioOffset), Outcome::Mmio { gpa }) => Outcome::Mmio {
                gpa: gpa.gfn().gpa(),
            },
            _ => outcome,
        }
    }

    /// Returns the parts of a store by the vCPU `cpu` that an MMU with this defect notices.
    pub fn stored(self, cpu: usize, kind: StoreKind, parts: &[Part]) -> Vec<Part> {
        let of_first_entry = |part: &Part| Part {
            bytes: part.bytes.min(8 - (part.gpa.0 % 8) as usize),
            ..*part
        };
        match self.0 {
            Some(Defect::MergesEntries) => parts.iter().map(of_first_entry).collect(),
            Some(Defect::IgnoresSecondPage) => parts[..1].to_vec(),
            Some(Defect::IgnoresOtherCpu) if cpu != 0 => Vec::new(),
            Some(Defect::IgnoresLocked) if kind == StoreKind::Locked => Vec::new(),
            _ => parts.to_vec(),
        }
    }
}
