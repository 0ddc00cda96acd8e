//! Guest memory for the processor: translation by the engine's second level, and guarded accesses.

use crate::arch::aarch64::cpu::{Refusal, access};
use crate::arch::aarch64::machine::VcpuMachine;
use crate::arch::aarch64::tables::Tables;
use crate::guest_memory::Unreachable;
use slat_a64::{Hypervisor, Order, Page, Right, State, SystemName};
use slat_guard::Gone;
use slat_host::{is_resident, page_size};
use std::sync::atomic::{Ordering, fence};

/// The size of the pages by which the processor translates.
const PAGE: u64 = 4096;

/// Orders an access with the accesses before it and after it. The fences before and after an access order more than the
/// architecture demands of a load-acquire or a store-release.
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
    /// Translates the page of an intermediate physical address.
    fn translate(&mut self, ipa: u64, access: slat::Access) -> Result<Page, Refusal> {
        let size = page_size() as u64;
        let found = self.memory.data_page(ipa & !(size - 1), access);
        let found = found.map_err(refusal)?;
        // A page of the host can be larger than the processor's page. Then the processor's page begins at this offset
        // in it.
        let inside = ipa & (size - 1) & !(PAGE - 1);
        Ok(Page {
            base: found.host.as_ptr() as u64 + inside,
            write: found.write,
            execute: true,
        })
    }

    /// Returns the result of a guarded access at `at`. An access that has failed is made again after the vCPU has
    /// served the requests in its attention word.
    #[inline(always)]
    fn guarded<R>(&mut self, at: u64, result: Result<R, Gone>) -> Result<R, Refusal> {
        result.map_err(|_| self.gone(at))
    }

    #[cold]
    fn gone(&mut self, at: u64) -> Refusal {
        // The signal of a kick may arrive during any access. Only if the page is not in memory has the signal
        // interrupted a wait.
        self.memory.is_interrupted |= slat_guard::was_kicked() && !is_resident(at as usize);
        self.memory.forget(at as *const u8);
        Refusal::Retry
    }

    /// Records in this vCPU's dirty ring the pages that the interrupt controllers have written. A later call records
    /// the pages for which the ring has no space. Call inside the engine's reader section.
    pub(crate) fn log_tables(&mut self) {
        let vm = &self.vm;
        let tables = vm.interrupts.gic().map(|chips| &chips.tables);
        while let Some(gpa) = tables.and_then(Tables::take_unlogged) {
            // Translating the page for a write records it in the dirty ring.
            let noted = self.memory.data_page(gpa, slat::Access::Write);
            if let (Err(Unreachable::Retry), Some(tables)) = (noted, tables) {
                return tables.put_unlogged(gpa);
            }
        }
    }

    /// Reads guest-physical memory. Call inside the engine's reader section. Returns `false` if the address is not
    /// memory, or not accessible.
    pub(crate) fn read_here(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        self.memory.read(gpa, bytes)
    }

    /// Writes guest-physical memory, and marks the pages in the dirty log. Call inside the engine's reader section.
    /// Returns `false` if the address is not memory, or not accessible.
    pub(crate) fn write_here(&mut self, gpa: u64, bytes: &[u8]) -> bool {
        self.memory.write(gpa, bytes, |_| ())
    }
}

/// Converts the reason why guest memory is not accessible to the processor's type.
fn refusal(why: Unreachable) -> Refusal {
    match why {
        Unreachable::NotMemory => Refusal::Device,
        Unreachable::Retry => Refusal::Retry,
        Unreachable::BadAddress => Refusal::BadAddress,
        Unreachable::OutOfMemory => Refusal::OutOfMemory,
    }
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
            slat_guard::load_sized(at as *const u8, size)
        });
        self.guarded(at, loaded)
    }

    #[inline]
    fn store(&mut self, at: u64, size: u8, value: u64, order: Order) -> Result<(), Refusal> {
        // SAFETY: `at` is in a page of guest memory that the engine has translated for a write. The access is guarded.
        let stored = fenced(order, || unsafe {
            slat_guard::store_sized(at as *mut u8, size, value)
        });
        self.guarded(at, stored)
    }

    fn load_wide(&mut self, at: u64) -> Result<u128, Refusal> {
        let half = |at: u64| {
            // SAFETY: as in `load`, the engine has translated the page of `at`, and the access is guarded.
            unsafe { slat_guard::load(at as *const u64) }
        };
        let loaded = half(at).and_then(|low| Ok(u128::from(low) | u128::from(half(at + 8)?) << 64));
        self.guarded(at, loaded)
    }

    fn store_wide(&mut self, at: u64, value: u128) -> Result<(), Refusal> {
        let half = |at: u64, value: u64| {
            // SAFETY: as in `store`, the engine has translated the page of `at` for a write, and the access is guarded.
            unsafe { slat_guard::store(at as *mut u64, value) }
        };
        let stored = half(at, value as u64).and_then(|()| half(at + 8, (value >> 64) as u64));
        self.guarded(at, stored)
    }

    fn compare_exchange(
        &mut self,
        at: u64,
        size: u8,
        values: [u128; 2],
        order: Order,
    ) -> Result<u128, Refusal> {
        // SAFETY: as in `store`, the engine has translated the page of `at` for a write, and the access is guarded. A
        // word of 16 bytes is aligned.
        let found = fenced(order, || unsafe {
            slat_guard::compare_exchange_sized(at as *mut u8, size, values)
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
