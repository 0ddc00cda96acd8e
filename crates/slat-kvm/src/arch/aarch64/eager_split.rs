//! `KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE`: a VM can split huge leaves eagerly. It splits them when a memslot's dirty log
//! begins, or in the call that clears the log. The capability's value is the number of bytes that the VM splits at a
//! time; 0: the VM does not split eagerly.
//!
//! In KVM, a new VM has the value 0. In slat, the policies `eager_page_split` and `eager_page_split_chunk` determine
//! the value of a new VM.

use crate::engine::EngineVm;
use crate::errno::{Result, fail};
use slat::{Gfn, Setting, Switch};
use slat_process::page_size;

/// Returns the sizes of pages and blocks of stage 2, as bits: the value of `KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES`.
pub(crate) fn block_sizes() -> u64 {
    let page = page_size() as u64;
    let block = page * page / 8;
    match page {
        // With pages of 4 KiB, tables of level 1 can have blocks, too.
        0x1000 => page | block | (block * page / 8),
        _ => page | block,
    }
}

/// Returns how many bytes a VM splits at a time, at most the size of the largest block, so that the result fits in a
/// capability's `int`. 0: the VM does not split eagerly.
pub(crate) fn chunk(engine: &EngineVm) -> u64 {
    let policy = engine.policy();
    let largest = 1 << block_sizes().ilog2();
    match policy.eager_page_split {
        Switch::On => (u64::from(policy.eager_page_split_chunk) * page_size() as u64).min(largest),
        Switch::Off => 0,
    }
}

/// Sets how many bytes a VM splits at a time. 0: the VM does not split eagerly.
///
/// # Errors
/// `EINVAL` if stage 2 has no block of this size, and for a VM with memslots.
pub(crate) fn set_chunk(engine: &EngineVm, bytes: u64) -> Result<()> {
    let is_size = bytes == 0 || bytes.is_power_of_two() && block_sizes() & bytes != 0;
    if !is_size || engine.memslot_from(0, Gfn(0)).is_some() {
        return fail(libc::EINVAL);
    }
    let splits = match bytes {
        0 => Switch::Off,
        _ => Switch::On,
    };
    engine.set_policy(Setting::EagerPageSplit(splits));
    if bytes != 0 {
        let pages = bytes / page_size() as u64;
        engine.set_policy(Setting::EagerPageSplitChunk(pages as u32));
    }
    Ok(())
}
