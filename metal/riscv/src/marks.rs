//! Finds out whether G-stage walks set the accessed and dirty bits (Svadu, or the behaviour of machines before Svadu
//! had its name), or fault on a clear bit (Svade). No register shows this, so the monitor makes a test.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};

use metal_core::{Command, Cpu, Exit, Op};
use slat::format::Sv39x4;
use slat::{Gpa, Pfn};

use crate::Tables;
use crate::cpu::{Hart, fence_all};

#[repr(C, align(16384))]
struct Root(UnsafeCell<[u64; 2048]>);

// SAFETY: only one hart uses the table, before any other hart is started.
unsafe impl Sync for Root {}

static ROOT: Root = Root(UnsafeCell::new([0; 2048]));
static WRITTEN: AtomicU32 = AtomicU32::new(0);
static SET_BY_HARDWARE: AtomicBool = AtomicBool::new(false);

const ACCESSED: u64 = 1 << 6;
const DIRTY: u64 = 1 << 7;

/// Whether walks set the accessed and dirty bits, as [`learn`] has found out.
pub(crate) fn are_set_by_hardware() -> bool {
    SET_BY_HARDWARE.load(Relaxed)
}

/// Finds out whether walks set the accessed and dirty bits, by making a guest write through a leaf whose bits are
/// clear. Call on the first hart, before it starts others.
pub(crate) fn learn<F: Tables>(hart: &mut Hart<F>) {
    const GIB: u64 = 1 << 30;
    const VALID_RWX_USER: u64 = 0b1_1111;
    let program = Hart::<F>::program().as_ptr().addr() as u64;
    let written = (&raw const WRITTEN).addr() as u64;
    assert_eq!(program / GIB, written / GIB, "one leaf for both");
    let base = program / GIB * GIB;
    // SAFETY: no other hart runs, and no walker knows the table yet.
    let leaf = unsafe { &mut (*ROOT.0.get())[(base / GIB) as usize] };
    *leaf = base >> 12 << 10 | VALID_RWX_USER;
    let leaf: *mut u64 = leaf;
    let command = Command {
        op: Op::Write,
        gpa: Gpa(written),
        step: 0,
        count: 1,
        value: 1,
    };
    hart.begin(Gpa(program), &command);
    let root = Pfn(ROOT.0.get().addr() as u64 >> 12);
    let exit = hart.run_with(Sv39x4::hgatp(root, 0));
    // SAFETY: no other hart runs, and the walker has finished.
    let bits = unsafe { leaf.read_volatile() };
    match exit {
        Exit::Done { .. } => {
            assert_eq!(WRITTEN.load(Relaxed), 1, "the guest wrote");
            assert_eq!(bits & (ACCESSED | DIRTY), ACCESSED | DIRTY);
            SET_BY_HARDWARE.store(true, Relaxed);
        }
        Exit::Fault { .. } => {}
        exit => panic!("trying the walker: {exit:?}"),
    }
    fence_all();
}
