//! All blocks of a CPU, found by address and verified against memory.
//!
//! A block is keyed by linear address, RIP and decoding mode. The CPU has a copy of each page of code (`snapshot`). As
//! long as the copy is known to equal memory, the page's blocks run without being compared with memory.
//!
//! New code is decoded into a block that is reused, because much code is executed only once, and keeping a block costs
//! more than decoding it. When code runs for the second time, its block is copied into a block that is kept. Only
//! complete blocks are copied, so a fetch that fails half-way changes no kept block.
//!
//! Kept blocks and copies of pages are allocated in a [`Pool`], and never move. Before they would exceed
//! [`CODE_BYTES`], all are freed at once, while no block runs. If there is no memory to keep a block, the block still
//! runs, and its code is decoded again the next time.

use crate::block::{Block, MAX_OPS};
use crate::hash::Seeded;
use crate::heap::{self, OutOfMemory, Pages, Zeroed};
use crate::key::Key;
use crate::pool::Pool;
#[cfg(feature = "jit")]
use crate::region::{Entrance, Step};
use std::collections::HashMap;
use std::ptr::NonNull;

/// The greatest number of heap bytes for one CPU's kept blocks, the copies of its code, and their indices. Enough for
/// about 120,000 blocks of six instructions in 2,000 pages.
pub const CODE_BYTES: usize = 64 << 20;
/// An upper bound of the bytes that one block and the copies of its code need.
pub(crate) const RESERVE: usize = 64 << 10;
/// The number of entries of the direct-mapped front table. A Linux guest soon keeps more blocks than a quarter of this
/// number. If another block has replaced a block in the table, finding the block costs several cache misses.
const FRONT: usize = 65536;
/// The number of bits in [`Seen`], and in one of its lines.
const SEEN: usize = 1 << 20;
const SEEN_LINE: usize = 512;
/// The number of bits of [`Seen`] that one address sets. All of these bits are in one line.
const SEEN_EACH: u32 = 3;

/// A Bloom filter of the addresses of code that ran recently. If two addresses collide, a block is kept needlessly, but
/// no other block is evicted because of the collision.
struct Seen {
    lines: [[u64; SEEN_LINE / 64]; SEEN / SEEN_LINE],
    set: usize,
}

// SAFETY: the type consists of integers, for which zeroes are a valid value.
unsafe impl Zeroed for Seen {}

impl Seen {
    /// Adds the address `lin`. Returns whether the address may have been added before.
    fn note(&mut self, lin: u64) -> bool {
        if self.set >= SEEN / 4 {
            self.lines.as_flattened_mut().fill(0);
            self.set = 0;
        }
        // The multiplication gives different hashes to addresses that are close together, and to addresses at the same
        // offset in neighbouring pages.
        let mut hash = lin.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut take = |bits: u32| {
            hash = hash.rotate_left(bits);
            hash as usize & ((1 << bits) - 1)
        };
        let line = &mut self.lines[take((SEEN / SEEN_LINE).ilog2())];
        let mut new = 0;
        for _ in 0..SEEN_EACH {
            let bit = take(SEEN_LINE.ilog2());
            let word = &mut line[bit / 64];
            new += usize::from(*word >> (bit % 64) & 1 == 0);
            *word |= 1 << (bit % 64);
        }
        self.set += new;
        new == 0
    }
}

/// Kept blocks by address, direct-mapped.
struct Front([Option<NonNull<Block>>; FRONT]);

// SAFETY: zeroes are `None`, as Rust guarantees for an `Option` of a `NonNull`.
unsafe impl Zeroed for Front {}

impl Front {
    #[inline(always)]
    fn at(&mut self, lin: u64) -> &mut Option<NonNull<Block>> {
        &mut self.0[(lin ^ lin >> 12) as usize & (FRONT - 1)]
    }
}

/// The tables by which blocks are found.
struct Tables {
    seen: Seen,
    front: Front,
}

// SAFETY: zeroes are a valid value of both fields, because both types are `Zeroed`.
unsafe impl Zeroed for Tables
where
    Seen: Zeroed,
    Front: Zeroed,
{
}

/// All blocks of a CPU.
pub(crate) struct Blocks {
    /// A number that `Blocks` and the CPU's `Snapshots` (copies of pages of code) share if these blocks refer to those
    /// copies.
    pub(crate) pair: u64,
    kept: HashMap<Key, NonNull<Block>, Seeded>,
    /// The memory of the blocks in `kept` is allocated here.
    pool: Pool,
    /// The memory of `once` and `single` is allocated here.
    _own: Pool,
    /// The block into which new code is decoded. It is reused for code that is not kept.
    pub(crate) once: NonNull<Block>,
    /// The block of a single-stepped instruction.
    pub(crate) single: NonNull<Block>,
    tables: Pages<Tables>,
    /// The block that was executed last, if it is alive.
    last: Option<NonNull<Block>>,
}

impl Blocks {
    pub(crate) fn try_new() -> Result<Self, OutOfMemory> {
        let mut own = Pool::default();
        // SAFETY: these blocks' own pool is never cleared, and lives as long as the blocks.
        let [once, single] = unsafe {
            [
                Block::with_room(&mut own, MAX_OPS)?,
                Block::with_room(&mut own, 1)?,
            ]
        };
        Ok(Self {
            pair: 0,
            kept: HashMap::with_hasher(Seeded::new()),
            pool: Pool::default(),
            _own: own,
            once,
            single,
            tables: Pages::zeroed()?,
            last: None,
        })
    }

    /// Returns the heap bytes that the kept blocks and their index use after `more` bytes are taken from the pool.
    pub(crate) fn heap_bytes(&self, more: usize) -> usize {
        let entry = size_of::<(Key, NonNull<Block>)>();
        self.pool.bytes_with(more) + heap::map_bytes(self.kept.capacity(), entry)
    }

    /// Allocates memory in the index for one more block. If there is no memory for the index, the block will not be
    /// kept.
    pub(crate) fn reserve(&mut self) {
        let _ = self.kept.try_reserve(1);
    }

    /// Returns the block with this key if a CPU whose clock has this `stamp` may execute it without reading memory, and
    /// the block is easy to find: it ran after the last block before, or it is in the front table.
    #[inline(always)]
    pub(crate) fn current(&mut self, key: &Key, stamp: u64) -> Option<NonNull<Block>> {
        // SAFETY: the last block is alive: all blocks are freed at once, while no block runs, and then `last` is
        // cleared.
        let last = self.last.map(|last| unsafe { last.as_ref() });
        let is_it = |found: NonNull<Block>| {
            // SAFETY: `found` is in the front table, or is the recorded successor of a block that is alive. In both
            // cases `found` is alive.
            let block = unsafe { found.as_ref() };
            block.key == *key && block.is_current(stamp)
        };
        if let Some(found) = last.and_then(Block::next)
            && is_it(found)
        {
            return Some(found);
        }
        let found = *self.tables.front.at(key.lin);
        if let Some(found) = found
            && is_it(found)
        {
            if let Some(last) = last {
                last.precede(found);
            }
            return Some(found);
        }
        None
    }

    /// Returns the block with this key if it is in the front table.
    pub(crate) fn in_front(&mut self, key: &Key) -> Option<NonNull<Block>> {
        let found = *self.tables.front.at(key.lin);
        // SAFETY: blocks in the table are alive.
        found.filter(|block| unsafe { block.as_ref() }.key == *key)
    }

    /// Puts a kept block into the front table.
    pub(crate) fn put_in_front(&mut self, kept: NonNull<Block>) {
        // SAFETY: a kept block is alive.
        let lin = unsafe { kept.as_ref() }.key.lin;
        *self.tables.front.at(lin) = Some(kept);
    }

    /// Records that code at `lin` runs. Returns whether the code may have run recently.
    pub(crate) fn note(&mut self, lin: u64) -> bool {
        self.tables.seen.note(lin)
    }

    /// Call when `block` begins to run.
    #[inline(always)]
    pub(crate) fn begin(&mut self, block: &Block) {
        self.last = Some(NonNull::from(block));
    }

    /// Returns the kept block with this key. The block is alive until all blocks are freed.
    pub(crate) fn kept(&self, key: &Key) -> Option<NonNull<Block>> {
        self.kept.get(key).copied()
    }

    /// Returns the instruction of compiled code whose guarded access is at host address `address`.
    #[cfg(feature = "jit")]
    pub(crate) fn step_at(&self, address: usize) -> Option<*const Step> {
        self.kept.values().find_map(|block| {
            // SAFETY: a block in the map is alive until it is removed from the map.
            let entrance = unsafe { block.as_ref() }.entrance.as_ref()?;
            entrance.region.step_at(address)
        })
    }

    /// Attaches compiled code to the block with this key, if the block still exists and has no better code. The block
    /// and the compiled code will be compared with memory before they run. Returns whether the block had other compiled
    /// code. Call while no block is running.
    #[cfg(feature = "jit")]
    pub(crate) fn attach(&mut self, key: &Key, entrance: Entrance) -> bool {
        if let Some(&block) = self.kept.get(key) {
            // SAFETY: blocks in the map are alive, and no block is running.
            let block = unsafe { &mut *block.as_ptr() };
            if (block.entrance.as_ref()).is_some_and(|old| old.region.tier > entrance.region.tier) {
                return false;
            }
            if let Some(first) = &mut block.first {
                first.edition = 0;
            }
            return block.entrance.replace(entrance).is_some();
        }
        false
    }

    /// Frees the kept blocks, and empties `once` and `single`. Call while no block is running.
    pub(crate) fn clear(&mut self) {
        self.last = None;
        self.tables.front.0.fill(None);
        self.free();
        for block in [&mut self.once, &mut self.single] {
            // SAFETY: the block is alive as long as `self`; nothing else refers to it while no block is running.
            let block = unsafe { block.as_mut() };
            block.clear(block.key);
        }
    }

    /// Frees all blocks in the map. The caller must make sure that no reference to any of them is left.
    fn free(&mut self) {
        for (_, mut block) in self.kept.drain() {
            // SAFETY: the block is alive, and is removed from the map here; the caller has made sure that no reference
            // to it is left.
            unsafe { block.as_mut() }.cool();
        }
        // SAFETY: the map contained all blocks of the pool.
        unsafe { self.pool.clear() };
    }

    /// Keeps a copy of `once`. If there is a kept block with the same key, overwrites it. On failure that block is
    /// unchanged.
    pub(crate) fn keep(&mut self) -> Result<NonNull<Block>, OutOfMemory> {
        // SAFETY: the block is alive as long as `self`; nothing else refers to it while no block is running.
        let once = unsafe { self.once.as_ref() };
        if once.first.is_none() {
            return Err(OutOfMemory);
        }
        self.kept.try_reserve(1).map_err(|_| OutOfMemory)?;
        let kept = match self.kept.get(&once.key) {
            Some(&kept) => {
                // SAFETY: blocks in the map are alive, and nothing else refers to one while no block is running.
                let block = unsafe { &mut *kept.as_ptr() };
                // SAFETY: no code uses a block after the pool is cleared.
                unsafe { block.copy(once, &mut self.pool)? };
                kept
            }
            None => {
                // SAFETY: no code uses a block after the pool is cleared.
                let kept = unsafe { Block::copied(once, &mut self.pool)? };
                self.kept.insert(once.key, kept);
                kept
            }
        };
        *self.tables.front.at(once.key.lin) = Some(kept);
        Ok(kept)
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        // No block can run any more, because the CPU is being dropped.
        self.free();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_seen_from_its_second_run_on_until_much_other_code_has_run() {
        let mut seen = Pages::<Seen>::zeroed().unwrap();
        assert!(!seen.note(0x1000));
        assert!(seen.note(0x1000) && seen.note(0x1000));
        // The filter is cleared when a quarter of its bits are set. So it is not cleared before this number of
        // addresses was added.
        let pages = SEEN as u64 / 4 / u64::from(SEEN_EACH);
        let new = (1..pages).filter(|page| !seen.note(0x1000 + (page << 12)));
        assert!(
            new.count() as u64 > pages - pages / 50,
            "addresses are told apart"
        );
        assert!(seen.note(0x1000));
        for page in pages..4 * pages {
            seen.note(0x1000 + (page << 12));
        }
        assert!(seen.set <= SEEN / 4);
    }
}
