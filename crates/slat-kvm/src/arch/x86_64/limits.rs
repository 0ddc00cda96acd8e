//! The limits of a VM.

/// The number of vCPUs that one VM can have.
pub const MAX_VCPUS: u32 = 1024;
/// One more than the largest vCPU id.
pub const MAX_VCPU_ID: u32 = 4096;
/// The number of address spaces of a VM: vCPUs in system management mode have an address space of their own.
pub const ADDRESS_SPACES: u32 = 2;
