//! Copies of the guest's code, by page. Blocks are decoded from the copies, and comparing the copies with memory shows
//! whether blocks are still valid.
//!
//! A [`Snapshot`] has the code of one page that this CPU has decoded, in *lines*. A block is valid as long as its
//! snapshot is. A snapshot is valid while its *stamp* equals the CPU's, because every event that may make code stale
//! changes the CPU's stamp (`clock`). After such an event each page is checked once, when code of it is entered next
//! (`Cpu::check_snapshot`). The check finds out which event it was, and whether the event may concern this page. If so,
//! the check compares the lines with memory. If they differ, the snapshot begins a new *edition* without lines, and
//! each of its blocks is compared with memory by itself.
//!
//! Lines are copied from memory first. Then blocks are decoded from the copies, or compared with them. So later
//! comparisons use the same bytes that were decoded.

use crate::hash::Seeded;
use crate::heap::{self, OutOfMemory};
use crate::pool::Pool;
use slat_guard::Gone;
use std::collections::HashMap;
use std::ops::Range;
use std::ptr::{self, NonNull};

const PAGE: usize = 0x1000;
/// Bytes of a line.
const LINE: usize = 64;

/// The decoded code of a page. Its first cache line is read at each entry of its code.
#[repr(C, align(64))]
pub(crate) struct Snapshot {
    /// The CPU's stamp, as long as memory is known to hold the lines.
    pub(crate) stamp: u64,
    /// Host address of the page.
    pub(crate) host: *mut u8,
    /// A number that no other content of the page has had: 1 or more.
    pub(crate) edition: u64,
    /// The linear address of the page, and whether it was looked up with user rights.
    key: u64,
    /// The generation when `host` was looked up; 0 means that it has to be looked up again.
    pub(crate) generation: u64,
    /// The version of the page (see `code_pages`). 0: the page was not trusted, so the lines are
    /// compared at the next entry.
    pub(crate) version: u64,
    /// The epoch when the lines were compared.
    pub(crate) epoch: u64,
    /// Bit n: line n of `bytes` holds code.
    lines: u64,
    bytes: [u8; PAGE],
}

/// Returns the bits of the lines of `len` bytes at `at`.
fn bits(at: usize, len: usize) -> u64 {
    match len {
        0 => 0,
        _ => {
            let (first, last) = (at / LINE, (at + len - 1) / LINE);
            u64::MAX << first & u64::MAX >> (63 - last)
        }
    }
}

/// Returns the runs of consecutive set bits, as ranges of bytes.
fn runs(mut bits: u64) -> impl Iterator<Item = Range<usize>> {
    std::iter::from_fn(move || {
        let first = bits.trailing_zeros();
        let len = (bits.checked_shr(first)?).trailing_ones();
        bits &= u64::MAX.checked_shl(first + len).unwrap_or(0);
        Some(first as usize * LINE..(first + len) as usize * LINE)
    })
}

impl Snapshot {
    /// Makes the snapshot of a page, without lines.
    pub(crate) fn new(key: u64) -> Self {
        Self {
            stamp: 0,
            host: ptr::null_mut(),
            edition: 1,
            key,
            generation: 0,
            version: 0,
            epoch: 0,
            lines: 0,
            bytes: [0; PAGE],
        }
    }

    /// Returns the key of the page of `lin`.
    pub(crate) fn key_of(lin: u64, user: bool) -> u64 {
        lin & !0xfff | u64::from(user)
    }

    /// Whether the page was looked up with user rights.
    pub(crate) fn is_user(&self) -> bool {
        self.key & 1 != 0
    }

    /// Forces the page to be looked up again.
    pub(crate) fn outdate(&mut self) {
        self.stamp = 0;
        self.generation = 0;
    }

    /// Begins a new edition.
    pub(crate) fn clear(&mut self) {
        self.edition += 1;
        self.lines = 0;
    }

    /// Returns the offset of `lin` in its page, and the number of bytes up to the end.
    pub(crate) fn split(lin: u64) -> (usize, usize) {
        let at = (lin & 0xfff) as usize;
        (at, PAGE - at)
    }

    /// Returns the `len` bytes of code at `lin`. They have been fetched (`Cpu::fetch`).
    pub(crate) fn code(&self, lin: u64, len: usize) -> &[u8] {
        let (at, _) = Self::split(lin);
        &self.bytes[at..at + len]
    }

    /// Records that the `len` bytes at `at`, which have been fetched, are part of a block. Returns their place.
    pub(crate) fn keep(mut page: NonNull<Self>, at: usize, len: usize) -> Place {
        // SAFETY: snapshots live until `Snapshots::clear`; nothing else refers to one while no block is running.
        let this = unsafe { page.as_mut() };
        this.lines |= bits(at, len);
        Place {
            page,
            edition: this.edition,
        }
    }

    /// Whether the page has `code` at the offset `at`, whose bytes have been fetched. If so, records that they are part
    /// of a block.
    pub(crate) fn has(&mut self, at: usize, code: &[u8]) -> bool {
        let same = self.bytes[at..at + code.len()] == *code;
        if same {
            self.lines |= bits(at, code.len());
        }
        same
    }

    /// Whether memory holds the lines.
    pub(crate) fn is_held(&self) -> Result<bool, Gone> {
        for run in runs(self.lines) {
            // SAFETY: `host` was translated in this generation, and the access is guarded.
            if !unsafe { slat_guard::matches(self.host.wrapping_add(run.start), &self.bytes[run]) }?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Copies from memory the lines of the `len` bytes at `at` that the snapshot does not have yet.
    pub(crate) fn copy(&mut self, at: usize, len: usize) -> Result<(), Gone> {
        for run in runs(bits(at, len) & !self.lines) {
            let from = self.host.wrapping_add(run.start);
            // SAFETY: `host` was translated in this generation, and the access is guarded.
            unsafe { slat_guard::copy_in(&mut self.bytes[run], from) }.map_err(|_| Gone)?;
        }
        Ok(())
    }
}

/// The page that holds the code of a block, or a part of it.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) page: NonNull<Snapshot>,
    /// [`Snapshot::edition`] when the block was last compared with the page. The value 0, which no snapshot has, forces
    /// a comparison.
    pub(crate) edition: u64,
}

/// The snapshots of a CPU, by page. They never move, and are freed only all at once.
pub(crate) struct Snapshots {
    /// The number of the blocks that refer to these snapshots: the blocks have the same number.
    pub(crate) pair: u64,
    all: HashMap<u64, NonNull<Snapshot>, Seeded>,
    /// The memory of the snapshots in `all`.
    pool: Pool,
}

impl Snapshots {
    pub(crate) fn new() -> Self {
        Self {
            pair: 0,
            all: HashMap::with_hasher(Seeded::new()),
            pool: Pool::default(),
        }
    }

    /// Returns the heap bytes that the snapshots and their index use after `more` bytes are taken from the pool.
    pub(crate) fn heap_bytes(&self, more: usize) -> usize {
        let entry = size_of::<(u64, NonNull<Snapshot>)>();
        self.pool.bytes_with(more) + heap::map_bytes(self.all.capacity(), entry)
    }

    /// Allocates memory in the index for `more` snapshots. If that fails, the next snapshots may not be made.
    pub(crate) fn reserve(&mut self, more: usize) {
        let _ = self.all.try_reserve(more);
    }

    /// Returns the snapshot of a page if there is one.
    fn known(&self, key: u64) -> Option<NonNull<Snapshot>> {
        self.all.get(&key).copied()
    }

    /// Returns the snapshot of a page, which may be new.
    ///
    /// # Errors
    /// [`OutOfMemory`] if there is none, and no memory for one.
    pub(crate) fn of(&mut self, key: u64) -> Result<NonNull<Snapshot>, OutOfMemory> {
        if let Some(page) = self.known(key) {
            return Ok(page);
        }
        self.all.try_reserve(1).map_err(|_| OutOfMemory)?;
        let page = self.pool.put(Snapshot::new(key))?;
        self.all.insert(key, page);
        Ok(page)
    }

    /// Forces the page of `lin` to be looked up again before its code runs next. Returns whether the page has a
    /// snapshot.
    pub(crate) fn outdate(&mut self, lin: u64) -> bool {
        let mut is_known = false;
        for user in [false, true] {
            if let Some(mut page) = self.known(Snapshot::key_of(lin, user)) {
                // SAFETY: the snapshot is alive as long as it is in the map, and a running block does not use its
                // snapshots.
                unsafe { page.as_mut() }.outdate();
                is_known = true;
            }
        }
        is_known
    }

    /// Frees all snapshots.
    ///
    /// # Safety
    /// - No code uses a snapshot any more: the blocks of this pair that have a [`Place`] have been freed or emptied.
    pub(crate) unsafe fn clear(&mut self) {
        self.all.clear();
        // SAFETY: the map contained all snapshots of the pool, and no code uses them any more, as this function's
        // `# Safety` asks of its caller.
        unsafe { self.pool.clear() };
    }
}
