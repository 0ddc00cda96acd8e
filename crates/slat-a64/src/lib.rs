//! A software AArch64 processor.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! A [`Cpu`] has a [`State`], translations and decoded code. It executes guest code at EL0 and EL1, and takes EL1's
//! exceptions. The embedder implements a [`Hypervisor`], which has the physical memory and the system registers of
//! devices. [`Cpu::run`] returns a [`Leave`] when the embedder has to act.
//!
//! There is also an interface without translation: [`run::step`] decodes and executes an instruction on a [`State`] and
//! a [`Machine`], whose memory has virtual addresses. [`run::run_block`] executes a decoded [`Block`]. Execution ends
//! with an [`Exit`], for example at an exception. The caller then lets EL1 take the exception ([`State::take_stop`]),
//! or handles it itself.
//!
//! The meaning of each instruction is written once, as calls of functions that a *tier* provides: the interpreter's
//! tier computes with numbers, and the compiler's tier emits code. So the meaning has no branch that depends on a guest
//! value. Vector instructions are functions of whole registers, which a tier calls.
//!
//! | layer | file | idea |
//! |---|---|---|
//! | base | `bits`, `width` | fields of words, numbers of a given width; the widths of registers |
//! | | `crc` | the results of the CRC instructions |
//! | | `pstate` | PSTATE without the flags |
//! | | `abort` | why an access fails: stage 1 or the machine below refuses it |
//! | instructions | `simd/` | Advanced SIMD and floating point: decoding, and what each function computes |
//! | | `insn` | decoded instructions |
//! | | `decode/` | decodes an instruction word |
//! | state | `registers` | the table of system registers: name, rights, reset value, writable bits |
//! | | `stage1/` | translation: the parameters of the regime, the walk, permissions, memory types |
//! | | `debugger` | the breakpoints, watchpoints and steps of a debugger outside of the guest |
//! | | `state` | the architectural state |
//! | | `debug` | software step, breakpoints and watchpoints |
//! | | `returning` | the return from an exception |
//! | meaning | `tier` | what a tier provides |
//! | | `meaning/` | what each instruction does, a file per kind |
//! | machine | `memory` | the memory by virtual addresses, and the other services of the machine |
//! | | `hypervisor` | the machine below stage 1 |
//! | | `probes` | the addresses whose accesses are recorded for a debugger outside of the guest |
//! | | `tlb`, `code`, `caches` | the software TLB; decoded code; a struct of both and the probes |
//! | | `mmu/` | accesses by virtual address: translation, then the memory of the machine below |
//! | | `system` | accesses to system registers, system instructions, and their traps |
//! | | `syndrome` | the syndrome of an access to a device, and its completion |
//! | interpreter | `now` | the tier that computes at once |
//! | | `exception` | syndromes, and how EL1 takes exceptions and interrupts |
//! | | `run` | steps, blocks, and why execution ends |
//! | compiler | `ran` | what a run of compiled code has done |
//! | | `jit/`, `interpreted` | the compiler; its replacement in builds without the `jit` feature |
//! | processor | `cpu` | a processor with its translations: runs until its embedder has to act |
//! | | `compiling` | sets the processor's compiler |
//!
//! # Promises
//!
//! - An instruction that ends early, by a fault or an exception, has changed nothing. For that, base registers are
//!   written back only after the access. An instruction with several stores checks all of them before the first store.
//! - An exclusive store, and each operation of LSE, is one compare and swap of the [`Memory`]. So it is atomic with
//!   respect to processors on other threads and their plain stores, without a lock. An exclusive store compares the
//!   value that the exclusive load has loaded.
//! - Where the architecture leaves a result to the implementation, or calls it CONSTRAINED UNPREDICTABLE, the result
//!   is a state that EL0 can have.
//!
//! # The decoder
//!
//! This crate has its own decoder. A processor needs the fields of an encoding, grouped by common meaning, and must be
//! certain that every other word is UNDEFINED; a disassembler's operands would have to be turned back into fields. Of
//! the available crates, `fARM64` 0.1 has the right coverage and no dependencies, but it is written by hand like ours,
//! returns 112 bytes of operands, and has one release; `yaxpeax-arm` and `disarm64` lack newer extensions or checks of
//! what is UNDEFINED; `bad64` is C. Arm's machine-readable specification decides instead: `tests/oracle` has its table
//! of all encodings, and checks that the decoder accepts words of exactly those encodings that the processor has.
//!
//! # Extensions
//!
//! The processor has CRC32, LSE, RDM, FP16, DotProd, LRCPC and LRCPC2, FlagM and FlagM2, FRINTTS, DIT, SB, and DPB.
//! Hints of pointer authentication and branch targets are NOPs. All other instructions of these two extensions are
//! UNDEFINED, and so are SVE and SME. `tests/oracle/missing.rs` lists the missing extensions.
//!
//! # Translation
//!
//! Stage 1 has granules of 4, 16 and 64 KiB, 48 bits of addresses, 16 bits of ASIDs, hardware updates of access flag
//! and dirty state, hierarchical permissions, PAN, and TBI. UAO, EPAN, LPA, LPA2, LVA, TTST and TLBI of ranges are
//! absent. Writes to the registers that control translation take effect at once, even before the next ISB.
//!
//! AT and cache maintenance set no flags in descriptors. For a TLBI that also affects other processors (Inner or Outer
//! Shareable), the run ends with [`Leave::Invalidated`]. The embedder then makes all other processors drop the invalid
//! translations before this processor runs again.
//!
//! # Missing
//!
//! EL2, EL3 and AArch32 are missing, and so are Debug state, the debug communication channel, and watchpoints of DC
//! IVAC. The [`Hypervisor`] has to implement the registers of timers, interrupt controllers, performance monitors and
//! caches. The interpreter computes floating point with integers only, which is slow.

#![no_std]

extern crate alloc;
#[cfg(any(test, feature = "jit"))]
extern crate std;

pub mod abort;
mod bits;
mod caches;
mod code;
#[cfg(feature = "jit")]
mod compiling;
mod cpu;
mod crc;
mod debug;
mod debugger;
mod decode;
pub mod exception;
pub mod hypervisor;
mod insn;
#[cfg(not(feature = "jit"))]
#[path = "interpreted.rs"]
mod jit;
#[cfg(feature = "jit")]
mod jit;
mod meaning;
pub mod memory;
mod mmu;
mod now;
mod probes;
pub mod pstate;
mod ran;
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
pub use debugger::Debugger;
pub use exception::{Debug, Interrupt};
pub use hypervisor::{Hypervisor, Page};
pub use insn::{AtomicOp, Barrier, Hint, Order, SystemName};
#[cfg(feature = "jit")]
pub use jit::{Compile, Compiler};
pub use memory::{AddressTranslation, Invalidation, Machine, Maintenance, Memory};
pub use now::Stop;
pub use probes::AccessProbe;
pub use pstate::Pstate;
pub use registers::{BREAKPOINTS, WATCHPOINTS, is_writable, system_registers};
pub use run::{Block, Exit};
pub use state::{Exclusive, State};
pub use syndrome::Syndrome;
pub use tier::{Access, Exception, Kind};

/// Whether `word` is an instruction of this processor. If not, the word is UNDEFINED at every exception level.
pub fn is_defined(word: u32) -> bool {
    decode::decode(word).is_some()
}
