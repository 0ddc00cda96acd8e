//! The vCPUs of a VM, and how interrupt messages find them.

use crate::errno::{Result, no_memory};
use crate::heap;
use crate::vcpu::VcpuCommon;
use crate::vm::VmObject;
use slat::Shared;
use slat_irqchip::apic_map::ApicMap;
use slat_irqchip::lapic::Request;
use slat_irqchip::message::{Destination, Message};
use std::ops::Deref;

/// The vCPUs of a VM, by id.
///
/// One lock protects them and the map of their APICs' addresses: a message acquires that lock for reading, and then only the locks of
/// the APICs that it addresses.
#[derive(Default)]
pub(crate) struct Vcpus {
    by_id: Vec<Shared<VcpuCommon>>,
    /// Maps APIC addresses to indices in `by_id`. Always has memory for all vCPUs.
    map: ApicMap,
}

impl Deref for Vcpus {
    type Target = [Shared<VcpuCommon>];

    fn deref(&self) -> &Self::Target {
        &self.by_id
    }
}

impl Vcpus {
    /// Allocates memory for one more vCPU: [`insert`](Self::insert) cannot fail then.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn reserve(&mut self) -> Result<()> {
        heap::reserve(&mut self.by_id, 1)?;
        self.map.reserve(self.by_id.len() + 1).map_err(no_memory)
    }

    /// `Ok`: the index of the vCPU with this id. `Err`: the index at which to insert it.
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
    /// vCPUs that accepted the message, those with the same interrupt pending included.
    pub(crate) taken: usize,
    /// vCPUs for which the interrupt was not pending yet.
    pub(crate) new: usize,
}

impl VmObject {
    /// Delivers a message from a vCPU, or from a device (`None`), to the APICs that it addresses.
    pub(crate) fn send_message(&self, from: Option<&VcpuCommon>, message: &Message) -> Sent {
        let vcpus = self.vcpus();
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

    /// Wakes the vCPU with this APIC id from its halt, or else from its next one.
    pub(crate) fn end_halt(&self, apic_id: u32) {
        let vcpus = self.vcpus();
        (vcpus.map).visit(Destination::Physical(apic_id), None, |place| {
            vcpus[place].end_halt();
        });
    }

    /// Call after a change that may give an APIC another address. No APIC may be locked.
    pub(crate) fn apic_addresses_changed(&self) {
        self.vcpus_mut().map_again();
    }
}
