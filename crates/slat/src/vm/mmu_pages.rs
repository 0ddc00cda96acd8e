//! The limit of shadow pages, for the MMUs that use them: [`MmuKind::Direct`](crate::MmuKind) and `MmuKind::Shadow`.

use core::iter;

use super::{RangeOp, Space, Vm};
use crate::format::{Format, all_gfns};
use crate::platform::Platform;

impl<P: Platform, F: Format> Vm<P, F> {
    /// Limits the number of shadow pages, not counting roots, to `pages` or 64, whichever is larger:
    /// KVM_SET_NR_MMU_PAGES. If there are more, zaps the oldest shadow pages. The default limit is a fiftieth of the
    /// number of pages in memslots.
    ///
    /// Do not call this while the calling thread's vCPU is between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    pub fn set_mmu_pages(&self, pages: u64) {
        self.budget.set(pages);
        self.recycle(&self.spaces[0], self.budget.beyond());
    }

    /// Zaps the oldest `pages` shadow pages of `space`. If `space` has fewer shadow pages, zaps the remaining number in
    /// other address spaces. The caller is in no reader section.
    pub(crate) fn recycle(&self, space: &Space<P, F>, pages: u64) {
        let mut left = pages;
        for space in iter::once(space).chain(&self.spaces) {
            if left > 0 {
                left -= self.recycle_in(space, left);
            }
        }
    }

    /// Zaps up to `pages` of the oldest shadow pages of `space`. Returns the number of zapped pages.
    fn recycle_in(&self, space: &Space<P, F>, pages: u64) -> u64 {
        // The operation must cover all frames: which frames these pages map is unknown until the pages are zapped.
        let mut op = RangeOp::on(self, space, &all_gfns::<F>());
        let zapped = (0..pages).take_while(|_| op.zap_oldest()).count() as u64;
        op.counters().mmu_recycled.add(zapped);
        op.finish();
        zapped
    }
}
