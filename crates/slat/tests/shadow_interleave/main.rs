//! The shadow MMU, beside all that it has to notice: a CPU is stopped before and after it reads an entry of the
//! guest's tables, in the resolution of a page, when resident pages were found, before a flush, and when it waits.
//! There other CPUs store, flush and fault, the host replaces pages, and the client changes slots. Then each address
//! is what the guest's tables say: for a CPU that has flushed what it stored, also when the other CPU's fault had
//! read the tables before.

mod cases;
#[path = "../common/guest.rs"]
mod guest;
#[path = "../common/interleave.rs"]
mod interleave;
mod world;
