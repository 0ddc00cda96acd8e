//! The operations on a guest of which a run consists.

use std::ops::Range;

use slat::guest_walk::Mode;
use slat::{Access, Region};

use super::mmu::{Invpcid, StoreKind};
use super::registers::Privilege;
use crate::host::HostChange;

/// The address of a store.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// A guest-virtual address, with these privileges.
    Virtual(u64, Privilege),
    /// A guest-physical address: the store is that of an emulated instruction.
    Physical(u64),
}

/// The way in which an instruction stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    Mov,
    CompareExchange,
    /// A compare-exchange whose comparison fails: the old value is stored again.
    FailedCompareExchange,
    LockedOr,
}

impl How {
    pub fn kind(self) -> StoreKind {
        match self {
            How::Mov => StoreKind::Plain,
            _ => StoreKind::Locked,
        }
    }

    /// Returns the byte that is stored.
    pub fn byte(self, old: u8, operand: u8) -> u8 {
        match self {
            How::Mov | How::CompareExchange => operand,
            How::FailedCompareExchange => old,
            How::LockedOr => old | operand,
        }
    }
}

/// A bit of a control register that guests change while paging is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Control {
    WriteProtect,
    GlobalPages,
    Pcids,
    Smep,
    Smap,
    ProtectionKeys,
    NoExecute,
}

/// One operation. Each can be run in any state, so any operation of a sequence can be left out.
#[derive(Clone, Debug)]
pub(super) enum GuestOp {
    Access {
        cpu: usize,
        gva: u64,
        access: Access,
        privilege: Privilege,
    },
    /// A store of the first `bytes` bytes of `operand`.
    Store {
        cpu: usize,
        target: Target,
        how: How,
        operand: [u8; 8],
        bytes: usize,
    },
    /// The client writes guest memory, and then sets the registers of all vCPUs.
    ClientStore {
        gpa: u64,
        operand: [u8; 8],
        bytes: usize,
    },
    Invlpg {
        cpu: usize,
        gva: u64,
    },
    Invpcid {
        cpu: usize,
        invpcid: Invpcid,
    },
    /// MOV to CR3. `keep`: bit 63. The low 12 bits are the PCID, if PCIDs are on.
    LoadCr3 {
        cpu: usize,
        cr3: u64,
        keep: bool,
    },
    /// A bit of a control register changes. If the SDM requires software to flush everything afterwards, a flush
    /// follows.
    Toggle {
        cpu: usize,
        control: Control,
    },
    /// Paging is turned off, and on again in this mode.
    SetMode {
        cpu: usize,
        mode: Option<Mode>,
        cr3: u64,
    },
    SetRegion(Region),
    /// The host replaces pages of its memory, or changes their rights.
    Invalidate {
        pages: Range<u64>,
        change: HostChange,
    },
    DirtyLog {
        slot: u32,
    },
    Audit,
}
