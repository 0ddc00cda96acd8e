//! Hyper-V's interface to a guest, as far as KVM offers it, as pure state machines.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! Nothing here knows a descriptor, an ioctl, a thread, a clock or guest memory: time is an argument, what is to be
//! written to guest memory is a value, what is read from it goes through a closure, and what a register access brings
//! about outside comes back as a value. The rules are those of Hyper-V's Top Level Functional Specification (TLFS);
//! where KVM differs, those of KVM.
//!
//! | file | idea |
//! |---|---|
//! | [`msr`] | the numbers of the synthetic MSRs |
//! | [`cpuid`] | the CPUID leaves of the interface, and what a guest's leaves allow it |
//! | [`partition`] | the registers that all virtual processors share |
//! | [`clock`] | the reference clock, and the page by which a guest computes it from its TSC |
//! | [`synic`] | the synthetic interrupt controller of a virtual processor |
//! | [`stimer`] | its synthetic timers |
//! | [`message`] | messages in the page of a SynIC |
//! | [`hypercall`] | what a hypercall asks for, and how its result looks |
//! | [`vp_set`] | sets of virtual processors, as hypercalls name them |
//!
//! MSRs are written by two: by the guest, whose writes are checked and have effects, and by the host, which restores
//! a state ([`Writer`]).

#![no_std]

#[cfg(test)]
extern crate std;

pub mod clock;
pub mod cpuid;
pub mod hypercall;
pub mod message;
pub mod msr;
pub mod partition;
pub mod stimer;
pub mod synic;
pub mod vp_set;

/// Who writes or reads an MSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// The guest, by WRMSR or RDMSR.
    Guest,
    /// The host, which saves or restores the state of a machine.
    Host,
}

/// Why an MSR access is refused: the guest gets #GP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;
