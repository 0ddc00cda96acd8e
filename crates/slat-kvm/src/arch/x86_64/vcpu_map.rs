//! The map from the addresses of local APICs to a VM's vCPUs.

use crate::errno::{Result, no_memory};
use crate::vcpu_common::VcpuCommon;
use slat::Shared;
use slat_irqchip::apic_map::ApicMap;
use std::ops::Deref;

/// Maps the addresses of local APICs to the indices of their vCPUs.
#[derive(Default)]
pub(crate) struct VcpuMap(ApicMap);

impl Deref for VcpuMap {
    type Target = ApicMap;

    fn deref(&self) -> &ApicMap {
        &self.0
    }
}

impl VcpuMap {
    /// Allocates memory for `count` vCPUs.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn reserve(&mut self, count: usize) -> Result<()> {
        self.0.reserve(count).map_err(no_memory)
    }

    /// Rebuilds the map from the present addresses of the local APICs of `vcpus`. Call with no local APIC locked.
    pub(crate) fn rebuild(&mut self, vcpus: &[Shared<VcpuCommon>]) {
        let addresses = vcpus.iter().enumerate().filter_map(|(place, vcpu)| {
            let address = vcpu.lapic()?.address()?;
            Some((place, address))
        });
        self.0.rebuild(addresses);
    }
}
