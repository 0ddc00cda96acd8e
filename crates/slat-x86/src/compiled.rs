//! The fields of a CPU that compiled code uses, besides the architectural state.

use crate::flow::Break;
use crate::heap::Zeroed;
use crate::snapshot::Snapshot;
use crate::tlb::Entry;
use std::ptr;
use std::sync::atomic::AtomicU32;

/// The number of sets in [`Targets`]. The next constant is the logarithm of a set's size in bytes.
pub(crate) const SETS: usize = 4096;
pub(crate) const SET_BITS: u32 = size_of::<[Target; 2]>().trailing_zeros();
pub(crate) const SETS_BYTES: u64 = (SETS as u64) << SET_BITS;

/// Returns the index of the set in which a target at this address is looked up first.
pub(crate) fn set_of(rip: u64) -> usize {
    (rip ^ rip >> 12) as usize & (SETS - 1)
}

/// Compiled code that can be entered for a guest address. A target is small, because most targets are in the host's
/// slower caches.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(crate) struct Target {
    /// The guest's linear address (RIP) of the compiled code.
    pub(crate) rip: u64,
    /// The snapshot of the code's page. If its stamp is not the CPU's, the page must be checked before the code is
    /// entered. The snapshot is alive as long as `edition` equals the CPU's.
    pub(crate) page: *const Snapshot,
    pub(crate) code: *const u8,
    /// The value of [`Compiled::edition`] when the target was stored. 0: no target.
    pub(crate) edition: u32,
}

/// A table of compiled code in which a region looks for its successor, to jump to the successor directly. A set is a
/// cache line with two targets, the newer one first. Every valid target is compiled code that a block still has: see
/// [`Compiled::forget_targets`].
#[repr(align(64))]
pub(crate) struct Targets(pub(crate) [[Target; 2]; SETS]);

// SAFETY: the type consists of integers and raw pointers, for which zeroes are valid.
unsafe impl Zeroed for Targets {}

/// The fields of a CPU that compiled code uses, besides the architectural state. The last fields are in R15's window
/// (`jit::window`).
#[repr(C)]
pub(crate) struct Compiled {
    /// The instruction at which the region was stopped: a [`Step`](crate::region::Step).
    pub(crate) step: *const (),
    /// The [`Break`] with which the last instruction has ended.
    pub(crate) why: Break,
    /// The RIP set by an instruction that ended with [`Break::Jump`].
    pub(crate) rip: u64,
    /// Only targets with this edition are valid. The lowest byte is the CPU's mode, so targets for other modes are
    /// invalid, too. See `tell_targets_apart`.
    pub(crate) edition: u32,
    /// The set in which the last region looked for its successor without finding it: the successor's target is to be
    /// stored in this set. Null: the last region did not look for a successor.
    pub(crate) wanted: *const Target,
    /// The guest address at which the last region was entered, if `attention` ended the run in that region.
    pub(crate) ran: u64,
    /// Not 0 if the host's MXCSR contains the guest's value (`float`).
    pub(crate) floats: u32,
    /// The host's own MXCSR, while MXCSR contains the guest's value.
    pub(crate) host_mxcsr: u32,
    /// A copy of the bytes of a load that crosses into another page.
    pub(crate) copy: [u8; 32],
    /// Compiled code stores floating-point results in this field if no instruction uses the results. No code reads the
    /// field.
    pub(crate) unused: [u8; 16],
    /// The number of instructions that compiled code has executed so far, including those of this run.
    pub(crate) instructions: u64,
    pub(crate) attention: *const AtomicU32,
    /// The table of the TLB that data accesses use.
    pub(crate) table: *const Entry,
    pub(crate) targets: *const [Target; 2],
}

impl Compiled {
    pub(crate) fn new() -> Self {
        Self {
            step: ptr::null(),
            why: Break::Jump,
            rip: 0,
            edition: 1 << 8,
            wanted: ptr::null(),
            ran: 0,
            floats: 0,
            host_mxcsr: 0,
            copy: [0; 32],
            unused: [0; 16],
            instructions: 0,
            attention: ptr::null(),
            table: ptr::null(),
            targets: ptr::null(),
        }
    }

    /// Call before the CPU executes. `targets` are this CPU's targets.
    pub(crate) fn prepare(&mut self, targets: &Targets, attention: &AtomicU32) {
        self.targets = &raw const targets.0[0];
        self.attention = attention;
    }

    /// Makes all targets invalid. Call in three cases: a block may lose its compiled code; a snapshot begins a new
    /// edition; code may have become stale although the stamp has not changed.
    pub(crate) fn forget_targets(&mut self, targets: &mut Targets) {
        self.edition = self.edition.wrapping_add(1 << 8);
        if self.edition >> 8 == 0 {
            // The edition has wrapped around: clear all targets, because a very old target could have the same edition
            // again.
            for target in targets.0.as_flattened_mut() {
                target.edition = 0;
            }
            self.edition += 1 << 8;
        }
    }
}
