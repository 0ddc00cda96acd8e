//! The task priority in guest memory (`KVM_SET_VAPIC_ADDR`), for guests that write the APIC's register very often. A
//! client patches such guests so that they use a word in memory instead. Like KVM, slat copies the word to the APIC, or
//! from it, whenever guest code starts or stops running.

use crate::arch::x86_64::machine::VcpuMachine;
use crate::entered::Entered;
use crate::errno::{Result, fail};
use crate::vcpu::{Inner, VcpuObject};
use kvm_bindings::*;
use slat_irqchip::lapic::{Lapic, reg};

/// Returns the highest vector that is set in one of the APIC's bit arrays, or 0.
fn highest(lapic: &Lapic, array: u32, now: u64) -> u32 {
    let words = (0..8).rev().map(|n| (n, lapic.read(array + 16 * n, now)));
    let found = words.into_iter().find(|(_, word)| *word != 0);
    found.map_or(0, |(n, word)| 32 * n + word.ilog2())
}

impl VcpuMachine {
    /// Writes the guest's word: task priority, class of the vector in service, and highest pending vector. Call inside
    /// the engine's reader section.
    fn write_vapic(&mut self, address: u64) {
        let now = self.vm.arch.clock.now();
        let Some(word) = self.common.lapic().map(|lapic| {
            let in_service = highest(&lapic, reg::ISR, now) & 0xf0;
            lapic.read(reg::TPR, now) & 0xff
                | in_service << 8
                | highest(&lapic, reg::IRR, now) << 24
        }) else {
            return;
        };
        self.write_guest(address, &word.to_le_bytes());
    }
}

impl Inner {
    /// Copies the APIC's task priority to the guest's word. Call before guest code runs.
    pub(crate) fn vapic_to_guest(&mut self) {
        if let Some(address) = self.machine.vapic {
            self.sync_cr8_to_lapic();
            self.machine.write_vapic(address);
        }
    }

    /// Copies the task priority in the guest's word to the APIC. Call after guest code has run.
    pub(crate) fn vapic_from_guest(&mut self) {
        let Some(address) = self.machine.vapic else {
            return;
        };
        let Some(word) = self.machine.read_guest_word(address & !7) else {
            return;
        };
        // The guest may have changed the task priority by CR8 instead of the word.
        self.sync_cr8_to_lapic();
        let (now, priority) = (
            self.machine.vm.arch.clock.now(),
            (word >> (8 * (address % 8))) as u8,
        );
        if let Some(mut lapic) = self.machine.common.lapic() {
            lapic.write(reg::TPR, priority.into(), now);
        }
        self.sync_cr8_from_lapic();
    }
}

impl VcpuObject {
    /// Carries out `KVM_SET_VAPIC_ADDR`: sets the address of the guest's word. With 0, the guest has no such word.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller, and for an address that is not memory.
    pub fn set_vapic_address(&self, vapic: &kvm_vapic_addr) -> Result<()> {
        let mut inner = self.lock()?;
        let address = vapic.vapic_addr;
        if self.common().lapic().is_none() {
            return fail(libc::EINVAL);
        }
        if address != 0 {
            let mut inner = Entered::enter(&mut *inner);
            // The word must be within one page, and within one of the aligned 8-byte words by which it is read.
            if address % 8 > 4 || inner.machine.read_guest_word(address & !7).is_none() {
                return fail(libc::EINVAL);
            }
        }
        inner.machine.vapic = (address != 0).then_some(address);
        Ok(())
    }

    /// Carries out `KVM_TPR_ACCESS_REPORTING`: checks the flags, and has no other effect. Accesses to the task priority
    /// do not end `KVM_RUN`, as on a processor with a virtual APIC.
    ///
    /// # Errors
    /// `EINVAL` for flags.
    pub fn set_tpr_access_reporting(&self, control: &kvm_tpr_access_ctl) -> Result<()> {
        let _call = self.vm.begin()?;
        match control.flags {
            0 => Ok(()),
            _ => fail(libc::EINVAL),
        }
    }
}
