//! Tracepoints with KVM's names and fields, recorded in a mapped file.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! | file | idea |
//! |---|---|
//! | `points` | the tracepoints: their names and fields, as Linux 6.12 has them, and slat's own |
//! | [`exit`], [`arm_exit`] | the reasons of exits in `kvm_exit`: x86-64's, and arm64's |
//! | [`Selection`] | the set of tracepoints that are recorded |
//! | `layout` | the bytes of the file |
//! | `recorder` | the file of this process, and how a tracepoint writes to it |
//! | [`read`] | reading the file of any process, even of one that was killed |
//! | `clock` | the counter's cycles in the file, and nanoseconds for the reader |
//! | `arch` | the tracepoints that only one architecture has; its counter: x86's time-stamp counter, or Arm's virtual counter |
//!
//! # The design
//! A tracepoint that is off costs one relaxed load of a word with a bit for each tracepoint ([`point`]). The kernel
//! clears the memory of this word in a forked child. So a child never writes to its parent's file; the child begins a
//! file of its own when it uses KVM.
//!
//! A tracepoint that is on writes one record of 64 bytes to the ring of its thread. The ring is part of a shared
//! mapping of the file, so all records written before the process is killed are in the file. A tracepoint makes no
//! system call, allocates nothing, takes no lock and never waits. So a seccomp filter of the program does not affect
//! it. All other work is done when recording begins and when a vCPU is created: the (sparse) file gets its greatest
//! length, all of the file is mapped, and the pages of a few rings are allocated in advance. A thread claims a ring at
//! its first record, by one compare-exchange. If no ring is left, the thread's records are lost, and counted.
//!
//! A full ring overwrites its oldest records. The ring counts all records ever written, in total and for each
//! tracepoint. So the totals of a trace are exact even if records were overwritten.
//!
//! A record has the vCPU that the thread runs ([`run_vcpu`]), and the value of the processor's counter. The header has
//! two pairs of counter and clock, from which the reader computes nanoseconds.

#![cfg(target_os = "linux")]

mod arch;
pub mod arm_exit;
mod clock;
pub mod exit;
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
