//! Guest memory for the processor: translation by the engine's second level, and guarded accesses.

use crate::arch::aarch64::cpu::{Refusal, access};
use crate::arch::aarch64::machine::VcpuMachine;
use crate::entered::outside;
use crate::exit::MemoryFault;
use crate::thread::bits;
use slat::{Gpa, Hva, ResolveError, Stop};
use slat_a64::{Hypervisor, Order, Page, Right, State, SystemName};
use slat_guard::Gone;
use std::sync::atomic::{Ordering, fence};

/// The size of the pages by which the processor translates.
const PAGE: u64 = 4096;

/// Orders an access with the accesses before it and after it. A fence on both sides orders more than the architecture
/// demands of a load-acquire or a store-release.
fn fenced<R>(order: Order, work: impl FnOnce() -> R) -> R {
    if order == Order::default() {
        return work();
    }
    fence(Ordering::SeqCst);
    let result = work();
    fence(Ordering::SeqCst);
    result
}

impl VcpuMachine {
    /// Translates a page for the engine.
    fn translate(&mut self, ipa: u64, access: slat::Access) -> Result<Page, Refusal> {
        let page = Gpa(ipa & !(PAGE - 1));
        let found = (self.engine.translate(page, access)).map_err(|stop| self.refusal(stop))?;
        // The engine's page has the size of the format's granule.
        Ok(Page {
            base: found.host.0 + (page.0 & (self.engine_page - 1)),
            write: found.write,
            execute: true,
        })
    }

    #[cold]
    fn refusal(&mut self, stop: Stop) -> Refusal {
        match stop {
            Stop::Mmio { .. } => Refusal::Device,
            Stop::DirtyRingFull => {
                self.common.attention.raise(bits::RING_FULL);
                self.retry()
            }
            Stop::Retry
            | Stop::BadAddress {
                error: ResolveError::Interrupted,
                ..
            } => {
                self.is_interrupted |= slat_guard::was_kicked();
                self.retry()
            }
            Stop::MemoryFault { .. } => {
                self.memory_fault = MemoryFault::of(&stop);
                Refusal::BadAddress
            }
            Stop::OutOfMemory { .. } => {
                crate::messages::explain(&stop);
                Refusal::OutOfMemory
            }
            // The remaining error is `BadAddress`.
            _ => {
                crate::messages::explain(&stop);
                Refusal::BadAddress
            }
        }
    }

    /// Makes the run loop drop all translations before the guest executes again.
    fn retry(&self) -> Refusal {
        self.common.attention.raise(bits::RETRY);
        Refusal::Retry
    }

    /// Call after a guarded access at `at` failed. Either another thread has raised a bit of the attention word, or the
    /// client has changed the mapping without an invalidation. In the second case the engine drops the page, and asks
    /// the host again.
    #[cold]
    fn gone(&mut self, at: u64) -> Refusal {
        if self.common.attention.flag().load(Ordering::SeqCst) == 0 {
            let first = at & !(PAGE - 1);
            outside(&mut self.engine, || {
                drop(self.vm.engine.invalidate(Hva(first)..Hva(first + PAGE)));
            });
        }
        self.retry()
    }

    fn guarded<R>(&mut self, at: u64, result: Result<R, Gone>) -> Result<R, Refusal> {
        result.map_err(|_| self.gone(at))
    }

    /// Whether a signal or a full dirty ring ends the run. Then an access that has failed may succeed in the next run.
    fn is_called_out(&self) -> bool {
        self.common.attention.flag().load(Ordering::SeqCst) & (bits::SIGNAL | bits::RING_FULL) != 0
    }

    /// Reads guest-physical memory; the vCPU is entered. Returns `false` if the address is not memory, or not
    /// accessible.
    pub(crate) fn read_here(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        self.by_pages(gpa, bytes.len(), Right::Read, |host, part| {
            // SAFETY: `host` is in guest memory: the engine has translated the page, which the client gave to the
            // guest. The copy is guarded.
            unsafe { slat_guard::copy_in(&mut bytes[part], host) }.map_err(|_| Gone)
        })
    }

    /// Writes guest-physical memory, and marks the pages in the dirty log; the vCPU is entered. Returns `false` if the
    /// address is not memory, or not accessible.
    pub(crate) fn write_here(&mut self, gpa: u64, bytes: &[u8]) -> bool {
        self.by_pages(gpa, bytes.len(), Right::Write, |host, part| {
            // SAFETY: `host` is in guest memory: the engine has translated the page for a write. The copy is guarded.
            unsafe { slat_guard::copy_out(host, &bytes[part]) }.map_err(|_| Gone)
        })
    }

    fn by_pages(
        &mut self,
        gpa: u64,
        len: usize,
        right: Right,
        mut copy: impl FnMut(*mut u8, std::ops::Range<usize>) -> Result<(), Gone>,
    ) -> bool {
        let mut done = 0;
        while done < len {
            let at = gpa.wrapping_add(done as u64);
            let part = (len - done).min((PAGE - at % PAGE) as usize);
            let copied = self.translate(at, access(right)).and_then(|page| {
                let host = page.base + at % PAGE;
                let result = copy(host as *mut u8, done..done + part);
                self.guarded(host, result)
            });
            match copied {
                Ok(()) => done += part,
                Err(Refusal::Retry) if !self.is_called_out() => self.engine.quiesce(),
                Err(_) => return false,
            }
        }
        true
    }
}

/// Makes a guarded access of a word with 1 << `size` bytes, which fits in 8 bytes.
macro_rules! of_size {
    ($size:expr, $word:ident => $access:expr) => {
        match $size {
            0 => {
                type $word = u8;
                $access
            }
            1 => {
                type $word = u16;
                $access
            }
            2 => {
                type $word = u32;
                $access
            }
            _ => {
                type $word = u64;
                $access
            }
        }
    };
}

impl Hypervisor for VcpuMachine {
    type Fault = Refusal;

    fn page(&mut self, ipa: u64, right: Right) -> Result<Page, Refusal> {
        self.translate(ipa, access(right))
    }

    #[inline]
    fn load(&mut self, at: u64, size: u8, order: Order) -> Result<u64, Refusal> {
        // SAFETY: `at` is in a page of guest memory that the engine has translated, which the guest may share with
        // other threads. The access is guarded.
        let loaded = fenced(order, || unsafe {
            of_size!(size, Word => slat_guard::load(at as *const Word).map(u64::from))
        });
        self.guarded(at, loaded)
    }

    #[inline]
    fn store(&mut self, at: u64, size: u8, value: u64, order: Order) -> Result<(), Refusal> {
        // SAFETY: `at` is in a page of guest memory that the engine has translated for a write. The access is guarded.
        let stored = fenced(order, || unsafe {
            of_size!(size, Word => slat_guard::store(at as *mut Word, value as Word))
        });
        self.guarded(at, stored)
    }

    fn load_wide(&mut self, at: u64) -> Result<u128, Refusal> {
        let half = |at: u64| {
            // SAFETY: as in `load`.
            unsafe { slat_guard::load(at as *const u64) }
        };
        let loaded = half(at).and_then(|low| Ok(u128::from(low) | u128::from(half(at + 8)?) << 64));
        self.guarded(at, loaded)
    }

    fn store_wide(&mut self, at: u64, value: u128) -> Result<(), Refusal> {
        let half = |at: u64, value: u64| {
            // SAFETY: as in `store`.
            unsafe { slat_guard::store(at as *mut u64, value) }
        };
        let stored = half(at, value as u64).and_then(|()| half(at + 8, (value >> 64) as u64));
        self.guarded(at, stored)
    }

    fn compare_exchange(
        &mut self,
        at: u64,
        size: u8,
        [old, new]: [u128; 2],
        order: Order,
    ) -> Result<u128, Refusal> {
        let found = fenced(order, || {
            if size == 4 {
                // SAFETY: as in `store`. The address is a multiple of 16.
                return unsafe { slat_guard::compare_exchange(at as *mut u128, old, new) }
                    .map(|found| found.unwrap_or_else(|found| found));
            }
            // SAFETY: as in `store`.
            unsafe {
                of_size!(size, Word => {
                    slat_guard::compare_exchange(at as *mut Word, old as Word, new as Word)
                        .map(|found| u128::from(found.unwrap_or_else(|found| found)))
                })
            }
        });
        self.guarded(at, found)
    }

    fn read_system(&mut self, state: &State, name: SystemName) -> Option<u64> {
        self.read_register(name, state.pstate().el1)
    }

    fn write_system(&mut self, state: &State, name: SystemName, value: u64) -> Option<()> {
        self.write_register(name, state.pstate().el1, value)
    }

    #[inline]
    fn attention(&self) -> bool {
        self.common.attention.flag().load(Ordering::Relaxed) != 0
    }
}
