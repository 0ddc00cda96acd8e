//! The limit of shadow pages, for the VMs that have any ([`MmuKind::Direct`](crate::MmuKind)).

use super::{RangeOp, Space, Vm};
use crate::format::{Format, all_gfns};
use crate::platform::Platform;

impl<P: Platform, F: Format> Vm<P, F> {
    /// Limits the number of shadow pages, without the roots, to `pages`, but at least 64: KVM_SET_NR_MMU_PAGES. Zaps the
    /// oldest ones if there are more. Unless this is called, the limit is a fiftieth of the pages in memslots.
    ///
    /// Not for a vCPU between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    pub fn set_mmu_pages(&self, pages: u64) {
        self.budget.set(pages);
        for space in &self.spaces {
            self.recycle(space, self.budget.beyond());
        }
    }

    /// Returns the limit of shadow pages.
    pub fn mmu_pages(&self) -> u64 {
        self.budget.limit()
    }

    /// Zaps up to `pages` of the oldest shadow pages of `space`. The caller is in no reader section.
    pub(crate) fn recycle(&self, space: &Space<P, F>, pages: u64) {
        if pages == 0 {
            return;
        }
        // Which frames the pages map is not known before they are zapped.
        let mut op = RangeOp::on(self, space, &all_gfns::<F>());
        let counters = op.counters();
        for _ in 0..pages {
            if !op.zap_oldest() {
                break;
            }
            counters.mmu_recycled.add(1);
        }
        op.finish();
    }
}
