//! Calls of a [`VmFd`] for interrupt controllers and the 8254 timer.

use crate::api::VmFd;
use crate::errno::Result;
use kvm_bindings::*;

impl VmFd {
    /// Carries out `KVM_CREATE_IRQCHIP`: creates an I/O APIC and an 8259 pair, and gives every vCPU created from now on
    /// a local APIC.
    ///
    /// # Errors
    /// `EEXIST` when there are controllers already, `EINVAL` when there are vCPUs already.
    pub fn create_irq_chip(&self) -> Result<()> {
        self.vm.create_irqchip()
    }

    /// Carries out `KVM_GET_IRQCHIP`: fills in the state of the chip that `irqchip.chip_id` names.
    ///
    /// # Errors
    /// `ENXIO` without these controllers, `EINVAL` for a chip that does not exist.
    pub fn get_irqchip(&self, irqchip: &mut kvm_irqchip) -> Result<()> {
        self.vm.get_irqchip(irqchip)
    }

    /// Carries out `KVM_SET_IRQCHIP`.
    ///
    /// # Errors
    /// `ENXIO` without these controllers, `EINVAL` for a chip that does not exist.
    pub fn set_irqchip(&self, irqchip: &kvm_irqchip) -> Result<()> {
        self.vm.set_irqchip(irqchip)
    }

    /// Carries out `KVM_CREATE_PIT2`: creates an 8254.
    ///
    /// # Errors
    /// `EEXIST` when there is an 8254 already, `ENOENT` without an 8259 pair.
    pub fn create_pit2(&self, pit_config: kvm_pit_config) -> Result<()> {
        self.vm.create_pit(&pit_config)
    }

    /// Carries out `KVM_GET_PIT2`.
    ///
    /// # Errors
    /// `ENXIO` without 8254.
    pub fn get_pit2(&self) -> Result<kvm_pit_state2> {
        self.vm.get_pit2()
    }

    /// Carries out `KVM_SET_PIT2`.
    ///
    /// # Errors
    /// `ENXIO` without 8254.
    pub fn set_pit2(&self, pitstate: &kvm_pit_state2) -> Result<()> {
        self.vm.set_pit2(pitstate)
    }
}
