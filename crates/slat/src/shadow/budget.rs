//! The number of shadow pages that a VM may have (KVM: `n_max_mmu_pages`, KVM_SET_NR_MMU_PAGES).

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The number of shadow pages in use, in all address spaces of a VM, and its limit. Roots do not count.
pub(crate) struct Budget {
    used: AtomicU64,
    was_used: AtomicBool,
    limit: AtomicU64,
    /// Whether the VMM has set the limit.
    is_set: AtomicBool,
    /// The number of pages in memslots.
    memory: AtomicU64,
}

impl Default for Budget {
    fn default() -> Self {
        Budget {
            used: AtomicU64::new(0),
            was_used: AtomicBool::new(false),
            limit: AtomicU64::new(Self::LEAST),
            is_set: AtomicBool::new(false),
            memory: AtomicU64::new(0),
        }
    }
}

impl Budget {
    /// The lowest limit (KVM: `KVM_MIN_ALLOC_MMU_PAGES`).
    pub(crate) const LEAST: u64 = 64;
    /// Unless the client sets a limit, the limit is one shadow page for each 50 pages in memslots (KVM:
    /// `KVM_PERMILLE_MMU_PAGES` is 20).
    const MEMORY_PER_PAGE: u64 = 50;
    /// The largest number of shadow pages that a fault may make.
    const FAULT: u64 = 8;
    /// When shadow pages must be zapped, this number is zapped in addition, so that the next faults need not zap any
    /// (KVM: `KVM_REFILL_PAGES`).
    const AT_A_TIME: u64 = 25;

    pub(crate) fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    /// Sets the limit that the client requests, but at least [`Self::LEAST`].
    pub(crate) fn set(&self, limit: u64) {
        self.is_set.store(true, Relaxed);
        self.limit.store(limit.max(Self::LEAST), Relaxed);
    }

    /// Call after a slot change: the memslots of an address space had `before` pages, and have `after` now. Adapts the
    /// limit, unless the VMM has set it.
    pub(crate) fn memory_changed(&self, before: u64, after: u64) {
        let change = after.wrapping_sub(before);
        let memory = self.memory.fetch_add(change, Relaxed).wrapping_add(change);
        if !self.is_set.load(Relaxed) {
            let limit = (memory / Self::MEMORY_PER_PAGE).max(Self::LEAST);
            self.limit.store(limit, Relaxed);
        }
    }

    /// Returns the number of shadow pages that must be zapped before a fault may make shadow pages.
    pub(crate) fn excess(&self) -> u64 {
        let (used, limit) = (self.used.load(Relaxed), self.limit());
        match used + Self::FAULT > limit {
            true => (used + Self::FAULT - limit) + Self::AT_A_TIME.min(limit / 2),
            false => 0,
        }
    }

    /// Returns the number of shadow pages that are above the limit now, without space for a fault.
    pub(crate) fn beyond(&self) -> u64 {
        self.used.load(Relaxed).saturating_sub(self.limit())
    }

    /// Returns whether there has ever been a shadow page. (Even if there is none now, a TLB may still cache entries of
    /// an earlier one.)
    pub(crate) fn was_used(&self) -> bool {
        self.was_used.load(Relaxed)
    }

    pub(super) fn took(&self, pages: u64) {
        if !self.was_used() {
            self.was_used.store(true, Relaxed);
        }
        self.used.fetch_add(pages, Relaxed);
    }

    pub(super) fn gave_back(&self, pages: u64) {
        self.used.fetch_sub(pages, Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_limit_follows_the_memory_until_the_client_sets_it() {
        let budget = Budget::default();
        budget.memory_changed(0, 1 << 18);
        assert_eq!(budget.limit(), (1 << 18) / 50);
        budget.memory_changed(1 << 18, 0);
        assert_eq!(budget.limit(), Budget::LEAST);
        budget.took(56);
        assert_eq!(budget.excess(), 0);
        budget.took(1);
        assert_eq!(budget.excess(), 1 + 25);
        budget.set(100);
        budget.memory_changed(0, 1 << 30);
        assert_eq!(
            (budget.limit(), budget.excess(), budget.beyond()),
            (100, 0, 0)
        );
        budget.took(63);
        assert_eq!(budget.beyond(), 20);
        budget.gave_back(100);
        assert_eq!(budget.beyond(), 0);
    }
}
