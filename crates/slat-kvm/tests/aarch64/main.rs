//! The KVM API of arm64, with guests that execute.
#![cfg(target_arch = "aarch64")]

mod guests;
mod memory;
