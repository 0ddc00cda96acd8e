//! Performs operations that a fuzzer's bytes choose, on the KVM API and on the software CPU.
//!
//! The bytes are the decisions of a generator, as in `slat_model::streams`. For [`ioctls()`], they choose each
//! request, its argument and its object. For [`guests()`], they choose the instructions, page tables and registers of
//! a guest. The targets in `fuzz/` call only these two functions. `cargo test -p slat-streams` calls them with the
//! corpus and with pseudo-random bytes.
//!
//! Neither function returns an error. A finding (a defect of slat) ends the process, and prints the last steps of every
//! thread ([`watch`]). Findings are a panic, a call that does not end, a write outside the memory that was passed to a
//! call, an errno that the call must not return, a failed audit, and a leaked descriptor or thread.
//!
//! | file | idea |
//! |---|---|
//! | [`watch`] | the threads of a stream: kicks, time limits, the report of a finding |
//! | [`memory`] | mappings between guard pages, and patterns that show a stray write |
//! | [`leaks`] | descriptors, threads and memory before and after a stream |
//! | [`mod@ioctls`] | streams of requests, from several threads |
//! | [`answers`] | lists of KVM's results; the values at the edges of its rules |
//! | [`mod@guests`] | guests of random code over random page tables |

pub mod answers;
pub mod guests;
pub mod ioctls;
pub mod leaks;
pub mod memory;
pub mod watch;

pub use guests::guests;
pub use ioctls::ioctls;
