//! A VM's calls for interrupt controllers, lines, messages and irqfds.

use crate::errno::{Result, fail};
use crate::irq::Interrupts;
use crate::irq::chips::USERSPACE;
use crate::irq::irqfd::Lines;
use crate::irq::routing::{MAX_ROUTES, Routes};
use crate::vm::VmObject;
use kvm_bindings::*;
use std::sync::{Arc, Weak};

impl VmObject {
    /// `KVM_CREATE_IRQCHIP`: creates an I/O APIC and the 8259 pair. After that every new vCPU has a local APIC.
    ///
    /// # Errors
    /// `EEXIST` when there are controllers already, `EINVAL` when there are vCPUs already, `ENOMEM`.
    pub fn create_irqchip(&self) -> Result<()> {
        let _call = self.begin()?;
        (self.bus).add_pc(&self.engine, || self.interrupts.create_pc())
    }

    /// Whether vCPUs have a local APIC.
    pub fn has_irqchip(&self) -> bool {
        self.interrupts.exist()
    }

    /// `KVM_GET_IRQCHIP`: fills in the state of the chip that `chip` names.
    ///
    /// # Errors
    /// `ENXIO` without these controllers, `EINVAL` for a chip that does not exist.
    pub fn get_irqchip(&self, chip: &mut kvm_irqchip) -> Result<()> {
        let _call = self.begin()?;
        self.interrupts.save_chip(chip)
    }

    /// `KVM_SET_IRQCHIP`.
    ///
    /// # Errors
    /// The errors are those of [`get_irqchip`](Self::get_irqchip).
    pub fn set_irqchip(&self, chip: &kvm_irqchip) -> Result<()> {
        let _call = self.begin()?;
        self.interrupts.restore_chip(chip)
    }

    /// `KVM_CREATE_PIT2`, and `KVM_CREATE_PIT` without flags: creates the 8254.
    ///
    /// # Errors
    /// `EEXIST` when there is one already, `ENOENT` without an 8259 pair, `ENOMEM`.
    pub fn create_pit(&self, config: &kvm_pit_config) -> Result<()> {
        let _call = self.begin()?;
        let speaker = config.flags & KVM_PIT_SPEAKER_DUMMY != 0;
        let create = || self.interrupts.create_timer(speaker);
        self.bus.add_timer(&self.engine, speaker, create)
    }

    /// `KVM_GET_PIT2`.
    ///
    /// # Errors
    /// `ENXIO` without 8254.
    pub fn get_pit2(&self) -> Result<kvm_pit_state2> {
        let _call = self.begin()?;
        self.interrupts.save_timer()
    }

    /// `KVM_SET_PIT2`: restarts all counts.
    ///
    /// # Errors
    /// `ENXIO` without 8254.
    pub fn set_pit2(&self, state: &kvm_pit_state2) -> Result<()> {
        let _call = self.begin()?;
        self.interrupts.restore_timer(state)
    }

    /// `KVM_REINJECT_CONTROL`: sets whether ticks that a slow guest missed are injected later.
    ///
    /// # Errors
    /// `ENXIO` without 8254.
    pub fn reinject_control(&self, control: &kvm_reinject_control) -> Result<()> {
        let _call = self.begin()?;
        self.interrupts.set_reinject(control.pit_reinject != 0)
    }

    /// `KVM_IRQ_LINE_STATUS`, and `KVM_IRQ_LINE` without the result. Returns the number of vCPUs that accepted the
    /// interrupt, 0 if the interrupt was coalesced with a pending one, -1 if it was ignored (masked).
    ///
    /// # Errors
    /// `ENXIO` without interrupt controllers.
    pub fn irq_line(&self, gsi: u32, level: bool) -> Result<i32> {
        let _call = self.begin()?;
        if !self.has_irqchip() {
            return fail(libc::ENXIO);
        }
        Ok(self.interrupts.set_line(gsi, USERSPACE, level))
    }

    /// `KVM_SIGNAL_MSI`. Returns the number of vCPUs that accepted the interrupt, including those for which it was
    /// already pending.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller, for flags (a device's id, which other architectures use, has no effect),
    /// and for bits of the address that must be 0.
    pub fn signal_msi(&self, msi: &kvm_msi) -> Result<i32> {
        let _call = self.begin()?;
        if !self.has_irqchip()
            || msi.flags & !KVM_MSI_VALID_DEVID != 0
            || self.interrupts.has_wide_ids() && msi.address_hi & 0xff != 0
        {
            return fail(libc::EINVAL);
        }
        let address = u64::from(msi.address_hi) << 32 | u64::from(msi.address_lo);
        let message = self.interrupts.message(address, msi.data);
        Ok(self.interrupts.vcpus.send(None, &message).taken as i32)
    }

    /// `KVM_SET_GSI_ROUTING`: replaces all routes. When it returns, no interrupt is delivered by an old route any more.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controllers, for flags, for more than 4096 routes, and for invalid routes; `ENOMEM`.
    pub fn set_gsi_routing(&self, flags: u32, entries: &[kvm_irq_routing_entry]) -> Result<()> {
        let _call = self.begin()?;
        if !self.has_irqchip() || flags != 0 || entries.len() > MAX_ROUTES as usize {
            return fail(libc::EINVAL);
        }
        let has_chips = self.interrupts.chips().is_some();
        let routes = Routes::from_client(entries, has_chips, self.interrupts.has_wide_ids())?;
        self.interrupts.replace_routes(routes);
        Ok(())
    }

    /// `KVM_IRQFD`.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controllers, for unknown flags, a descriptor that is no eventfd, and resampling
    /// without an I/O APIC; `EBADF`; `EBUSY` when the eventfd is an irqfd of this VM already; `ENOMEM`, `EMFILE`.
    pub fn irqfd(&self, asked: &kvm_irqfd) -> Result<()> {
        let _call = self.begin()?;
        if asked.flags & !(KVM_IRQFD_FLAG_DEASSIGN | KVM_IRQFD_FLAG_RESAMPLE) != 0 {
            return fail(libc::EINVAL);
        }
        let interrupts = &self.interrupts;
        if asked.flags & KVM_IRQFD_FLAG_DEASSIGN != 0 {
            return interrupts.irqfds.remove(&**interrupts, asked);
        }
        let resampled = asked.flags & KVM_IRQFD_FLAG_RESAMPLE != 0;
        if !self.has_irqchip() || resampled && interrupts.chips().is_none() {
            return fail(libc::EINVAL);
        }
        let lines: Weak<dyn Lines> = Arc::<Interrupts>::downgrade(interrupts);
        interrupts.irqfds.add(lines, asked)
    }
}
