//! Memory attributes: which guest frames are private. If a guest has no private memory, this costs one comparison per
//! fault.

use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use crate::addr::Gfn;
use crate::heap::OutOfMemory;
use crate::heap::Shared;

/// Attributes of guest memory, with KVM's values (KVM_SET_MEMORY_ATTRIBUTES, api.rst 4.141).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryAttributes(pub u64);

impl MemoryAttributes {
    /// No attribute: the memory is shared with the host. All memory is shared at first.
    pub const NONE: MemoryAttributes = MemoryAttributes(0);
    /// KVM_MEMORY_ATTRIBUTE_PRIVATE: the memory belongs to the guest alone; the slot's
    /// [`private`](crate::Region::private) backing backs it.
    pub const PRIVATE: MemoryAttributes = MemoryAttributes(1 << 3);

    /// Whether memory with these attributes is private.
    pub const fn is_private(self) -> bool {
        self.0 & Self::PRIVATE.0 != 0
    }
}

/// The reason why attributes were not set. The failed call changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttributesError {
    /// The value has bits that are not attributes.
    Unknown(MemoryAttributes),
    /// The range is empty, or reaches beyond the last frame that has a 64-bit address.
    BadRange,
    /// There was no memory. The caller may repeat the call.
    OutOfMemory,
}

impl AttributesError {
    /// Returns the errno that KVM returns (positive, with Linux's numbers).
    pub fn errno(&self) -> i32 {
        const ENOMEM: i32 = 12;
        const EINVAL: i32 = 22;
        match self {
            AttributesError::OutOfMemory => ENOMEM,
            AttributesError::Unknown(_) | AttributesError::BadRange => EINVAL,
        }
    }
}

impl From<OutOfMemory> for AttributesError {
    fn from(_: OutOfMemory) -> Self {
        AttributesError::OutOfMemory
    }
}

impl fmt::Display for AttributesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("setting memory attributes: ")?;
        match self {
            AttributesError::Unknown(attributes) => write!(
                f,
                "{:#x} holds unknown bits; known are {:#x}",
                attributes.0,
                MemoryAttributes::PRIVATE.0
            ),
            AttributesError::BadRange => {
                f.write_str("the range is empty or reaches beyond the address space")
            }
            AttributesError::OutOfMemory => write!(f, "{OutOfMemory}"),
        }
    }
}

impl core::error::Error for AttributesError {}

/// The private frames, stored as an ascending list of boundaries: at the first, third, … boundary a private range
/// begins, and at the second, fourth, … it ends. The list is immutable and part of a [`super::SlotSet`], so a reader
/// that looks up a slot sees the slots and the attributes of the same moment.
///
/// A look-up is a binary search. A change copies the whole list. This is cheap enough: guests convert memory in
/// megabytes, and the TLB flush of a change costs more than the copy.
#[derive(Clone, Default)]
pub(crate) struct PrivateFrames(Option<Shared<Vec<Gfn>>>);

impl PrivateFrames {
    pub(crate) const NONE: PrivateFrames = PrivateFrames(None);

    /// Returns whether `gfn` is private, and the largest range around `gfn` that is private, or shared, like `gfn`.
    #[inline]
    pub(crate) fn around(&self, gfn: Gfn) -> (bool, Range<Gfn>) {
        match &self.0 {
            None => (false, Gfn(0)..Gfn(u64::MAX)),
            Some(boundaries) => around(boundaries, gfn),
        }
    }

    /// Returns a copy of the private frames in which all frames of `range` are private, or, unless `private`, shared.
    /// `None`: they already are.
    pub(crate) fn with(
        &self,
        range: &Range<Gfn>,
        private: bool,
    ) -> Result<Option<Self>, OutOfMemory> {
        let old = self.0.as_ref().map_or(&[][..], |boundaries| boundaries);
        let before = old.partition_point(|at| *at < range.start);
        let after = old.partition_point(|at| *at <= range.end);
        let is_private = |boundaries: usize| boundaries % 2 == 1;
        let ends = [
            (is_private(before) != private).then_some(range.start),
            (is_private(after) != private).then_some(range.end),
        ];
        let ends = ends.into_iter().flatten();
        if ends.clone().eq(old[before..after].iter().copied()) {
            return Ok(None);
        }
        let mut new = Vec::new();
        new.try_reserve_exact(before + 2 + old.len() - after)
            .map_err(|_| OutOfMemory)?;
        new.extend_from_slice(&old[..before]);
        new.extend(ends);
        new.extend_from_slice(&old[after..]);
        let new = (!new.is_empty())
            .then(|| Shared::try_new(new))
            .transpose()?;
        Ok(Some(PrivateFrames(new)))
    }
}

fn around(boundaries: &[Gfn], gfn: Gfn) -> (bool, Range<Gfn>) {
    let after = boundaries.partition_point(|at| *at <= gfn);
    let start = after.checked_sub(1).map_or(Gfn(0), |i| boundaries[i]);
    let end = boundaries.get(after).map_or(Gfn(u64::MAX), |at| *at);
    (after % 2 == 1, start..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slots::tests::Rng;

    /// Makes many changes to a small memory. After each, compares every frame with a plain list.
    #[test]
    fn frames_are_private_as_they_were_last_set() {
        const FRAMES: u64 = 48;
        let mut rng = Rng(1);
        let mut random = |below: u64| rng.below(below);
        let mut frames = PrivateFrames::NONE;
        let mut model = [false; FRAMES as usize];
        for _ in 0..if cfg!(miri) { 40 } else { 5000 } {
            let start = random(FRAMES);
            let end = start + 1 + random(FRAMES - start);
            let private = random(2) == 1;
            let part = &mut model[start as usize..end as usize];
            let changes = part.iter().any(|was| *was != private);
            part.fill(private);
            let new = frames.with(&(Gfn(start)..Gfn(end)), private).unwrap();
            assert_eq!(new.is_some(), changes);
            frames = new.unwrap_or(frames);
            assert_eq!(frames.0.is_some(), model.contains(&true));
            for gfn in 0..FRAMES {
                let (private, alike) = frames.around(Gfn(gfn));
                assert_eq!(private, model[gfn as usize]);
                assert!(alike.contains(&Gfn(gfn)));
                for other in [alike.start.0.wrapping_sub(1), alike.end.0] {
                    if other < FRAMES {
                        assert_ne!(
                            model[other as usize], private,
                            "{alike:?} is not the largest"
                        );
                    }
                }
                let alike = alike.start.0..alike.end.0.min(FRAMES);
                assert!(alike.into_iter().all(|g| model[g as usize] == private));
            }
        }
    }
}
