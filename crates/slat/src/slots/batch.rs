//! Changes several memslots atomically: the client's requests, and the rules that they must follow.
//!
//! The rules are those of KVM_SET_USER_MEMORY_REGION (Documentation/virt/kvm/api.rst, 4.35), applied to the final state
//! of the slots: a slot may overlap a slot that the same call deletes, moves or shrinks. KVM does not allow one call to
//! change a slot's size or backing, because KVM would have to delete the slot first, and its memory would be unmapped
//! for a moment. Here it is allowed.

use alloc::vec::Vec;

use super::region::place;
use super::{Region, RegionError, SlotsChange, check};
use crate::addr::Granule;
use crate::heap::OutOfMemory;

/// A change of one memslot, for [`crate::Vm::set_memory_regions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// Creates the slot, or changes its address, size, backing, flags and rights, to those of the [`Region`]. If the
    /// region has private backing, the slot must not exist yet.
    Set(Region),
    /// Deletes the slot with this id.
    Remove(u32),
}

impl Change {
    /// Returns the id of the slot that this change concerns.
    pub fn slot(&self) -> u32 {
        match self {
            Change::Set(region) => region.slot,
            Change::Remove(slot) => *slot,
        }
    }

    fn region(&self) -> Option<&Region> {
        match self {
            Change::Set(region) => Some(region),
            Change::Remove(_) => None,
        }
    }
}

/// Changes that were checked, each alone and all against each other, but not against the existing slots.
pub(crate) struct Batch<'a> {
    changes: &'a [Change],
    granule: Granule,
    /// The ids of the slots that the changes concern, in ascending order.
    ids: Vec<u32>,
}

impl<'a> Batch<'a> {
    /// Checks `changes`, for tables of `granule`, against the rules for which the existing slots need not be known. The
    /// caller holds no lock.
    ///
    /// # Errors
    /// [`RegionError`].
    pub(crate) fn check(changes: &'a [Change], granule: Granule) -> Result<Self, RegionError> {
        for region in changes.iter().filter_map(Change::region) {
            check(region, granule)?;
        }
        let mut ids = collected(changes.iter().map(Change::slot))?;
        ids.sort_unstable();
        if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(RegionError::NamedTwice(twice[0]));
        }
        let regions = changes.iter().filter_map(Change::region);
        let mut by_gpa = collected(regions.clone().map(|region| (region.gpa.0, region)))?;
        if let Some((region, with)) = overlap(&mut by_gpa) {
            return Err(RegionError::Overlap { region, with });
        }
        let private = regions.filter_map(|region| Some((region.private?.0, region)));
        if let Some((region, by)) = overlap(&mut collected(private)?) {
            return Err(RegionError::PrivateTaken { region, by });
        }
        Ok(Batch {
            changes,
            granule,
            ids,
        })
    }

    /// Checks the changes against the existing slots, in the order of the changes. `capacity` is the number of frames
    /// that the tables translate.
    ///
    /// # Errors
    /// [`RegionError`].
    pub(crate) fn plan(&self, slots: &SlotsChange<'_>, capacity: u64) -> Result<(), RegionError> {
        let is_named = |id| self.ids.binary_search(&id).is_ok();
        for change in self.changes {
            let old = slots.by_id(change.slot());
            match (change, old) {
                (Change::Remove(id), None) => return Err(RegionError::NothingToDelete(*id)),
                (Change::Remove(_), Some(_)) => {}
                (Change::Set(region), Some(old))
                    if old.private().is_some() || region.private.is_some() =>
                {
                    return Err(RegionError::PrivateChanged(region.slot));
                }
                (Change::Set(region), _) => {
                    place(slots, (region, self.granule), capacity, is_named)?
                }
            }
        }
        Ok(())
    }
}

/// Collects `items` in a vector.
///
/// # Errors
/// [`OutOfMemory`].
fn collected<T>(items: impl Iterator<Item = T> + Clone) -> Result<Vec<T>, OutOfMemory> {
    let mut all = Vec::new();
    (all.try_reserve_exact(items.clone().count())).map_err(|_| OutOfMemory)?;
    all.extend(items);
    Ok(all)
}

/// Returns one of two regions that share a page, and the slot id of the other. `None` if no two regions share a page.
/// Each element is the address of a region's first page, and the region; no range wraps around.
fn overlap(regions: &mut [(u64, &Region)]) -> Option<(Region, u32)> {
    regions.sort_unstable_by_key(|(start, region)| (*start, region.slot));
    let mut pairs = regions.windows(2);
    pairs.find_map(|pair| {
        let [(first, lower), (second, upper)] = [pair[0], pair[1]];
        (second < first + lower.size).then_some((*upper, lower.slot))
    })
}
