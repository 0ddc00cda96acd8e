//! The capabilities of a VM, and the effect of enabling each.

use crate::arch::options::NOTIFY_FLAGS;
use crate::arch::quirks;
use crate::errno::{Error, Result, fail};
use crate::irq::vcpus::MAX_VCPU_ID;
use crate::vm::VmObject;
use crate::{caps, guest_memfd, parameters};
use kvm_bindings::*;
use slat_irqchip::lapic::MAX_DIVISOR;
use std::sync::atomic::Ordering;

impl VmObject {
    /// `KVM_CHECK_EXTENSION`.
    pub fn check_extension(&self, cap: u64) -> i32 {
        match u32::try_from(cap) {
            Ok(caps::KVM_CAP_GUEST_MEMFD_FLAGS) => guest_memfd::flags(self.protected) as i32,
            Ok(KVM_CAP_MULTI_ADDRESS_SPACE) => self.address_spaces() as i32,
            Ok(KVM_CAP_MEMORY_ATTRIBUTES) => self.known_attributes() as i32,
            // As in KVM, the result is only the lower 32 bits of the VM's value.
            Ok(KVM_CAP_X86_APIC_BUS_CYCLES_NS) => self.options.apic_bus_cycle_ns() as i32,
            _ => caps::check(cap, self.engine.mmu()),
        }
    }

    /// `KVM_ENABLE_CAP` on the VM.
    ///
    /// # Errors
    /// `EINVAL` for capabilities that cannot be enabled, and for bad arguments.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        let _call = self.begin()?;
        if cap.flags != 0 {
            return fail(libc::EINVAL);
        }
        if let Some(result) = self.options.enable(cap.cap, cap.args[0]) {
            return result;
        }
        match cap.cap {
            KVM_CAP_X86_DISABLE_EXITS => {
                self.before_vcpus(|| self.options.disable_exits(cap.args[0]))
            }
            // The older capability ignores unknown quirks.
            KVM_CAP_DISABLE_QUIRKS => self
                .quirks
                .disable(cap.args[0] & u64::from(quirks::SUPPORTED)),
            KVM_CAP_DISABLE_QUIRKS2 => self.quirks.disable(cap.args[0]),
            KVM_CAP_MAX_VCPU_ID => self.limit_vcpu_ids(cap.args[0]),
            KVM_CAP_VM_DISABLE_NX_HUGE_PAGES if cap.args[0] == 0 => {
                self.before_vcpus(|| parameters::disable_nx(&self.engine))
            }
            KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 => self.set_manual_dirty_log(cap.args[0]),
            KVM_CAP_DIRTY_LOG_RING | KVM_CAP_DIRTY_LOG_RING_ACQ_REL => {
                self.enable_dirty_rings(cap.args[0])
            }
            KVM_CAP_SPLIT_IRQCHIP => self.interrupts.create_split(cap.args[0]),
            KVM_CAP_X86_NOTIFY_VMEXIT => self.set_notify_vmexit(cap.args[0]),
            KVM_CAP_X86_APIC_BUS_CYCLES_NS => self.set_apic_bus_cycle(cap.args[0]),
            KVM_CAP_X2APIC_API => self.interrupts.enable_x2apic_api(cap.args[0]),
            _ => fail(libc::EINVAL),
        }
    }

    /// Carries out `KVM_CAP_X86_NOTIFY_VMEXIT`. The call is allowed only before there are vCPUs.
    fn set_notify_vmexit(&self, asked: u64) -> Result<()> {
        let flags = asked as u32;
        if flags & !NOTIFY_FLAGS != 0 || flags & KVM_X86_NOTIFY_VMEXIT_ENABLED == 0 {
            return fail(libc::EINVAL);
        }
        self.before_vcpus(|| {
            self.options.set_notify_vmexit(asked);
            Ok(())
        })
    }

    /// Carries out `KVM_CAP_X86_APIC_BUS_CYCLES_NS`. The call is allowed only after there are local APICs and before
    /// there are vCPUs. The longest count of a timer has to fit 64 bits of nanoseconds.
    fn set_apic_bus_cycle(&self, nanoseconds: u64) -> Result<()> {
        let longest = (u64::from(u32::MAX) * MAX_DIVISOR).checked_mul(nanoseconds);
        if nanoseconds == 0 || longest.is_none() {
            return fail(libc::EINVAL);
        }
        if !self.has_irqchip() {
            return fail(libc::ENXIO);
        }
        self.before_vcpus(|| {
            self.options.set_apic_bus_cycle_ns(nanoseconds);
            Ok(())
        })
    }

    /// Carries out `KVM_CAP_MAX_VCPU_ID`: sets the limit once. The limit must not be below the bootstrap processor's
    /// id. As in KVM, 0 means that no limit is set, and then the first vCPU sets the largest limit.
    fn limit_vcpu_ids(&self, limit: u64) -> Result<()> {
        let limit = u32::try_from(limit).map_err(|_| Error::new(libc::EINVAL))?;
        let _no_new_vcpu = self.vcpus_mut();
        let now = self.max_vcpu_ids.load(Ordering::Relaxed);
        if limit > MAX_VCPU_ID
            || limit < self.boot_cpu.load(Ordering::Relaxed)
            || now != limit && now != 0
        {
            return fail(libc::EINVAL);
        }
        self.max_vcpu_ids.store(limit, Ordering::Relaxed);
        Ok(())
    }
}
