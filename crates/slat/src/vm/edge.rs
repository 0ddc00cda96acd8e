//! Splits huge leaves that cross an edge: a boundary between frames whose leaves change and frames whose leaves
//! stay.
//!
//! The leaves are split in place down to the edge, so that the frames beyond it stay mapped throughout. The tables
//! for the splits are allocated before anything is changed.

use alloc::vec::Vec;

use super::range_op::RangeOp;
use crate::addr::{Gfn, Level};
use crate::format::{Format, all_gfns};
use crate::platform::Platform;
use crate::policy::SplitWalk;
use crate::slots::Memslot;
use crate::table::{FrameCache, Walk};

/// The largest number of tables that one edge can need: those that split a leaf of the largest size down to the edge.
pub(super) const FRAMES_PER_EDGE: usize = Level::GIGA.0 as usize - 1;

impl<P: Platform, F: Format> RangeOp<'_, P, F> {
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
