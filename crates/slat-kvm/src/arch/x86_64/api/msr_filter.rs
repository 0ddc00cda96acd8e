//! Calls of a [`VmFd`] that set the MSR filter.

use crate::api::VmFd;
use crate::errno::{Result, fail};
use crate::heap;
use kvm_bindings::{KVM_MSR_FILTER_MAX_RANGES, kvm_msr_filter};
use kvm_ioctls::{MsrFilterDefaultAction, MsrFilterRange};

impl VmFd {
    /// Carries out `KVM_X86_SET_MSR_FILTER`: chooses the MSRs that the guest may access. The default action applies to
    /// MSRs in no range.
    ///
    /// # Errors
    /// `EINVAL` for more ranges than a filter can have, a bitmap that is too short for its range, and an
    /// invalid filter; `ENOMEM`.
    pub fn set_msr_filter(
        &self,
        default_action: MsrFilterDefaultAction,
        ranges: &[MsrFilterRange<'_>],
    ) -> Result<()> {
        if ranges.len() > KVM_MSR_FILTER_MAX_RANGES as usize {
            return fail(libc::EINVAL);
        }
        let mut filter = kvm_msr_filter {
            flags: default_action as u32,
            ..Default::default()
        };
        // Pads each bitmap to whole words, because KVM reads words and the client's bitmap may end within a word.
        let mut bitmaps = heap::with_room(ranges.len())?;
        for (to, range) in filter.ranges.iter_mut().zip(ranges) {
            let Some(bytes) = range.bitmap.get(..range.msr_count.div_ceil(8) as usize) else {
                return fail(libc::EINVAL);
            };
            let mut words = heap::zeroes(bytes.len().div_ceil(8))?;
            for (word, bytes) in words.iter_mut().zip(bytes.chunks(8)) {
                let mut whole = [0; 8];
                whole[..bytes.len()].copy_from_slice(bytes);
                *word = u64::from_le_bytes(whole);
            }
            to.flags = range.flags.bits();
            to.base = range.base;
            to.nmsrs = range.msr_count;
            to.bitmap = words.as_mut_ptr().cast();
            bitmaps.push(words);
        }
        self.vm.set_msr_filter(&filter)
    }

    /// Sets the MSR filter like [`set_msr_filter`](Self::set_msr_filter), but takes KVM's own struct.
    ///
    /// # Errors
    /// The errors are those of [`set_msr_filter`](Self::set_msr_filter), and `EFAULT` for a bitmap that is not mapped.
    ///
    /// # Safety
    /// The bitmaps have a bit for each MSR of their ranges, in whole words.
    pub unsafe fn set_msr_filter_unchecked(&self, filter: &kvm_msr_filter) -> Result<()> {
        self.vm.set_msr_filter(filter)
    }
}
