//! Tracepoints with KVM's names and fields, recorded in a mapped file.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! | file | idea |
//! |---|---|
//! | `points` | the tracepoints: their names and fields, as Linux 6.12 has them, and slat's own |
//! | [`Selection`] | which of them are recorded |
//! | `layout` | the bytes of the file |
//! | `recorder` | the file of this process, and how a tracepoint writes to it |
//! | [`read`] | reading the file of any process, even of one that was killed |
//! | `clock` | the counter's cycles in the file, and nanoseconds for the reader |
//! | `arch` | the processor's counter: x86's time-stamp counter, or Arm's virtual counter |
//!
//! # The design
//! A tracepoint that is off is one relaxed load of a word with a bit for each tracepoint ([`point`]). The word is in
//! memory that the kernel clears in a forked child. So a child never writes to its parent's file; it begins a file of
//! its own when it uses KVM.
//!
//! A tracepoint that is on writes one record of 64 bytes to the ring of its thread. The ring is part of a shared
//! mapping of the file, so when the process is killed, everything written is in the file. A tracepoint makes no system
//! call, allocates nothing, takes no lock and never waits; so a seccomp filter of the client does not affect it. All
//! other work is done when recording begins and when a vCPU is created: the file gets its greatest length (and is
//! sparse), all of it is mapped, and the pages of a few rings in advance are allocated. A thread claims a ring at its
//! first record, by one compare-exchange. If no ring is left, its records are lost, and counted.
//!
//! A full ring overwrites its oldest records. Their number is known, because the ring counts all records ever written,
//! in total and for each tracepoint. So the totals of a trace are exact, however few records are left.
//!
//! A record has the vCPU that the thread runs ([`run_vcpu`]), and the time as the processor's counter. The
//! header has two pairs of counter and clock, from which the reader computes nanoseconds.

#![cfg(target_os = "linux")]

mod arch;
mod clock;
mod layout;
mod points;
pub mod read;
mod recorder;
mod selection;

pub use points::*;
pub use recorder::{
    Buffer, OnVcpu, add_ring, begin, mark_time, name_thread, point, run_vcpu, vcpu,
};
pub use selection::Selection;
