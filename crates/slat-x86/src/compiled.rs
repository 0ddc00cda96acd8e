//! What compiled code uses of a CPU, besides the architectural state.

use crate::flow::Break;
use crate::heap::Zeroed;
use crate::snapshot::Snapshot;
use crate::tlb::Entry;
use std::ptr;
use std::sync::atomic::AtomicU32;

/// The number of sets in [`Targets`], and by how many bits a set's address is its index shifted left.
pub(crate) const SETS: usize = 4096;
pub(crate) const SET_BITS: u32 = size_of::<[Target; 2]>().trailing_zeros();
pub(crate) const SETS_BYTES: u64 = (SETS as u64) << SET_BITS;

/// Returns the index of the set where a target with this address is looked up first.
pub(crate) fn set_of(rip: u64) -> usize {
    (rip ^ rip >> 12) as usize & (SETS - 1)
}

/// An address of compiled code that can be entered. A target is small, because most of them are in the
/// host's farther caches.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(crate) struct Target {
    /// The address of the guest's code.
    pub(crate) rip: u64,
    /// The page of the code. If the page's stamp is not the CPU's, the page is checked first. The page is alive as long
    /// as `edition` is the CPU's.
    pub(crate) page: *const Snapshot,
    pub(crate) code: *const u8,
    /// [`Compiled::edition`] then. 0: none.
    pub(crate) edition: u32,
}

/// The code addresses where regions continue directly in another region. A set is a cache line with two targets, the
/// newer one first. Only code that blocks have now is in it; see [`Compiled::forget_targets`].
#[repr(align(64))]
pub(crate) struct Targets(pub(crate) [[Target; 2]; SETS]);

// SAFETY: integers and pointers.
unsafe impl Zeroed for Targets {}

/// The fields of a CPU that compiled code uses besides the architectural state. The last ones are in
/// R15's window (`jit::window`).
#[repr(C)]
pub(crate) struct Compiled {
    /// The instruction at which the region was stopped: a [`Step`](crate::region::Step).
    pub(crate) step: *const (),
    /// Why an instruction ended.
    pub(crate) why: Break,
    /// RIP that an instruction has set which ended with [`Break::Jump`].
    pub(crate) rip: u64,
    /// Targets with another edition are invalid. The lowest byte is the CPU's mode, so the edition also tells modes
    /// apart. See `tell_targets_apart`.
    pub(crate) edition: u32,
    /// The last target of its set that a region looked at, if none in the set was the right one.
    pub(crate) wanted: *const Target,
    /// Where the running region was entered, when the run was interrupted for something.
    pub(crate) ran: u64,
    /// Not 0: the host's MXCSR is the guest's (`float`).
    pub(crate) floats: u32,
    /// The host's own MXCSR, while the host has the guest's.
    pub(crate) host_mxcsr: u32,
    /// The copy of the bytes that a load in two pages has read.
    pub(crate) copy: [u8; 32],
    /// Results of floating point that nothing uses. This field is only written.
    pub(crate) unused: [u8; 16],
    /// The number of instructions that compiled code has executed: those already counted, and those of this run.
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

    /// Call before the CPU executes. `targets` are those of the CPU.
    pub(crate) fn prepare(&mut self, targets: &Targets, attention: &AtomicU32) {
        self.targets = &raw const targets.0[0];
        self.attention = attention;
    }

    /// Forgets all targets. Call whenever a block may lose its compiled code, a snapshot begins a new edition, or code
    /// may have become stale although the stamp has not changed.
    pub(crate) fn forget_targets(&mut self, targets: &mut Targets) {
        self.edition = self.edition.wrapping_add(1 << 8);
        if self.edition >> 8 == 0 {
            // The numbers of long ago come again.
            for target in targets.0.as_flattened_mut() {
                target.edition = 0;
            }
            self.edition += 1 << 8;
        }
    }
}
