//! Fetches code from memory, or from the CPU's copies of code (`snapshot`).

use crate::flow::Break;
use crate::machine::{Access, Fault};
use crate::once::Once;
use crate::snapshot::Snapshot;
use crate::sync::AtomicU32;
use crate::tlb::{SUPERVISOR, USER};
use crate::{Cpu, vector};
use slat_guard::Gone;
use std::ptr::NonNull;

impl Cpu {
    /// Returns the snapshot of the page of `lin`. The caller must check it before use. `None`: there is no memory for a
    /// snapshot.
    pub(crate) fn snapshot(&mut self, lin: u64) -> Option<NonNull<Snapshot>> {
        let key = Snapshot::key_of(lin, self.cpl == 3);
        self.code.snapshots.of(key).ok()
    }

    /// Checks that the copied lines of `page` equal memory. If they do not, `page` begins a new edition. `lin` is the
    /// address in the page that a page fault of the check would report.
    #[inline]
    pub(crate) fn check_snapshot(&mut self, page: &mut Snapshot, lin: u64) -> Result<(), Break> {
        match page.stamp == self.code.clock.stamp {
            true => Ok(()),
            false => self.look_at_snapshot(page, lin),
        }
    }

    /// Checks the copied lines of `page` like [`check_snapshot`](Self::check_snapshot), but gives up if the check would
    /// need an address translation. `page` is the page of the code at `rip`. Returns whether `page` is now current for
    /// this CPU, possibly in a new edition.
    #[cfg(feature = "jit")]
    pub(crate) fn look_again(&mut self, page: &mut Snapshot, rip: u64) -> bool {
        let lin = self.code_address(rip);
        page.generation == self.code.clock.generation()
            && self.look_at_snapshot(page, lin).is_ok()
            && page.stamp == self.code.clock.stamp
    }

    #[inline(never)]
    fn look_at_snapshot(&mut self, page: &mut Snapshot, lin: u64) -> Result<(), Break> {
        loop {
            let before = page.host;
            if page.generation != self.code.clock.generation() {
                page.host = self.code_host(lin)?;
                page.generation = self.code.clock.generation();
            }
            // Mark the page before the comparison, so that `version` belongs to the content that is compared.
            let version = self.mark_code(page.host).unwrap_or(0);
            let is_known = page.host == before
                && page.epoch == self.code.clock.epoch(page.is_user())
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
            page.epoch = self.code.clock.epoch(page.is_user());
            page.stamp = if version != 0 {
                self.code.clock.stamp
            } else {
                0
            };
            return Ok(());
        }
    }

    /// Copies the `len` bytes of code at `lin` to `page`, unless `page` has a copy of them that equals memory.
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

    /// Marks the page of `host` as a page with decoded code. Returns the page's version if the page is trusted: then no
    /// CPU can store to it without changing the version.
    fn mark_code(&mut self, host: *mut u8) -> Option<u64> {
        let page = host as usize;
        let tlb = &mut self.fixed.tlb;
        self.code
            .member
            .mark(page, || tlb.look_at_writes(|host| host == page))
    }

    /// Acts on other CPUs' changes of code. Call if `attention` has the bit `CodePages::CHANGED`.
    pub(crate) fn heed_code(&mut self, attention: &AtomicU32) {
        let tlb = &mut self.fixed.tlb;
        self.code.member.heed(attention, |pages| {
            tlb.look_at_writes(|host| pages.version_of(host) != 0)
        });
        self.code.clock.change();
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
        self.code.clock.flush();
        self.gone(lin, host, Access::Execute)
    }

    /// Returns the host address of the page with the code at `lin`, like [`code_host`](Self::code_host), but for code
    /// that is executed once and not kept (`once`).
    pub(crate) fn once_host(&mut self, lin: u64) -> Result<*mut u8, Break> {
        let key = Snapshot::key_of(lin, self.cpl == 3);
        if self.code.once.key != key || self.code.once.generation != self.code.clock.generation() {
            let host = self.code_host(lin)?;
            self.code.once = Once {
                key,
                generation: self.code.clock.generation(),
                host,
            };
        }
        Ok(self.code.once.host)
    }

    /// Copies the code at `lin`, which is in one page, from memory.
    pub(crate) fn copy_code(&mut self, lin: u64, code: &mut [u8]) -> Result<(), Break> {
        let (at, _) = Snapshot::split(lin);
        loop {
            let host = self.once_host(lin)?;
            // SAFETY: `host` was translated in this generation. All bytes are in the page, and the access is guarded.
            match unsafe { slat_guard::copy_in(code, host.wrapping_add(at)) } {
                Ok(()) => return Ok(()),
                Err(_) => self.code_gone(lin, host)?,
            }
        }
    }
}
