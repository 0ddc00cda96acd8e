//! Which backing pages the guest has used: the host's question before it takes memory away
//! (KVM's `kvm_age_gfn` and `kvm_test_age_gfn`).

use core::ops::Range;

use super::{RangeOp, Vm};
use crate::addr::Hva;
use crate::format::Format;
use crate::platform::Platform;

impl<P: Platform, F: Format> Vm<P, F> {
    /// How many leaves over the backing addresses `range` were used since their accessed bits were
    /// last cleared; `clear` clears them. A page that several slots share counts in each.
    ///
    /// CPUs are not flushed for this: a page that a TLB still holds may look unused until the CPU
    /// walks again.
    pub fn age(&self, range: Range<Hva>, clear: bool) -> u64 {
        let mut young = 0;
        for space in &self.spaces {
            let mut op = RangeOp::begin(self, space);
            op.walk_backed_by(
                &range,
                || (),
                |tree, _, walk, _| young += tree.age(walk, clear),
            );
        }
        young
    }
}
