//! What a client of the API sees, idea by idea. One program: to link one for each takes longer than to run them.
#![cfg(target_arch = "x86_64")]

#[path = "../common/mod.rs"]
mod common;

mod apic;
mod coalesced;
mod dirty;
mod exits;
mod guest_debug;
mod harvest;
mod hyperv;
mod interrupts;
mod msr_exits;
mod msrs;
mod nested;
mod nx;
mod paravirtual;
mod private;
mod quirks;
mod smm;
