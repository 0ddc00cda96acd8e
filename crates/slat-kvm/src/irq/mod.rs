//! Interrupts: their sources, and how they reach vCPUs. The controllers are in `slat-irqchip`.
//!
//! | file | idea |
//! |---|---|
//! | [`routing`] | the lines and messages to which a GSI is routed |
//! | `lines` | delivery of lines and messages to vCPUs, accesses to controllers, and ends of interrupts |
//! | `chips` | the 8259 pair and the I/O APIC of a VM: ports, registers, locks |
//! | `timer` | the 8254, and its alarm |
//! | [`irqfd`] | eventfds whose signals are interrupts |
//! | [`vcpus`], `vectors` | the vCPUs of a VM, and messages to them; sets of vectors |
//! | `create`, `state` | creation of controllers; how they are saved and restored |
//!
//! All of this belongs to [`Interrupts`], which knows nothing else of its VM. `Interrupts` carries out the effects that
//! a controller reports.
//!
//! # Locks
//! A call acquires locks in this order, and may skip some: the irqfds of the VM, the routes (for reading, while it
//! delivers an interrupt), the 8254, then the 8259 pair or the I/O APIC, the vCPUs (for reading), one local APIC, the
//! SynIC of its vCPU. A vCPU that ends an interrupt or writes to a controller has its own APIC unlocked. The effects
//! that a locked controller reports are carried out after it is unlocked.

pub(crate) mod chips;
mod create;
pub(crate) mod irqfd;
mod lines;
pub(crate) mod routing;
mod state;
mod timer;
pub(crate) mod vcpus;
mod vectors;

use crate::irq::chips::Chips;
use crate::irq::irqfd::IrqFds;
use crate::irq::routing::Routes;
use crate::irq::timer::Timer;
use crate::irq::vcpus::Targets;
use crate::irq::vectors::Vectors;
use slat::Shared;
use slat_irqchip::message::MsiIds;
use std::sync::{OnceLock, RwLock};

/// The interrupt controllers that a VM has, besides the local APICs.
enum Model {
    /// All controllers of a PC (`KVM_CREATE_IRQCHIP`).
    Pc(Shared<Chips>),
    /// No controllers: the client emulates them (`KVM_CAP_SPLIT_IRQCHIP`).
    Split {
        /// GSIs below this number are pins of the client's I/O APIC.
        pins: u32,
        /// The vectors of level-triggered pins. The end of an interrupt with such a vector exits to the client.
        reported: Vectors,
    },
}

/// The interrupt controllers of a VM, its vCPUs, its routes and its irqfds.
#[derive(Default)]
pub(crate) struct Interrupts {
    pub(crate) vcpus: Targets,
    /// Not set until the client creates controllers. Without it, vCPUs have no local APIC, and the client emulates all
    /// controllers.
    model: OnceLock<Model>,
    routes: RwLock<Routes>,
    msi_ids: OnceLock<MsiIds>,
    pub(crate) irqfds: IrqFds,
}

impl Interrupts {
    /// Whether vCPUs have local APICs.
    pub(crate) fn exist(&self) -> bool {
        self.model.get().is_some()
    }

    /// The 8259 pair and the I/O APIC, if slat emulates them.
    pub(crate) fn chips(&self) -> Option<&Chips> {
        match self.model.get() {
            Some(Model::Pc(chips)) => Some(chips),
            _ => None,
        }
    }

    /// The 8254, if slat emulates it.
    fn timer(&self) -> Option<&Timer> {
        self.chips()?.timer.get().map(|timer| &**timer)
    }

    /// Whether the client emulates all controllers but the local APICs.
    pub(crate) fn is_split(&self) -> bool {
        matches!(self.model.get(), Some(Model::Split { .. }))
    }

    /// Whether destinations of messages and ids of APICs have 32 bits in the client's structs.
    pub(crate) fn has_wide_ids(&self) -> bool {
        self.msi_ids() != MsiIds::Eight
    }

    fn msi_ids(&self) -> MsiIds {
        self.msi_ids.get().copied().unwrap_or_default()
    }
}
