//! The architecture of the guests, which is the host's.
//!
//! This is the only file that asks for which architecture slat is built. All others are neutral, or belong to one
//! architecture and are in its folder.

#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub use x86_64::for_other_crates;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{
    clock, compiler, cpuid, events, fpu, guest_debug, hyperv, machine, msr, msr_filter, nested,
    options, quirks, regs, same_fields,
};
