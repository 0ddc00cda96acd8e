//! Copies of the guest's code, by page. Blocks are decoded from the copies, and the copies tell whether
//! blocks are still good.
//!
//! A [`Snapshot`] has the code of one page that this CPU has decoded, in *lines*. A block is good as long as its
//! snapshot is. A snapshot is good while its *stamp* is the CPU's: every event that may make code stale changes the
//! CPU's stamp (`clock`). After such an event each page is checked once, when code of it is entered next
//! ([`Cpu::check_snapshot`]). The check finds out which event it was, and whether the event concerns this page; if it
//! may, it compares the lines with memory. If they differ, the snapshot begins a new *edition* without lines, and each
//! of its blocks is compared with memory by itself.
//!
//! Lines are copied from memory first; then blocks are decoded from the copies or compared with them. So later
//! comparisons are of the bytes that were decoded.

use crate::block::{Block, Place};
use crate::machine::{Access, Fault};
use crate::op::Break;
use crate::sync::AtomicU32;
use crate::tlb::{SUPERVISOR, USER};
use crate::{Cpu, vector};
use slat_guard::Gone;
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
    /// The linear address of the page, and whether it was looked up as user.
    key: u64,
    /// The generation when `host` was looked up; 0 means that it has to be looked up again.
    generation: u64,
    /// The version of the page (see `code_pages`). 0: the page was not trusted, so the lines are
    /// compared at the next entry.
    version: u64,
    /// The epoch when the lines were compared.
    epoch: u64,
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

    /// Whether the page was looked up as user.
    fn is_user(&self) -> bool {
        self.key & 1 != 0
    }

    /// Makes the page be looked up again.
    pub(crate) fn outdate(&mut self) {
        self.stamp = 0;
        self.generation = 0;
    }

    /// Begins a new edition.
    fn clear(&mut self) {
        self.edition += 1;
        self.lines = 0;
    }

    /// Returns the offset of `lin` in its page, and the number of bytes up to the end.
    pub(crate) fn split(lin: u64) -> (usize, usize) {
        let at = (lin & 0xfff) as usize;
        (at, PAGE - at)
    }

    /// Returns the `len` bytes of code at `lin`. They have been [fetched](Cpu::fetch).
    pub(crate) fn code(&self, lin: u64, len: usize) -> &[u8] {
        let (at, _) = Self::split(lin);
        &self.bytes[at..at + len]
    }

    /// Records that the `len` bytes at `at`, which have been fetched, are part of a block. Returns their place.
    pub(crate) fn keep(mut page: NonNull<Self>, at: usize, len: usize) -> Place {
        // SAFETY: snapshots live until `Blocks::clear`; nothing else refers to one while no block is running.
        let this = unsafe { page.as_mut() };
        this.lines |= bits(at, len);
        Place {
            page,
            edition: this.edition,
        }
    }

    /// Whether `code` is at `at`, which has been fetched. If so, records that it is part of a block.
    fn has(&mut self, at: usize, code: &[u8]) -> bool {
        let same = self.bytes[at..at + code.len()] == *code;
        if same {
            self.lines |= bits(at, code.len());
        }
        same
    }

    /// Whether memory holds the lines.
    fn is_held(&self) -> Result<bool, Gone> {
        for run in runs(self.lines) {
            // SAFETY: `host` was translated in this generation; the access is guarded.
            if !unsafe { slat_guard::matches(self.host.wrapping_add(run.start), &self.bytes[run]) }?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Copies from memory the lines of the `len` bytes at `at` that the snapshot does not have yet.
    fn copy(&mut self, at: usize, len: usize) -> Result<(), Gone> {
        for run in runs(bits(at, len) & !self.lines) {
            let from = self.host.wrapping_add(run.start);
            // SAFETY: `host` was translated in this generation; the access is guarded.
            unsafe { slat_guard::copy_in(&mut self.bytes[run], from) }.map_err(|_| Gone)?;
        }
        Ok(())
    }
}

#[cfg(feature = "jit")]
impl Block {
    /// Whether memory holds the code of a region that can be entered at this block. Call while the block is current for
    /// its CPU, and not running.
    pub(crate) fn holds(&self, region: &crate::jit::Region) -> bool {
        region
            .parts()
            .all(|(lin, code)| self.holds_beside(lin, code))
    }

    /// Whether memory holds `code` at `lin`, in the page of this block. Call under the conditions of
    /// [`holds`](Self::holds).
    pub(crate) fn holds_beside(&self, lin: u64, code: &[u8]) -> bool {
        let Some(mut place) = self.first else {
            return false;
        };
        // SAFETY: as in `Cpu::holds`.
        let page = unsafe { place.page.as_mut() };
        let (at, _) = Snapshot::split(lin);
        page.copy(at, code.len()).is_ok() && page.has(at, code)
    }
}

impl Cpu {
    /// Returns the snapshot of the page of `lin`. The caller has to check it. `None`: there is no
    /// memory for a snapshot.
    pub(crate) fn snapshot(&mut self, lin: u64) -> Option<NonNull<Snapshot>> {
        let key = Snapshot::key_of(lin, self.cpl == 3);
        self.blocks.snapshot(key).ok()
    }

    /// Makes sure that memory holds the lines of `page`; if it does not, `page` begins a new edition. `lin` is an
    /// address in the page, which a page fault reports.
    #[inline]
    fn check_snapshot(&mut self, page: &mut Snapshot, lin: u64) -> Result<(), Break> {
        match page.stamp == self.clock.stamp {
            true => Ok(()),
            false => self.look_at_snapshot(page, lin),
        }
    }

    /// Makes sure that memory holds the lines of `page`, which has the code at `rip`, if that needs no translation.
    /// Returns whether memory holds them.
    #[cfg(feature = "jit")]
    pub(crate) fn look_again(&mut self, page: &mut Snapshot, rip: u64) -> bool {
        let lin = self.code_address(rip);
        page.generation == self.clock.generation()
            && self.look_at_snapshot(page, lin).is_ok()
            && page.stamp == self.clock.stamp
    }

    #[inline(never)]
    fn look_at_snapshot(&mut self, page: &mut Snapshot, lin: u64) -> Result<(), Break> {
        loop {
            let before = page.host;
            if page.generation != self.clock.generation() {
                page.host = self.code_host(lin)?;
                page.generation = self.clock.generation();
            }
            // The page is marked before the comparison, so that the version is that of the compared content.
            let version = self.mark_code(page.host).unwrap_or(0);
            let is_known = page.host == before
                && page.epoch == self.clock.epoch(page.is_user())
                && page.version == version;
            if version == 0 || !is_known {
                self.counters.pages_compared += 1;
                match page.is_held() {
                    Ok(true) => {}
                    Ok(false) => {
                        page.clear();
                        self.forget_targets();
                    }
                    Err(Gone) => {
                        self.code_gone(lin, page.host)?;
                        continue;
                    }
                }
            }
            page.version = version;
            page.epoch = self.clock.epoch(page.is_user());
            page.stamp = if version != 0 { self.clock.stamp } else { 0 };
            return Ok(());
        }
    }

    /// Makes sure that `page` has a copy of the `len` bytes at `lin`, equal to memory now.
    pub(crate) fn fetch(&mut self, page: &mut Snapshot, lin: u64, len: usize) -> Result<(), Break> {
        let (at, _) = Snapshot::split(lin);
        loop {
            self.check_snapshot(page, lin)?;
            match page.copy(at, len) {
                Ok(()) => return Ok(()),
                Err(Gone) => self.code_gone(lin, page.host)?,
            }
        }
    }

    /// Whether `block` may be executed, because memory holds the bytes that it was decoded from.
    /// `false` for an empty block.
    pub(crate) fn verify(&mut self, block: &mut Block) -> Result<bool, Break> {
        let Some(mut first) = block.first else {
            return Ok(false);
        };
        let lin = block.key.lin;
        let before = first.edition;
        if !self.holds(&mut first, lin, block.parts().0)? {
            return Ok(false);
        }
        // The second page is checked last: only if memory holds the first part does the instruction
        // still cross into it.
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

    /// Whether memory holds `code` at `lin`, in the page of `place`.
    fn holds(&mut self, place: &mut Place, lin: u64, code: &[u8]) -> Result<bool, Break> {
        // SAFETY: a block's snapshots live until `Blocks::clear`; nothing else refers to one while no block is running.
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

    /// Drops the compiled code of a block that was just compared with memory, if memory no longer holds the rest
    /// of the region's code.
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

    /// Marks the page of `host` as one with decoded code. Returns the page's version if the page is trusted.
    fn mark_code(&mut self, host: *mut u8) -> Option<u64> {
        let page = host as usize;
        let tlb = &mut self.fixed.tlb;
        self.code
            .mark(page, || tlb.look_at_writes(|host| host == page))
    }

    /// Heeds other CPUs' changes of code, when `attention` has asked for it.
    pub(crate) fn heed_code(&mut self, attention: &AtomicU32) {
        let tlb = &mut self.fixed.tlb;
        self.code.heed(attention, |pages| {
            tlb.look_at_writes(|host| pages.version_of(host) != 0)
        });
        self.clock.change();
    }

    /// Returns the host address of the page from which the code at `lin` is fetched.
    pub(crate) fn code_host(&mut self, lin: u64) -> Result<*mut u8, Break> {
        if !self.canonical(lin) {
            return Err(self.raise(vector::GP, Some(0)));
        }
        let table = if self.cpl == 3 { USER } else { SUPERVISOR };
        match self.translate(table, lin, Access::Execute) {
            Ok(page) => Ok(page.base.as_ptr()),
            Err(Fault::Mmio { .. }) => Err(self.unimplemented("an instruction fetch from MMIO")),
            Err(fault) => Err(self.fault(lin, fault)),
        }
    }

    pub(crate) fn code_gone(&mut self, lin: u64, host: *mut u8) -> Result<(), Break> {
        self.clock.flush();
        self.gone(lin, host, Access::Execute)
    }
}
