//! The map of the addresses by which interrupt messages name vCPUs. On arm64 it is empty, because the GIC keeps its own
//! list of vCPUs.

use crate::errno::Result;
use crate::vcpu_common::VcpuCommon;
use slat::Shared;

/// Maps the addresses by which interrupts name vCPUs to the indices of the vCPUs.
#[derive(Default)]
pub(crate) struct VcpuMap;

impl VcpuMap {
    /// Allocates memory for `count` vCPUs.
    ///
    /// # Errors
    /// No error can happen.
    pub(crate) fn reserve(&mut self, _count: usize) -> Result<()> {
        Ok(())
    }

    /// Replaces the map's addresses by those that the vCPUs have now.
    pub(crate) fn rebuild(&mut self, _vcpus: &[Shared<VcpuCommon>]) {}
}
