//! The KVM API of arm64: VMs with memory, and vCPUs that execute small guests.
#![cfg(target_arch = "aarch64")]

mod compiler;
mod debug;
mod firmware;
mod gic;
mod guests;
mod hostile;
mod identification;
mod memory;
mod vm;
