//! The control registers of a vCPU that affect paging.

use slat::guest_walk::{GuestPaging, Mode};

/// CR0.WP.
pub const CR0_WP: u64 = 1 << 16;
/// CR0.PG.
pub const CR0_PG: u64 = 1 << 31;
/// CR4.PSE.
pub const CR4_PSE: u64 = 1 << 4;
/// CR4.PAE.
pub const CR4_PAE: u64 = 1 << 5;
/// CR4.PGE.
pub const CR4_PGE: u64 = 1 << 7;
/// CR4.LA57.
pub const CR4_LA57: u64 = 1 << 12;
/// CR4.PCIDE.
pub const CR4_PCIDE: u64 = 1 << 17;
/// CR4.SMEP.
pub const CR4_SMEP: u64 = 1 << 20;
/// CR4.SMAP.
pub const CR4_SMAP: u64 = 1 << 21;
/// CR4.PKE.
pub const CR4_PKE: u64 = 1 << 22;
/// EFER.LME.
pub const EFER_LME: u64 = 1 << 8;
/// EFER.LMA.
pub const EFER_LMA: u64 = 1 << 10;
/// EFER.NXE.
pub const EFER_NXE: u64 = 1 << 11;

/// The width of guest-physical addresses in bits. Fewer than 40, so that a 4 MiB page has reserved bits.
pub(super) const PHYSICAL_BITS: u32 = 38;

/// The registers of a vCPU that choose how it translates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// CR0: PG and WP.
    pub cr0: u64,
    /// CR3, without bit 63.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// IA32_EFER.
    pub efer: u64,
    /// The page-directory-pointer entries that PAE paging has loaded; meaningless in other modes.
    pub pdptes: [u64; 4],
    /// This is not a register. It says whether the tables are those of an AMD processor
    /// ([`GuestPaging::reserves_table_global`]). This value does not change during a run.
    pub reserves_table_global: bool,
}

/// The part of a vCPU's state that may differ between two accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Privilege {
    /// CPL 3.
    pub user: bool,
    /// EFLAGS.AC.
    pub ac: bool,
    /// PKRU.
    pub pkru: u32,
}

impl Privilege {
    /// A supervisor without protection keys.
    pub const KERNEL: Privilege = Privilege {
        user: false,
        ac: false,
        pkru: 0,
    };
}

impl Registers {
    /// Returns the paging mode; `None`: paging is off.
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

    /// Returns the paging state that a walk for an access depends on; `None`: paging is off.
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
