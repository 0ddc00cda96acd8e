//! The control registers of a vCPU that affect paging.

use slat::guest_walk::{GuestPaging, Mode};

/// CR0.WP: a supervisor may not write to read-only pages.
pub const CR0_WP: u64 = 1 << 16;
/// CR0.PG: paging is on.
pub const CR0_PG: u64 = 1 << 31;
/// CR4.PSE: 32-bit paging has pages of 4 MiB.
pub const CR4_PSE: u64 = 1 << 4;
/// CR4.PAE: page-table entries have 8 bytes.
pub const CR4_PAE: u64 = 1 << 5;
/// CR4.PGE: global pages are enabled.
pub const CR4_PGE: u64 = 1 << 7;
/// CR4.LA57: long mode has five levels of tables.
pub const CR4_LA57: u64 = 1 << 12;
/// CR4.PCIDE: PCIDs are enabled.
pub const CR4_PCIDE: u64 = 1 << 17;
/// CR4.SMEP: a supervisor may not execute user pages.
pub const CR4_SMEP: u64 = 1 << 20;
/// CR4.SMAP: a supervisor may access user pages only with EFLAGS.AC set.
pub const CR4_SMAP: u64 = 1 << 21;
/// CR4.PKE: protection keys of user pages are enabled.
pub const CR4_PKE: u64 = 1 << 22;
/// EFER.LME: long mode is enabled.
pub const EFER_LME: u64 = 1 << 8;
/// EFER.LMA: long mode is active.
pub const EFER_LMA: u64 = 1 << 10;
/// EFER.NXE: entries may forbid execution.
pub const EFER_NXE: u64 = 1 << 11;

/// The width of guest-physical addresses in bits. Fewer than 40, so that a 4 MiB page has reserved bits.
pub(super) const PHYSICAL_BITS: u32 = 38;

/// The registers of a vCPU that determine how it translates addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// The bits PG and WP of CR0.
    pub cr0: u64,
    /// The value of CR3, without bit 63.
    pub cr3: u64,
    /// The value of CR4.
    pub cr4: u64,
    /// The value of the MSR IA32_EFER.
    pub efer: u64,
    /// The page-directory-pointer entries that the vCPU has loaded for PAE paging. Meaningless in other modes.
    pub pdptes: [u64; 4],
    /// Not a register: whether the tables have AMD's format ([`GuestPaging::reserves_table_global`]). This value does
    /// not change during a run.
    pub reserves_table_global: bool,
}

/// The vCPU's state at an access, as far as it affects rights and may differ from access to access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Privilege {
    /// Whether the access is made at CPL 3.
    pub user: bool,
    /// The value of EFLAGS.AC.
    pub ac: bool,
    /// The value of PKRU.
    pub pkru: u32,
}

impl Privilege {
    /// The privilege of an access at CPL 0 without effect of protection keys.
    pub const KERNEL: Privilege = Privilege {
        user: false,
        ac: false,
        pkru: 0,
    };
}

impl Registers {
    /// Returns the paging mode. `None`: paging is off.
    pub fn mode(&self) -> Option<Mode> {
        if self.cr0 & CR0_PG == 0 {
            None
        } else if self.efer & EFER_LMA != 0 {
            Some(match self.cr4 & CR4_LA57 {
                0 => Mode::Level4,
                _ => Mode::Level5,
            })
        } else if self.cr4 & CR4_PAE != 0 {
            Some(Mode::Pae)
        } else {
            let pse = self.cr4 & CR4_PSE != 0;
            Some(Mode::Bits32 { pse })
        }
    }

    /// Returns the current PCID (SDM 3A, "Process-Context Identifiers").
    pub fn pcid(&self) -> u16 {
        match self.cr4 & CR4_PCIDE {
            0 => 0,
            _ => (self.cr3 & 0xfff) as u16,
        }
    }

    /// Returns the paging state on which a walk depends. `None`: paging is off.
    pub fn paging(&self, privilege: &Privilege) -> Option<GuestPaging> {
        let mode = self.mode()?;
        Some(GuestPaging {
            cr3: self.cr3,
            mode,
            user: privilege.user,
            write_protect: self.cr0 & CR0_WP != 0,
            no_execute: self.efer & EFER_NXE != 0,
            smep: self.cr4 & CR4_SMEP != 0,
            smap: self.cr4 & CR4_SMAP != 0 && !privilege.ac,
            pkru: match self.cr4 & CR4_PKE {
                0 => 0,
                _ => privilege.pkru,
            },
            pdptes: (mode == Mode::Pae).then_some(self.pdptes),
            physical_bits: PHYSICAL_BITS,
            reserves_table_global: self.reserves_table_global,
        })
    }

    /// Returns whether leaves with the G flag are global.
    pub(super) fn has_global_pages(&self) -> bool {
        self.cr4 & CR4_PGE != 0
    }
}
