//! Interleaves the shadow MMU's operations with all changes that it must notice. A CPU is stopped before and after it
//! reads an entry of the guest's tables, while it resolves a page, after it has found resident pages, before a flush,
//! and when it waits. Meanwhile other CPUs store, flush and fault, the host replaces pages, and the client changes
//! slots. Afterwards a CPU that has flushed must find, at each address, what it has stored to the guest's tables, also
//! if the other CPU's fault had read the tables before.

mod cases;
#[path = "../common/guest.rs"]
mod guest;
#[path = "../common/interleave.rs"]
mod interleave;
mod world;
