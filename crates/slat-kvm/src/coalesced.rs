//! Coalesced I/O: writes to device registers that the client may see later.
//!
//! The client names ranges of addresses or ports. A write there goes into a ring of one page, which all vCPUs of a VM
//! share and which is mapped after the port-data page of each vCPU; `KVM_RUN` returns only when the ring is full.

use crate::errno::{Result, fail};
use crate::heap;
use crate::run_page::{PAGE, Shared};
use kvm_bindings::*;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Offset of the ring in a vCPU's mapping.
pub const OFFSET: usize = KVM_COALESCED_MMIO_PAGE_OFFSET as usize * PAGE;
/// Number of ring entries. One of them always stays free.
const ENTRIES: u32 =
    ((PAGE - size_of::<kvm_coalesced_mmio_ring>()) / size_of::<kvm_coalesced_mmio>()) as u32;
/// Ranges that a VM can have: as many as KVM's buses have devices.
const MAX_ZONES: usize = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Zone {
    start: u64,
    size: u64,
    port: bool,
}

impl Zone {
    fn contains(&self, other: &Zone) -> bool {
        let end = other.start.checked_add(other.size);
        self.port == other.port
            && other.start >= self.start
            && end.is_some_and(|end| end <= self.start.saturating_add(self.size))
    }
}

/// The ring of a VM, and the ranges whose writes go there.
#[derive(Debug)]
pub(crate) struct Coalesced {
    ring: Shared,
    /// The lock also protects the ring from concurrent writes of vCPUs.
    zones: Mutex<Vec<Zone>>,
    /// Whether there are zones; if not, exits skip the lock.
    wanted: AtomicBool,
}

impl Coalesced {
    pub(crate) fn new() -> Result<Self> {
        Ok(Coalesced {
            ring: Shared::new(PAGE)?,
            zones: Mutex::default(),
            wanted: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Zone>> {
        self.zones.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets writes to the range go to the ring.
    ///
    /// # Errors
    /// `EINVAL` for a kind that is neither memory nor ports, `ENOSPC` for too many ranges, `ENOMEM`.
    pub(crate) fn register(&self, zone: &kvm_coalesced_mmio_zone) -> Result<()> {
        let zone = taken(zone)?;
        let mut zones = self.lock();
        if zones.len() >= MAX_ZONES {
            return fail(libc::ENOSPC);
        }
        heap::reserve(&mut zones, 1)?;
        zones.push(zone);
        self.wanted.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Removes every registered range that contains the given one.
    ///
    /// # Errors
    /// `EINVAL` for a kind that is neither memory nor ports.
    pub(crate) fn unregister(&self, zone: &kvm_coalesced_mmio_zone) -> Result<()> {
        let zone = taken(zone)?;
        let mut zones = self.lock();
        zones.retain(|registered| !registered.contains(&zone));
        self.wanted.store(!zones.is_empty(), Ordering::Relaxed);
        Ok(())
    }

    /// Maps the ring at `address`, too.
    ///
    /// # Errors
    /// What the host returns for the mapping.
    ///
    /// # Safety
    /// The page at `address` belongs to a mapping that the caller may replace.
    pub(crate) unsafe fn show_at(&self, address: usize) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.ring.show_at(0, address) }
    }

    /// Returns `first` (which the client advances) and `last` (which slat advances).
    fn indices(&self) -> (&AtomicU32, &AtomicU32) {
        let ring: *mut kvm_coalesced_mmio_ring = self.ring.start().cast();
        // SAFETY: within the page, aligned, and atomics may be shared with the client.
        unsafe {
            (
                AtomicU32::from_ptr(&raw mut (*ring).first),
                AtomicU32::from_ptr(&raw mut (*ring).last),
            )
        }
    }

    /// Puts the write of `count` items of `size` bytes at one address or port into the ring. Returns `false` if the
    /// client has to see it now.
    pub(crate) fn take(&self, start: u64, port: bool, size: u8, count: u32, data: &[u8]) -> bool {
        if !self.wanted.load(Ordering::Relaxed) {
            return false;
        }
        let zones = self.lock();
        let written = Zone {
            start,
            size: size.into(),
            port,
        };
        if !zones.iter().any(|zone| zone.contains(&written)) {
            return false;
        }
        let (first, last) = self.indices();
        let mut index = last.load(Ordering::Relaxed);
        let taken_from = first.load(Ordering::Acquire);
        // The client can write nonsense to both.
        if index >= ENTRIES || taken_from >= ENTRIES {
            return false;
        }
        let free = (taken_from + ENTRIES - index - 1) % ENTRIES;
        if free < count {
            return false;
        }
        for item in data.chunks_exact(size.into()).take(count as usize) {
            let mut entry = kvm_coalesced_mmio {
                phys_addr: start,
                len: size.into(),
                ..Default::default()
            };
            entry.__bindgen_anon_1.pio = port.into();
            entry.data[..item.len()].copy_from_slice(item);
            let ring: *mut kvm_coalesced_mmio_ring = self.ring.start().cast();
            // SAFETY: the ring entry lies after the indices within the page, since `index` is below `ENTRIES`; plain
            // data, written under the lock, and read by the client only after `last` has advanced.
            unsafe {
                let entries = (&raw mut (*ring).coalesced_mmio).cast::<kvm_coalesced_mmio>();
                entries.add(index as usize).write_volatile(entry);
            }
            index = (index + 1) % ENTRIES;
        }
        last.store(index, Ordering::Release);
        true
    }

    /// Removes the oldest ring entry, as a client does. `None`: the ring is empty, or its indices name no ring entry.
    pub(crate) fn next(&self) -> Option<kvm_coalesced_mmio> {
        let (first, last) = self.indices();
        let (index, end) = (first.load(Ordering::Relaxed), last.load(Ordering::Acquire));
        // The client can write nonsense to both: with an end that is never reached, it would read for ever.
        if index == end || index >= ENTRIES || end >= ENTRIES {
            return None;
        }
        let ring: *mut kvm_coalesced_mmio_ring = self.ring.start().cast();
        // SAFETY: the ring entry lies after the indices within the page, since `index` is below `ENTRIES`; plain data.
        let entry = unsafe {
            let entries = (&raw const (*ring).coalesced_mmio).cast::<kvm_coalesced_mmio>();
            entries.add(index as usize).read_volatile()
        };
        first.store((index + 1) % ENTRIES, Ordering::Release);
        Some(entry)
    }
}

fn taken(zone: &kvm_coalesced_mmio_zone) -> Result<Zone> {
    // SAFETY: both fields of the union are plain and of the same size.
    let pio = unsafe { zone.__bindgen_anon_1.pio };
    if pio > 1 {
        return fail(libc::EINVAL);
    }
    Ok(Zone {
        start: zone.addr,
        size: zone.size.into(),
        port: pio == 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zone(start: u64, size: u64) -> Zone {
        Zone {
            start,
            size,
            port: false,
        }
    }

    #[test]
    fn a_zone_takes_what_lies_in_it_whole() {
        let zone_at_10 = zone(0x10, 8);
        assert!(zone_at_10.contains(&zone(0x10, 8)));
        assert!(zone_at_10.contains(&zone(0x14, 4)));
        assert!(!zone_at_10.contains(&zone(0x14, 8)));
        assert!(!zone_at_10.contains(&zone(0xc, 8)));
        assert!(!zone_at_10.contains(&zone(u64::MAX, 8)));
        let port = Zone {
            port: true,
            ..zone(0x10, 8)
        };
        assert!(!zone_at_10.contains(&port));
    }

    #[test]
    fn indices_that_the_client_spoils_make_an_ordinary_exit() {
        let coalesced = Coalesced::new().unwrap();
        coalesced.lock().push(zone(0, 8));
        coalesced.wanted.store(true, Ordering::Relaxed);
        let (first, last) = coalesced.indices();
        for (bad_first, bad_last) in [(0, ENTRIES), (u32::MAX, 0), (ENTRIES, 1), (1, u32::MAX)] {
            first.store(bad_first, Ordering::Relaxed);
            last.store(bad_last, Ordering::Relaxed);
            assert!(!coalesced.take(0, false, 4, 1, &[1, 2, 3, 4]));
        }
        first.store(0, Ordering::Relaxed);
        last.store(ENTRIES - 2, Ordering::Relaxed);
        assert!(!coalesced.take(0, false, 1, 2, &[1, 2]), "room for one");
        assert!(coalesced.take(0, false, 1, 1, &[1]));
        assert_eq!(last.load(Ordering::Relaxed), ENTRIES - 1);
    }
}
