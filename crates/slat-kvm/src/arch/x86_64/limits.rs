//! The limits of a VM.

/// The number of vCPUs that one VM can have.
pub const MAX_VCPUS: u32 = 1024;
/// One more than the largest vCPU id.
pub const MAX_VCPU_ID: u32 = 4096;
/// The end of the addresses that user space can have: the last page below the hole of non-canonical addresses is never
/// mapped.
pub const USER_END: u64 = (1 << 47) - 4096;
/// The memory attributes that VMs of some type have.
pub const MEMORY_ATTRIBUTES: u32 = kvm_bindings::KVM_MEMORY_ATTRIBUTE_PRIVATE;
/// The number of address spaces of a VM: vCPUs in system management mode have an address space of their own.
pub const ADDRESS_SPACES: u32 = 2;
