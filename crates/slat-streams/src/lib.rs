//! Makes operations of a fuzzer's bytes, and performs them on the KVM API and on the software CPU.
//!
//! The bytes are the decisions of a generator, as in `slat_model::streams`. They decide either which request is made,
//! with which argument, on which object; or which instructions, page tables and registers a guest has. The targets in
//! `fuzz/` call only [`ioctls()`] and [`guests()`]; `cargo test -p slat-streams` calls them with the corpus and with
//! pseudo-random bytes.
//!
//! Neither function returns an error. A finding ends the process, with an account of every thread's last steps
//! ([`watch`]): a panic, a call that does not end, a write outside the memory that was passed to a call, an errno that
//! the call must not return, a failed audit, a leaked descriptor or thread.
//!
//! | file | idea |
//! |---|---|
//! | [`watch`] | the threads of a stream: kicks, limits of time, the account of a finding |
//! | [`memory`] | mappings between guard pages, and patterns that show a stray write |
//! | [`leaks`] | descriptors, threads and memory, before and after |
//! | [`mod@ioctls`] | streams of requests, from several threads |
//! | [`answers`] | KVM's results, as lists; the values at the edges of its rules |
//! | [`mod@guests`] | guests of random code over random page tables |

pub mod answers;
pub mod guests;
pub mod ioctls;
pub mod leaks;
pub mod memory;
pub mod watch;

pub use guests::guests;
pub use ioctls::ioctls;
