//! Conversions: guest frames become private, or become shared again.
//!
//! A conversion works like a slot change ([`super::region`]): it publishes slot sets with the new attributes, raises
//! the invalidation sequence, zaps, flushes, and returns. A fault that has found the old attributes cannot install its
//! leaf any more, because the sequence has changed. The slots stay in the set, so a concurrent invalidation of the
//! shared or the private backing finds the frames and zaps their leaves itself. If a slot is deleted or moved during
//! the conversion, that change zaps the slot's leaves. A fault that takes the page from an existing leaf, because only
//! the dirty log has write-protected the leaf, is safe: a slot with two backings does not log. The new sets have a new
//! generation, too: an access that was MMIO while the frame was shared may be an access to memory when the frame is
//! private.
//!
//! No leaf may cross a boundary between private and shared frames. Faults obey this rule (`SlotFacts::gfns`). A
//! conversion splits in place the huge leaves that also map frames outside its range, and zaps only the pieces in the
//! range: the other pieces stay mapped throughout. The conversion allocates the tables for these splits before it
//! changes anything.

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
    /// KVM_SET_MEMORY_ATTRIBUTES. When this returns, no CPU uses a translation by the old attributes. The contents of
    /// the shared and the private backing are the client's concern.
    ///
    /// Do not call this while the calling thread's vCPU is between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
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
        // Take the locks of all address spaces, always in this order. So while a thread holds any of these locks, no
        // other thread can publish a conversion.
        let mut changes = Vec::new();
        changes
            .try_reserve_exact(self.spaces.len())
            .map_err(|_| OutOfMemory)?;
        changes.extend((self.spaces.iter()).map(|space| space.slots.change(self.turn_wait())));
        let Some(first) = changes.first() else {
            return Ok(());
        };
        let Some(private) = first.set().private.with(&gfns, private)? else {
            // The frames already have these attributes. But the conversion that set them may still be zapping leaves:
            // wait.
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

    /// Publishes `private` in all address spaces, and zaps the leaves of `gfns`. `frames` contains frames for the
    /// tables of the splits; `changes` holds the slot writers' locks of all address spaces.
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
        // Count this conversion before releasing the locks: a later conversion that finds nothing to change must notice
        // that this one is still in progress.
        let _converting = self.in_progress.converts();
        // Other threads may change slots again from now on, because faults now install leaves with the new attributes.
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
