//! Asynchronous page faults (`KVM_FEATURE_ASYNC_PF`; KVM's document "msr"): their three MSRs, and
//! the event "page ready".
//!
//! KVM may handle any fault synchronously, and slat handles all faults synchronously: the vCPU waits for the page, and
//! the guest never gets the event "page not present". The only event that slat delivers is "all pages are ready", after
//! a guest has enabled asynchronous page faults. If the guest was migrated from another host, some of its tasks may
//! still wait for pages. The event lets these tasks continue.
//!
//! Events need a local APIC that slat emulates. Without such a local APIC, KVM refuses accesses to the MSRs although
//! its CPUID has the feature, so guests print warnings. In slat these MSRs then hold the written values, and no event
//! is delivered.

use crate::arch::x86_64::cpuid::{KVM_FEATURE_ASYNC_PF_INT, KVM_FEATURE_ASYNC_PF_VMEXIT};
use crate::arch::x86_64::machine::VcpuMachine;
use crate::arch::x86_64::msr::index;
use crate::thread::bits;
use slat_x86::MsrFault;

/// The bit of `MSR_KVM_ASYNC_PF_EN`: asynchronous page faults are enabled.
const ENABLED: u64 = 1;
/// The bit of `MSR_KVM_ASYNC_PF_EN`: the event "page ready" is an interrupt. Without this bit there are no events.
const READY_BY_INTERRUPT: u64 = 1 << 3;
/// The bit of `MSR_KVM_ASYNC_PF_EN`: "page not present" exits to a nested hypervisor.
const AS_VMEXIT: u64 = 1 << 2;
/// Reserved bits of `MSR_KVM_ASYNC_PF_EN`.
const RESERVED: u64 = 3 << 4;
/// The bits of `MSR_KVM_ASYNC_PF_EN` that hold the address of the guest's structure.
const ADDRESS: u64 = !0x3f;
/// The offset of the field `token` in the guest's structure (`struct kvm_vcpu_pv_apf_data`). The field is 0 while the
/// guest can accept an event.
const TOKEN: u64 = 4;
/// The token of the event "all pages are ready".
const ALL_PAGES: u32 = u32::MAX;

impl VcpuMachine {
    /// Returns the address of the guest's structure, if the guest accepts events.
    fn async_pf_address(&self) -> Option<u64> {
        let value = self.msr(index::KVM_ASYNC_PF_EN);
        let both = ENABLED | READY_BY_INTERRUPT;
        (value & both == both).then_some(value & ADDRESS)
    }

    /// Writes `MSR_KVM_ASYNC_PF_EN`. For the guest (`by_guest`), refuses an address without memory; then call inside
    /// the engine's reader section.
    pub(crate) fn set_async_pf(&mut self, value: u64, by_guest: bool) -> Result<(), MsrFault> {
        let without =
            |machine: &Self, bit, feature| value & bit != 0 && !machine.has_pv_feature(feature);
        if value & RESERVED != 0
            || without(self, AS_VMEXIT, KVM_FEATURE_ASYNC_PF_VMEXIT)
            || without(self, READY_BY_INTERRUPT, KVM_FEATURE_ASYNC_PF_INT)
        {
            return Err(MsrFault::Invalid);
        }
        let before = self.msr(index::KVM_ASYNC_PF_EN);
        self.store(index::KVM_ASYNC_PF_EN, value);
        let address = self.async_pf_address();
        if by_guest && address.is_some_and(|at| self.read_guest_word(at).is_none()) {
            self.store(index::KVM_ASYNC_PF_EN, before);
            return Err(MsrFault::Invalid);
        }
        self.pages_are_ready = address.is_some() && self.common.has_lapic();
        if self.pages_are_ready {
            // RETRY makes the run loop deliver the event.
            self.common.attention.raise(bits::RETRY);
        }
        Ok(())
    }

    /// Writes `MSR_KVM_ASYNC_PF_INT`: the vector of the event "page ready".
    pub(crate) fn set_async_pf_vector(&mut self, value: u64) -> Result<(), MsrFault> {
        if value >> 8 != 0 {
            return Err(MsrFault::Invalid);
        }
        self.store(index::KVM_ASYNC_PF_INT, value);
        Ok(())
    }

    /// Writes `MSR_KVM_ASYNC_PF_ACK`: if bit 0 is set, the guest can accept the next event.
    pub(crate) fn acknowledge_async_pf(&mut self, value: u64) {
        if value & 1 != 0 && self.pages_are_ready {
            self.common.attention.raise(bits::RETRY);
        }
    }

    /// Delivers the event "all pages are ready", if it is due and the guest can accept it. The guest can accept it if
    /// its local APIC is enabled and its structure holds no token. Call inside the engine's reader section.
    pub(crate) fn deliver_page_ready(&mut self) {
        let Some(address) = self.async_pf_address().filter(|_| self.pages_are_ready) else {
            return;
        };
        let can_take = |machine: &mut Self| {
            let enabled = (machine.common.lapic()).is_some_and(|lapic| lapic.software_enabled());
            let word = enabled.then(|| machine.read_guest_word(address)).flatten();
            word.is_some_and(|word| word >> (8 * TOKEN) == 0)
        };
        if can_take(self) && self.write_guest(address + TOKEN, &ALL_PAGES.to_le_bytes()) {
            self.pages_are_ready = false;
            let vector = self.msr(index::KVM_ASYNC_PF_INT) as u8;
            if let Some(mut lapic) = self.common.lapic() {
                lapic.request(vector, false);
            }
            self.look_for_interrupts();
        }
    }
}
