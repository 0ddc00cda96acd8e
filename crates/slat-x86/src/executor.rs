//! A CPU together with the code that it executes.
//!
//! Instructions act on a [`Cpu`]. Blocks and compiled code belong to the [`Executor`], which instructions cannot
//! access. So the functions that execute instructions cannot free the running block.

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

/// A software CPU that can run. [`Executor::try_new`] allocates all memory that running needs.
///
/// An executor dereferences to its [`Cpu`], so it has all methods of the CPU.
pub struct Executor {
    pub(crate) cpu: Cpu,
    pub(crate) blocks: Blocks,
    /// The instruction that waits for data of its MMIO reads, if the caller has provided data.
    pub(crate) reader: Option<Reader>,
    #[cfg(feature = "jit")]
    pub(crate) client: Option<Client>,
    /// The base of CS for which the current targets were stored. In code with segments, targets are valid only for this
    /// base.
    #[cfg(feature = "jit")]
    pub(crate) code_base: u64,
    /// The RIP at which `attention` ended the last run. A region at which runs often end so is hot.
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
    /// the host has. CPUs that share memory must get the same `code`, through which they learn of each other's stores
    /// to code.
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

    /// Returns the heap bytes that the blocks and the copies of their code would use if each of the two allocated
    /// `more` further bytes.
    pub(crate) fn heap_bytes(&self, more: usize) -> usize {
        self.blocks.heap_bytes(more) + self.cpu.code.snapshots.heap_bytes(more)
    }

    /// Frees all blocks, and the copies of their code. Call while no block is running.
    pub(crate) fn forget_blocks(&mut self) {
        self.blocks.clear();
        self.cpu.forget_targets();
        // SAFETY: all of this executor's blocks that referred to these snapshots are now freed or empty, and no target
        // refers to a snapshot. Blocks of another executor that refer to them are freed before any code uses them: see
        // `pair`.
        unsafe { self.cpu.code.snapshots.clear() };
    }

    /// Makes sure that the executor's blocks belong to its CPU. Call before using blocks.
    ///
    /// An executor lends its CPU, so safe code can exchange the CPUs of two executors. The blocks would then refer to
    /// snapshots of another CPU. To detect this, an executor's blocks and its CPU's snapshots store the same number. If
    /// the numbers differ, this function empties both, and gives them a new number.
    pub(crate) fn pair(&mut self) {
        if self.blocks.pair != self.cpu.code.snapshots.pair {
            self.forget_blocks();
            self.number();
        }
    }

    /// Gives the blocks and the CPU's snapshots a new number that was never used before.
    fn number(&mut self) {
        static PAIRS: AtomicU64 = AtomicU64::new(1);
        let pair = PAIRS.fetch_add(1, Ordering::Relaxed);
        (self.blocks.pair, self.cpu.code.snapshots.pair) = (pair, pair);
    }

    /// Whether blocks are compiled before they run for the first time: never, in builds without the compiler.
    #[cfg(not(feature = "jit"))]
    pub(crate) fn compiles_at_once(&self) -> bool {
        false
    }
}
