//! Splits huge leaves that cross an edge: a boundary between frames whose leaves change and frames whose leaves
//! stay.
//!
//! The leaves are split in place down to the edge, so that the frames beyond it stay mapped throughout. The tables
//! for the splits are allocated before anything is changed.

use alloc::vec::Vec;
use core::ops::Range;

use super::range_op::{RangeOp, space_for_broken};
use super::{Space, Vm};
use crate::addr::{Gfn, Hva, Level};
use crate::format::{Format, all_gfns};
use crate::platform::Platform;
use crate::policy::SplitWalk;
use crate::slots::{Memslot, Place};
use crate::table::{At, FrameCache, Next, Show, Walk};

/// The largest number of tables that one edge can need: those that split a leaf of the largest size down to the edge.
pub(super) const FRAMES_PER_EDGE: usize = Level::GIGA.0 as usize - 1;

impl<P: Platform, F: Format> Vm<P, F> {
    /// Splits the huge leaves of `space` that map both frames that `range` backs and other frames, as long as there is
    /// memory. The other frames stay mapped.
    pub(super) fn split_at_edges(&self, space: &Space<P, F>, range: &Range<Hva>) {
        let Ok(mut broken) = space_for_broken::<F>() else {
            return;
        };
        let mut frames = FrameCache::new(self.frames.clone());
        let mut op = RangeOp::begin(self, space);
        let mut done = None;
        while let Some((gfns, place)) = op.next_backed_by(range, done) {
            for edge in [gfns.start, gfns.end] {
                if op.has_leaf_over(edge) && frames.fill(&*self.platform, FRAMES_PER_EDGE).is_ok() {
                    op.split_over(edge, &mut frames, &mut broken);
                }
            }
            done = Some(place);
        }
        op.finish();
        frames.release(&*self.platform);
    }
}

impl<P: Platform, F: Format> RangeOp<'_, P, F> {
    /// Returns the frames that `range` backs in the first slot after `done`, and the slot's place in the order of
    /// backings. If `done` is `None`, in the first slot of all.
    fn next_backed_by(
        &mut self,
        range: &Range<Hva>,
        done: Option<Place>,
    ) -> Option<(Range<Gfn>, Place)> {
        let mut found = None;
        self.alone(|_, slots, _| {
            slots.backed_by(range, done.unwrap_or(Place::FIRST), |_, gfns, place| {
                if done != Some(place) {
                    found = Some((gfns, place));
                }
                found.is_none()
            });
        });
        found
    }

    /// Whether a huge leaf maps both `gfn` and the frame before it.
    fn has_leaf_over(&mut self, gfn: Gfn) -> bool {
        if !all_gfns::<F>().contains(&gfn) {
            return false;
        }
        let show = Show {
            skip_last_level: true,
            ..Show::default()
        };
        let mut found = false;
        self.walk(&mut Walk::new(gfn..gfn.add(1)), |step, walk| {
            step.walk(walk, show, &mut |at: &At<'_>| {
                found |= at.gfn < gfn;
                Next::Pass
            });
        });
        found
    }

    /// Splits, in place, the huge leaf that maps both `gfn` and the frame before it, if there is such a leaf. `frames`
    /// contains the frames for the split's tables.
    pub(super) fn split_over(
        &mut self,
        gfn: Gfn,
        frames: &mut FrameCache,
        broken: &mut Vec<(Gfn, Level)>,
    ) {
        if !all_gfns::<F>().contains(&gfn) {
            return;
        }
        let mut walk = Walk::new(gfn..gfn.add(1));
        // The loop may end without a split: faults may have installed huge leaves again and again until no frame was
        // left, or there may be no memory. Then the caller zaps the whole leaf.
        while !walk.is_done() && !frames.is_empty() && self.prepare(frames, 0).is_ok() {
            let crosses = |start: Gfn, _| start < gfn;
            self.split_some(&mut walk, SplitWalk::SkipLastLevel, crosses, frames, broken);
            self.pass();
        }
    }

    /// Zaps the leaf of `slot` that maps both `gfn` and the frame before it, if there is such a leaf. If dirty bits are
    /// part of the slot's log, records the leaf's dirty bit in the log.
    pub(super) fn zap_over(&mut self, gfn: Gfn, slot: &Memslot) {
        let crosses = |start: Gfn, _| start < gfn;
        self.zap_some(&(gfn..gfn.add(1)), slot, crosses);
    }
}
