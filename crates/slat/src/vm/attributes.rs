//! Conversions: guest frames become private, or shared again.
//!
//! A conversion is an invalidation as a slot change is ([`super::region`]): publish the sets in which
//! the frames have their new attributes, raise the sequence, zap, flush, return. A fault that went by
//! the old attributes cannot install any more. No slot leaves the set, so an invalidation of either
//! backing meanwhile finds the frames and zaps them itself; and a leaf that is protected for a dirty log,
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
use crate::format::{Entry, Format};
use crate::platform::Platform;
use crate::slots::{AttributesError, MemoryAttributes, PrivateFrames, SlotsChange};
use crate::table::{FrameCache, OutOfMemory, SplitWalk, Tree};

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
            return Ok(());
        };
        let mut frames = FrameCache::default();
        let filled = frames.fill(&*self.platform, changes.len() * FRAMES_TO_SPLIT);
        let converted = filled.map(|()| self.convert(&mut changes, &private, &gfns, &mut frames));
        frames.release(&*self.platform);
        Ok(converted?)
    }

    fn convert(
        &self,
        changes: &mut [SlotsChange<'_>],
        private: &PrivateFrames,
        gfns: &Range<Gfn>,
        frames: &mut FrameCache,
    ) {
        for change in &mut *changes {
            change.catch_up(&self.readers, self.reader_wait());
        }
        for change in &mut *changes {
            change.set_private(private.clone(), &self.readers);
        }
        self.in_progress.raise();
        for space in &self.spaces {
            let mut op = RangeOp::begin(self, space);
            op.split_over(gfns.start, frames);
            op.split_over(gfns.end, frames);
            // With all changes of slots locked out, nothing is mapped but what the slots hold.
            op.zap_slots(gfns);
            op.finish(Some(gfns.clone()));
        }
        for (space, change) in self.spaces.iter().zip(&*changes) {
            self.forget_old_mmio(space, change.set().generation);
        }
    }
}

/// Tables that two huge leaves of the largest size are split into, each down to one boundary.
const FRAMES_TO_SPLIT: usize = 2 * (Level::GIGA.0 as usize - 1);

impl<P: Platform, F: Format> RangeOp<'_, P, F> {
    /// Splits, in place, the huge leaf that reaches over the boundary before `gfn`, if there is one.
    /// `frames` has the tables for it.
    fn split_over(&mut self, gfn: Gfn, frames: &mut FrameCache) {
        let (vm, space) = (self.vm(), self.space);
        if gfn.0 >= Tree::<P, F>::capacity() {
            return;
        }
        let found = self.tree().lookup(gfn);
        let whole =
            gfn.align_down(found.level)..gfn.align_down(found.level).add(found.level.pages());
        if !matches!(found.entry::<F>(), Entry::Leaf(_)) || whole.start == gfn {
            return;
        }
        // SAFETY: `split` is called in this operation's section, and between one that `flush` ends and the
        // next it has nothing in hand.
        let tree = unsafe { space.tree.unguarded() };
        let split = vm.with_path(frames, self.counters(), |path| {
            let reaches_over = |start: Gfn, _| start < gfn;
            tree.split(
                gfn..gfn.add(1),
                SplitWalk::SkipLastLevel,
                reaches_over,
                path,
                || self.flush(whole.clone()),
            )
        });
        debug_assert!(split.is_ok(), "the tables were allocated before");
    }
}
