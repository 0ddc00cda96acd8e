//! A VM's calls for the interrupt controllers and the timer of a PC.

use crate::arch::x86_64::devices;
use crate::errno::Result;
use crate::io_devices::Device;
use crate::vm::VmObject;
use kvm_bindings::*;

impl VmObject {
    /// Carries out `KVM_CREATE_IRQCHIP`: creates an I/O APIC and the 8259 pair. After that every new vCPU has a local
    /// APIC.
    ///
    /// # Errors
    /// `EEXIST` when there are controllers already, `EINVAL` when there are vCPUs already, `ENOMEM`.
    pub fn create_irqchip(&self) -> Result<()> {
        let _call = self.begin()?;
        let devices = devices::PC.map(|(range, device)| (range, Device::OfArch(device)));
        let create = || self.interrupts.create_pc();
        self.bus.add(&self.engine, |_| Ok(devices), create)
    }

    /// Carries out `KVM_GET_IRQCHIP`: fills in the state of the chip that `chip` names.
    ///
    /// # Errors
    /// `ENXIO` without these controllers, `EINVAL` for a chip that does not exist.
    pub fn get_irqchip(&self, chip: &mut kvm_irqchip) -> Result<()> {
        let _call = self.begin()?;
        self.interrupts.save_chip(chip)
    }

    /// Carries out `KVM_SET_IRQCHIP`.
    ///
    /// # Errors
    /// `ENXIO` without these controllers, `EINVAL` for a chip that does not exist.
    pub fn set_irqchip(&self, chip: &kvm_irqchip) -> Result<()> {
        let _call = self.begin()?;
        self.interrupts.restore_chip(chip)
    }

    /// Carries out `KVM_CREATE_PIT2`, and `KVM_CREATE_PIT` without flags: creates the 8254.
    ///
    /// # Errors
    /// `EEXIST` when there is an 8254 already, `ENOENT` without an 8259 pair, `ENOMEM`.
    pub fn create_pit(&self, config: &kvm_pit_config) -> Result<()> {
        let _call = self.begin()?;
        let speaker = config.flags & KVM_PIT_SPEAKER_DUMMY != 0;
        let create = || self.interrupts.create_timer(speaker);
        let [timer, port] = [devices::TIMER, devices::TIMERS_PORT]
            .map(|(range, device)| (range, Device::OfArch(device)));
        match speaker {
            true => self.bus.add(&self.engine, |_| Ok([timer, port]), create),
            false => self.bus.add(&self.engine, |_| Ok([timer]), create),
        }
    }

    /// Carries out `KVM_GET_PIT2`.
    ///
    /// # Errors
    /// `ENXIO` without 8254.
    pub fn get_pit2(&self) -> Result<kvm_pit_state2> {
        let _call = self.begin()?;
        self.interrupts.save_timer()
    }

    /// Carries out `KVM_SET_PIT2`: restarts all counts.
    ///
    /// # Errors
    /// `ENXIO` without 8254.
    pub fn set_pit2(&self, state: &kvm_pit_state2) -> Result<()> {
        let _call = self.begin()?;
        self.interrupts.restore_timer(state)
    }

    /// Carries out `KVM_REINJECT_CONTROL`: sets whether ticks of the 8254 that a slow guest has missed are injected
    /// later.
    ///
    /// # Errors
    /// `ENXIO` without 8254.
    pub fn reinject_control(&self, control: &kvm_reinject_control) -> Result<()> {
        let _call = self.begin()?;
        self.interrupts.set_reinject(control.pit_reinject != 0)
    }
}
