//! The capabilities of a VM that only x86 has, and the calls that enable them.

use crate::arch::x86_64::limits::MAX_VCPU_ID;
use crate::arch::x86_64::options::NOTIFY_FLAGS;
use crate::arch::x86_64::{parameters, quirks};
use crate::errno::{Error, Result, fail};
use crate::vm::VmObject;
use kvm_bindings::*;
use slat_irqchip::lapic::MAX_DIVISOR;
use std::sync::atomic::Ordering;

impl VmObject {
    /// Enables a capability that not every architecture has.
    ///
    /// # Errors
    /// `EINVAL` for capabilities that cannot be enabled, and for bad arguments.
    pub(crate) fn enable_arch_cap(&self, cap: u32, argument: u64) -> Result<()> {
        if let Some(result) = self.arch.options.enable(cap, argument) {
            return result;
        }
        match cap {
            KVM_CAP_VM_DISABLE_NX_HUGE_PAGES if argument == 0 => {
                self.before_vcpus(|| parameters::disable_nx(&self.engine))
            }
            KVM_CAP_X86_DISABLE_EXITS => {
                self.before_vcpus(|| self.arch.options.disable_exits(argument))
            }
            // KVM_CAP_DISABLE_QUIRKS, unlike KVM_CAP_DISABLE_QUIRKS2, ignores unknown quirks.
            KVM_CAP_DISABLE_QUIRKS => self
                .arch
                .quirks
                .disable(argument & u64::from(quirks::SUPPORTED)),
            KVM_CAP_DISABLE_QUIRKS2 => self.arch.quirks.disable(argument),
            KVM_CAP_MAX_VCPU_ID => self.limit_vcpu_ids(argument),
            KVM_CAP_SPLIT_IRQCHIP => self.interrupts.create_split(argument),
            KVM_CAP_X86_NOTIFY_VMEXIT => self.set_notify_vmexit(argument),
            KVM_CAP_X86_APIC_BUS_CYCLES_NS => self.set_apic_bus_cycle(argument),
            KVM_CAP_X2APIC_API => self.interrupts.enable_x2apic_api(argument),
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
            self.arch.options.set_notify_vmexit(asked);
            Ok(())
        })
    }

    /// Carries out `KVM_CAP_X86_APIC_BUS_CYCLES_NS`. The call is allowed only after interrupt controllers and before
    /// vCPUs are created. The cycle must be short enough that a timer's longest count, in nanoseconds, fits into 64
    /// bits.
    fn set_apic_bus_cycle(&self, nanoseconds: u64) -> Result<()> {
        let longest = (u64::from(u32::MAX) * MAX_DIVISOR).checked_mul(nanoseconds);
        if nanoseconds == 0 || longest.is_none() {
            return fail(libc::EINVAL);
        }
        if !self.has_irqchip() {
            return fail(libc::ENXIO);
        }
        self.before_vcpus(|| {
            self.arch.options.set_apic_bus_cycle_ns(nanoseconds);
            Ok(())
        })
    }

    /// Carries out `KVM_CAP_MAX_VCPU_ID`: sets the limit once. The limit must not be below the bootstrap processor's
    /// id. As in KVM, 0 means that no limit is set. Creating the first vCPU without a limit sets the largest limit.
    fn limit_vcpu_ids(&self, limit: u64) -> Result<()> {
        let limit = u32::try_from(limit).map_err(|_| Error::new(libc::EINVAL))?;
        let _no_new_vcpu = self.vcpus_mut();
        let now = self.arch.max_vcpu_ids.load(Ordering::Relaxed);
        if limit > MAX_VCPU_ID
            || limit < self.arch.boot_cpu.load(Ordering::Relaxed)
            || now != limit && now != 0
        {
            return fail(libc::EINVAL);
        }
        self.arch.max_vcpu_ids.store(limit, Ordering::Relaxed);
        Ok(())
    }
}
