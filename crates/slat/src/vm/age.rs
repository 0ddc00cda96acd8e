//! Which backing pages the guest has used: what a host wants to know before it reclaims memory (KVM's `kvm_age_gfn`
//! and `kvm_test_age_gfn`). No lock of a tree of tables is taken: `table/age.rs`
//! has the argument.

use core::ops::Range;

use super::{RangeOp, Vm};
use crate::addr::Hva;
use crate::format::Format;
use crate::platform::Platform;
use crate::trace::Event;

impl<P: Platform, F: Format> Vm<P, F> {
    /// Returns how many leaves backed by the addresses `range` were used since their accessed bits were last cleared;
    /// clears these if `clear`. A page that several slots map counts once for each.
    ///
    /// Does not flush: a page that a TLB still caches may look unused until the CPU walks again.
    pub fn age(&self, range: Range<Hva>, clear: bool) -> u64 {
        self.platform.trace(Event::AgeHva(range.clone()));
        let mut young = 0;
        for space in &self.spaces {
            let mut op = RangeOp::begin(self, space);
            op.walk_backed_by(
                &range,
                || (),
                |step, _, walk| young += step.age(walk, clear),
            );
        }
        young
    }
}
