//! Interrupts: their sources, and how they reach vCPUs.
//!
//! [`Interrupts`] owns the controllers, the routes, the irqfds and the list of the vCPUs of a VM, and uses no other
//! part of the VM. The architecture determines which controllers there are, and what the controllers do
//! ([`Interrupts::arch`]).
//!
//! # Locks
//! A call acquires locks in the following order, and may leave out any of them: the irqfds of the VM, the routes (for
//! reading, while it delivers an interrupt), the controllers, the vCPUs (for reading), the part of the controllers that
//! one vCPU has. The architecture's module `irq` has the order of the locks of its controllers.

use crate::arch::Controllers;
use crate::irqfd::{IrqFds, Lines};
use crate::routing::Routes;
use crate::vcpus::Targets;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// The interrupt controllers of a VM, its vCPUs, its routes and its irqfds.
#[derive(Default)]
pub(crate) struct Interrupts {
    pub(crate) vcpus: Targets,
    routes: RwLock<Routes>,
    pub(crate) irqfds: IrqFds,
    pub(crate) arch: Controllers,
}

impl Interrupts {
    pub(crate) fn routes(&self) -> RwLockReadGuard<'_, Routes> {
        self.routes.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces all routes. When this returns, no interrupt is delivered by an old route any more.
    pub(crate) fn replace_routes(&self, routes: Routes) {
        let mut current = self.routes.write().unwrap_or_else(PoisonError::into_inner);
        *current = routes;
        self.routes_changed(&current);
    }

    /// Sets the level that `source` gives the line of a GSI. Returns the status of `KVM_IRQ_LINE_STATUS`.
    pub(crate) fn set_line(&self, gsi: u32, source: u8, level: bool) -> i32 {
        let mut status = -1;
        for target in self.routes().of(gsi) {
            let one = self.set_target(target, source, level);
            if one >= 0 {
                status = one + status.max(0);
            }
        }
        status
    }

    /// Raises and lowers the line of a GSI. Does both under one lock at each controller, so that no other thread finds
    /// the line high. So a change of routes cannot leave the line high. And if the guest ends the interrupt at once,
    /// the next pulse is a new interrupt.
    pub(crate) fn pulse_line(&self, gsi: u32, source: u8) {
        for target in self.routes().of(gsi) {
            self.pulse_target(target, source);
        }
    }
}

impl Lines for Interrupts {
    fn set(&self, gsi: u32, source: u8, level: bool) {
        self.set_line(gsi, source, level);
    }

    fn pulse(&self, gsi: u32, source: u8) {
        self.pulse_line(gsi, source);
    }
}
