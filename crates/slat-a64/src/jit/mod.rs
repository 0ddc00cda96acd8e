//! The compiler.
//!
//! Code to which the interpreter comes often becomes a *region*: instructions of one page that are reached from the
//! region's first instruction, including called functions and the code to which they return. Cranelift compiles the
//! region to one function of the host, on a thread of the compiler's own ([`Compiler::work`]). Until that function
//! exists, the interpreter runs the code. A region is entered at its first instruction only.
//!
//! | layer | file | idea |
//! |---|---|---|
//! | guest code | `context` | what compiled code depends on besides its instructions |
//! | | `uses` | the tier that records which registers an instruction reads and writes |
//! | | `source` | the instructions of a region |
//! | | `plan` | the blocks of a region, and where registers are written back |
//! | code | `frame` | the memory that compiled code accesses |
//! | | `helpers` | the interpreter's functions, for compiled code to call |
//! | | `values`, `truth` | integers and truth values of Cranelift's |
//! | | `vectors` | values of vectors |
//! | | `translator` | the state of a translation: registers, flags, checkpoints |
//! | | `registers` | the vector registers |
//! | | `access` | loads and stores, by the TLB |
//! | | `vector` | vector functions on integers |
//! | | `host` | operands and results of the host's floating-point unit |
//! | | `float` | floating-point functions that the host computes |
//! | | `emit` | the tier that emits code |
//! | | `translate` | makes a host function of a region: its blocks, its exits |
//! | use | `region` | the compiled code of a region |
//! | | `compiler` | the queue of code to compile, and all compiled regions |
//! | | `attached` | the compiled code that one processor uses |
//!
//! # One meaning
//! The meaning of an instruction (`meaning`) is written once and executed on three tiers: the interpreter computes;
//! `uses` records which registers are read and written, and whether the instruction may end early; `emit` emits code.
//! If `emit` emits no code for a function of the tier, it emits a call of a helper, which runs the interpreter's
//! function.
//!
//! The interpreter executes what ends a run of compiled code: exceptions, SVC, HVC and SMC, writes to system registers
//! and to PSTATE, TLBI and cache maintenance, hints, and ISB. So only the interpreter changes the state on which
//! compiled code depends.
//!
//! # Exactness
//! Where the interpreter may have to continue, all registers were written back to the state (`plan`). Compiled code
//! takes no exceptions: it leaves at the last checkpoint, and the interpreter executes the instructions from that
//! checkpoint on, and takes the exception. The number of executed instructions is exact: at its beginning, each block
//! subtracts its number of instructions from a budget, and does not begin if the budget is too small. So each iteration
//! of a loop checks the budget. Every few thousand instructions the processor calls
//! [`Hypervisor::attention`](crate::Hypervisor::attention).
//!
//! # Invalidation
//! Decoded instructions and regions are kept until the guest invalidates them, as in an instruction cache. Every
//! invalidation of code begins a new *edition*, and each region compares its words with memory before it runs in a new
//! edition. Before one region continues in another (`frame::Target`), it compares a second edition, which also changes
//! with every invalidation of the TLB. Neither edition changes while compiled code runs.
//!
//! A region belongs to no processor. All processors use the regions of the same words at the same virtual address.
//!
//! # Hosts of the same architecture
//! On arm64 the compiler does the same as on x86. Two shortcuts that only arm64 allows are not implemented:
//! `emit::compute` could emit each function on vectors as the host's own instruction, with the guest's FPCR and FPSR in
//! the host's registers; and `translate` could copy an instruction that neither accesses memory nor branches, with the
//! guest's registers in the host's.

mod access;
mod attached;
mod compiler;
mod context;
mod emit;
mod float;
mod frame;
mod helpers;
mod host;
#[cfg(test)]
mod order;
mod plan;
mod region;
mod registers;
mod source;
mod translate;
mod translator;
mod truth;
mod uses;
mod values;
mod vector;
mod vectors;

pub(crate) use attached::Compiled;
pub use compiler::{Compile, Compiler};
