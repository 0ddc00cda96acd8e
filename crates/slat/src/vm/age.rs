//! Which backing pages the guest has used: what a host wants to know before it reclaims memory (KVM's `kvm_age_gfn`
//! and `kvm_test_age_gfn`). No lock of a tree of tables is taken: `table/age.rs`
//! has the argument. Which were not used for some time is in [`super::cold`].

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
        let mut young = 0;
        self.each_leaf(range, clear, |_, used| young += u64::from(used));
        young
    }

    /// Calls `seen` for every leaf that maps a page backed by `range`, in any address space, with what backs it, and whether it
    /// was used since its accessed bit was last cleared; clears that if `clear`. Leaves out frames whose memory is that of
    /// their slot's other backing.
    #[inline]
    pub(super) fn each_leaf(
        &self,
        range: Range<Hva>,
        clear: bool,
        mut seen: impl FnMut(Range<Hva>, bool),
    ) {
        self.platform.trace(Event::AgeHva(range.clone()));
        for space in &self.spaces {
            let mut op = RangeOp::begin(self, space);
            op.walk_backed_by(
                &range,
                || (),
                |step, slot, place, walk| {
                    let (gfns, backing) = (slot.gfns(), place.backing_of(slot));
                    let attributes = &space.slots.current(step.section()).private;
                    while !walk.is_done() && !walk.is_spent() {
                        let (is_backed, alike) = place.backs(slot, walk.at(), attributes);
                        if !is_backed {
                            walk.visits();
                            walk.stop_at(alike.end);
                            continue;
                        }
                        walk.before(alike.end, |walk| {
                            step.age(walk, clear, |gfn, level, young| {
                                // A leaf of a slot that has just left may reach out of this one.
                                let leaf = gfn.block(level);
                                let start = leaf.start.max(gfns.start).0 - gfns.start.0;
                                let end = leaf.end.min(gfns.end).0 - gfns.start.0;
                                seen(backing.add_pages(start)..backing.add_pages(end), young);
                            });
                        });
                    }
                },
            );
        }
    }
}
