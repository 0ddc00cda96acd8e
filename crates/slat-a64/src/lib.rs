//! A software AArch64 processor.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! [`run::step`] decodes and executes an instruction on a [`State`], which holds the registers of EL0 and EL1, against a
//! [`Machine`], which has the memory. [`run::run_block`] executes a decoded [`Block`]. Execution ends with an [`Exit`],
//! for example at an exception, which the caller lets EL1 take ([`State::take_stop`]) or serves itself.
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
//! | instructions | `simd/` | Advanced SIMD and floating point: decoding, and what each function computes |
//! | | `insn` | decoded instructions |
//! | | `decode/` | from a word to an instruction |
//! | state | `registers` | the table of system registers: name, rights, reset value, writable bits |
//! | | `state` | the architectural state |
//! | | `returning` | the return from an exception |
//! | meaning | `tier` | what a tier provides |
//! | | `meaning/` | what each instruction does, a file per kind |
//! | machine | `memory` | the memory, and the other services of the machine |
//! | | `system` | accesses to system registers, system instructions, and their traps |
//! | interpreter | `now` | the tier that computes at once |
//! | | `exception` | syndromes, and how EL1 takes exceptions and interrupts |
//! | | `run` | steps, blocks, and why execution ends |
//!
//! # Promises
//!
//! - An instruction that ends early, by a fault or an exception, has changed nothing: base registers are written back
//!   after the access, and an instruction with several stores asks for all of them before the first.
//! - An exclusive store, and each operation of LSE, is one compare and swap of the [`Memory`]: atomic with processors on
//!   other threads, and with their plain stores, without a lock. An exclusive store compares the value that the
//!   exclusive load has loaded.
//! - What the architecture leaves to the implementation or calls CONSTRAINED UNPREDICTABLE does not leave the state that
//!   EL0 can have.
//!
//! # The decoder
//!
//! The decoder is our own. A processor needs the fields of an encoding, by groups that have a meaning in common, and the
//! certainty that everything else is UNDEFINED; a disassembler's operands would have to be turned back into fields.
//! Of the crates that can be had, `fARM64` 0.1 has the right coverage and no dependencies, but it is written by hand like
//! ours, returns 112 bytes of operands, and has one release; `yaxpeax-arm` and `disarm64` lack newer extensions or checks
//! of what is UNDEFINED; `bad64` is C. Arm's machine-readable specification decides instead: `tests/oracle` has its table
//! of all encodings, and checks that the decoder accepts words of exactly those encodings that the processor has.
//!
//! # Extensions
//!
//! CRC32, LSE, RDM, FP16, DotProd, LRCPC and LRCPC2, FlagM and FlagM2, FRINTTS, DIT, SB, and DPB. Pointer
//! authentication and branch targets are NOPs where they are hints, and otherwise UNDEFINED, as SVE and SME are. The
//! list of what is missing is `tests/oracle/missing.rs`.
//!
//! # Missing
//!
//! Translation: stage 1 and its TLB. Debug. Checks of the stack pointer's alignment. EL2 and EL3, and AArch32. The compiler.
//! The registers that identify the memory model, the timer and the caches are the [`Machine`]'s. Floating point is
//! computed by integers alone, which is slow.

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

/// Whether the instruction exists: whether the processor executes `word` other than as UNDEFINED at every level.
pub fn is_defined(word: u32) -> bool {
    decode::decode(word).is_some()
}
