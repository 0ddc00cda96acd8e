//! Conversions: guest frames become private, or become shared again.
//!
//! A conversion works like a slot change ([`super::region`]): publish the sets with the new attributes, raise the
//! sequence, zap, flush, return. A fault that has found the old attributes cannot install its leaf any more. The slots
//! stay in the set, so a concurrent invalidation of either backing finds the frames and zaps them itself. If a slot is
//! deleted or moved meanwhile, that change zaps the slot's leaves. A fault on a leaf that is write-protected for a
//! dirty log takes the page from the table; such a leaf is never in a slot with two backings. The new sets have a new
//! generation, too: a frame that was MMIO to a shared access may be memory to a private access.
//!
//! No leaf may cross a boundary between private and shared frames. Faults obey this rule (`gfns` in the facts of the
//! fault's slot). A conversion splits in place the huge leaves that reach beyond its range, and zaps only the part in
//! the range: the rest stays mapped throughout. The conversion allocates the tables for these splits before it changes
//! anything.

use alloc::vec::Vec;
use core::ops::Range;

use super::edge::FRAMES_PER_EDGE;
use super::range_op::space_for_broken;
use super::{RangeOp, Vm};
use crate::addr::{Gfn, Gpa, Level};
use crate::format::Format;
use crate::heap::OutOfMemory;
use crate::platform::Platform;
use crate::slots::{AttributesError, MemoryAttributes, PrivateFrames, SlotsChange};
use crate::table::FrameCache;

impl<P: Platform, F: Format> Vm<P, F> {
    /// Sets the attributes of the frames `gfns` in every address space, whether memslots contain them or not:
    /// KVM_SET_MEMORY_ATTRIBUTES. When this returns no CPU uses the old state. The client is responsible for the
    /// contents of both backings.
    ///
    /// Do not call it for a vCPU between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
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
        if gfns.is_empty() || gfns.end > F::GRANULE.gfn(Gpa(u64::MAX)).add(1) {
            return Err(AttributesError::BadRange);
        }
        // Take the locks of all spaces, always in this order. While a thread holds one of them, no conversion is
        // published.
        let mut changes = Vec::new();
        changes
            .try_reserve_exact(self.spaces.len())
            .map_err(|_| OutOfMemory)?;
        changes.extend((self.spaces.iter()).map(|space| space.slots.change(self.turn_wait())));
        let Some(first) = changes.first() else {
            return Ok(());
        };
        let Some(private) = first.set().private.with(&gfns, private)? else {
            // The frames already have these attributes. But the conversion that set them may still be zapping.
            if self.in_progress.is_converting() {
                drop(changes);
                for space in 0..self.spaces.len() {
                    self.zap(space, gfns.clone());
                }
            }
            return Ok(());
        };
        let mut broken = space_for_broken::<F>()?;
        let mut frames = FrameCache::new(self.frames.clone());
        let filled = frames.fill(&*self.platform, changes.len() * 2 * FRAMES_PER_EDGE);
        let converted =
            filled.map(|()| self.convert(changes, &private, &gfns, &mut frames, &mut broken));
        frames.release(&*self.platform);
        Ok(converted?)
    }

    /// Publishes `private` in all spaces, and zaps `gfns`. `frames` contains tables for the splits; `changes` holds
    /// the locks of all spaces.
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
        for (space, change) in self.spaces.iter().zip(&changes) {
            self.forget_old_mmio(space, change);
        }
        for change in &mut *changes {
            change.set_private(private.clone(), &self.readers);
        }
        self.in_progress.raise();
        // Count this conversion before releasing the locks: a conversion that finds nothing to change must see that
        // this one is not done.
        let _converting = self.in_progress.converts();
        // Slots may change again from here on: faults now install leaves with the new attributes.
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
