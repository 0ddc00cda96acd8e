//! Conversions: guest frames become private, or shared again.
//!
//! A conversion works like a slot change ([`super::region`]): publish the sets with the new attributes, raise the
//! sequence, zap, flush, return. No fault that has found the old attributes can install its leaf any more. The slots
//! stay in the set, so an invalidation of either backing meanwhile finds the frames and zaps them itself; the
//! leaves of a slot that is deleted or moved meanwhile are zapped by that change. And a leaf that is
//! write-protected for a dirty log, whose page the next fault takes from the table, is never in a slot with two
//! backings. The new sets have a new generation, too: a frame that was MMIO to a shared access may be memory to a
//! private one.
//!
//! No leaf may cross a boundary between private and shared frames. Faults keep to that
//! (`gfns` in the facts of the fault's slot). A conversion splits in place the huge leaves that reach out of its
//! range, and zaps only the part in the range: the rest stays mapped throughout. It allocates the tables that this
//! can need before it changes anything.

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
    /// Sets the attributes of the frames `gfns`, in every address space, whether memslots contain them or not:
    /// KVM_SET_MEMORY_ATTRIBUTES. When this returns no CPU uses the old state. The client takes care of the
    /// contents of both backings.
    ///
    /// Not for a vCPU between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
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
        // The locks of all spaces, always in this order. While one of them is held, no conversion is published.
        let mut changes = Vec::new();
        changes
            .try_reserve_exact(self.spaces.len())
            .map_err(|_| OutOfMemory)?;
        changes.extend((self.spaces.iter()).map(|space| space.slots.change(self.turn_wait())));
        let Some(first) = changes.first() else {
            return Ok(());
        };
        let Some(private) = first.set().private.with(&gfns, private)? else {
            // The frames have these attributes already. But the conversion that set them may still be zapping.
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

    /// Publishes `private` in all spaces, and zaps `gfns`. `frames` has tables for the splits; `changes` has the locks
    /// of all spaces.
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
        // Before the locks are released: a conversion that finds nothing to change must see that this one is not done.
        let _converting = self.in_progress.converts();
        // Slots may change again from here: leaves that faults install from now on have the new attributes.
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
