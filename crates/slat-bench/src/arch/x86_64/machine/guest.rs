//! The environment of a guest: its page tables, and the initial registers of a vCPU.
//!
//! Guest-virtual addresses equal guest-physical addresses. The guest maps them by 2 MiB pages, so it has few tables.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use kvm_bindings::kvm_sregs;
use slat_demo::for_other_crates::long_mode::{PRESENT_WRITABLE, identity_map, registers};

use super::api::Failure;
pub use super::layout::{DATA, DEVICE, END, MAX_VCPUS, PAGE, SYSTEM, SYSTEM_SIZE};
use super::layout::{IDT, MODES, PDPT, PROGRAM};
pub(crate) use super::layout::{PAGE_DIRECTORIES, PML4};
use super::{interrupts, loops, modes};

const MAX_GIB: u64 = (SYSTEM_SIZE as u64 - PAGE_DIRECTORIES) / PAGE;

/// The host's side of the programs [`Program::turns`](super::Program::turns) and
/// [`Program::hammer`](super::Program::hammer). Host and guest communicate by two words of guest memory.
pub struct Turns<'m> {
    stop: &'m AtomicU64,
    turn: &'m AtomicU64,
}

impl<'m> Turns<'m> {
    /// Makes the host's side from the first two words of `words`.
    pub fn new(words: &'m [AtomicU64]) -> Self {
        let (stop, turn) = (&words[0], &words[1]);
        stop.store(0, SeqCst);
        turn.store(0, SeqCst);
        Turns { stop, turn }
    }

    /// Lets the guest begin its next turn (one round of its work). Returns when the guest has finished the previous
    /// turn and has begun the next one.
    ///
    /// # Errors
    /// If the guest does not act in time, because it has ended.
    pub fn pass(&self) -> Result<(), Failure> {
        self.turn.store(1, SeqCst);
        wait_until(|| self.turn.load(SeqCst) == 0)
    }

    /// Tells the guest to halt.
    pub fn stop(&self) {
        self.stop.store(1, SeqCst);
    }
}

/// Waits until `done` returns `true`, as a result of the guest's work.
///
/// # Errors
/// If that takes too long.
pub fn wait_until(done: impl Fn() -> bool) -> Result<(), Failure> {
    const PATIENCE: Duration = Duration::from_secs(60);
    let began = Instant::now();
    let mut round = 0u32;
    while !done() {
        round += 1;
        if round.is_multiple_of(256) {
            std::thread::yield_now();
            if began.elapsed() > PATIENCE {
                return Err("the guest does not answer".into());
            }
        } else {
            std::hint::spin_loop();
        }
    }
    Ok(())
}

/// Writes page tables and the programs into the memory of the system slot. The tables map the addresses `0..end` one to
/// one.
///
/// # Panics
/// If the tables do not fit.
pub fn load(system: &mut [u8], end: u64) {
    let gib = end.div_ceil(1 << 30);
    assert!(gib <= MAX_GIB, "guest tables for {gib} GiB");
    identity_map(system, PRESENT_WRITABLE, PML4, PDPT, PAGE_DIRECTORIES, gib);
    for (code, place) in [(loops::code(), PROGRAM..MODES), (modes::code(), MODES..IDT)] {
        assert!(code.len() as u64 <= place.end - place.start);
        system[place.start as usize..][..code.len()].copy_from_slice(code);
    }
    interrupts::load(system, loops::interrupt_handler());
}

/// Returns the special registers of a vCPU in long mode, at privilege level 0, that uses the page tables of [`load`].
pub fn special_registers(from_reset: kvm_sregs) -> kvm_sregs {
    registers(from_reset, PML4)
}
