//! How interrupts reach vCPUs: not at all without an interrupt controller.

use crate::arch::aarch64::devices::{Device, VmTimer};
use crate::arch::aarch64::state::{LINE_FIQ, LINE_IRQ};
use crate::arch::aarch64::target::Target;
use crate::errno::{Result, fail};
use crate::irq::Interrupts;
use crate::routing::Routes;
use crate::ticker::VmTimers;
use kvm_bindings::*;
use std::sync::atomic::Ordering;

impl Interrupts {
    /// Whether the VM has an interrupt controller.
    pub(crate) fn exist(&self) -> bool {
        false
    }

    /// Sets a line that belongs to no GSI: an interrupt line of a vCPU's processor. Returns the status of
    /// `KVM_IRQ_LINE_STATUS`.
    ///
    /// # Errors
    /// `ENXIO` for a line of an interrupt controller. `EINVAL` for a vCPU that does not exist, and for an unknown type
    /// or number (api.rst 4.25).
    pub(crate) fn set_own_line(&self, line: u32, level: bool) -> Result<Option<i32>> {
        let field = |shift: u32, mask: u32| line >> shift & mask;
        match field(KVM_ARM_IRQ_TYPE_SHIFT, KVM_ARM_IRQ_TYPE_MASK) {
            KVM_ARM_IRQ_TYPE_CPU => {}
            KVM_ARM_IRQ_TYPE_PPI | KVM_ARM_IRQ_TYPE_SPI => return fail(libc::ENXIO),
            _ => return fail(libc::EINVAL),
        }
        // The upper part of the index is the number of groups of 256 vCPUs.
        let vcpu = field(KVM_ARM_IRQ_VCPU2_SHIFT, KVM_ARM_IRQ_VCPU2_MASK) << 8
            | field(KVM_ARM_IRQ_VCPU_SHIFT, KVM_ARM_IRQ_VCPU_MASK);
        let bit = match field(KVM_ARM_IRQ_NUM_SHIFT, KVM_ARM_IRQ_NUM_MASK) {
            KVM_ARM_IRQ_CPU_IRQ => LINE_IRQ,
            KVM_ARM_IRQ_CPU_FIQ => LINE_FIQ,
            _ => return fail(libc::EINVAL),
        };
        let vcpus = self.vcpus.read();
        let Ok(place) = vcpus.place(vcpu) else {
            return fail(libc::EINVAL);
        };
        let lines = &vcpus[place].arch.lines;
        let before = match level {
            true => lines.fetch_or(bit, Ordering::SeqCst),
            false => lines.fetch_and(!bit, Ordering::SeqCst),
        };
        // The processor has to look at its lines also when a line falls, because it must not take the interrupt then.
        if (before & bit != 0) != level {
            vcpus[place].notice();
        }
        Ok(Some(0))
    }

    /// Checks that irqfds can be added.
    ///
    /// # Errors
    /// `EAGAIN`, as long as the VM has no interrupt controller.
    pub(crate) fn check_irqfd(&self) -> Result<()> {
        fail(libc::EAGAIN)
    }

    /// Whether the controllers tell when the guest ends an interrupt.
    pub(crate) fn can_resample(&self) -> bool {
        false
    }

    /// Returns the target that an entry of a client's table names.
    ///
    /// # Errors
    /// `EINVAL`.
    pub(crate) fn target(&self, _: &kvm_irq_routing_entry) -> Result<Target> {
        fail(libc::EINVAL)
    }

    /// Sets the level that `source` gives a target.
    pub(crate) fn set_target(&self, target: Target, _source: u8, _level: bool) -> i32 {
        match target {}
    }

    /// Raises and lowers the line of a target.
    pub(crate) fn pulse_target(&self, target: Target, _source: u8) {
        match target {}
    }

    /// Call after a change of the routes. No controller depends on them.
    pub(crate) fn routes_changed(&self, _: &Routes) {}

    /// Carries out `KVM_SIGNAL_MSI`.
    ///
    /// # Errors
    /// `EINVAL`.
    pub(crate) fn signal_msi(&self, _: &kvm_msi) -> Result<i32> {
        fail(libc::EINVAL)
    }

    /// Carries out the guest's reads of a device.
    pub(crate) fn read(
        &self,
        device: Device,
        _address: u64,
        _units: &mut dyn Iterator<Item = &mut [u8]>,
    ) -> bool {
        match device {}
    }

    /// Carries out the guest's writes to a device.
    pub(crate) fn write(
        &self,
        device: Device,
        _address: u64,
        _units: &mut dyn Iterator<Item = &[u8]>,
    ) -> bool {
        match device {}
    }
}

impl VmTimers for Interrupts {
    fn expired(&self, timer: VmTimer) {
        match timer {}
    }
}
