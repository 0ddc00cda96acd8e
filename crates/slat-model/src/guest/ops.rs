//! The operations on a guest. A run is a sequence of them.

use std::ops::Range;

use slat::guest_walk::Mode;
use slat::{Access, Region};

use super::mmu::{Invpcid, StoreKind};
use super::registers::Privilege;
use crate::host::HostChange;

/// The address to which a store writes: virtual or physical.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// A guest-virtual address, and the privileges of the access.
    Virtual(u64, Privilege),
    /// A guest-physical address, as for the store of an emulated instruction.
    Physical(u64),
}

/// The kind of instruction that stores.
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

    /// Returns the byte that is stored if memory has `old` and the instruction's operand has `operand`.
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

/// One operation. Each operation can be run in any state. So a sequence stays valid if an operation is left out.
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
    /// The VMM writes guest memory, and then sets the registers of all vCPUs to their current values.
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
    /// MOV to CR3. `keep` is bit 63 of the operand. If PCIDs are on, the low 12 bits are the PCID.
    LoadCr3 {
        cpu: usize,
        cr3: u64,
        keep: bool,
    },
    /// A bit of a control register changes. If the SDM requires software to flush everything after this change, a flush
    /// follows.
    Toggle {
        cpu: usize,
        control: Control,
    },
    /// Paging is turned off, and then on again in this mode.
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
