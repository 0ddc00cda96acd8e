//! Probes of a debugger outside of the guest: addresses whose accesses are recorded for the debugger.

use alloc::vec::Vec;

/// A range of virtual addresses, and the kinds of accesses to it that are recorded.
///
/// Unlike a watchpoint ([`Debugger`](crate::Debugger)), a probe lets the access happen, and the guest cannot notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessProbe {
    /// The first address of the range.
    pub first: u64,
    /// The number of bytes of the range.
    pub bytes: u64,
    /// Whether loads are recorded.
    pub reads: bool,
    /// Whether stores are recorded.
    pub writes: bool,
}

/// The probes of a processor, and the last access that has hit one.
#[derive(Default)]
pub(crate) struct Probes {
    list: Vec<AccessProbe>,
    hit: Option<(usize, u64)>,
}

impl Probes {
    pub(crate) fn new(list: Vec<AccessProbe>) -> Self {
        Probes { list, hit: None }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Records an access if it hits a probe.
    pub(crate) fn note(&mut self, address: u64, bytes: u64, reads: bool, writes: bool) {
        for (n, probe) in self.list.iter().enumerate() {
            let at = address.max(probe.first);
            let is_met = at - address < bytes && at - probe.first < probe.bytes;
            if is_met && (reads && probe.reads || writes && probe.writes) {
                self.hit = Some((n, at));
            }
        }
    }

    /// Returns the index of the probe that an access has hit since the last call, and the first address that the access
    /// and the probe share.
    pub(crate) fn take(&mut self) -> Option<(usize, u64)> {
        self.hit.take()
    }
}
