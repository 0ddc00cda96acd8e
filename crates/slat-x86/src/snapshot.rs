//! A CPU's copies of the guest's code, by page. Blocks are decoded from the copies. Comparing a copy with memory tells
//! whether the blocks are still valid.
//!
//! A [`Snapshot`] has the code of one page that this CPU has decoded, in *lines*. A block is valid as long as its
//! snapshot is valid, and a snapshot is valid while its *stamp* equals the CPU's stamp: every event that may make code
//! stale changes the CPU's stamp (`clock`). After such an event each page is checked once, when its code is entered
//! next (`Cpu::check_snapshot`). The check finds out which event it was, and whether it may affect this page. If so,
//! the check compares the lines with memory. If they differ, the snapshot begins a new *edition* without lines, and
//! each block of the page is compared with memory separately.
//!
//! Lines are first copied from memory. Then blocks are decoded from the copies, or compared with them. So later
//! comparisons of a line use the same bytes that were decoded.

use crate::hash::Seeded;
use crate::heap::{self, OutOfMemory};
use crate::pool::Pool;
use slat_guard::Gone;
use std::collections::HashMap;
use std::ops::Range;
use std::ptr::{self, NonNull};

const PAGE: usize = 0x1000;
/// The number of bytes of a line, the unit in which code is copied and compared.
const LINE: usize = 64;

/// The decoded code of a page. The run loop reads only a snapshot's first cache line each time that it enters the
/// page's code.
#[repr(C, align(64))]
pub(crate) struct Snapshot {
    /// The CPU's stamp when the lines were last known to equal memory.
    pub(crate) stamp: u64,
    /// The host address of the page of which this is a snapshot.
    pub(crate) host: *mut u8,
    /// A number, at least 1, that identifies the page's contents. Different contents have different numbers.
    pub(crate) edition: u64,
    /// The linear address of the page, and whether it was translated with user rights.
    key: u64,
    /// The clock's generation when `host` was translated. 0: the address must be translated again.
    pub(crate) generation: u64,
    /// The version of the page (see `code_pages`) when the lines were last compared with memory. 0: the page was not
    /// trusted, so the lines are compared again at the next entry.
    pub(crate) version: u64,
    /// The clock's epoch when the lines were last compared with memory.
    pub(crate) epoch: u64,
    /// Bit n is set if line n of `bytes` holds code.
    lines: u64,
    bytes: [u8; PAGE],
}

/// Returns a mask of the lines that contain the `len` bytes at offset `at`.
fn bits(at: usize, len: usize) -> u64 {
    match len {
        0 => 0,
        _ => {
            let (first, last) = (at / LINE, (at + len - 1) / LINE);
            u64::MAX << first & u64::MAX >> (63 - last)
        }
    }
}

/// Returns the ranges of bytes in the page that correspond to runs of consecutive bits that are set.
fn runs(mut bits: u64) -> impl Iterator<Item = Range<usize>> {
    std::iter::from_fn(move || {
        let first = bits.trailing_zeros();
        let len = (bits.checked_shr(first)?).trailing_ones();
        bits &= u64::MAX.checked_shl(first + len).unwrap_or(0);
        Some(first as usize * LINE..(first + len) as usize * LINE)
    })
}

impl Snapshot {
    /// Makes the snapshot of a page. The snapshot has no lines yet.
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

    /// Whether the page's address was translated with user rights.
    pub(crate) fn is_user(&self) -> bool {
        self.key & 1 != 0
    }

    /// Makes the CPU translate the page's address again before its code runs next.
    pub(crate) fn outdate(&mut self) {
        self.stamp = 0;
        self.generation = 0;
    }

    /// Begins a new edition of the snapshot, without lines.
    pub(crate) fn clear(&mut self) {
        self.edition += 1;
        self.lines = 0;
    }

    /// Returns the offset of `lin` in its page, and the number of bytes from there to the end of the page.
    pub(crate) fn split(lin: u64) -> (usize, usize) {
        let at = (lin & 0xfff) as usize;
        (at, PAGE - at)
    }

    /// Returns the `len` bytes of code at `lin`. Call after `Cpu::fetch` for these bytes.
    pub(crate) fn code(&self, lin: u64, len: usize) -> &[u8] {
        let (at, _) = Self::split(lin);
        &self.bytes[at..at + len]
    }

    /// Records that the `len` bytes at offset `at` are part of a block. Call after `Cpu::fetch` for these bytes.
    /// Returns the [`Place`] that the block stores.
    pub(crate) fn keep(mut page: NonNull<Self>, at: usize, len: usize) -> Place {
        // SAFETY: snapshots live until `Snapshots::clear`; nothing else refers to one while no block is running.
        let this = unsafe { page.as_mut() };
        this.lines |= bits(at, len);
        Place {
            page,
            edition: this.edition,
        }
    }

    /// Whether the page has `code` at offset `at`. If so, records that these bytes are part of a block. Call after
    /// `Cpu::fetch` for these bytes.
    pub(crate) fn has(&mut self, at: usize, code: &[u8]) -> bool {
        let same = self.bytes[at..at + code.len()] == *code;
        if same {
            self.lines |= bits(at, code.len());
        }
        same
    }

    /// Whether memory still equals all copied lines of the page.
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

    /// Copies the lines that contain the `len` bytes at offset `at` from memory, except lines that the snapshot already
    /// has.
    pub(crate) fn copy(&mut self, at: usize, len: usize) -> Result<(), Gone> {
        for run in runs(bits(at, len) & !self.lines) {
            let from = self.host.wrapping_add(run.start);
            // SAFETY: `host` was translated in this generation, and the access is guarded.
            unsafe { slat_guard::copy_in(&mut self.bytes[run], from) }.map_err(|_| Gone)?;
        }
        Ok(())
    }
}

/// A block's reference to the snapshot of one page with its code.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) page: NonNull<Snapshot>,
    /// The value of [`Snapshot::edition`] when the block was last compared with the snapshot. 0 forces a comparison,
    /// because no snapshot has it.
    pub(crate) edition: u64,
}

/// The snapshots of a CPU, by page. A snapshot never moves. All snapshots are freed at once.
pub(crate) struct Snapshots {
    /// A number that `Snapshots` and the executor's `Blocks` share if these blocks refer to these snapshots.
    pub(crate) pair: u64,
    all: HashMap<u64, NonNull<Snapshot>, Seeded>,
    /// The memory of the snapshots in `all` is allocated here.
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

    /// Returns the heap bytes that the snapshots and their index use after `more` further bytes are allocated.
    pub(crate) fn heap_bytes(&self, more: usize) -> usize {
        let entry = size_of::<(u64, NonNull<Snapshot>)>();
        self.pool.bytes_with(more) + heap::map_bytes(self.all.capacity(), entry)
    }

    /// Allocates memory in the index for `more` snapshots. If there is no memory, later pages may get no snapshot.
    pub(crate) fn reserve(&mut self, more: usize) {
        let _ = self.all.try_reserve(more);
    }

    /// Returns the snapshot of a page. `None`: the page has no snapshot.
    fn known(&self, key: u64) -> Option<NonNull<Snapshot>> {
        self.all.get(&key).copied()
    }

    /// Returns the snapshot of a page. If there is none, makes it.
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

    /// Makes the CPU translate the address of the page of `lin` again before the page's code runs next. Returns whether
    /// the page has a snapshot.
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
    /// - No code uses a snapshot after this call: all blocks with the same number `pair` that have a [`Place`] were
    ///   freed or emptied.
    pub(crate) unsafe fn clear(&mut self) {
        self.all.clear();
        // SAFETY: the map contained all snapshots of the pool. No code uses a snapshot any more, as this function's `#
        // Safety` demands.
        unsafe { self.pool.clear() };
    }
}
