//! A VM's calls for lines, messages, routes and irqfds.

use crate::errno::{Result, fail};
use crate::irq::Interrupts;
use crate::irqfd::{Lines, USERSPACE};
use crate::routing::{MAX_ROUTES, Routes};
use crate::vm::VmObject;
use kvm_bindings::*;
use std::sync::{Arc, Weak};

impl VmObject {
    /// Whether the VM has interrupt controllers.
    pub fn has_irqchip(&self) -> bool {
        self.interrupts.exist()
    }

    /// Carries out `KVM_IRQ_LINE_STATUS`, and `KVM_IRQ_LINE` without the result. Returns the number of vCPUs that
    /// accepted the interrupt, 0 if the interrupt was coalesced with a pending interrupt, -1 if the interrupt was
    /// ignored (masked).
    ///
    /// # Errors
    /// The architecture's error without interrupt controllers: `ENXIO` on x86.
    pub fn irq_line(&self, gsi: u32, level: bool) -> Result<i32> {
        let _call = self.begin()?;
        match self.interrupts.set_own_line(gsi, level)? {
            Some(status) => Ok(status),
            None => Ok(self.interrupts.set_line(gsi, USERSPACE, level)),
        }
    }

    /// Carries out `KVM_SIGNAL_MSI`. Returns the number of vCPUs that accepted the interrupt, including those for which
    /// it was already pending.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller, for flags (a device's id, which other architectures use, has no effect),
    /// and for bits of the address that must be 0.
    pub fn signal_msi(&self, msi: &kvm_msi) -> Result<i32> {
        let _call = self.begin()?;
        if !self.has_irqchip() || msi.flags & !KVM_MSI_VALID_DEVID != 0 {
            return fail(libc::EINVAL);
        }
        self.interrupts.signal_msi(msi)
    }

    /// Carries out `KVM_SET_GSI_ROUTING`: replaces all routes. When it returns, no interrupt is delivered by an old
    /// route any more.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controllers, for flags, for more than 4096 routes, and for invalid routes; `ENOMEM`.
    pub fn set_gsi_routing(&self, flags: u32, entries: &[kvm_irq_routing_entry]) -> Result<()> {
        let _call = self.begin()?;
        if !self.has_irqchip() || flags != 0 || entries.len() > MAX_ROUTES as usize {
            return fail(libc::EINVAL);
        }
        let routes = Routes::from_client(entries, |entry| self.interrupts.target(entry))?;
        self.interrupts.replace_routes(routes);
        Ok(())
    }

    /// Carries out `KVM_IRQFD`.
    ///
    /// # Errors
    /// The architecture's error without interrupt controllers: `EINVAL` on x86. `EINVAL` for unknown flags, a
    /// descriptor that is no eventfd, and resampling without controllers that tell when the guest ends an interrupt;
    /// `EBADF`; `EBUSY` when the eventfd is already an irqfd of any VM; `ENOMEM`, `EMFILE`.
    pub fn irqfd(&self, asked: &kvm_irqfd) -> Result<()> {
        let _call = self.begin()?;
        if asked.flags & !(KVM_IRQFD_FLAG_DEASSIGN | KVM_IRQFD_FLAG_RESAMPLE) != 0 {
            return fail(libc::EINVAL);
        }
        let interrupts = &self.interrupts;
        if asked.flags & KVM_IRQFD_FLAG_DEASSIGN != 0 {
            return interrupts.irqfds.remove(&**interrupts, asked);
        }
        interrupts.check_irqfd()?;
        let resampled = asked.flags & KVM_IRQFD_FLAG_RESAMPLE != 0;
        if resampled && !interrupts.can_resample() {
            return fail(libc::EINVAL);
        }
        let lines: Weak<dyn Lines> = Arc::<Interrupts>::downgrade(interrupts);
        interrupts.irqfds.add(lines, asked)
    }
}
