//! Finds the block to execute, and checks that memory still holds the block's code.

use crate::block::{Block, MAX_OPS};
use crate::blocks::{CODE_BYTES, RESERVE};
use crate::executor::Executor;
use crate::flow::Break;
use crate::key::Key;
#[cfg(feature = "jit")]
use crate::region::Tier;
use crate::snapshot::{Place, Snapshot};
use std::ptr::NonNull;

impl Executor {
    /// Frees all blocks if memory for one more block might exceed [`CODE_BYTES`]. Call while no block is running.
    fn make_room(&mut self) {
        self.blocks.reserve();
        // Reserve two snapshots: a block has code in at most two pages.
        self.code.snapshots.reserve(2);
        if self.heap_bytes(RESERVE) > CODE_BYTES {
            self.forget_blocks();
        }
    }

    /// Returns the block at RIP, after checking that its code equals memory. The block stays valid until the next call.
    #[inline(always)]
    pub(crate) fn find_block(&mut self) -> Result<NonNull<Block>, Break> {
        let rip = self.state.rip;
        let key = Key {
            lin: self.code_address(rip),
            rip,
            mode: self.mode,
        };
        let stamp = self.code.clock.stamp;
        match self.blocks.current(&key, stamp) {
            Some(found) => Ok(found),
            None => self.find_block_slow(key),
        }
    }

    #[cold]
    #[inline(never)]
    fn find_block_slow(&mut self, key: Key) -> Result<NonNull<Block>, Break> {
        self.counters.blocks_looked_up += 1;
        self.check_code_limit(key.rip)?;
        let known = self.blocks.in_front(&key);
        if let Some(found) = known {
            // SAFETY: blocks in the table are alive; nothing else refers to one while no block is running.
            if self.verify(unsafe { &mut *found.as_ptr() })? {
                return Ok(found);
            }
        }
        if known.is_none()
            && let Some(kept) = self.blocks.kept(&key)
        {
            // SAFETY: blocks in the map are alive; nothing else refers to one while no block is running.
            if self.verify(unsafe { &mut *kept.as_ptr() })? {
                self.blocks.put_in_front(kept);
                return Ok(kept);
            }
        }
        let eager = self.compiles_at_once();
        let seen = self.blocks.note(key.lin) || eager;
        self.make_room();
        let once = self.blocks.once;
        // SAFETY: the block is alive as long as the CPU; nothing else refers to it while no block is running.
        self.decode(unsafe { &mut *once.as_ptr() }, key, MAX_OPS, seen)?;
        match seen {
            true => {
                let kept = self.blocks.keep().unwrap_or(once);
                #[cfg(feature = "jit")]
                self.adopt(kept, Tier::Baseline);
                if eager {
                    // SAFETY: the block is alive until all blocks are freed.
                    unsafe { kept.as_ref() }.heat_up();
                }
                Ok(kept)
            }
            false => Ok(once),
        }
    }

    /// Returns a block of only the instruction at RIP. The block stays valid until the next call.
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
        // SAFETY: the block is alive as long as the CPU; nothing else refers to it while no block is running.
        let single = unsafe { &mut *found.as_ptr() };
        if single.key != key || !self.holds_once(single)? {
            self.decode(single, key, 1, false)?;
        }
        Ok(found)
    }

    /// Whether `block` may be executed: memory holds the bytes from which it was decoded. `false` for an empty block.
    pub(crate) fn verify(&mut self, block: &mut Block) -> Result<bool, Break> {
        let Some(mut first) = block.first else {
            return Ok(false);
        };
        let lin = block.key.lin;
        let before = first.edition;
        if !self.holds(&mut first, lin, block.parts().0)? {
            return Ok(false);
        }
        // Check the second page last: unless the first page still holds the first part of the instruction, the
        // instruction may not reach into the second page.
        if let Some(mut second) = block.second {
            if !self.holds(&mut second, self.next_page(lin), block.parts().1)? {
                return Ok(false);
            }
            block.second = Some(second);
        }
        block.first = Some(first);
        if first.edition != before {
            self.verify_region(block);
        }
        Ok(true)
    }

    /// Whether memory holds `code` at `lin`. `place` refers to the snapshot of the code's page.
    fn holds(&mut self, place: &mut Place, lin: u64, code: &[u8]) -> Result<bool, Break> {
        // SAFETY: a block's snapshots live until `Snapshots::clear`; nothing else refers to one while no block is
        // running.
        let page = unsafe { place.page.as_mut() };
        self.check_snapshot(page, lin)?;
        if page.edition == place.edition {
            return Ok(true);
        }
        self.fetch(page, lin, code.len())?;
        let (at, _) = Snapshot::split(lin);
        let same = page.has(at, code);
        if same {
            place.edition = page.edition;
        }
        Ok(same)
    }

    /// Drops the compiled code of `block` if memory no longer holds all guest code of its region. Call after comparing
    /// `block` itself with memory.
    fn verify_region(&self, block: &mut Block) {
        #[cfg(feature = "jit")]
        if let Some(entrance) = &block.entrance
            && !block.holds(&entrance.region)
        {
            block.cool();
        }
        #[cfg(not(feature = "jit"))]
        let _ = block;
    }

    /// Whether memory still holds the code of `block`, which is not a kept block. If so, the code need not be decoded
    /// again.
    pub(crate) fn holds_once(&mut self, block: &Block) -> Result<bool, Break> {
        let (code, beyond) = block.parts();
        if code.is_empty() || !beyond.is_empty() {
            return Ok(false);
        }
        let (at, _) = Snapshot::split(block.key.lin);
        let host = self.once_host(block.key.lin)?.wrapping_add(at);
        // SAFETY: `host` was translated in this generation of the clock. All of `code` is in that page, and the access
        // is guarded.
        Ok(unsafe { slat_guard::matches(host, code) }.unwrap_or(false))
    }
}
