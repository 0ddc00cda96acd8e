//! A software AArch64 processor.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! A [`Cpu`] is a processor with stage 1 translation. It executes guest code at EL0 and EL1, and takes the exceptions of
//! EL1. The machine below it, a [`Hypervisor`], has the memory and the devices.
//!
//! [`run::step`] decodes and executes one instruction. A [`State`] holds the registers of EL0 and EL1, and a
//! [`Machine`] provides the memory. [`run::run_block`] executes a decoded [`Block`]. Execution ends with an [`Exit`],
//! for example at an exception. The caller lets EL1 take the exception ([`State::take_stop`]), or serves it itself.
//!
//! The meaning of instructions is written once, as functions of operations that a *tier* provides: the interpreter's
//! tier computes with numbers, and a compiler's tier can emit code. A meaning has no branch that depends on a value.
//! Vector instructions are functions of whole registers, which a tier calls.
//!
//! | layer | file | idea |
//! |---|---|---|
//! | base | `bits`, `width` | fields of words, numbers of a given width; the widths of registers |
//! | | `crc` | the CRC instructions' sums |
//! | | `pstate` | PSTATE without the flags |
//! | | `abort` | why an access fails: in stage 1, or in the machine below |
//! | instructions | `simd/` | Advanced SIMD and floating point: decoding, and what each function computes |
//! | | `insn` | decoded instructions |
//! | | `decode/` | from a word to an instruction |
//! | state | `registers` | the table of system registers: name, rights, reset value, writable bits |
//! | | `state` | the architectural state |
//! | | `stage1/` | the walk of EL1's tables |
//! | | `returning` | the return from an exception |
//! | meaning | `tier` | what a tier provides |
//! | | `meaning/` | what each instruction does, a file per kind |
//! | machine | `memory` | the memory, and the other services of the machine |
//! | | `system` | accesses to system registers, system instructions, and their traps |
//! | | `hypervisor` | what a processor with stage 1 needs of the machine below |
//! | | `syndrome` | what a load or store does that a device completes |
//! | interpreter | `now` | the tier that computes at once |
//! | | `exception` | syndromes, and how EL1 takes exceptions and interrupts |
//! | | `run` | steps, blocks, and why execution ends |
//! | translation | `tlb`, `code`, `caches` | what the processor keeps: translations, decoded code |
//! | | `mmu/` | accesses by virtual addresses |
//! | processor | `cpu` | a processor that takes EL1's exceptions, until its embedder is needed |
//!
//! # Promises
//!
//! - An instruction that ends early, by a fault or an exception, has changed nothing. Base registers are written back
//!   after the access. An instruction with several stores checks all of them before the first store.
//! - An exclusive store, and each operation of LSE, is one compare and swap of the [`Memory`]. So it is atomic with
//!   respect to processors on other threads and their plain stores, without a lock. An exclusive store compares the
//!   value that the exclusive load has loaded.
//! - Where the architecture leaves a result to the implementation, or calls it CONSTRAINED UNPREDICTABLE, the result
//!   is a state that EL0 can have.
//!
//! # The decoder
//!
//! The decoder is our own. A processor needs the fields of an encoding, in groups with a common meaning, and must know
//! that all other words are UNDEFINED. A disassembler's operands would have to be converted back to fields. Of the
//! existing crates, `fARM64` 0.1 has the right coverage and no dependencies, but it is written by hand like ours,
//! returns 112 bytes of operands, and has one release. `yaxpeax-arm` and `disarm64` lack newer extensions or checks of
//! UNDEFINED words. `bad64` is written in C. Arm's machine-readable specification checks our decoder instead:
//! `tests/oracle` has its table of all encodings, and tests that the decoder accepts words of exactly those encodings
//! that the processor has.
//!
//! # Extensions
//!
//! The processor has CRC32, LSE, RDM, FP16, DotProd, LRCPC and LRCPC2, FlagM and FlagM2, FRINTTS, DIT, SB, and DPB.
//! Hints of pointer authentication and branch targets are NOPs. All other instructions of these two extensions are
//! UNDEFINED, and so are SVE and SME. `tests/oracle/missing.rs` lists the missing extensions.
//!
//! # Missing
//!
//! These parts are missing: debugging; EL2 and EL3; AArch32; the compiler.
//! The [`Hypervisor`] provides the registers that identify the processor's place, the timer and the caches. Floating
//! point is computed with integers alone, which is slow.

#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod abort;
mod bits;
mod caches;
mod code;
mod cpu;
mod crc;
mod decode;
pub mod exception;
pub mod hypervisor;
mod insn;
mod meaning;
pub mod memory;
mod mmu;
mod now;
pub mod pstate;
mod registers;
mod returning;
pub mod run;
mod simd;
mod stage1;
pub mod state;
mod syndrome;
mod system;
mod tier;
mod tlb;
mod width;

pub use abort::{Abort, Fault, Right, Stage2};
pub use cpu::{Cpu, Leave, Pending};
pub use exception::Interrupt;
pub use hypervisor::{Hypervisor, Page};
pub use insn::{AtomicOp, Barrier, Hint, Order, SystemName};
pub use memory::{AddressTranslation, Invalidation, Machine, Maintenance, Memory};
pub use now::Stop;
pub use pstate::Pstate;
pub use registers::{is_writable, system_registers};
pub use run::{Block, Exit};
pub use state::{Exclusive, State};
pub use syndrome::Syndrome;
pub use tier::{Access, Exception, Kind};

/// Whether the processor can execute `word` as an instruction: whether `word` is not UNDEFINED at every level.
pub fn is_defined(word: u32) -> bool {
    decode::decode(word).is_some()
}
