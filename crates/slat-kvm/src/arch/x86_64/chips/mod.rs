//! The interrupt controllers of a VM besides the local APICs. The controllers themselves are in `slat-irqchip`. This
//! folder has their locks, and delivers their interrupts to vCPUs.
//!
//! | file | idea |
//! |---|---|
//! | `pc` | the 8259 pair and the I/O APIC of a VM: ports, registers, locks |
//! | `timer` | the 8254, and its alarm |
//! | `vectors` | sets of vectors |
//! | `targets` | messages to vCPUs |

mod pc;
mod targets;
mod timer;
mod vectors;

pub(crate) use pc::{Chips, Ended, TIMER};
pub(crate) use timer::Timer;
pub(crate) use vectors::Vectors;

use slat::Shared;
use slat_irqchip::message::MsiIds;
use std::sync::OnceLock;

/// The interrupt controllers that a VM has, besides the local APICs.
pub(crate) enum Model {
    /// All controllers of a PC (`KVM_CREATE_IRQCHIP`).
    Pc(Shared<Chips>),
    /// Only local APICs: the client emulates the other controllers (`KVM_CAP_SPLIT_IRQCHIP`).
    Split {
        /// The number of pins of the client's I/O APIC. The GSIs below this number are these pins.
        pins: u32,
        /// The vectors of level-triggered pins. The EOI of an interrupt with such a vector exits to the client.
        reported: Vectors,
    },
}

/// x86's part of a VM's interrupts: the VM's interrupt controllers.
#[derive(Default)]
pub(crate) struct Controllers {
    /// The controllers besides the local APICs. Empty until the client creates controllers. Until then vCPUs have no
    /// local APIC, and the client emulates all controllers.
    pub(crate) model: OnceLock<Model>,
    pub(crate) msi_ids: OnceLock<MsiIds>,
}
