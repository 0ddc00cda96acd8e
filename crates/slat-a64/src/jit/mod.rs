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
//! | | `uses` | the tier that notes what an instruction uses |
//! | | `source` | the instructions of a region |
//! | | `plan` | its blocks, and where registers are written back |
//! | code | `frame` | the fields that compiled code reaches |
//! | | `helpers` | the functions that it calls: the interpreter's tier |
//! | | `values`, `truth` | integers and truth values of Cranelift's |
//! | | `vectors` | values of vectors |
//! | | `translator` | the state of a translation: registers, flags, checkpoints |
//! | | `registers` | the vector registers |
//! | | `access` | loads and stores, by the TLB |
//! | | `vector` | functions on integers that are emitted |
//! | | `host` | operands and results of the host's floating-point unit |
//! | | `float` | floating-point functions that the host computes |
//! | | `emit` | the tier that emits code |
//! | | `translate` | a region as a function: its blocks, its exits |
//! | use | `region` | compiled code |
//! | | `compiler` | what is compiled, and what is known already |
//! | | `attached` | a processor's side |
//!
//! # One meaning
//! The meaning of an instruction (`meaning`) is executed on three tiers: the interpreter computes; `uses` notes which
//! registers are read and written, and whether the instruction may end early; `emit` emits code. What `emit` does not
//! emit, it calls: each function of a tier has a helper that is the interpreter's function.
//!
//! What ends a run of compiled code is left to the interpreter: exceptions and calls, writes to system registers and to
//! PSTATE, TLBI and cache maintenance, hints, and ISB. So only the interpreter changes what compiled code depends on.
//!
//! # Exactness
//! Where the interpreter may have to continue, all registers are in the state: `plan`. Compiled code takes no
//! exceptions: it leaves at the last checkpoint, and the interpreter executes the instructions from there on, and takes
//! the exception where it finds it. The number of executed instructions is exact: each block takes its number from a
//! budget at its beginning, and does not begin if the budget is too small. So each turn of a loop looks at the budget.
//! After a few thousand instructions the processor asks for its machine's attention.
//!
//! # Invalidation
//! Decoded instructions are kept until the guest invalidates them, as in an instruction cache; regions are, too. Every
//! invalidation of code begins a new *edition*, and each region compares its words with memory before it runs in a new
//! edition. Where one region continues in another (`frame::Target`), the edition of translations is compared, too,
//! which every invalidation of the TLB begins. Neither changes while compiled code runs.
//!
//! A region belongs to no processor. All processors use the regions of the same words at the same virtual address.
//!
//! # Hosts of the same architecture
//! On arm64 the compiler does what it does on x86. Shortcuts that only arm64 allows have these places, and none is made:
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
