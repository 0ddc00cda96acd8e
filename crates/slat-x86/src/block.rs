//! One basic block: decoded operations, and the code bytes from which they were decoded, to compare them with memory.

use crate::heap::OutOfMemory;
use crate::key::Key;
use crate::op::Op;
use crate::pool::{List, Pool};
#[cfg(feature = "jit")]
use crate::region::{Entrance, Region, Tier, WARM};
use crate::snapshot::Place;
#[cfg(feature = "jit")]
use crate::snapshot::Snapshot;
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::cell::Cell;
use std::ptr::NonNull;

/// The greatest number of operations of a block.
pub(crate) const MAX_OPS: usize = 48;
/// A block with at least this number of code bytes gets no further instruction. So the offsets of its instructions fit
/// into a byte.
pub(crate) const MAX_BYTES: usize = 200;
/// The greatest number of code bytes of a block. The block's last instruction starts before [`MAX_BYTES`].
pub(crate) const LONGEST: usize = MAX_BYTES + 16;
/// The greatest number of operations for one instruction: its own operation and a check.
const PER_INSTRUCTION: usize = 2;

/// The block that ran next after another block's last run.
#[derive(Clone, Copy)]
struct Next {
    block: NonNull<Block>,
    ops: *const Op,
}

/// A decoded basic block.
///
/// A block is rarely in the host's first-level data cache. So the block's first cache line has the fields that identify
/// the block, and the second line has the fields that are needed to run it. While a block runs, the processor
/// prefetches both lines of the next block.
#[repr(C, align(64))]
pub(crate) struct Block {
    pub(crate) key: Key,
    /// The page of the block's first byte. `None`: the block is empty, or holds code that runs only once (see `once`).
    pub(crate) first: Option<Place>,
    next: Cell<Option<Next>>,
    /// The number of further entries until the block is warm: then it has run often enough to be compiled.
    #[cfg(feature = "jit")]
    pub(crate) heat: Cell<u32>,
    /// The tier for which compilation was requested. `None`: no compilation was requested.
    #[cfg(feature = "jit")]
    pub(crate) asked: Cell<Option<Tier>>,
    /// Whether the block's code crosses into a second page.
    crosses: bool,
    /// The number of code bytes in the first page.
    split: u8,
    /// The number of instructions in `ops`.
    pub(crate) count: u8,
    /// The decoded operations: none in an empty block.
    pub(crate) ops: List<Op>,
    /// The compiled region that contains this block, and the region's entry point at this block.
    #[cfg(feature = "jit")]
    pub(crate) entrance: Option<Entrance>,
    bytes: List<u8>,
    /// The second page, if the last instruction crosses into it.
    pub(crate) second: Option<Place>,
}

#[cfg(feature = "jit")]
const _: () = assert!(std::mem::offset_of!(Block, ops) == 64 && size_of::<Block>() == 128);

impl Block {
    fn empty() -> Self {
        Self {
            key: Key {
                lin: 0,
                rip: 0,
                mode: 0,
            },
            first: None,
            next: Cell::new(None),
            #[cfg(feature = "jit")]
            heat: Cell::new(WARM),
            #[cfg(feature = "jit")]
            asked: Cell::new(None),
            crosses: false,
            split: 0,
            count: 0,
            ops: List::empty(),
            #[cfg(feature = "jit")]
            entrance: None,
            bytes: List::empty(),
            second: None,
        }
    }

    /// Makes an empty block in `pool`, with space for `max_ops` operations.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    ///
    /// # Safety
    /// - The block is not used after the pool is cleared or dropped.
    pub(crate) unsafe fn with_room(
        pool: &mut Pool,
        max_ops: usize,
    ) -> Result<NonNull<Self>, OutOfMemory> {
        // `max_ops` counts one operation per instruction, but the last instruction may need [`PER_INSTRUCTION`]
        // operations.
        let (ops, longest) = (max_ops - 1 + PER_INSTRUCTION, LONGEST.min(16 * max_ops));
        let mut block = Self::empty();
        // SAFETY: the block, and with it the lists, is not used after the pool is cleared or dropped, as this
        // function's `# Safety` asks of its caller.
        unsafe {
            block.ops.reserve(pool, ops)?;
            block.bytes.reserve(pool, longest)?;
        }
        pool.put(block)
    }

    /// Makes a copy of `from` in `pool`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    ///
    /// # Safety
    /// - The new block is not used after the pool is cleared or dropped.
    pub(crate) unsafe fn copied(
        from: &Block,
        pool: &mut Pool,
    ) -> Result<NonNull<Self>, OutOfMemory> {
        let mut new = pool.put(Self::empty())?;
        // SAFETY: `new` was made just now. The block is not used after the pool is cleared or dropped, as this
        // function's `# Safety` asks of its caller.
        unsafe { new.as_mut().copy(from, pool)? };
        Ok(new)
    }

    /// Makes this block a copy of `from`.
    ///
    /// # Errors
    /// [`OutOfMemory`]: the block is unchanged.
    ///
    /// # Safety
    /// - The block is not used after the pool is cleared or dropped.
    pub(crate) unsafe fn copy(&mut self, from: &Block, pool: &mut Pool) -> Result<(), OutOfMemory> {
        // SAFETY: the block, and with it the lists, is not used after the pool is cleared or dropped, as this
        // function's `# Safety` asks of its caller.
        unsafe {
            self.ops.reserve(pool, from.ops.len())?;
            self.bytes.reserve(pool, from.bytes.len())?;
        }
        self.ops.clear();
        self.ops.extend(&from.ops);
        self.bytes.clear();
        self.bytes.extend(&from.bytes);
        (self.key, self.first, self.second) = (from.key, from.first, from.second);
        self.cool();
        (self.crosses, self.split, self.count) = (from.crosses, from.split, from.count);
        Ok(())
    }

    /// Empties the block. The caller appends to `ops`, and then calls [`fill`](Self::fill).
    pub(crate) fn clear(&mut self, key: Key) {
        self.key = key;
        (self.first, self.second) = (None, None);
        self.cool();
        self.ops.clear();
        self.bytes.clear();
        (self.crosses, self.split) = (false, 0);
    }

    /// Makes the block warm, so that its next entry requests compilation.
    pub(crate) fn heat_up(&self) {
        #[cfg(feature = "jit")]
        self.heat.set(0);
    }

    /// Makes the block cold: resets its counter of entries, and forgets its compiled code and its successor.
    pub(crate) fn cool(&mut self) {
        self.next.set(None);
        #[cfg(feature = "jit")]
        {
            self.heat.set(WARM);
            self.asked.set(None);
            self.entrance = None;
        }
    }

    /// Stores `bytes`, from which `ops` were decoded. The first `split` of them are in the first page.
    pub(crate) fn fill(&mut self, bytes: &[u8], split: usize) {
        self.crosses = split < bytes.len();
        self.split = split as u8;
        self.count = self.ops.iter().map(|op| op.count).sum();
        self.bytes.clear();
        self.bytes.extend(bytes);
    }

    /// Whether a CPU whose clock has this `stamp` may execute the block without reading memory, because memory is known
    /// to hold the block's code. Always `false` for a block in two pages.
    #[inline(always)]
    pub(crate) fn is_current(&self, stamp: u64) -> bool {
        let Some(Place { page, edition }) = self.first else {
            return false;
        };
        // SAFETY: the snapshots of a block live until all blocks are freed or emptied (`Snapshots::clear`); no thread
        // changes a snapshot meanwhile.
        let page = unsafe { page.as_ref() };
        page.stamp == stamp && page.edition == edition && !self.crosses
    }

    /// Records that `next` ran after this block, for [`next`](Self::next). Call [`cool`](Self::cool) on this block
    /// before `next` is freed.
    pub(crate) fn precede(&self, next: NonNull<Block>) {
        // SAFETY: `next` is a kept block that was not freed.
        let ops = unsafe { next.as_ref() }.ops.as_ptr();
        self.next.set(Some(Next { block: next, ops }));
    }

    /// Returns the block that ran next after this block's last run.
    #[inline(always)]
    pub(crate) fn next(&self) -> Option<NonNull<Block>> {
        self.next.get().map(|next| next.block)
    }

    /// Makes the processor prefetch the cache lines of the next block that the run loop will read.
    #[inline(always)]
    pub(crate) fn fetch_next(&self) {
        if let Some(Next { block, ops }) = self.next.get() {
            let line = block.as_ptr().cast::<i8>();
            // SAFETY: a prefetch accesses nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(line);
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(64));
                _mm_prefetch::<_MM_HINT_T0>(ops.cast());
                _mm_prefetch::<_MM_HINT_T0>(ops.cast::<i8>().wrapping_add(64));
            }
        }
    }

    /// Returns the code bytes in the first page, and those in the second.
    pub(crate) fn parts(&self) -> (&[u8], &[u8]) {
        self.bytes.split_at(self.split.into())
    }

    /// Returns the number of code bytes.
    pub(crate) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns the address of the host page that contains the first byte.
    #[inline(always)]
    pub(crate) fn page(&self) -> usize {
        // SAFETY: the snapshots of a block live until all blocks are freed or emptied (`Snapshots::clear`).
        (self.first).map_or(
            usize::MAX,
            |place| unsafe { place.page.as_ref() }.host as usize,
        )
    }

    /// Returns the code bytes of `op`.
    pub(crate) fn op_bytes(&self, op: &Op) -> &[u8] {
        let at = usize::from(op.offset);
        self.bytes.get(at..at + usize::from(op.len)).unwrap_or(&[])
    }
}

#[cfg(feature = "jit")]
impl Block {
    /// Whether memory holds the code of `region`, which can be entered at this block. Call while this block is current
    /// for its CPU and does not run.
    pub(crate) fn holds(&self, region: &Region) -> bool {
        region
            .parts()
            .all(|(lin, code)| self.holds_beside(lin, code))
    }

    /// Returns whether guest memory still contains `code` at `lin`, an address in the page of this block.
    /// [`holds`](Self::holds) checks the block's own code in this way.
    pub(crate) fn holds_beside(&self, lin: u64, code: &[u8]) -> bool {
        let Some(mut place) = self.first else {
            return false;
        };
        // SAFETY: the snapshots of a block live until all blocks are freed or emptied, and no block is running.
        let page = unsafe { place.page.as_mut() };
        let (at, _) = Snapshot::split(lin);
        page.copy(at, code.len()).is_ok() && page.has(at, code)
    }
}
