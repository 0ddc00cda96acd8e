//! What compiled code reaches: the host's pinned register points to a [`Frame`].

use crate::state::State;
use crate::tlb::Entry;
use std::ptr;

/// The fields that compiled code uses. They are set before it is entered.
#[repr(C)]
pub(super) struct Frame {
    pub(super) entry: slat_jit::Frame,
    pub(super) state: *mut State,
    /// The first entry of the TLB.
    pub(super) tlb: *const Entry,
    /// The first of the [`TARGETS`].
    pub(super) targets: *const Target,
    /// Only targets of this edition may be entered: a number that changes with the context, and when translations or
    /// decoded code are dropped.
    pub(super) edition: u64,
    /// The number of instructions that may still be executed.
    pub(super) budget: i64,
    /// The [`Helpers`](super::helpers::Helpers).
    pub(super) helpers: *const (),
    /// The [`Mmu`](crate::mmu::Mmu), of a type that the helpers know.
    pub(super) machine: *mut (),
    /// The operands of helpers that are vectors, and a result that is one.
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
            operands: [0; 3],
            result: 0,
        }
    }
}

/// The number of targets: a power of two.
pub(super) const TARGETS: usize = 4096;

/// The logarithm of the bytes of a target.
pub(super) const TARGET_BITS: u32 = size_of::<Target>().trailing_zeros();

/// An address of guest code, and the compiled code for it.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct Target {
    pub(super) pc: u64,
    pub(super) code: *const u8,
    /// The edition (the value of [`Frame::edition`]) for which the target is valid. 0: for none.
    pub(super) edition: u64,
}

impl Target {
    pub(super) const NONE: Target = Target {
        pc: 0,
        code: ptr::null(),
        edition: 0,
    };
}

/// Returns the index of the target for an address.
pub(super) fn target_index(pc: u64) -> usize {
    (pc >> 2 ^ pc >> 14) as usize & (TARGETS - 1)
}
