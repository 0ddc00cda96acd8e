//! Tracepoints with KVM's names and fields, recorded in a mapped file.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! | file | idea |
//! |---|---|
//! | `points` | the tracepoints: their names and fields, as Linux 6.12 has them, and slat's own |
//! | [`Selection`] | which of them are recorded |
//! | `layout` | the bytes of the file |
//! | `recorder` | the file of this process, and a point's way into it |
//! | [`read`] | a file of any process, also of one that was killed |
//! | `clock` | cycles of the processor's time-stamp counter in the file, nanoseconds for the reader |
//!
//! # The design
//! A point that is off is one relaxed load of a word that has a bit for each tracepoint ([`point`]). The word is in
//! memory that the kernel clears in a forked child, so a child never writes to its parent's file; it begins one of its
//! own when it uses KVM.
//!
//! A point that is on writes one record of 64 bytes to the ring of its thread. The ring is a part of a shared mapping
//! of the file: what is stored there is in the file when the process is killed, with no further work. A point makes no
//! system call, allocates nothing, takes no lock and waits for nothing, so a seccomp filter of the client does not
//! matter to it. For that, all else is done when recording begins and when a vCPU is created: the file is as long as it
//! can get (and sparse), all of it is mapped, and the pages of some rings more are allocated. A thread claims a ring at
//! its first point, by one compare-exchange. If no ring is left, its points are lost, and counted.
//!
//! A full ring overwrites its oldest records. How many is known: the ring counts what was ever written, in total and
//! for each tracepoint. So the totals of a trace are exact, whatever is left of it.
//!
//! A record has the thread's vCPU, which the thread sets while it runs one ([`run_vcpu`]), and the time as
//! the processor's time-stamp counter. The header has two pairs of counter and clock, by which the reader
//! computes nanoseconds.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

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
