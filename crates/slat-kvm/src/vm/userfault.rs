//! Memslots with `KVM_MEM_USERFAULT`: the client marks the pages that it has not provided yet in a bitmap
//! ([`slat_host::userfault`]).
//!
//! The bitmap is used before the slot exists, and until the slot is deleted. When an existing slot gets a bitmap, or
//! loses it, the slot's memory is invalidated, so that all pages of the slot are zapped. This matches KVM, which
//! flushes the slot when the flag is set, and recovers huge pages when the flag is cleared. The engine does not know
//! the flag. The engine asks the platform for each page, and the platform checks the bitmap.

use crate::errno::{Result, fail};
use crate::policy;
use crate::user;
use crate::vm::VmObject;
use kvm_bindings::kvm_userspace_memory_region2;
use slat::{Hva, Region, RegionError};
use slat_host::granule;
use slat_host::userfault::Userfault;
use std::sync::PoisonError;

/// The memslot flag of the patch series that was posted for Linux (version 3).
pub(super) const KVM_MEM_USERFAULT: u32 = 1 << 3;

/// Returns the memslot flags that this module adds to those that the VM accepts.
pub(super) fn flags() -> u32 {
    match policy::userfault() {
        true => KVM_MEM_USERFAULT,
        false => 0,
    }
}

/// Returns the address of the bitmap that `region` names: the first word of `pad2`. `None`: `region` does not have the
/// flag, or deletes a slot.
///
/// # Errors
/// `EINVAL` if the bitmap does not lie in user space.
pub(super) fn bitmap(region: &kvm_userspace_memory_region2) -> Result<Option<u64>> {
    let size = region.memory_size;
    if region.flags & KVM_MEM_USERFAULT == 0 || size == 0 {
        return Ok(None);
    }
    let words = (size >> granule().shift()).div_ceil(64) as usize;
    match user::in_user_space(region.pad2[0], words * 8) {
        true => Ok(Some(region.pad2[0])),
        false => fail(libc::EINVAL),
    }
}

impl VmObject {
    /// Creates, deletes or changes the memslot `asked`. `bitmap` names the slot's absent pages.
    ///
    /// # Errors
    /// [`RegionError`]; nothing was changed.
    pub(super) fn set_slot(
        &self,
        space: usize,
        asked: &Region,
        bitmap: Option<u64>,
    ) -> std::result::Result<(), RegionError> {
        let set = || match self.engine.set_memory_region(space, asked) {
            // As in KVM, a size of 0 deletes the slot. `set_memory_region` has made the checks that do not depend on
            // the size.
            Err(RegionError::Empty(slot)) => self.engine.remove_memory_region(space, slot),
            set => set,
        };
        if !policy::userfault() {
            return set();
        }
        let turn = self.userfault_turn.lock();
        let _turn = turn.unwrap_or_else(PoisonError::into_inner);
        let userfaults = self.engine.userfaults();
        let old = userfaults.get(space, asked.slot);
        let new = bitmap.map(|bitmap| Userfault {
            backing: (asked.backing, asked.private),
            pages: asked.size >> granule().shift(),
            bitmap,
        });
        if asked.size == 0 {
            set()?;
            return Ok(userfaults.set(space, asked.slot, None)?);
        }
        if old == new {
            return set();
        }
        self.engine.check_memory_region(space, asked)?;
        let change = |userfault| {
            let bytes = |start: Hva| start..Hva(start.0 + asked.size);
            let _shared = self.engine.invalidate(bytes(asked.backing));
            let _private = (asked.private).map(|start| self.engine.invalidate(bytes(start)));
            userfaults.set(space, asked.slot, userfault)
        };
        change(new)?;
        set().inspect_err(|_| {
            // Undo the change: restore the old bitmap, or remove the new bitmap. Neither needs memory, so the call
            // cannot fail.
            let _no_error = change(old);
        })
    }
}
