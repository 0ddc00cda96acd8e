//! The part of Hyper-V's guest interface that KVM offers, as pure state machines.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! The modules use no descriptor, ioctl, thread, clock or guest memory. Time is an argument. Data to write to guest
//! memory is returned as a value, and data is read from guest memory through a closure. If a register access has
//! effects outside a module, the module returns these effects as values. The rules are those of Hyper-V's Top Level
//! Functional Specification (TLFS), or KVM's where KVM differs.
//!
//! | file | idea |
//! |---|---|
//! | [`msr`] | the numbers of the synthetic MSRs |
//! | [`cpuid`] | the CPUID leaves of the interface, and the rights that a guest's leaves grant |
//! | [`partition`] | the registers that all virtual processors share |
//! | [`clock`] | the reference clock, and the page by which a guest computes it from its TSC |
//! | [`synic`] | the synthetic interrupt controller of a virtual processor |
//! | [`stimer`] | the synthetic timers of a virtual processor |
//! | [`message`] | messages in the page of a SynIC |
//! | [`code`] | the numbers of hypercalls |
//! | [`hypercall`] | decoding of hypercalls, and their results |
//! | [`vp_set`] | sets of virtual processors, as hypercalls name them |
//!
//! MSRs have two writers: the guest, whose writes are checked and have effects, and the host, which restores
//! a state ([`Writer`]).

#![no_std]

#[cfg(test)]
extern crate std;

pub mod clock;
pub mod code;
pub mod cpuid;
pub mod hypercall;
pub mod message;
pub mod msr;
pub mod partition;
pub mod stimer;
pub mod synic;
pub mod vp_set;

/// The origin of an access to an MSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// The guest, by WRMSR or RDMSR.
    Guest,
    /// The host, which saves or restores the state of a machine.
    Host,
}

/// The error of a refused MSR access: the guest gets #GP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;
