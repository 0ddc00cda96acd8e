//! How interrupts reach vCPUs: not at all without an interrupt controller.

use crate::arch::aarch64::devices::{Device, VmTimer};
use crate::arch::aarch64::target::Target;
use crate::errno::{Result, fail};
use crate::irq::Interrupts;
use crate::routing::Routes;
use crate::ticker::VmTimers;
use kvm_bindings::*;

impl Interrupts {
    /// Whether the VM has an interrupt controller.
    pub(crate) fn exist(&self) -> bool {
        false
    }

    /// Checks that the client may change the level of a line.
    ///
    /// # Errors
    /// `ENXIO` for a line of an interrupt controller. `EINVAL` for a line of a vCPU, which does not exist, and for an
    /// unknown type.
    pub(crate) fn check_line(&self, line: u32) -> Result<()> {
        match line >> KVM_ARM_IRQ_TYPE_SHIFT & KVM_ARM_IRQ_TYPE_MASK {
            KVM_ARM_IRQ_TYPE_PPI | KVM_ARM_IRQ_TYPE_SPI => fail(libc::ENXIO),
            _ => fail(libc::EINVAL),
        }
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
