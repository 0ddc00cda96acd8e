//! How the controllers of a PC, and local APICs, deliver interrupts to vCPUs.
//!
//! | file | idea |
//! |---|---|
//! | `lines` | delivery of lines and messages to vCPUs, accesses to controllers, and EOIs |
//! | `routes` | the routes of a PC |
//! | `create`, `state` | creation of controllers; how they are saved and restored |
//!
//! A controller only reports its effects. [`Interrupts`] carries them out.
//!
//! # Locks
//! After the locks of the irqfds and the routes, a call acquires the following locks in this order, and may leave out
//! any of them: the 8254, then the 8259 pair or the I/O APIC, the vCPUs (for reading), one local APIC, the SynIC of
//! that APIC's vCPU. When a vCPU ends an interrupt or writes to a controller, its own APIC is unlocked. The effects
//! that a locked controller reports are carried out after that controller is unlocked.

mod create;
mod lines;
mod routes;
mod state;

use crate::arch::x86_64::chips::{Chips, Model, Timer};
use crate::errno::{Result, fail};
use crate::irq::Interrupts;
use slat_irqchip::message::MsiIds;

impl Interrupts {
    /// Whether the client has created interrupt controllers. Then vCPUs have local APICs.
    pub(crate) fn exist(&self) -> bool {
        self.arch.model.get().is_some()
    }

    /// Sets a line that is no GSI. `None`: the line is a GSI. On x86 every line is a GSI.
    ///
    /// # Errors
    /// `ENXIO` without interrupt controllers.
    pub(crate) fn set_own_line(&self, _line: u32, _level: bool) -> Result<Option<i32>> {
        match self.exist() {
            true => Ok(None),
            false => fail(libc::ENXIO),
        }
    }

    /// Checks that irqfds can be added.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controllers.
    pub(crate) fn check_irqfd(&self) -> Result<()> {
        match self.exist() {
            true => Ok(()),
            false => fail(libc::EINVAL),
        }
    }

    /// Returns the 8259 pair and the I/O APIC, if slat emulates them.
    pub(crate) fn chips(&self) -> Option<&Chips> {
        match self.arch.model.get() {
            Some(Model::Pc(chips)) => Some(chips),
            _ => None,
        }
    }

    /// Returns the 8254, if slat emulates it.
    pub(crate) fn timer(&self) -> Option<&Timer> {
        self.chips()?.timer.get().map(|timer| &**timer)
    }

    /// Whether the client emulates all controllers but the local APICs.
    pub(crate) fn is_split(&self) -> bool {
        matches!(self.arch.model.get(), Some(Model::Split { .. }))
    }

    /// Whether ids of APICs, and destinations of messages, have 32 bits in the client's structs.
    pub(crate) fn has_wide_ids(&self) -> bool {
        self.msi_ids() != MsiIds::Eight
    }

    fn msi_ids(&self) -> MsiIds {
        self.arch.msi_ids.get().copied().unwrap_or_default()
    }
}
