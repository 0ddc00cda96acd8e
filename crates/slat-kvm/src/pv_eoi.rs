//! PV EOI (`KVM_FEATURE_PV_EOI`): a guest ends an interrupt by clearing a bit in its own memory, without a way out to the APIC.
//!
//! slat sets the bit when it delivers an interrupt whose end nobody waits for. A guest that finds it set, and clears it, is done;
//! before slat looks at the APIC again it sees to the end of the interrupt, or takes the offer back.

use crate::machine::VcpuMachine;
use crate::msr::{KVM_ENABLED, index};
use slat_irqchip::lapic::reg;
use slat_x86::MsrFault;

/// The address has to be a multiple of 4.
const RESERVED: u64 = 2;
/// The bit in the guest's memory: the interrupt needs no write of the APIC's EOI register.
const OFFERED: u8 = 1;

impl VcpuMachine {
    /// Writes the MSR. What the guest has done at the old address counts.
    pub(crate) fn set_pv_eoi(&mut self, value: u64) -> Result<(), MsrFault> {
        if value & RESERVED != 0 {
            return Err(MsrFault::Invalid);
        }
        self.collect_pv_eoi();
        self.pv_eoi_offered = false;
        self.store(index::KVM_PV_EOI, value);
        Ok(())
    }

    /// Call after the vCPU, which is entered, has accepted an interrupt of its APIC.
    pub(crate) fn offer_pv_eoi(&mut self) {
        let value = self.msr(index::KVM_PV_EOI);
        // What became of an earlier offer may not be known yet.
        if value & KVM_ENABLED == 0 || self.pv_eoi_offered {
            return;
        }
        let silent = (self.common.lapic()).is_some_and(|lapic| lapic.may_end_silently());
        self.pv_eoi_offered = silent && self.write_guest(value & !KVM_ENABLED, &[OFFERED]);
    }

    /// Call before looking at the APIC of the vCPU, which is entered: ends the interrupt if the guest has, and otherwise takes the
    /// offer back. Both wait for the next call if the thread is wanted elsewhere and cannot wait for the guest's memory. Where that
    /// cannot be read, the interrupt ends, as in KVM.
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
        let now = self.vm.clock.now();
        let effect = (self.common.lapic()).map(|mut lapic| lapic.write(reg::EOI, 0, now));
        if let Some(effect) = effect {
            self.carry_out(effect);
        }
    }
}
