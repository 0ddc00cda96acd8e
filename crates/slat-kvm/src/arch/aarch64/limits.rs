//! The limits of a VM.

/// The number of vCPUs that one VM can have, as in KVM for arm64.
pub const MAX_VCPUS: u32 = 512;
/// One more than the largest vCPU id.
pub const MAX_VCPU_ID: u32 = MAX_VCPUS;
/// The number of address spaces of a VM.
pub const ADDRESS_SPACES: u32 = 1;
/// The end of user space's addresses. (On a processor with FEAT_LVA, a program can also map memory above this address,
/// but only if it asks for such an address.)
pub const USER_END: u64 = 1 << 48;
/// The memory attributes that VMs of some type have: none, as in KVM for arm64.
pub const MEMORY_ATTRIBUTES: u32 = 0;
