//! The paravirtual clock kvmclock: when its pages, and the page of the wall clock, are written.

use super::VcpuMachine;
use crate::arch::x86_64::clock::{self, host_tsc};
use crate::arch::x86_64::msr::index;
use crate::thread::bits;
use std::sync::Arc;

impl VcpuMachine {
    /// Makes the run loop write the pages of kvmclock and of Hyper-V's reference clock again before the guest
    /// continues.
    pub(crate) fn clock_page_changed(&mut self) {
        self.clock_changed = true;
        self.vm.arch.hyperv.clock_changed();
        self.common.attention.raise(bits::RETRY);
    }

    pub(crate) fn wall_clock_wanted(&mut self) {
        self.wall_clock_wanted = true;
        self.common.attention.raise(bits::RETRY);
    }

    /// Sets the MSR of the clock: bit 0 enables the clock, and the other bits are the guest-physical address of its
    /// page.
    pub(crate) fn set_kvmclock(&mut self, value: u64) {
        self.store(index::KVM_SYSTEM_TIME_NEW, value);
        let page = (value & 1 != 0).then_some(value & !1);
        self.vm.arch.clock.set_page(self.clock_number, page);
    }

    /// Carries out `KVM_KVMCLOCK_CTRL`. Returns `false` if the guest does not use the clock.
    pub(crate) fn mark_guest_paused(&mut self) -> bool {
        let uses = self.msr(index::KVM_SYSTEM_TIME_NEW) & 1 != 0;
        if uses {
            self.guest_paused = true;
            self.clock_page_changed();
        }
        uses
    }

    /// Reads an aligned 32-bit word of guest memory. Returns 0 if there is no memory.
    fn read_guest_half(&mut self, at: u64) -> u32 {
        let word = self.read_guest_word(at & !7).unwrap_or(0);
        (word >> (8 * (at % 8))) as u32
    }

    /// Writes the pages of the paravirtual clocks that have changed. Call before the vCPU executes guest code, after
    /// [`bits::RETRY`] was cleared, inside the engine's reader section. Skips a page that is not memory.
    pub(crate) fn write_clocks(&mut self) {
        if self.vm.arch.clock.is_updating() {
            self.outside(|machine| machine.vm.arch.clock.wait_for_update());
        }
        self.write_tsc_page();
        self.write_wall_clock();
        self.write_kvmclock();
    }

    fn write_wall_clock(&mut self) {
        let address = self.msr(index::KVM_WALL_CLOCK_NEW);
        // A client that resets the MSR to 0 does not ask for a page.
        if std::mem::take(&mut self.wall_clock_wanted) && address != 0 {
            let start = self.vm.arch.clock.boot_time();
            let mut page = [0; 12];
            page[0..4].copy_from_slice(&2u32.to_le_bytes());
            page[4..8].copy_from_slice(&((start / 1_000_000_000) as u32).to_le_bytes());
            page[8..12].copy_from_slice(&((start % 1_000_000_000) as u32).to_le_bytes());
            self.wall_clock_wanted = !self.write_guest(address, &page) && self.is_called_out();
        }
    }

    /// Writes the pages of kvmclock that have changed: the pages of all vCPUs, if the VM's pair has changed and no other
    /// vCPU has written them since; otherwise this vCPU's page. If another vCPU is writing pages, returns with
    /// [`bits::RETRY`] raised, so that the run loop looks for signals and calls again.
    fn write_kvmclock(&mut self) {
        let set = self.vm.arch.clock.changes();
        let is_due = self.clock_due.is_some_and(|due| host_tsc() >= due);
        if !(self.clock_changed || self.clock_set != set || is_due) {
            return;
        }
        let vm = Arc::clone(&self.vm);
        let clock = &vm.arch.clock;
        let Some(mut all_written) = clock.page_turn() else {
            self.outside(|_| std::thread::yield_now());
            self.common.attention.raise(bits::RETRY);
            return;
        };
        let mut written = true;
        if *all_written != set && clock.is_stable() {
            for number in 0..clock.numbers() {
                written &= self.write_kvmclock_page(number);
            }
            if written {
                *all_written = set;
            }
        } else if self.clock_changed || is_due || *all_written != set {
            // If the clock is not stable, a guest reads the page of the CPU that it runs on.
            written = self.write_kvmclock_page(self.clock_number);
        }
        // If a signal has interrupted the wait for guest memory, the pages have to be written later. Otherwise the guest
        // would keep using the old pages.
        (self.clock_changed, self.clock_set) = (!written, set);
        self.guest_paused &= self.clock_changed;
    }

    /// Writes the kvmclock page of the vCPU with this number in the VM's clock. Returns `false` if a signal has
    /// interrupted the wait for guest memory.
    fn write_kvmclock_page(&mut self, number: usize) -> bool {
        let clock = &self.vm.arch.clock;
        let is_own = number == self.clock_number;
        let page = clock.page(number);
        if is_own {
            self.clock_due = (page.as_ref()).and_then(|(_, parameters)| clock.refresh(parameters));
        }
        let Some((at, parameters)) = page else {
            return true;
        };
        // The new version is greater than the version in guest memory. So if a guest was migrated while it read the
        // page, it notices the change.
        let odd = self.read_guest_half(at).wrapping_add(1) | 1;
        // As in KVM, the page reports the pause until the guest has cleared the flag.
        let told = clock::is_paused(self.read_guest_half(at.wrapping_add(clock::FLAGS_AT)));
        let paused = told || is_own && self.guest_paused;
        let page = parameters.page(odd.wrapping_add(1), paused);
        // The version is odd while the page's other fields change, so that readers on other vCPUs try again.
        let written = self.write_guest(at, &odd.to_le_bytes())
            && self.write_guest(at.wrapping_add(4), &page[4..])
            && self.write_guest(at, &page[..4]);
        written || !self.is_called_out()
    }
}
