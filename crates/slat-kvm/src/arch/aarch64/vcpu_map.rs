//! The map of the addresses by which interrupts name vCPUs. No interrupt is sent without an interrupt controller.

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

    /// Replaces the addresses by those that the vCPUs have now.
    pub(crate) fn rebuild(&mut self, _vcpus: &[Shared<VcpuCommon>]) {}
}
