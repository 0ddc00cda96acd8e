//! Tests what a client of the API sees, with a file for each topic. The files are one program: linking a program for
//! each would take longer than running them.
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
mod log_reader;
mod msr_exits;
mod msrs;
mod nested;
mod nx;
mod paravirtual;
mod private;
mod quirks;
mod smm;
