//! A CPU with the code that it executes.
//!
//! Instructions act on a [`Cpu`]. Blocks and compiled code belong to the [`Executor`], and instructions have no access
//! to them. So the interpreter's functions cannot free the running block.

use crate::blocks::Blocks;
use crate::code_pages::CodePages;
use crate::heap::OutOfMemory;
#[cfg(feature = "jit")]
use crate::jit::Client;
use crate::reader::Reader;
use crate::sync::Arc;
use crate::{Cpu, decoder, simd};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};

/// A software CPU that can run. All memory that running needs is allocated when the executor is made; see
/// [`Executor::try_new`].
///
/// An executor dereferences to its [`Cpu`], so it has all methods of the CPU.
pub struct Executor {
    pub(crate) cpu: Cpu,
    pub(crate) blocks: Blocks,
    /// The unfinished instruction, if the caller has provided data for its MMIO reads.
    pub(crate) reader: Option<Reader>,
    #[cfg(feature = "jit")]
    pub(crate) client: Option<Client>,
    /// The base of CS with which the present targets were stored. Targets of code with segments are valid only for this
    /// base.
    #[cfg(feature = "jit")]
    pub(crate) code_base: u64,
    /// The RIP at which `attention` ended the last run. Code that is found there repeatedly is hot.
    #[cfg(feature = "jit")]
    pub(crate) interrupted: Option<u64>,
}

impl Deref for Executor {
    type Target = Cpu;
    #[inline(always)]
    fn deref(&self) -> &Cpu {
        &self.cpu
    }
}

impl DerefMut for Executor {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Cpu {
        &mut self.cpu
    }
}

// SAFETY: the blocks belong to this executor alone. Their host addresses are addresses of guest memory, which any
// thread may access by guarded accesses, or of compiled code, which the regions keep alive.
unsafe impl Send for Executor {}

impl Executor {
    /// Makes a CPU in its state after RESET, with all memory that running needs: about one MiB, most of which the host
    /// provides at first use. The blocks of decoded code need more, up to [`CODE_BYTES`](crate::CODE_BYTES).
    ///
    /// The first CPU of a process also builds the tables of the instruction decoder, and finds out which instructions
    /// the host has. CPUs that share memory also share `code`, by which they learn of each other's stores to code.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the host has no memory.
    pub fn try_new(code: Arc<CodePages>) -> Result<Self, OutOfMemory> {
        decoder::build_tables()?;
        simd::detect();
        let mut executor = Self {
            cpu: Cpu::try_new(code)?,
            blocks: Blocks::try_new()?,
            reader: None,
            #[cfg(feature = "jit")]
            client: None,
            #[cfg(feature = "jit")]
            code_base: 0,
            #[cfg(feature = "jit")]
            interrupted: None,
        };
        executor.number();
        Ok(executor)
    }

    /// Returns the heap bytes of the blocks of decoded code, the copies of the code, and their indices: at most
    /// [`CODE_BYTES`](crate::CODE_BYTES).
    pub fn code_bytes(&self) -> usize {
        self.heap_bytes(0)
    }

    /// Returns the heap bytes that the blocks and the copies of their code would use after `more` further bytes were
    /// allocated for each of the two.
    pub(crate) fn heap_bytes(&self, more: usize) -> usize {
        self.blocks.heap_bytes(more) + self.cpu.code.snapshots.heap_bytes(more)
    }

    /// Frees all blocks, and the copies of their code. Call while no block is running.
    pub(crate) fn forget_blocks(&mut self) {
        self.blocks.clear();
        self.cpu.forget_targets();
        // SAFETY: all blocks of this pair that referred to snapshots are now freed or empty, and no target refers to a
        // snapshot. Blocks of another pair are freed before any code uses them: see `pair`.
        unsafe { self.cpu.code.snapshots.clear() };
    }

    /// Makes sure that the executor's blocks belong to its CPU. Call before using blocks.
    ///
    /// An executor lends its CPU, so safe code can exchange the CPUs of two executors. Blocks, and the snapshots that
    /// they refer to, would then belong to different CPUs. So an executor's blocks and its CPU's snapshots store the
    /// same number. If the numbers differ, both are emptied and get a new number.
    pub(crate) fn pair(&mut self) {
        if self.blocks.pair != self.cpu.code.snapshots.pair {
            self.forget_blocks();
            self.number();
        }
    }

    /// Gives the blocks and the CPU's snapshots a new number, which no other pair has ever had.
    fn number(&mut self) {
        static PAIRS: AtomicU64 = AtomicU64::new(1);
        let pair = PAIRS.fetch_add(1, Ordering::Relaxed);
        (self.blocks.pair, self.cpu.code.snapshots.pair) = (pair, pair);
    }

    /// Whether blocks are compiled before they run for the first time. This is never the case without a compiler.
    #[cfg(not(feature = "jit"))]
    pub(crate) fn compiles_at_once(&self) -> bool {
        false
    }
}
