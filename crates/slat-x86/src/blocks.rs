//! All blocks of a CPU, found by address and verified against memory.
//!
//! A block is keyed by linear address, RIP and decoding mode. It is executed without a look at memory as long as the
//! copy of its page is good (`snapshot`).
//!
//! Code is decoded into a block that is reused for the next code: much code is executed only once, and keeping it costs
//! more than decoding it. Code that has run before is copied into a block that is kept. So every block that can be
//! found is complete: a fetch that fails half-way has changed no kept block.
//!
//! Kept blocks and copies of pages lie in a [`Pool`]: they never move and are freed only all at once, between blocks,
//! when they are about to exceed [`CODE_BYTES`]. If there is no memory to keep a block, it runs all the same, and is
//! decoded again the next time.

use crate::Cpu;
use crate::block::{Block, Key, MAX_OPS};
use crate::hash::Seeded;
use crate::heap::{OutOfMemory, Zeroed};
use crate::op::Break;
use crate::pool::Pool;
use crate::snapshot::Snapshot;
use std::collections::HashMap;
use std::ptr::NonNull;

/// The most heap bytes that the kept blocks of one CPU, the copies of its code and their indices may use: about 120,000
/// blocks of six instructions in 2,000 pages.
pub const CODE_BYTES: usize = 64 << 20;
/// More bytes than one block and its copies need.
const RESERVE: usize = 64 << 10;
/// Entries of the direct-mapped front table.
const FRONT: usize = 16384;
/// The number of bits in [`Seen`], and in one of its lines.
const SEEN: usize = 1 << 20;
const SEEN_LINE: usize = 512;
/// Bits that an address sets, all in one line.
const SEEN_EACH: u32 = 3;

/// Bloom filter of addresses that ran lately. A collision keeps a block needlessly; it evicts none.
pub(crate) struct Seen {
    lines: [[u64; SEEN_LINE / 64]; SEEN / SEEN_LINE],
    set: usize,
}

// SAFETY: integers.
unsafe impl Zeroed for Seen {}

impl Seen {
    /// Adds `lin`. Returns whether it may have been added before.
    fn note(&mut self, lin: u64) -> bool {
        if self.set >= SEEN / 4 {
            self.lines.as_flattened_mut().fill(0);
            self.set = 0;
        }
        // Neighbouring code, and code at one offset of neighbouring pages, is hashed to different bits.
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
pub(crate) struct Front([Option<NonNull<Block>>; FRONT]);

// SAFETY: zeroes are `None`, as Rust promises for an `Option` of a `NonNull`.
unsafe impl Zeroed for Front {}

impl Front {
    #[inline(always)]
    fn at(&mut self, lin: u64) -> &mut Option<NonNull<Block>> {
        &mut self.0[(lin ^ lin >> 12) as usize & (FRONT - 1)]
    }
}

/// All blocks of a CPU.
pub(crate) struct Blocks {
    kept: HashMap<Key, NonNull<Block>, Seeded>,
    snapshots: HashMap<u64, NonNull<Snapshot>, Seeded>,
    /// Has the blocks in `kept`, and the snapshots.
    pool: Pool,
    /// Holds the memory of the two other blocks.
    _own: Pool,
    /// The reused block, which is not kept.
    once: NonNull<Block>,
    /// The block of a single-stepped instruction.
    single: NonNull<Block>,
}

impl Blocks {
    pub(crate) fn try_new() -> Result<Self, OutOfMemory> {
        let mut own = Pool::default();
        // SAFETY: the pool is never cleared, and lives as long as the blocks.
        let [once, single] = unsafe {
            [
                Block::with_room(&mut own, MAX_OPS)?,
                Block::with_room(&mut own, 1)?,
            ]
        };
        Ok(Self {
            kept: HashMap::with_hasher(Seeded::new()),
            snapshots: HashMap::with_hasher(Seeded::new()),
            pool: Pool::default(),
            _own: own,
            once,
            single,
        })
    }

    /// Returns the heap bytes of the kept blocks, the snapshots and their indices if `more` bytes are
    /// taken from the pool.
    fn heap_bytes(&self, more: usize) -> usize {
        // A map fills at most seven eighths of a power of two of entries, and has a byte more for each.
        let index =
            |capacity: usize, entry: usize| (capacity * 8 / 7).next_power_of_two() * (entry + 1);
        self.pool.bytes_with(more)
            + index(self.kept.capacity(), size_of::<(Key, NonNull<Block>)>())
            + index(
                self.snapshots.capacity(),
                size_of::<(u64, NonNull<Snapshot>)>(),
            )
    }

    /// Whether one more block may exceed [`CODE_BYTES`].
    fn is_full(&mut self) -> bool {
        // If there is no memory for the index, no block will be kept.
        let _ = self.kept.try_reserve(1);
        let _ = self.snapshots.try_reserve(2);
        self.heap_bytes(RESERVE) > CODE_BYTES
    }

    /// Returns the snapshot of a page if there is one.
    pub(crate) fn known_snapshot(&self, key: u64) -> Option<NonNull<Snapshot>> {
        self.snapshots.get(&key).copied()
    }

    /// Returns the snapshot of a page, which may be new.
    ///
    /// # Errors
    /// [`OutOfMemory`] if there is none, and no memory for one.
    pub(crate) fn snapshot(&mut self, key: u64) -> Result<NonNull<Snapshot>, OutOfMemory> {
        if let Some(page) = self.known_snapshot(key) {
            return Ok(page);
        }
        self.snapshots.try_reserve(1).map_err(|_| OutOfMemory)?;
        let page = self.pool.put(Snapshot::new(key))?;
        self.snapshots.insert(key, page);
        Ok(page)
    }

    /// Returns a kept block.
    #[cfg(feature = "jit")]
    pub(crate) fn kept(&self, key: &Key) -> Option<&Block> {
        // SAFETY: blocks in the map are alive as long as they are in it; they are changed through `&mut self` only.
        self.kept.get(key).map(|block| unsafe { block.as_ref() })
    }

    /// Returns the instruction with the guarded access at a host address.
    #[cfg(feature = "jit")]
    pub(crate) fn step_at(&self, address: usize) -> Option<*const crate::jit::Step> {
        self.kept.values().find_map(|block| {
            // SAFETY: as in `kept`.
            let entrance = unsafe { block.as_ref() }.entrance.as_ref()?;
            entrance.region.step_at(address)
        })
    }

    /// Attaches compiled code to its block, if the block still exists and has no better code. The block and the
    /// compiled code are verified before they run next. Returns whether other code of the block was replaced. Call
    /// while no block is running.
    #[cfg(feature = "jit")]
    pub(crate) fn attach(&mut self, key: &Key, entrance: crate::jit::Entrance) -> bool {
        if let Some(&block) = self.kept.get(key) {
            // SAFETY: as in `kept`, and no block is running.
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

    /// Frees the kept blocks and the snapshots. Call while no block is running.
    pub(crate) fn clear(&mut self, front: &mut Front) {
        front.0.fill(None);
        self.free();
        for block in [&mut self.once, &mut self.single] {
            // SAFETY: alive as long as `self`; nothing else refers to it while no block is running.
            let block = unsafe { block.as_mut() };
            block.clear(block.key);
        }
    }

    /// Frees all blocks in the maps. The caller makes sure that no reference to one of them is left.
    fn free(&mut self) {
        for (_, mut block) in self.kept.drain() {
            // SAFETY: alive, removed from the map here; the caller's promise.
            unsafe { block.as_mut() }.cool();
        }
        self.snapshots.clear();
        // SAFETY: the maps had all of its pieces.
        unsafe { self.pool.clear() };
    }

    /// Keeps a copy of `once`, which replaces an old block with its key. On failure the old block is unchanged.
    fn keep(&mut self, front: &mut Front) -> Result<NonNull<Block>, OutOfMemory> {
        // SAFETY: alive as long as `self`; nothing else refers to it while no block is running.
        let once = unsafe { self.once.as_ref() };
        if once.first.is_none() {
            return Err(OutOfMemory);
        }
        self.kept.try_reserve(1).map_err(|_| OutOfMemory)?;
        let kept = match self.kept.get(&once.key) {
            Some(&kept) => {
                // SAFETY: blocks in the map are alive, and nothing else refers to one while no block is running.
                let block = unsafe { &mut *kept.as_ptr() };
                // SAFETY: nobody uses a block once the pool is cleared.
                unsafe { block.copy(once, &mut self.pool)? };
                kept
            }
            None => {
                // SAFETY: as above.
                let kept = unsafe { Block::copied(once, &mut self.pool)? };
                self.kept.insert(once.key, kept);
                kept
            }
        };
        *front.at(once.key.lin) = Some(kept);
        Ok(kept)
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        // The CPU is being dropped, so none of these blocks can run.
        self.free();
    }
}

impl Cpu {
    /// Returns the heap bytes of the blocks of decoded code and their index: at most [`CODE_BYTES`].
    pub fn code_bytes(&self) -> usize {
        self.blocks.heap_bytes(0)
    }

    /// Frees all blocks if one more may exceed [`CODE_BYTES`]. Call while no block is running.
    fn make_room(&mut self) {
        if self.blocks.is_full() {
            self.forget_blocks();
        }
    }

    /// Has a page looked up again before its code runs next.
    pub(crate) fn outdate_page(&mut self, lin: u64) {
        self.once.outdate();
        for user in [false, true] {
            let page = self.blocks.known_snapshot(Snapshot::key_of(lin, user));
            if let Some(mut page) = page {
                // SAFETY: alive as long as it is in the map. A running block does not look at its snapshots.
                unsafe { page.as_mut() }.outdate();
                self.forget_targets();
            }
        }
    }

    /// Frees all blocks. Call while no block is running.
    pub(crate) fn forget_blocks(&mut self) {
        self.last = None;
        self.blocks.clear(&mut self.fixed.front);
        self.forget_targets();
    }

    /// Returns the block at RIP, verified. It stays valid until the next call.
    #[inline(always)]
    pub(crate) fn find_block(&mut self) -> Result<NonNull<Block>, Break> {
        let rip = self.state.rip;
        let key = Key {
            lin: self.code_address(rip),
            rip,
            mode: self.mode,
        };
        // SAFETY: the last block is alive: blocks are freed all together, between blocks, and then `last` is cleared.
        let last = self.last.map(|last| unsafe { last.as_ref() });
        let stamp = self.clock.stamp;
        let is_it = |found: NonNull<Block>| {
            // SAFETY: as above: it is from the table, or has followed another block that is alive.
            let block = unsafe { found.as_ref() };
            block.key == key && block.is_current(stamp)
        };
        if let Some(found) = last.and_then(Block::next)
            && is_it(found)
        {
            return Ok(found);
        }
        if let Some(found) = *self.fixed.front.at(key.lin)
            && is_it(found)
        {
            if let Some(last) = last {
                last.precede(found);
            }
            return Ok(found);
        }
        self.find_block_slow(key)
    }

    #[cold]
    #[inline(never)]
    fn find_block_slow(&mut self, key: Key) -> Result<NonNull<Block>, Break> {
        self.counters.blocks_looked_up += 1;
        self.check_code_limit(key.rip)?;
        let mut is_known = false;
        if let Some(found) = *self.fixed.front.at(key.lin) {
            // SAFETY: blocks in the table are alive; nothing else refers to one while no block is running.
            let block = unsafe { &mut *found.as_ptr() };
            if block.key == key {
                if self.verify(block)? {
                    return Ok(found);
                }
                is_known = true;
            }
        }
        let eager = self.compiles_at_once();
        let seen = self.fixed.seen.note(key.lin) || eager;
        if seen
            && !is_known
            && let Some(&kept) = self.blocks.kept.get(&key)
        {
            // SAFETY: blocks in the map are alive; nothing else refers to one while no block is running.
            if self.verify(unsafe { &mut *kept.as_ptr() })? {
                *self.fixed.front.at(key.lin) = Some(kept);
                return Ok(kept);
            }
        }
        self.make_room();
        let once = self.blocks.once;
        // SAFETY: alive as long as the CPU; nothing else refers to it while no block is running.
        self.decode(unsafe { &mut *once.as_ptr() }, key, MAX_OPS, seen)?;
        match seen {
            true => {
                let kept = self.blocks.keep(&mut self.fixed.front).unwrap_or(once);
                #[cfg(feature = "jit")]
                self.adopt(kept, crate::jit::Tier::Baseline);
                if eager {
                    // SAFETY: alive until all are freed.
                    unsafe { kept.as_ref() }.heat_up();
                }
                Ok(kept)
            }
            false => Ok(once),
        }
    }

    /// Returns the one instruction at RIP as a block of its own. It stays valid until the next call.
    pub(crate) fn single_block(&mut self) -> Result<NonNull<Block>, Break> {
        let rip = self.state.rip;
        self.check_code_limit(rip)?;
        let key = Key {
            lin: self.code_address(rip),
            rip,
            mode: self.mode,
        };
        self.make_room();
        let found = self.blocks.single;
        // SAFETY: alive as long as the CPU; nothing else refers to it while no block is running.
        let single = unsafe { &mut *found.as_ptr() };
        if single.key != key || !self.holds_once(single)? {
            self.decode(single, key, 1, false)?;
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap;

    #[test]
    fn code_is_seen_from_its_second_run_on_until_much_other_code_has_run() {
        let mut seen = heap::Pages::<Seen>::zeroed().unwrap();
        assert!(!seen.note(0x1000));
        assert!(seen.note(0x1000) && seen.note(0x1000));
        // The filter can hold this number of addresses.
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
