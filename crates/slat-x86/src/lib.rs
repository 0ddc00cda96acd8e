//! A software x86-64 CPU.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! The crate has an interpreter of decoded basic blocks, and a compiler for blocks that run often. Instructions act on
//! a [`Cpu`], which holds the architectural [`State`]. An [`Executor`] is a CPU with its decoded and compiled code. The
//! executor runs the CPU together with a [`Machine`], which translates guest-virtual addresses to host pages ([`Mmu`])
//! and implements CPUID, MSRs and the like. [`Executor::run`] runs until the caller has to act, and returns the reason
//! as an [`Exit`].
//!
//! | layer | file | idea |
//! |---|---|---|
//! | base | `heap`, `pool`, `hash`, `sync` | allocations that may fail; memory freed as a whole; a hash; locks |
//! | | `counters` | counts of the CPU's work |
//! | | `clock` | when decoded code must be checked again |
//! | | `decoder` | the tables of the instruction decoder |
//! | | `frame`, `source`, `tss` | the words that an event pushes; the origins of events; the task-state segment |
//! | guest | `state` | the architectural registers |
//! | | `machine` | the services that the CPU needs from its machine, and its exits |
//! | | `mode`, `flow` | the state on which decoding depends; how an instruction ends |
//! | sem | `int` | the operand sizes |
//! | | `sem/` | the meaning of integer instructions, for interpreter and compiler |
//! | parts | `features` | the features in the guest's CPUID |
//! | | `lazy` | the record of the last operation that has set flags |
//! | | `tlb/` | the software TLB, of two levels |
//! | | `watch`, `probe` | breakpoints, of the guest and of KVM's API; probes, invisible to both |
//! | | `devices` | accesses to devices that are in progress |
//! | | `nested/` | the state of guest mode, and the layout of its control block |
//! | | `code_pages` | the pages with decoded code, and the stores to them that CPUs report to one another |
//! | | `code`, `snapshot`, `once` | what a CPU knows about code: copies of its pages; code that is not kept |
//! | | `compiled` | the fields of a CPU that compiled code uses |
//! | | `raised`, `requests` | what an instruction has raised; the caller's requests to end a run |
//! | | `bus_lock` | locked accesses that cross a cache line |
//! | | `progress` | how long events were delivered without an instruction in between |
//! | | `fixed` | the memory that a CPU allocates when it is made |
//! | cpu | `cpu` | the CPU object |
//! | | `watched` | accesses to watched bytes |
//! | | `derive` | computes mode, CPL, and which translations are still valid, from the state |
//! | | `flags` | lazy arithmetic flags |
//! | | `op` | the decoded operation, with the function that executes it on a CPU |
//! | memory | `mmio` | MMIO accesses |
//! | | `mem/` | loads and stores |
//! | | `fetch` | fetching code |
//! | events | `intercept` | the instructions and events that cause a #VMEXIT of a nested guest |
//! | | `debug` | debug exceptions and single steps |
//! | | `ask` | instructions of which the caller executes a part |
//! | | `svm/` | nested virtualization by SVM |
//! | | `segment`, `task`, `interrupt` | descriptors; task switches; delivery of exceptions and interrupts |
//! | interpreter | `exec/` | the handlers of operations, a file per kind |
//! | | `simd/`, `x87/` | SSE, AVX, and x87 |
//! | decoding | `lower` | converts a decoded instruction to an operation |
//! | | `key`, `block`, `blocks` | the key of a block; a basic block; all blocks, found by address |
//! | | `decode` | decoding code into blocks |
//! | | `region/` | the code of a compiled region, and the memory for it |
//! | compiler | `jit/` | the compiler of hot code (feature `jit`) |
//! | run | `executor` | a CPU with its code |
//! | | `find`, `hot` | finding the block to execute; compiling blocks that run often, and running compiled code |
//! | | `run`, `step` | the run loop; single instructions |
//! | | `complete`, `reader`, `results` | finishing an instruction after its run, with the caller's results |
//! | | `smm` | system-management mode |
//!
//! A module imports from its own layer and from lower ones, and imports form no circle. The same holds for the methods
//! of [`Cpu`] and [`Executor`]. Methods can be called without an import, but a method is called only from its own layer
//! and from higher layers. (`crates/slat/tests/architecture` checks this.)
//!
//! Guarantees:
//!
//! - An instruction that faults has changed nothing.
//! - LOCKed operations are atomic among CPUs on several threads.
//! - Overwritten code is not executed from the block cache: after a store by this CPU, from the next instruction on;
//!   after a store by another CPU, from the next block on; after a store by the VMM or a device, from the next run or
//!   serialising instruction on. An IRET to user code serialises only user code.
//!
//! The caller must call `slat_guard::install` before it runs a CPU.
//!
//! The CPU does not have AVX-512 and later extensions, and VMX.

mod ask;
mod block;
mod blocks;
mod bus_lock;
mod clock;
mod code;
mod code_pages;
#[cfg(feature = "jit")]
mod compiled;
mod complete;
mod counters;
mod cpu;
mod debug;
mod decode;
mod decoder;
mod derive;
mod devices;
mod exec;
mod executor;
mod features;
mod fetch;
mod find;
mod fixed;
mod flags;
mod flow;
mod frame;
mod hash;
mod heap;
#[cfg(feature = "jit")]
mod hot;
mod int;
mod intercept;
mod interrupt;
#[cfg(feature = "jit")]
mod jit;
mod key;
mod lazy;
mod lower;
pub mod machine;
mod mem;
mod mmio;
mod mode;
mod nested;
mod once;
mod op;
mod pool;
mod probe;
mod progress;
mod raised;
mod reader;
#[cfg(feature = "jit")]
mod region;
mod requests;
mod results;
mod run;
mod segment;
mod sem;
pub mod simd;
mod smm;
mod snapshot;
mod source;
pub mod state;
mod step;
pub mod svm;
mod sync;
mod task;
mod tlb;
mod tss;
mod watch;
mod watched;
mod x87;

pub use blocks::CODE_BYTES;
pub use code_pages::CodePages;
pub use counters::Counters;
pub use cpu::Cpu;
pub use decoder::DECODER_BYTES;
pub use devices::PORT_BYTES;
pub use executor::Executor;
pub use features::{Features, PKRU_OFFSET};
pub use heap::OutOfMemory;
#[cfg(feature = "jit")]
pub use jit::{Compile, CompiledCode, Compiler, Tier};
pub use machine::{
    Access, BusLocks, Exit, Fault, GuestFlush, HostPage, HypercallInstruction, HypercallOutcome,
    Hypercalls, Machine, Mmu, MsrFault, NestedPaging, Paging, ProbeHit, ProbeKind,
};
pub use probe::Probe;
pub use requests::Requests;
pub use smm::{BadSmram, SMRAM_BYTES, SMRAM_OFFSET, SmramMap, interrupted_vmcb};
pub use state::{Events, Exception, F80, Segment, State, Table};
pub use watch::{Breakpoints, Debugger};

/// Exception vectors.
#[allow(missing_docs)]
pub mod vector {
    pub const DE: u8 = 0;
    pub const DB: u8 = 1;
    pub const NMI: u8 = 2;
    pub const BP: u8 = 3;
    pub const OF: u8 = 4;
    pub const BR: u8 = 5;
    pub const UD: u8 = 6;
    pub const NM: u8 = 7;
    pub const DF: u8 = 8;
    pub const TS: u8 = 10;
    pub const NP: u8 = 11;
    pub const SS: u8 = 12;
    pub const GP: u8 = 13;
    pub const PF: u8 = 14;
    pub const MF: u8 = 16;
    pub const AC: u8 = 17;
    pub const MC: u8 = 18;
    pub const XM: u8 = 19;
}
