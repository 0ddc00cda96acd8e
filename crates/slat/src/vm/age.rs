//! Finds the backing pages that the guest has used. A host uses this to choose the memory that it reclaims (KVM's
//! `kvm_age_gfn` and `kvm_test_age_gfn`). In a tree of tables the walk takes no lock: `table/age.rs` explains why that
//! is safe. [`super::cold`] finds the pages that were not used for some time.

use core::ops::Range;

use super::{RangeOp, Vm};
use crate::addr::Hva;
use crate::format::Format;
use crate::platform::Platform;
use crate::table::Aged;
use crate::trace::Event;

impl<P: Platform, F: Format> Vm<P, F> {
    /// Returns the number of leaves that are backed by the addresses `range` and were used since their accessed bits
    /// were last cleared. Clears these bits if `clear`. A page that several slots map counts once for each slot.
    ///
    /// Does not flush TLBs. So a page that the guest uses through a TLB entry may look unused until a CPU walks the
    /// tables for it again.
    pub fn age(&self, range: Range<Hva>, clear: bool) -> u64 {
        let mut young = 0;
        self.each_leaf(range, clear, |_, aged| {
            young += u64::from(aged.young.count_ones())
        });
        young
    }

    /// Calls `seen`, for some leaves at a time, until it was called for all leaves that map pages backed by `range`, in
    /// any address space. Passes the leaves, and the backing address of the first one (`Aged::gfn`). Clears the
    /// accessed bits of the leaves if `clear`. A slot may have shared and private backing: leaves out frames that use
    /// the backing outside `range`. A huge leaf may also map pages outside `range`.
    pub(super) fn each_leaf(
        &self,
        range: Range<Hva>,
        clear: bool,
        mut seen: impl FnMut(Hva, Aged),
    ) {
        self.platform.trace(Event::AgeHva(range.clone()));
        for space in &self.spaces {
            let mut op = RangeOp::begin(self, space);
            op.walk_backed_by(
                &range,
                || (),
                |step, slot, place, walk| {
                    let (base, backing) = (slot.base().0, place.backing_of(slot).0);
                    // The backing address of the slot minus its guest-physical address: a frame's backing is this plus
                    // the frame's address.
                    let origin = backing.wrapping_sub(base << F::GRANULE.shift());
                    let attributes = &space.slots.current(step.section()).private;
                    while !walk.is_done() && !walk.is_spent() {
                        let (is_backed, alike) = place.backs(slot, walk.at(), attributes);
                        if is_backed {
                            walk.before(alike.end, |walk| {
                                step.age(walk, clear, |aged| {
                                    let hva = origin.wrapping_add(F::GRANULE.gpa(aged.gfn).0);
                                    seen(Hva(hva), aged);
                                });
                            });
                        } else {
                            walk.visits();
                            walk.stop_at(alike.end);
                        }
                    }
                },
            );
        }
    }
}
