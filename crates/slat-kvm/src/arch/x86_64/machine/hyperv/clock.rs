//! Hyper-V's reference clock, and the page by which the guest computes the clock from its TSC.

use crate::arch::x86_64::clock::ordered_tsc;
use crate::arch::x86_64::machine::VcpuMachine;
use slat_hyperv::clock::{TscPage, UNIT};
use slat_hyperv::partition::{DuePage, PageOutcome, Partition};

impl VcpuMachine {
    /// Returns the reference clock now, in units of 100 ns. The reference clock has the value of kvmclock. It is
    /// computed with the arithmetic of the guest's page, even if the guest has no page.
    pub(super) fn reference_time(&self) -> u64 {
        (self.vm.arch.hyperv).with_partition(|partition| self.time_of(partition))
    }

    /// Returns the same time as [`reference_time`](Self::reference_time). The caller has locked the partition already.
    pub(super) fn time_of(&self, partition: &Partition) -> u64 {
        let page = self.tsc_page();
        let host_tsc = ordered_tsc();
        let tsc = self.tsc.at(host_tsc);
        let now = match page {
            Some(page) => page.time(tsc).wrapping_mul(UNIT),
            None => self.vm.arch.clock.kvmclock_at(host_tsc),
        };
        partition.time(tsc, now)
    }

    /// Returns the contents that the page should have now. `None`: no contents are correct for all vCPUs, because their
    /// TSCs differ or are too slow.
    fn tsc_page(&self) -> Option<TscPage> {
        let clock = self.vm.arch.clock.parameters(&self.tsc);
        let clock = clock.without_wrap(self.guest_tsc());
        let page = TscPage::new(
            clock.scale.mul,
            clock.scale.shift,
            clock.tsc,
            clock.nanoseconds,
        );
        page.filter(|_| clock.is_stable)
    }

    /// Writes the guest's page of the reference clock, if the page has to be written. Call inside the engine's reader
    /// section. If the write is interrupted, the next call on this vCPU or another one writes the page.
    pub(crate) fn write_tsc_page(&mut self) {
        if let Some(due) = self.vm.arch.hyperv.begin_page() {
            let outcome = self
                .fill_tsc_page(&due)
                .unwrap_or_else(|| match self.is_called_out() {
                    true => PageOutcome::Later,
                    false => PageOutcome::Broken,
                });
            self.vm.arch.hyperv.end_page(due, outcome);
        }
    }

    /// Writes the page of the reference clock. `None`: the page cannot be accessed.
    fn fill_tsc_page(&mut self, due: &DuePage) -> Option<PageOutcome> {
        let at = due.address;
        let words = [
            self.read_guest_word(at)?,
            self.read_guest_word(at + 8)?,
            self.read_guest_word(at + 16)?,
        ];
        let old = TscPage::from_words(words);
        if old.sequence != 0 && due.keeps_contents {
            return Some(PageOutcome::Shows(old));
        }
        // The sequence 0 makes guests on other vCPUs read the MSR while the other fields change.
        let mut write = |offset, bytes: &[u8]| self.write_guest(at + offset, bytes).then_some(());
        write(0, &0u32.to_le_bytes())?;
        let Some(mut page) = self.tsc_page() else {
            return Some(PageOutcome::Broken);
        };
        page.sequence = TscPage::next_sequence(due.last_sequence.max(old.sequence));
        let bytes = page.to_bytes();
        let mut write = |offset, bytes: &[u8]| self.write_guest(at + offset, bytes).then_some(());
        write(4, &bytes[4..])?;
        write(0, &bytes[..4])?;
        Some(PageOutcome::Shows(page))
    }
}
