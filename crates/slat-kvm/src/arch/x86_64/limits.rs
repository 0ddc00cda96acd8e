//! The limits of a VM.

/// The greatest number of vCPUs of a VM.
pub const MAX_VCPUS: u32 = 1024;
/// One more than the largest vCPU id.
pub const MAX_VCPU_ID: u32 = 4096;
/// The end of user space's addresses. The last page below the non-canonical addresses is never mapped.
pub const USER_END: u64 = (1 << 47) - 4096;
/// The memory attributes that at least one type of VM has.
pub const MEMORY_ATTRIBUTES: u32 = kvm_bindings::KVM_MEMORY_ATTRIBUTE_PRIVATE;
/// The number of address spaces of a VM: one for system management mode, and one for all other modes.
pub const ADDRESS_SPACES: u32 = 2;
/// The address space of vCPUs that are not in system management mode.
pub(crate) const ORDINARY: usize = 0;
