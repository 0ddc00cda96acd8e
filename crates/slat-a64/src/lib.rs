//! A software AArch64 processor.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! A [`Cpu`] has a [`State`], translations and decoded code. It executes at EL0 and EL1 against a [`Hypervisor`], which
//! has the physical memory and the system registers of devices, and takes EL1's exceptions. [`Cpu::run`] ends when the
//! embedder is needed: [`Leave`].
//!
//! Below that, [`run::step`] decodes and executes an instruction on a [`State`] against a [`Machine`], which has memory
//! by virtual addresses. [`run::run_block`] executes a decoded [`Block`]. Execution ends with an [`Exit`], for example
//! at an exception, which the caller lets EL1 take ([`State::take_stop`]) or serves itself.
//!
//! The meaning of instructions is written once, as functions of operations that a *tier* provides: the interpreter's
//! tier computes with numbers, and the compiler's tier emits code. A meaning has no branch that depends on a value.
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
//! | | `stage1/` | translation: the parameters of the regime, the walk, permissions, memory types |
//! | | `debugger` | the breakpoints, watchpoints and steps of a debugger outside of the guest |
//! | | `state` | the architectural state |
//! | | `debug` | software step, breakpoints and watchpoints |
//! | | `returning` | the return from an exception |
//! | meaning | `tier` | what a tier provides |
//! | | `meaning/` | what each instruction does, a file per kind |
//! | machine | `memory` | the memory by virtual addresses, and the other services of the machine |
//! | | `hypervisor` | the machine below stage 1 |
//! | | `probes` | the addresses whose accesses a debugger outside of the guest wants to know of |
//! | | `tlb`, `code`, `caches` | the software TLB; decoded code; both, and the probes |
//! | | `mmu/` | the memory of a processor with translation, over the machine below |
//! | | `system` | accesses to system registers, system instructions, and their traps |
//! | | `syndrome` | the syndrome of an access to a device, and its completion |
//! | interpreter | `now` | the tier that computes at once |
//! | | `exception` | syndromes, and how EL1 takes exceptions and interrupts |
//! | | `run` | steps, blocks, and why execution ends |
//! | compiler | `ran` | what a run of compiled code has done |
//! | | `jit/`, `interpreted` | the compiler; what is in its place without its feature |
//! | processor | `cpu` | a processor with its translations: runs until its embedder is needed |
//! | | `compiling` | its compiler |
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
//! The decoder is our own. A processor needs the fields of an encoding, by groups that have a meaning in common, and
//! the certainty that everything else is UNDEFINED; a disassembler's operands would have to be turned back into fields.
//! Of the crates that can be had, `fARM64` 0.1 has the right coverage and no dependencies, but it is written by hand
//! like ours, returns 112 bytes of operands, and has one release; `yaxpeax-arm` and `disarm64` lack newer extensions or
//! checks of what is UNDEFINED; `bad64` is C. Arm's machine-readable specification decides instead: `tests/oracle` has
//! its table of all encodings, and checks that the decoder accepts words of exactly those encodings that the processor
//! has.
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
//! absent. Writes to the registers of translation have their effect at once, also before the next ISB.
//!
//! AT and cache maintenance set no flags in descriptors. TLBI is for other processors, too, where its name says so:
//! then the run leaves with [`Leave::Invalidated`], and the embedder has all other processors drop what is invalid
//! before this one goes on.
//!
//! # Missing
//!
//! EL2 and EL3, and AArch32. The registers of timers, interrupt controllers, performance monitors and
//! caches are the [`Hypervisor`]'s. Debug state, the debug communication channel, and watchpoints of DC IVAC. The
//! interpreter computes floating point by integers alone, which is slow.

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

/// Whether the processor can execute `word` as an instruction: whether `word` is not UNDEFINED at every level.
pub fn is_defined(word: u32) -> bool {
    decode::decode(word).is_some()
}
