//! The monitor on Intel's VMX and EPT, for Bochs (`ept/bochsrc`). `metal/run --arch ept` runs it.
#![no_std]
#![no_main]

extern crate alloc;

mod vmcs;
mod vmx;

metal_x86::monitor!(vmx::Vmx);
