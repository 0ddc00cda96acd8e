//! PV EOI (`KVM_FEATURE_PV_EOI`): a guest ends an interrupt by clearing a bit in its own memory, without an access to
//! the APIC.
//!
//! slat offers a PV EOI by setting the bit when it delivers an interrupt whose end need not be reported to the I/O
//! APIC. A guest that finds the bit set clears it, and need not write the EOI register. Before slat uses the APIC
//! again, it reads the bit. If the guest has cleared the bit, slat ends the interrupt; otherwise slat withdraws the
//! offer.

use crate::arch::x86_64::machine::VcpuMachine;
use crate::arch::x86_64::msr::{KVM_ENABLED, index};
use slat_irqchip::lapic::reg;
use slat_x86::MsrFault;

/// The bit of `MSR_KVM_PV_EOI` that has to be 0, because the address in this MSR is a multiple of 4.
const RESERVED: u64 = 2;
/// The bit in the guest's memory that offers a PV EOI: the guest need not write the APIC's EOI register.
const OFFERED: u8 = 1;

impl VcpuMachine {
    /// Writes `MSR_KVM_PV_EOI`. If the guest has ended an interrupt at the old address, ends this interrupt first.
    pub(crate) fn set_pv_eoi(&mut self, value: u64) -> Result<(), MsrFault> {
        if value & RESERVED != 0 {
            return Err(MsrFault::Invalid);
        }
        self.collect_pv_eoi();
        self.pv_eoi_offered = false;
        self.store(index::KVM_PV_EOI, value);
        Ok(())
    }

    /// Offers a PV EOI. Call after the vCPU has accepted an interrupt of its APIC, inside the engine's reader section.
    pub(crate) fn offer_pv_eoi(&mut self) {
        let value = self.msr(index::KVM_PV_EOI);
        // An earlier offer may still be open. Its result is collected later.
        if value & KVM_ENABLED == 0 || self.pv_eoi_offered {
            return;
        }
        let silent = (self.common.lapic()).is_some_and(|lapic| lapic.may_end_silently());
        self.pv_eoi_offered = silent && self.write_guest(value & !KVM_ENABLED, &[OFFERED]);
    }

    /// Ends the interrupt if the guest has cleared the bit, and otherwise withdraws the offer. If a signal or a full
    /// dirty ring interrupts the access to guest memory, the next call does this work. If the memory cannot be read,
    /// ends the interrupt, as KVM does. Call before using the vCPU's APIC, inside the engine's reader section.
    pub(crate) fn collect_pv_eoi(&mut self) {
        if !self.pv_eoi_offered {
            return;
        }
        let address = self.msr(index::KVM_PV_EOI) & !KVM_ENABLED;
        let word = self.read_guest_word(address & !7);
        let is_offered =
            word.is_some_and(|word| (word >> (8 * (address % 8))) as u8 & OFFERED != 0);
        let is_done = match word {
            Some(_) if is_offered => self.write_guest(address, &[0]),
            word => word.is_some(),
        };
        if !is_done && self.is_called_out() {
            return;
        }
        self.pv_eoi_offered = false;
        if is_offered {
            return;
        }
        let now = self.vm.arch.clock.now();
        let effect = (self.common.lapic()).map(|mut lapic| lapic.write(reg::EOI, 0, now));
        if let Some(effect) = effect {
            self.carry_out(effect);
        }
    }
}
