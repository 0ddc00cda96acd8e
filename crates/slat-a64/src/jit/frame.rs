//! The memory that compiled code can access: the host's pinned register points to a [`Frame`].

use crate::simd::float::IXC;
use crate::state::State;
use crate::tlb::Entry;
use slat_jit::floats;
use std::ptr;

/// The flags in the form in which compiled code holds them.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct SavedFlags {
    /// A value that is negative if the flag N is set.
    pub(super) n: i64,
    /// A value that is zero if the flag Z is set.
    pub(super) z: u64,
    /// A value that is negative if the flag V is set.
    pub(super) v: i64,
    pub(super) c: bool,
}

impl SavedFlags {
    /// Returns N, Z, C, V.
    pub(super) fn nzcv(self) -> [bool; 4] {
        [self.n < 0, self.z == 0, self.c, self.v < 0]
    }
}

/// The fields that compiled code uses. The processor sets them before it enters compiled code.
#[repr(C)]
pub(super) struct Frame {
    pub(super) entry: slat_jit::Frame,
    pub(super) state: *mut State,
    /// The address of the first entry of the processor's TLB.
    pub(super) tlb: *const Entry,
    /// The first of the table's [`TARGETS`] entries.
    pub(super) targets: *const Target,
    /// Compiled code may enter only targets of this edition. The number changes with the context, and when translations
    /// or decoded code are dropped.
    pub(super) edition: u64,
    /// The number of instructions that compiled code may still execute.
    pub(super) budget: i64,
    /// The table of helpers ([`Helpers`](super::helpers::Helpers)).
    pub(super) helpers: *const (),
    /// The [`Mmu`](crate::mmu::Mmu). Its type depends on the embedder's `Hypervisor`, which the helpers know.
    pub(super) machine: *mut (),
    /// The flags at the last [checkpoint](super::plan), if the checkpoint did not write them to the state.
    pub(super) flags: SavedFlags,
    /// Not 0 while the host's floating-point unit is prepared for compiled code.
    pub(super) floats: u64,
    /// The settings of the host's floating-point unit before [`begin_floats`](Self::begin_floats).
    before: floats::Before,
    /// Vector operands of helpers, and a vector result.
    pub(super) operands: [u128; 3],
    pub(super) result: u128,
}

impl Frame {
    pub(super) fn new() -> Self {
        Self {
            entry: slat_jit::Frame::default(),
            state: ptr::null_mut(),
            tlb: ptr::null(),
            targets: ptr::null(),
            edition: 0,
            budget: 0,
            helpers: ptr::null(),
            machine: ptr::null_mut(),
            flags: SavedFlags::default(),
            floats: 0,
            before: floats::Before::default(),
            operands: [0; 3],
            result: 0,
        }
    }

    /// Prepares the host's floating-point unit for compiled code, until [`end_floats`](Self::end_floats).
    pub(super) fn begin_floats(&mut self) {
        self.before = floats::begin();
        self.floats = 1;
    }

    /// Call before code other than compiled code and the computing helpers runs, and before FPSR is read. Restores the
    /// host's floating-point unit, and copies its inexact flag to the guest's FPSR. Returns whether the unit was
    /// prepared for compiled code.
    pub(super) fn end_floats(&mut self) -> bool {
        let was = std::mem::take(&mut self.floats) != 0;
        if was && self.before.end() {
            // SAFETY: as in the helpers: the pointer was made of an exclusive reference before compiled code was
            // entered, and nothing uses that reference until compiled code is left.
            unsafe { (*self.state).fpsr |= IXC };
        }
        was
    }
}

/// The number of entries in the table of targets: a power of two.
pub(super) const TARGETS: usize = 4096;

/// The logarithm of the size of a target in bytes.
pub(super) const TARGET_BITS: u32 = size_of::<Target>().trailing_zeros();

/// An address of guest code, and the compiled code for it.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct Target {
    pub(super) pc: u64,
    pub(super) code: *const u8,
    /// The value of [`Frame::edition`] for which the target is valid. 0: the target is never valid.
    pub(super) edition: u64,
}

impl Target {
    pub(super) const NONE: Target = Target {
        pc: 0,
        code: ptr::null(),
        edition: 0,
    };
}

/// Returns the index of the target for guest address `pc`.
pub(super) fn target_index(pc: u64) -> usize {
    (pc >> 2 ^ pc >> 14) as usize & (TARGETS - 1)
}
