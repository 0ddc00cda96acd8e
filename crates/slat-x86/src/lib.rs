//! A software x86-64 CPU.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! The crate has an interpreter of decoded basic blocks, and a compiler of those that run often. [`Cpu`] holds the
//! architectural [`State`] and runs it against a [`Machine`], which translates guest-virtual addresses to host
//! pages ([`Mmu`]) and serves CPUID, MSRs and the like. [`Cpu::run`] runs until it needs its caller and returns
//! the reason: [`Exit`].
//!
//! | layer | file | idea |
//! |---|---|---|
//! | base | `heap`, `pool`, `hash`, `sync` | allocations that may fail; memory freed at once; a hash; loom's parts |
//! | | `counters` | what the CPU counts of its work |
//! | | `clock` | when decoded code has to be checked again |
//! | | `decoder` | the tables of the instruction decoder |
//! | | `frame`, `source`, `tss` | what the delivery of an event pushes; the origins of events; the task-state segment |
//! | guest | `state` | the architectural registers |
//! | | `machine` | what the CPU needs from its machine, and its exits |
//! | sem | `int` | the operand sizes |
//! | | `sem/` | what integer instructions mean, whatever computes it |
//! | cpu | `cpu` | the CPU object |
//! | | `op`, `block`, `blocks` | the decoded operation; a basic block; all of them, found by address |
//! | | `snapshot`, `once` | the copies of code that blocks are compared with; code that is not kept |
//! | | `code_pages` | the pages with decoded code: what CPUs tell each other of stores to them |
//! | | `features` | the features in the guest's CPUID |
//! | | `fixed` | the memory that a CPU has from its creation |
//! | | `flags` | lazy arithmetic flags |
//! | | `tlb/`, `mmio` | the software TLB, of two levels; MMIO and port accesses, whose data the device model provides |
//! | | `debug`, `probe` | debug registers and single steps, of the guest and of KVM's API; probes, which neither sees |
//! | | `progress` | how long events have been delivered without an instruction |
//! | | `svm/` | nested virtualization by SVM |
//! | interpreter | `mem` | loads and stores |
//! | | `segment`, `interrupt`, `task` | descriptors; delivery of exceptions and interrupts; task switches |
//! | | `exec/` | the handlers of operations, a file per kind |
//! | | `simd/`, `x87/` | SSE, AVX, and x87 |
//! | decoding | `lower` | from an instruction to an operation |
//! | | `decode` | decoding code into blocks |
//! | compiler | `jit/` | the compiler of hot code (feature `jit`) |
//! | run | `run`, `complete`, `smm` | the run loop; finishing an instruction after its run; system-management mode |
//!
//! A module imports from its own layer and from lower ones (checked by `tests/architecture.rs`). Inside the `cpu` layer
//! modules import one another: a CPU holds blocks, whose operations hold functions that take the CPU.
//!
//! Promises:
//!
//! - An instruction that faults has changed nothing.
//! - LOCKed operations are atomic among CPUs on several threads.
//! - Code that was overwritten is not executed from the block cache. If this CPU has overwritten it, that holds from
//!   the next instruction on; if another CPU has, from the next block on; if the client or a device has, from the next
//!   run or serialising instruction on. An IRET to user code serialises user code alone.
//!
//! The caller has called `slat_guard::install` before it runs a CPU.
//!
//! Missing: AVX-512 and what came after it, interrupt and trap gates out of virtual-8086 mode and IRET into it (task
//! switches do both), VMX.

mod block;
mod blocks;
mod clock;
mod code_pages;
mod complete;
mod counters;
mod cpu;
mod debug;
mod decode;
mod decoder;
mod exec;
mod features;
mod fixed;
mod flags;
mod frame;
mod hash;
mod heap;
mod int;
mod interrupt;
#[cfg(feature = "jit")]
mod jit;
mod lower;
pub mod machine;
mod mem;
mod mmio;
mod once;
mod op;
mod pool;
mod probe;
mod progress;
mod run;
mod segment;
mod sem;
pub mod simd;
mod smm;
mod snapshot;
mod source;
pub mod state;
pub mod svm;
mod sync;
mod task;
mod tlb;
mod tss;
mod x87;

pub use blocks::CODE_BYTES;
pub use code_pages::CodePages;
pub use counters::Counters;
pub use cpu::Cpu;
pub use debug::{Breakpoints, Debugger};
pub use decoder::DECODER_BYTES;
pub use features::{Features, PKRU_OFFSET};
pub use heap::OutOfMemory;
#[cfg(feature = "jit")]
pub use jit::{Compile, CompiledCode, Compiler, Tier};
pub use machine::{
    Access, BusLocks, Exit, Fault, GuestFlush, HostPage, HypercallInstruction, HypercallOutcome,
    Hypercalls, Machine, Mmu, MsrFault, NestedPaging, Paging, ProbeHit, ProbeKind,
};
pub use mmio::PORT_BYTES;
pub use probe::Probe;
pub use smm::{BadSmram, SMRAM_BYTES, SMRAM_OFFSET, SmramMap, interrupted_vmcb};
pub use state::{Events, Exception, F80, Segment, State, Table};

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
