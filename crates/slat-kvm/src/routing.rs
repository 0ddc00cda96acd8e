//! The lines and messages to which a GSI (a client's number for an interrupt) is routed: `KVM_SET_GSI_ROUTING`.

use crate::arch::Target;
use crate::errno::{Result, fail};
use crate::heap;
use kvm_bindings::*;

/// The greatest number of GSIs, and of routes, of a VM: KVM's `KVM_MAX_IRQ_ROUTES`.
pub(crate) const MAX_ROUTES: u32 = 4096;
/// All routes of a VM, by GSI.
#[derive(Debug, Default)]
pub(crate) struct Routes(pub(crate) Vec<(u32, Target)>);

impl Routes {
    /// Makes routes of a list that is sorted by GSI.
    pub(crate) fn new(sorted: Vec<(u32, Target)>) -> Self {
        Routes(sorted)
    }

    /// Makes routes of the client's routing table `entries`. `target` returns the target that an entry names, or
    /// `EINVAL`.
    ///
    /// # Errors
    /// `EINVAL` for numbers beyond the limits, unknown kinds and flags, and a GSI with two targets that exclude
    /// each other; `ENOMEM`.
    pub(crate) fn from_client(
        entries: &[kvm_irq_routing_entry],
        target: impl Fn(&kvm_irq_routing_entry) -> Result<Target>,
    ) -> Result<Self> {
        let mut routes = heap::with_room(entries.len())?;
        for entry in entries {
            let known = match entry.type_ {
                // The flag KVM_MSI_VALID_DEVID says that `devid` is valid. Only other architectures use `devid`.
                KVM_IRQ_ROUTING_MSI => KVM_MSI_VALID_DEVID,
                _ => 0,
            };
            if entry.gsi >= MAX_ROUTES || entry.flags & !known != 0 {
                return fail(libc::EINVAL);
            }
            let target = target(entry)?;
            // The new route comes after all earlier routes of this GSI in the client's table. VMMs list GSIs in
            // ascending order, so the new route is usually the last one.
            let at = routes.partition_point(|(gsi, _)| *gsi <= entry.gsi);
            routes.insert(at, (entry.gsi, target));
        }
        let conflict = |group: &[(u32, Target)]| {
            (1..group.len()).any(|i| group[..i].iter().any(|other| other.1.excludes(group[i].1)))
        };
        match routes.chunk_by(|one, next| one.0 == next.0).any(conflict) {
            true => fail(libc::EINVAL),
            false => Ok(Routes(routes)),
        }
    }

    /// Returns the targets of `gsi`; none if there is no route.
    pub(crate) fn of(&self, gsi: u32) -> impl Iterator<Item = Target> + '_ {
        let first = self.0.partition_point(|route| route.0 < gsi);
        (self.0[first..].iter())
            .take_while(move |route| route.0 == gsi)
            .map(|route| route.1)
    }

    /// Returns the first GSI that is routed to `target`. `None`: no GSI is routed to `target`.
    pub(crate) fn gsi_of(&self, target: Target) -> Option<u32> {
        (self.0.iter().find(|route| route.1 == target)).map(|route| route.0)
    }
}
