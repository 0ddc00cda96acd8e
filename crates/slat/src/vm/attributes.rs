//! Conversions: guest frames become private, or shared again.
//!
//! A conversion is an invalidation as a slot change is ([`super::region`]): publish the sets in which
//! the frames have their new attributes, raise the sequence, zap, flush, return. A fault that went by
//! the old attributes cannot install any more. The slots stay in the set, so an invalidation of either
//! backing meanwhile finds the frames and zaps them itself; one that leaves while this zaps is zapped by its
//! own change. And a leaf that is protected for a dirty log,
//! whose page the next fault takes for known, is never in a slot with two backings. The new sets have a
//! new generation, too: what was MMIO to a shared access is none to a private one.
//!
//! No leaf may reach over a boundary between private and shared frames. A fault sees to that by its
//! bounds (`gfns` of the fault's facts). Here, huge leaves that reach out of the range are split in place,
//! and only the part in the range is zapped: the rest stays mapped throughout. The tables that this can
//! need are allocated before anything is changed.

use alloc::vec::Vec;
use core::ops::Range;

use super::{RangeOp, Vm};
use crate::addr::{Gfn, Gpa, Level};
use crate::format::Format;
use crate::platform::Platform;
use crate::slots::{AttributesError, MemoryAttributes, PrivateFrames, SlotsChange};
use crate::table::{FrameCache, OutOfMemory, SplitWalk, Tree, Walk, room_for_broken};

impl<P: Platform, F: Format> Vm<P, F> {
    /// Gives the frames `gfns` these attributes, in every address space, whether there are memslots or
    /// not: KVM_SET_MEMORY_ATTRIBUTES. When this returns no CPU uses the old state. What the memory
    /// holds in either backing is the client's business.
    ///
    /// The caller is no vCPU inside [`crate::Vcpu::enter`]/[`crate::Vcpu::leave`].
    ///
    /// # Errors
    /// [`AttributesError`]; nothing was changed.
    pub fn set_memory_attributes(
        &self,
        gfns: Range<Gfn>,
        attributes: MemoryAttributes,
    ) -> Result<(), AttributesError> {
        let private = attributes.is_private();
        if attributes.0 & !MemoryAttributes::PRIVATE.0 != 0 {
            return Err(AttributesError::Unknown(attributes));
        }
        if gfns.is_empty() || gfns.end > Gpa(u64::MAX).gfn().add(1) {
            return Err(AttributesError::BadRange);
        }
        // All of them, always in this order. Whoever holds one sees no conversion.
        let mut changes = Vec::new();
        changes
            .try_reserve_exact(self.spaces.len())
            .map_err(|_| OutOfMemory)?;
        changes.extend((self.spaces.iter()).map(|space| space.slots.change(self.turn_wait())));
        let Some(first) = changes.first() else {
            return Ok(());
        };
        let Some(private) = first.set().private.with(&gfns, private)? else {
            // Whoever converted them may still be zapping.
            if self.in_progress.is_converting() {
                drop(changes);
                for space in 0..self.spaces.len() {
                    self.zap(space, gfns.clone());
                }
            }
            return Ok(());
        };
        let mut broken = room_for_broken::<F>()?;
        let mut frames = FrameCache::default();
        let filled = frames.fill(&*self.platform, changes.len() * FRAMES_TO_SPLIT);
        let converted =
            filled.map(|()| self.convert(changes, &private, &gfns, &mut frames, &mut broken));
        frames.release(&*self.platform);
        Ok(converted?)
    }

    fn convert(
        &self,
        mut changes: Vec<SlotsChange<'_>>,
        private: &PrivateFrames,
        gfns: &Range<Gfn>,
        frames: &mut FrameCache,
        broken: &mut Vec<(Gfn, Level)>,
    ) {
        for change in &mut *changes {
            change.catch_up(&self.readers, self.reader_wait());
        }
        for change in &mut *changes {
            change.set_private(private.clone(), &self.readers);
        }
        self.in_progress.raise();
        for (space, change) in self.spaces.iter().zip(&changes) {
            self.forget_old_mmio(space, change);
        }
        // Before the locks are released: a conversion that finds nothing to convert sees that.
        let _converting = self.in_progress.converts();
        // Slots may change again: whatever faults bring from now on has the new attributes.
        drop(changes);
        for space in &self.spaces {
            let mut op = RangeOp::on(self, space, gfns);
            op.split_over(gfns.start, frames, broken);
            op.split_over(gfns.end, frames, broken);
            op.zap_slots(gfns);
            op.finish();
        }
        self.flush_leaving_slots();
    }
}

/// Tables that two huge leaves of the largest size are split into, each down to one boundary.
const FRAMES_TO_SPLIT: usize = 2 * (Level::GIGA.0 as usize - 1);

impl<P: Platform, F: Format> RangeOp<'_, P, F> {
    /// Splits, in place, the huge leaf that reaches over the boundary before `gfn`, if there is one.
    /// `frames` has the tables for it.
    fn split_over(&mut self, gfn: Gfn, frames: &mut FrameCache, broken: &mut Vec<(Gfn, Level)>) {
        if gfn.0 >= Tree::<P, F>::capacity() {
            return;
        }
        let mut walk = Walk::new(gfn..gfn.add(1));
        // What it has no tables for (somebody else has brought it back and back) goes as a whole.
        while !walk.is_done() && !frames.is_empty() {
            let reaches_over = |start: Gfn, _| start < gfn;
            self.split_some(
                &mut walk,
                SplitWalk::SkipLastLevel,
                reaches_over,
                frames,
                broken,
            );
            self.pass();
        }
    }
}
