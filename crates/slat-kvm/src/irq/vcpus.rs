//! The vCPUs of a VM, and how interrupt messages find them.

use crate::errno::{Result, no_memory};
use crate::heap;
use crate::vcpu_common::VcpuCommon;
use slat::Shared;
use slat_irqchip::apic_map::ApicMap;
use slat_irqchip::lapic::Request;
use slat_irqchip::message::{Destination, Message};
use std::ops::Deref;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The vCPUs of a VM, by id.
///
/// One lock protects the vCPUs and the map of their APICs' addresses. A message acquires that lock for reading, and
/// then only the locks of the APICs to which it goes.
#[derive(Default)]
pub(crate) struct Vcpus {
    by_id: Vec<Shared<VcpuCommon>>,
    /// Maps APIC addresses to indices in `by_id`. The map always has memory for all vCPUs.
    map: ApicMap,
}

impl Deref for Vcpus {
    type Target = [Shared<VcpuCommon>];

    fn deref(&self) -> &Self::Target {
        &self.by_id
    }
}

impl Vcpus {
    /// Allocates memory for one more vCPU, so that [`insert`](Self::insert) cannot fail.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn reserve(&mut self) -> Result<()> {
        heap::reserve(&mut self.by_id, 1)?;
        self.map.reserve(self.by_id.len() + 1).map_err(no_memory)
    }

    /// Looks up the vCPU with this id. `Ok`: its index. `Err`: the index at which to insert it.
    pub(crate) fn place(&self, id: u32) -> std::result::Result<usize, usize> {
        self.by_id.binary_search_by_key(&id, |vcpu| vcpu.id)
    }

    pub(crate) fn insert(&mut self, place: usize, vcpu: Shared<VcpuCommon>) {
        self.by_id.insert(place, vcpu);
        self.map_again();
    }

    fn map_again(&mut self) {
        let addresses = self.by_id.iter().enumerate().filter_map(|(place, vcpu)| {
            let address = vcpu.lapic()?.address()?;
            Some((place, address))
        });
        self.map.rebuild(addresses);
    }
}

/// The number of vCPUs that a message reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    /// vCPUs that accepted the message, including those for which the interrupt was already pending.
    pub(crate) taken: usize,
    /// vCPUs for which the interrupt was not pending yet.
    pub(crate) new: usize,
}

/// The vCPUs of a VM as the targets of its interrupts, under their lock.
#[derive(Default)]
pub(crate) struct Targets(RwLock<Vcpus>);

impl Targets {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Vcpus> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Vcpus> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers a message to the APICs that it addresses. `from` is the vCPU that sends it; `None` for a device.
    pub(crate) fn send(&self, from: Option<&VcpuCommon>, message: &Message) -> Sent {
        let vcpus = self.read();
        let sender = from.and_then(|from| vcpus.place(from.id).ok());
        let mut sent = Sent::default();
        vcpus.map.route(message, sender, |place| {
            match vcpus[place].deliver(message) {
                Request::Refused => {}
                Request::Merged => sent.taken += 1,
                Request::Pending => {
                    sent.taken += 1;
                    sent.new += 1;
                }
            }
        });
        sent
    }

    /// Ends the halt of the vCPU with this APIC id. If the vCPU is not halted, ends its next halt.
    pub(crate) fn end_halt(&self, apic_id: u32) {
        let vcpus = self.read();
        (vcpus.map).visit(Destination::Physical(apic_id), None, |place| {
            vcpus[place].end_halt();
        });
    }

    /// Call after a change that may give an APIC another address. No APIC may be locked.
    pub(crate) fn addresses_changed(&self) {
        self.write().map_again();
    }

    /// Notifies the vCPUs whose local APIC accepts interrupts of the 8259 pair.
    pub(crate) fn notice_external(&self) {
        for vcpu in self.read().iter() {
            if vcpu.lapic().is_some_and(|lapic| lapic.accepts_external()) {
                vcpu.notice();
            }
        }
    }

    /// Sends an NMI to the vCPUs whose LINT0 delivers NMIs. In this way guests use the 8254 as a watchdog.
    pub(crate) fn pulse_lint0(&self) {
        for vcpu in self.read().iter() {
            if vcpu.lapic().is_some_and(|lapic| lapic.lint0_is_nmi()) {
                vcpu.non_maskable();
            }
        }
    }
}
