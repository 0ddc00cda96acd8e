//! The kinds of operations, and how frequent each kind is in a run.

use std::fmt;
use std::ops::Range;

use slat::{Access, Change, Region};

use crate::host::HostChange;
use crate::rng::Rng;

/// One operation on a VM. Each operation can be run in any state. So a sequence stays valid if an operation is left
/// out.
#[derive(Clone, Debug)]
pub enum Op {
    /// A call of KVM_SET_USER_MEMORY_REGION, whose arguments may be invalid.
    SetRegion {
        /// The number of the address space, which may be invalid.
        space: usize,
        /// The arguments of the call.
        region: Region,
    },
    /// Changes several memslots atomically, with valid or invalid arguments.
    SetRegions {
        /// The number of the address space.
        space: usize,
        /// The arguments of the call.
        changes: Vec<Change>,
    },
    /// A vCPU looks up the slot that contains an address.
    FindSlot {
        /// The number of the vCPU.
        vcpu: usize,
        /// The guest-physical address.
        gpa: u64,
    },
    /// An access by a vCPU.
    Translate {
        /// The number of the vCPU.
        vcpu: usize,
        /// The guest-physical address.
        gpa: u64,
        /// The kind of the access.
        access: Access,
    },
    /// A write by the hardware walker of a vCPU, if the tables allow it.
    Walk {
        /// The number of the vCPU.
        vcpu: usize,
        /// The guest-physical address.
        gpa: u64,
    },
    /// A call of KVM_PRE_FAULT_MEMORY.
    Prefault {
        /// The number of the vCPU.
        vcpu: usize,
        /// The first guest-physical address.
        gpa: u64,
        /// The number of bytes to populate.
        bytes: u64,
    },
    /// A call of KVM_SET_MEMORY_ATTRIBUTES.
    Convert {
        /// The first guest frame to convert.
        gfn: u64,
        /// The number of guest frames to convert.
        pages: u64,
        /// Whether the frames become private; otherwise they become shared.
        private: bool,
    },
    /// The host mapping of some pages changes, in an invalidation.
    Invalidate {
        /// The pages of host memory whose mapping changes.
        pages: Range<u64>,
        /// The new mapping of these pages.
        change: HostChange,
        /// Accesses to these frames by a vCPU during the invalidation, both before and after the change.
        during: Vec<(u64, Access)>,
    },
    /// A call of KVM_GET_DIRTY_LOG.
    DirtyLog {
        /// The number of the address space.
        space: usize,
        /// The id of the slot.
        id: u32,
    },
    /// A call of KVM_CLEAR_DIRTY_LOG for a range that may be invalid.
    ClearLog {
        /// The number of the address space.
        space: usize,
        /// The id of the slot.
        id: u32,
        /// The first page of the slot for which the call clears the log.
        first: u64,
        /// The number of pages for which the call clears the log.
        pages: u64,
        /// The value of every word of the bitmap.
        pattern: u64,
    },
    /// The VMM enables KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.
    ManualLog {
        /// Whether KVM_GET_DIRTY_LOG leaves the log and its pages unchanged.
        manual: bool,
        /// Whether a new dirty log initially has all bits set.
        initially_set: bool,
    },
    /// The VMM collects entries of a vCPU's dirty ring.
    Collect {
        /// The number of the vCPU.
        vcpu: usize,
        /// The largest number of ring entries to collect.
        entries: u32,
    },
    /// A call of KVM_RESET_DIRTY_RINGS.
    ResetRings,
    /// Sets the policy of this name to this value.
    Policy(&'static str, &'static str),
    /// Zaps some of the small leaves' tables that exist because of NX huge pages.
    RecoverNx,
    /// Clears all accessed bits. Then a vCPU accesses one page.
    Age {
        /// The number of the vCPU.
        vcpu: usize,
        /// The guest-physical address of the page.
        gpa: u64,
        /// The kind of the access.
        access: Access,
    },
    /// Searches for memory that was not accessed for some time.
    Cold,
    /// Replaces small leaves by huge leaves. At most this many tables are checked with the platform.
    Promote(usize),
    /// A vCPU drops its translations, and reports this to the engine.
    Quiesce(usize),
    /// Deletes a vCPU and creates a new one.
    Replace(usize),
    /// A vCPU switches to an address space, which may be its current one.
    UseSpace {
        /// The number of the vCPU.
        vcpu: usize,
        /// The number of the address space.
        space: usize,
    },
    /// Begins a snapshot of the VM, unless there is one.
    BeginSnapshot,
    /// Gives the platform a run of at most this many pages of the snapshot.
    KeepNext(u64),
    /// Ends the snapshot.
    EndSnapshot {
        /// Whether the platform is given all pages before.
        whole: bool,
    },
    /// Clones the VM. The next operations are for the clone.
    Fork,
    /// Switches to another VM, given by its index, where 0 is the oldest. The next operations are run on that VM.
    Turn(usize),
    /// Ends the current VM, unless it is the only one. The next operations are run on the oldest remaining VM.
    End,
    /// Makes one allocation fail, after this number of other allocations have succeeded.
    FailAllocation(u64),
}

/// The kinds of operations, from which the generator chooses.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Region,
    Regions,
    FindSlot,
    Translate,
    Walk,
    Prefault,
    Convert,
    Invalidate,
    DirtyLog,
    ClearLog,
    ManualLog,
    Collect,
    ResetRings,
    Policy,
    RecoverNx,
    Age,
    Cold,
    Promote,
    Quiesce,
    Replace,
    UseSpace,
    Snapshot,
    Fork,
    Turn,
    End,
    Fail,
}

/// A choice of operations: some kinds are more frequent than others, and some do not occur.
#[derive(Clone, Copy)]
pub struct Mix {
    name: &'static str,
    /// The mix's column in [`FREQUENCIES`].
    column: usize,
}

/// The frequency of each kind of operation, relative to the other kinds, in the mixes "all", "slots", "logs",
/// "clones" and "snapshots".
const FREQUENCIES: [(Kind, [u64; 5]); 26] = [
    (Kind::Fork, [0, 0, 0, 6, 4]),
    (Kind::Turn, [0, 0, 0, 30, 20]),
    (Kind::End, [0, 0, 0, 4, 3]),
    (Kind::Translate, [700, 2, 500, 700, 600]),
    (Kind::Walk, [30, 0, 100, 0, 40]),
    (Kind::Region, [80, 8, 30, 60, 40]),
    (Kind::Regions, [30, 3, 20, 20, 20]),
    (Kind::Invalidate, [60, 0, 20, 60, 60]),
    (Kind::DirtyLog, [30, 0, 60, 20, 20]),
    (Kind::ClearLog, [25, 0, 120, 20, 20]),
    (Kind::ManualLog, [4, 0, 10, 3, 3]),
    (Kind::Collect, [5, 0, 30, 8, 8]),
    (Kind::ResetRings, [1, 0, 15, 4, 3]),
    (Kind::Prefault, [10, 0, 0, 10, 10]),
    (Kind::Convert, [16, 0, 12, 12, 8]),
    (Kind::FindSlot, [10, 6, 0, 0, 0]),
    (Kind::Policy, [12, 0, 30, 12, 15]),
    (Kind::RecoverNx, [12, 0, 0, 6, 6]),
    (Kind::Age, [3, 0, 0, 3, 3]),
    (Kind::Cold, [12, 0, 0, 3, 3]),
    (Kind::Promote, [6, 0, 0, 6, 12]),
    (Kind::Quiesce, [4, 0, 10, 4, 6]),
    (Kind::Replace, [2, 0, 0, 2, 2]),
    (Kind::UseSpace, [4, 1, 5, 4, 4]),
    (Kind::Snapshot, [6, 0, 4, 4, 80]),
    (Kind::Fail, [10, 0, 20, 6, 6]),
];

impl fmt::Debug for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Mix {
    /// All kinds except those that clone the VM.
    pub const ALL: Mix = Mix::new("all", 0);
    /// Slot changes and look-ups.
    pub const SLOTS: Mix = Mix::new("slots", 1);
    /// Writes, and reading and clearing of dirty logs all the time.
    pub const LOGS: Mix = Mix::new("logs", 2);
    /// A VM and its clones, which take turns to access memory, log writes and lose pages.
    pub const CLONES: Mix = Mix::new("clones", 3);
    /// A VM that is saved most of the time, with clones, while it writes and its memory changes.
    pub const SNAPSHOTS: Mix = Mix::new("snapshots", 4);

    const fn new(name: &'static str, column: usize) -> Self {
        Mix { name, column }
    }

    pub(crate) fn pick(self, rng: &mut Rng) -> Kind {
        let frequencies = || {
            FREQUENCIES
                .iter()
                .map(|(kind, all)| (*kind, all[self.column]))
        };
        let mut left = rng.below(frequencies().map(|(_, frequency)| frequency).sum());
        for (kind, frequency) in frequencies() {
            match left.checked_sub(frequency) {
                Some(rest) => left = rest,
                None => return kind,
            }
        }
        unreachable!("below the sum of the frequencies")
    }
}

/// All policies with their values. A value that is listed twice is chosen more often.
pub const POLICIES: [(&str, &[&str]); 13] = [
    ("mmio_caching", &["on", "on", "off"]),
    ("huge_pages", &["on", "on", "on", "off"]),
    ("eager_page_split", &["on", "off"]),
    ("eager_page_split_chunk", &["512", "1024", "262144"]),
    ("nx_huge_pages", &["off", "on"]),
    ("nx_huge_pages_split", &["on", "on", "off"]),
    ("nx_huge_pages_recovery_ratio", &["1", "3", "0", "60"]),
    ("nx_huge_pages_recovery_period_ms", &["1", "60000"]),
    ("prefetch", &["8", "64", "512", "adaptive", "off"]),
    ("split_walk", &["default", "skip-last-level", "full-walk"]),
    (
        "dirty_log",
        &["write-protect", "dirty-bit", "buffer", "buffer"],
    ),
    ("dirty_log_reads", &["auto", "on", "off"]),
    ("hierarchical_protect", &["on", "off"]),
];
