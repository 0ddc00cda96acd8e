//! A VM's calls for dirty logs: bitmaps, manual protection, and the rings. The engine logs; these calls check KVM's
//! arguments and return its errors.

use crate::call::Call;
use crate::errno::{Error, Result, fail};
use crate::vm::VmObject;
use crate::{dirty, heap};
use kvm_bindings::*;
use slat::{DirtyLogError, Gpa};
use slat_host::granule;

fn refused(error: DirtyLogError) -> Error {
    Error::new(error.errno())
}

impl VmObject {
    /// Begins a call of an operation on dirty bitmaps. Fails with `ENXIO` in a VM with dirty rings.
    fn begin_with_bitmaps(&self) -> Result<Call<'_>> {
        let call = self.begin()?;
        if self.rings.size() == 0 {
            Ok(call)
        } else {
            fail(libc::ENXIO)
        }
    }

    /// Splits a client's slot number into address space and id.
    fn space_and_id(&self, slot: u32) -> Result<(usize, u32)> {
        let (space, id) = ((slot >> 16) as usize, slot & 0xffff);
        if space >= self.address_spaces() || id >= slat::MAX_SLOTS {
            return fail(libc::EINVAL);
        }
        Ok((space, id))
    }

    /// Carries out `KVM_GET_DIRTY_LOG`. Returns one bit for each page, which is set if the page was written since the
    /// last call. Without manual protection, write-protects these pages again. Calls `ready` with the size in bytes
    /// before it harvests anything.
    ///
    /// # Errors
    /// `EINVAL` for a bad slot, `ENOENT` for a slot that is not logged, `ENXIO` with dirty rings, `ENOMEM`,
    /// the errors of `ready`.
    pub fn dirty_log(&self, slot: u32, ready: impl Fn(usize) -> Result<()>) -> Result<Vec<u64>> {
        let _call = self.begin_with_bitmaps()?;
        let (space, id) = self.space_and_id(slot)?;
        loop {
            let words = self.engine.dirty_log_words(space, id).map_err(refused)?;
            ready(words * size_of::<u64>())?;
            let mut bitmap = heap::zeroes(words)?;
            match self.engine.get_dirty_log(space, id, &mut bitmap) {
                Ok(()) => return Ok(bitmap),
                // The slot was replaced by a larger slot since its size was read.
                Err(DirtyLogError::BufferTooSmall(_)) => {}
                Err(error) => return Err(refused(error)),
            }
        }
    }

    /// Carries out `KVM_CLEAR_DIRTY_LOG`: clears the pages that are set in a bitmap, so that their next write is logged
    /// again. The closure `bitmap` returns the bitmap, for a given number of words.
    ///
    /// # Errors
    /// `EINVAL` for a bad slot or range, `ENOENT` for a slot that is not logged, `ENXIO` with dirty rings,
    /// the errors of `bitmap`.
    pub fn clear_dirty_log<B: AsRef<[u64]>>(
        &self,
        slot: u32,
        first: u64,
        pages: u32,
        bitmap: impl FnOnce(usize) -> Result<B>,
    ) -> Result<()> {
        let _call = self.begin_with_bitmaps()?;
        let (space, id) = self.space_and_id(slot)?;
        if !first.is_multiple_of(64) {
            return fail(libc::EINVAL);
        }
        let words = self.engine.dirty_log_words(space, id).map_err(refused)?;
        let wanted = pages.div_ceil(64) as usize;
        if first / 64 + wanted as u64 > words as u64 {
            return fail(libc::EINVAL);
        }
        let bitmap = bitmap(wanted)?;
        self.engine
            .clear_dirty_log(space, id, first, pages.into(), bitmap.as_ref())
            .map_err(refused)
    }

    /// Marks in the dirty logs the pages that the client has written: the pages of the `len` bytes from the
    /// guest-physical address `start` on, in address space `space`.
    ///
    /// # Errors
    /// `EINVAL` for an address space that the VM does not have, and for bytes beyond the last address;
    /// `ENXIO` with dirty rings.
    pub fn mark_dirty(&self, space: usize, start: u64, len: u64) -> Result<()> {
        let _call = self.begin()?;
        let last = start.checked_add(len.saturating_sub(1));
        let (true, Some(last)) = (space < self.address_spaces(), last) else {
            return fail(libc::EINVAL);
        };
        if len == 0 {
            return Ok(());
        }
        let gfns = granule().gfn(Gpa(start))..granule().gfn(Gpa(last)).add(1);
        self.engine.mark_dirty(space, gfns).map_err(refused)
    }

    /// Whether the page of `address` in address space `space` is marked in a dirty log. Does not clear the mark.
    ///
    /// # Errors
    /// `EIO` in a forked child, and after a call that panicked.
    pub fn is_marked_dirty(&self, space: usize, address: u64) -> Result<bool> {
        let _call = self.begin()?;
        Ok(self
            .engine
            .is_marked_dirty(space, granule().gfn(Gpa(address))))
    }

    /// Carries out `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`.
    pub(crate) fn set_manual_dirty_log(&self, options: u64) -> Result<()> {
        let manual = options & u64::from(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE) != 0;
        let set = options & u64::from(KVM_DIRTY_LOG_INITIALLY_SET) != 0;
        let known = u64::from(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET);
        if options & !known != 0 || set && !manual {
            return fail(libc::EINVAL);
        }
        self.engine.set_manual_dirty_log(manual, set);
        Ok(())
    }

    /// Carries out `KVM_CAP_DIRTY_LOG_RING` and `KVM_CAP_DIRTY_LOG_RING_ACQ_REL`. The call is allowed once, before
    /// there are vCPUs. The second capability promises acquire and release order. An architecture has the first
    /// capability only if its plain loads and stores have this order.
    pub(crate) fn enable_dirty_rings(&self, size: u64) -> Result<()> {
        // KVM looks only at the lower 32 bits.
        let size = dirty::check_size(size as u32)?;
        self.before_vcpus(|| self.rings.enable(&self.engine, size))
    }

    /// Carries out `KVM_RESET_DIRTY_RINGS`: resets the ring entries that the client has collected. Returns the number
    /// of entries that were reset.
    ///
    /// # Errors
    /// `EINVAL` without rings.
    pub fn reset_dirty_rings(&self) -> Result<i32> {
        let _call = self.begin()?;
        if self.rings.size() == 0 {
            return fail(libc::EINVAL);
        }
        Ok(self.engine.reset_dirty_rings() as i32)
    }
}
