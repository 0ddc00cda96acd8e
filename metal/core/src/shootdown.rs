//! Flushes by interrupts, for machines whose CPUs can only flush their own TLB.
//!
//! Each CPU has a word: the number of its last flush, and whether it is in the guest. A CPU that needs a flush raises
//! the number of flushes, interrupts every CPU that is in the guest and has not made that flush, and waits until that
//! CPU has left the guest or made the flush. A CPU that is about to enter the guest first sets its word, and then reads
//! the number of flushes. The accesses are sequentially consistent. So either the entering CPU sees the raised number,
//! and flushes before it enters, or the flushing CPU sees that the other CPU is in the guest. Interrupts are masked
//! from before the CPU sets its word until the guest runs, so an interrupt that arrives in between is not lost: it
//! makes the CPU leave the guest at once.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU64, Ordering::*};

/// The state of `CPUS` CPUs: which are in the guest, and which must flush.
pub struct Shootdown<const CPUS: usize> {
    wanted: AtomicU64,
    cpus: [AtomicU64; CPUS],
}

/// The bit in the word of a CPU that says that the CPU is in the guest. The other bits are the number of its last
/// flush.
const INSIDE: u64 = 1 << 63;

impl<const CPUS: usize> Shootdown<CPUS> {
    /// Makes a state with no CPU in the guest, and no flush pending.
    pub const fn new() -> Self {
        Shootdown {
            wanted: AtomicU64::new(0),
            cpus: [const { AtomicU64::new(0) }; CPUS],
        }
    }

    /// Call when `cpu` is about to enter the guest, with interrupts masked. Calls `flush` if its TLB may hold removed
    /// translations.
    pub fn enter(&self, cpu: usize, mut flush: impl FnMut()) {
        let word = &self.cpus[cpu];
        let mut flushed = word.load(Relaxed);
        loop {
            word.store(flushed | INSIDE, SeqCst);
            let wanted = self.wanted.load(SeqCst);
            if wanted == flushed {
                return;
            }
            flush();
            flushed = wanted;
        }
    }

    /// Call when `cpu` has left the guest.
    pub fn leave(&self, cpu: usize) {
        self.cpus[cpu].fetch_and(!INSIDE, Release);
    }

    /// Makes every CPU flush before it runs another instruction of the guest. `interrupt` makes a CPU leave the guest.
    /// The caller is not in the guest.
    pub fn flush(&self, interrupt: impl Fn(usize)) {
        let wanted = self.wanted.fetch_add(1, SeqCst) + 1;
        let behind = |cpu: usize| {
            let word = self.cpus[cpu].load(SeqCst);
            word & INSIDE != 0 && word & !INSIDE < wanted
        };
        for cpu in 0..CPUS {
            if behind(cpu) {
                interrupt(cpu);
                while behind(cpu) {
                    spin_loop();
                }
            }
        }
    }
}

impl<const CPUS: usize> Default for Shootdown<CPUS> {
    fn default() -> Self {
        Self::new()
    }
}
