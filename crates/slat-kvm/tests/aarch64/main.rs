//! The KVM API of arm64: VMs with memory, and vCPUs that execute small guests.
#![cfg(target_arch = "aarch64")]

mod guests;
mod memory;
mod vm;
