//! Coalesced I/O: writes to device registers that the client may see later.
//!
//! The client names ranges of addresses or ports. A write to such a range goes into a ring of one page. All vCPUs of a
//! VM share the ring, which is mapped after the other pages of each vCPU. `KVM_RUN` returns only when the ring is
//! full.
//!
//! # Order
//! Ring entries are plain memory, which belongs to one side at a time. slat gives an entry to the client by advancing
//! `last` (a release store), and gets the entry back when it reads `first` (an acquire load). The client reads `last`
//! and advances `first` in the same way ([`Coalesced::next`]). Only one vCPU writes at a time, under a lock.

use crate::errno::{Result, fail};
use crate::io_bus::{Range, Space};
use crate::run_page::Shared;
use kvm_bindings::*;
use slat_host::page_size;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Returns the offset of the ring in a vCPU's mapping.
pub fn offset() -> usize {
    KVM_COALESCED_MMIO_PAGE_OFFSET as usize * page_size()
}

/// Returns the number of ring entries. One ring entry is always unused, so that a full ring differs from an empty one.
fn entries() -> u32 {
    let bytes = page_size() - size_of::<kvm_coalesced_mmio_ring>();
    (bytes / size_of::<kvm_coalesced_mmio>()) as u32
}

/// The ring of coalesced MMIO and port writes of a VM.
#[derive(Debug)]
pub(crate) struct Coalesced {
    ring: Shared,
    /// The lock that is held while a vCPU writes to the ring.
    turn: Mutex<()>,
}

impl Coalesced {
    pub(crate) fn new() -> Result<Self> {
        Ok(Coalesced {
            ring: Shared::new(page_size())?,
            turn: Mutex::default(),
        })
    }

    /// Maps the ring's page also at `address`. The ring's other mappings stay.
    ///
    /// # Errors
    /// The host's error for the mapping.
    ///
    /// # Safety
    /// The page at `address` belongs to a mapping that the caller may replace.
    pub(crate) unsafe fn show_at(&self, address: usize) -> Result<()> {
        // SAFETY: the caller keeps this function's contract.
        unsafe { self.ring.show_at(0, address) }
    }

    /// Returns `first` (which the client advances) and `last` (which slat advances).
    fn indices(&self) -> (&AtomicU32, &AtomicU32) {
        let ring: *mut kvm_coalesced_mmio_ring = self.ring.start().cast();
        // SAFETY: both indices are within the page and aligned. The client may change an atomic at any time.
        unsafe {
            (
                AtomicU32::from_ptr(&raw mut (*ring).first),
                AtomicU32::from_ptr(&raw mut (*ring).last),
            )
        }
    }

    /// Puts writes of `units` (1 to 8 bytes each) to one address or port into the ring. If the ring does not have space
    /// for all units, puts none of them into the ring and returns `false`. Then `KVM_RUN` has to exit, so that the
    /// client sees the writes.
    pub(crate) fn put<'a>(
        &self,
        start: u64,
        port: bool,
        units: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> bool {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (first, last) = self.indices();
        let mut index = last.load(Ordering::Relaxed);
        let taken_from = first.load(Ordering::Acquire);
        // The client can write invalid values to both indices.
        if index >= entries() || taken_from >= entries() {
            return false;
        }
        let free = (taken_from + entries() - index - 1) % entries();
        if (free as usize) < units.clone().count() {
            return false;
        }
        for item in units {
            let mut entry = kvm_coalesced_mmio {
                phys_addr: start,
                len: item.len() as u32,
                ..Default::default()
            };
            entry.__bindgen_anon_1.pio = port.into();
            entry.data[..item.len()].copy_from_slice(item);
            let ring: *mut kvm_coalesced_mmio_ring = self.ring.start().cast();
            // SAFETY: the ring entry lies after the indices within the page, since `index` is below `entries()`. The
            // ring entry is plain data. This call holds the lock of writers, and the client reads the ring entry only
            // after `last` has advanced.
            unsafe {
                let entries = (&raw mut (*ring).coalesced_mmio).cast::<kvm_coalesced_mmio>();
                entries.add(index as usize).write_volatile(entry);
            }
            index = (index + 1) % entries();
        }
        last.store(index, Ordering::Release);
        true
    }

    /// Removes the oldest ring entry, as a client does. `None`: the ring is empty, or its indices name no ring entry.
    pub(crate) fn next(&self) -> Option<kvm_coalesced_mmio> {
        let (first, last) = self.indices();
        let (index, end) = (first.load(Ordering::Relaxed), last.load(Ordering::Acquire));
        // The client can write invalid values to both indices. If `end` were not the index of a ring entry, `index`
        // would never reach `end`, and reading would never stop.
        if index == end || index >= entries() || end >= entries() {
            return None;
        }
        let ring: *mut kvm_coalesced_mmio_ring = self.ring.start().cast();
        // SAFETY: the ring entry lies after the indices within the page, since `index` is below `entries()`. Every bit
        // pattern of a ring entry is valid.
        let entry = unsafe {
            let entries = (&raw const (*ring).coalesced_mmio).cast::<kvm_coalesced_mmio>();
            entries.add(index as usize).read_volatile()
        };
        first.store((index + 1) % entries(), Ordering::Release);
        Some(entry)
    }
}

/// Returns the range of addresses or ports that the client's `zone` names.
///
/// # Errors
/// `EINVAL` for a kind that is neither memory nor ports.
pub(crate) fn range(zone: &kvm_coalesced_mmio_zone) -> Result<Range> {
    // SAFETY: every bit pattern of both fields of the union is valid, and the fields have the same size.
    let space = match unsafe { zone.__bindgen_anon_1.pio } {
        0 => Space::Memory,
        1 => Space::Ports,
        _ => return fail(libc::EINVAL),
    };
    Ok(Range::new(space, zone.addr, zone.size.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_that_the_client_spoils_make_an_ordinary_exit() {
        let coalesced = Coalesced::new().unwrap();
        let put = |units: &[&[u8]]| coalesced.put(0, false, units.iter().copied());
        let (first, last) = coalesced.indices();
        for (bad_first, bad_last) in [(0, entries()), (u32::MAX, 0), (entries(), 1), (1, u32::MAX)]
        {
            first.store(bad_first, Ordering::Relaxed);
            last.store(bad_last, Ordering::Relaxed);
            assert!(!put(&[&[1, 2, 3, 4]]));
        }
        first.store(0, Ordering::Relaxed);
        last.store(entries() - 2, Ordering::Relaxed);
        assert!(!put(&[&[1], &[2]]), "room for one");
        assert!(put(&[&[1]]));
        assert_eq!(last.load(Ordering::Relaxed), entries() - 1);
    }
}
