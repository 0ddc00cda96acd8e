//! The part of a virtual processor that other threads use while its vCPU runs: its index, and its SynIC. Devices signal
//! the sources of the SynIC.

use slat_hyperv::synic::Synic;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The part of a virtual processor that other threads use. Accesses to the atomics need no order, because no other data
/// depends on their values.
#[derive(Debug)]
pub(crate) struct VirtualProcessor {
    index: AtomicU32,
    synic: Mutex<Synic>,
    /// Whether the client has enabled the SynIC. If not, delivering an interrupt does not acquire the SynIC's lock.
    has_synic: AtomicBool,
}

impl VirtualProcessor {
    /// Creates the virtual processor with this index.
    pub(crate) fn new(index: u32) -> Self {
        VirtualProcessor {
            index: AtomicU32::new(index),
            synic: Mutex::default(),
            has_synic: AtomicBool::new(false),
        }
    }

    /// Returns the VP index, by which hypercalls and routes name the processor.
    pub(crate) fn index(&self) -> u32 {
        self.index.load(Ordering::Relaxed)
    }

    /// Sets the VP index.
    pub(crate) fn set_index(&self, index: u32) {
        self.index.store(index, Ordering::Relaxed);
    }

    /// Locks the SynIC.
    pub(crate) fn synic(&self) -> MutexGuard<'_, Synic> {
        self.synic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the client has enabled the SynIC.
    pub(crate) fn has_synic(&self) -> bool {
        self.has_synic.load(Ordering::Relaxed)
    }

    /// Enables the SynIC. If `clears_pages`, each page that the guest names for the SynIC is filled with zeros.
    pub(crate) fn activate_synic(&self, clears_pages: bool) {
        self.synic().activate(clears_pages);
        self.has_synic.store(true, Ordering::Relaxed);
    }

    /// Returns the vector of the source `sint`. `None`: there is no SynIC or no such source, or the source is masked.
    pub(crate) fn vector(&self, sint: u32) -> Option<u8> {
        self.has_synic().then(|| self.synic().vector(sint))?
    }

    /// Returns the sources that have this vector, one bit for each source.
    pub(crate) fn sources_of(&self, vector: u8) -> u16 {
        match self.has_synic() {
            true => self.synic().sources_of(vector),
            false => 0,
        }
    }

    /// Whether an interrupt with this vector ends as soon as it is delivered (auto-EOI).
    pub(crate) fn ends_itself(&self, vector: u8) -> bool {
        self.has_synic() && self.synic().ends_itself(vector)
    }
}
