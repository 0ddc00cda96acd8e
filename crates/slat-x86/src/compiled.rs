//! The fields of a CPU that compiled code uses, besides the architectural state.

use crate::flow::Break;
use crate::heap::Zeroed;
use crate::snapshot::Snapshot;
use crate::tlb::Entry;
use std::ptr;
use std::sync::atomic::AtomicU32;

/// The number of sets in [`Targets`]. The next constant is the shift that turns a set's index into its offset in bytes.
pub(crate) const SETS: usize = 4096;
pub(crate) const SET_BITS: u32 = size_of::<[Target; 2]>().trailing_zeros();
pub(crate) const SETS_BYTES: u64 = (SETS as u64) << SET_BITS;

/// Returns the index of the set in which a target at this address is looked up first.
pub(crate) fn set_of(rip: u64) -> usize {
    (rip ^ rip >> 12) as usize & (SETS - 1)
}

/// An address of compiled code that can be entered. A target is small, because most targets are in the host's slower
/// caches.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(crate) struct Target {
    /// The address of the guest's code.
    pub(crate) rip: u64,
    /// The snapshot of the code's page. If its stamp is not the CPU's, the page is checked first. The snapshot is alive
    /// as long as `edition` is the CPU's.
    pub(crate) page: *const Snapshot,
    pub(crate) code: *const u8,
    /// The value of [`Compiled::edition`] when the target was stored. 0: no target.
    pub(crate) edition: u32,
}

/// The addresses of compiled code at which one region continues directly in another. A set is a cache line with two
/// targets, the newer target first. Every target is compiled code that a block still has: see
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
    /// The reason why an instruction ended.
    pub(crate) why: Break,
    /// The RIP set by an instruction that ended with [`Break::Jump`].
    pub(crate) rip: u64,
    /// The current edition: targets with another edition are invalid. The lowest byte is the CPU's mode, so targets for
    /// other modes are invalid, too. See `tell_targets_apart`.
    pub(crate) edition: u32,
    /// The set in which the last region's successor was looked up and not found. The pointer is to a target of the set.
    /// The new target will be stored in that set. Null: there is no such set.
    pub(crate) wanted: *const Target,
    /// The guest address at which a region was entered, if `attention` interrupted the run in that region.
    pub(crate) ran: u64,
    /// Not 0 if the host's MXCSR contains the guest's value (`float`).
    pub(crate) floats: u32,
    /// The host's own value of MXCSR, while the host's MXCSR contains the guest's.
    pub(crate) host_mxcsr: u32,
    /// A copy of the bytes of a load that crosses into another page.
    pub(crate) copy: [u8; 32],
    /// Receives floating-point results that nothing uses. This field is only written.
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

    /// Forgets all targets. Call in three cases: a block may lose its compiled code; a snapshot begins a new edition;
    /// code may have become stale although the stamp has not changed.
    pub(crate) fn forget_targets(&mut self, targets: &mut Targets) {
        self.edition = self.edition.wrapping_add(1 << 8);
        if self.edition >> 8 == 0 {
            // The edition has wrapped around, so all targets are cleared: an old target must not match a reused number.
            for target in targets.0.as_flattened_mut() {
                target.edition = 0;
            }
            self.edition += 1 << 8;
        }
    }
}
