//! `KVM_IOEVENTFD`: guest writes to an address or a port that only signal an eventfd.

use crate::errno::{Result, fail, no_memory};
use crate::eventfd::EventFd;
use crate::io_bus::{Range, Space};
use kvm_bindings::*;
use slat::Shared;

const DATAMATCH: u32 = 1 << kvm_ioeventfd_flag_nr_datamatch;
const PIO: u32 = 1 << kvm_ioeventfd_flag_nr_pio;
const DEASSIGN: u32 = 1 << kvm_ioeventfd_flag_nr_deassign;
const VIRTIO_CCW: u32 = 1 << kvm_ioeventfd_flag_nr_virtio_ccw_notify;
/// KVM's internal flag, which clients may set without effect.
const FAST_MMIO: u32 = 1 << kvm_ioeventfd_flag_nr_fast_mmio;

/// One registration, for writes to one address or port.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    /// The number of bytes of the write; 0 matches any length.
    len: u32,
    /// The value that is written; `None` matches any value.
    value: Option<u64>,
    eventfd: Shared<EventFd>,
}

impl Event {
    /// Whether the client asks for a removal.
    pub(crate) fn is_removal(asked: &kvm_ioeventfd) -> bool {
        asked.flags & DEASSIGN != 0
    }

    /// Returns the registration that the client asks for, and the range of the writes. If the registration matches
    /// writes of any length, the range is one address.
    ///
    /// # Errors
    /// For a registration: `EINVAL` for unknown flags, a length other than 0, 1, 2, 4 and 8, a range that wraps around,
    /// and a value to compare without a length. Also for removals: `EBADF`, `EINVAL` for a descriptor that is no
    /// eventfd, `ENOMEM`, `EMFILE`.
    pub(crate) fn new(asked: &kvm_ioeventfd) -> Result<(Range, Self)> {
        let known = DATAMATCH | PIO | DEASSIGN | VIRTIO_CCW | FAST_MMIO;
        let compares = asked.flags & DATAMATCH != 0;
        let wraps = asked.addr.checked_add(asked.len.into()).is_none();
        let valid = asked.flags & !known == 0
            && matches!(asked.len, 0 | 1 | 2 | 4 | 8)
            && !wraps
            && (asked.len != 0 || !compares);
        // As in KVM, a removal with invalid arguments fails with ENOENT, because no registration has these arguments.
        if !valid && !Self::is_removal(asked) {
            return fail(libc::EINVAL);
        }
        let space = match asked.flags {
            flags if flags & PIO != 0 => Space::Ports,
            flags if flags & VIRTIO_CCW != 0 => Space::VirtioCcw,
            _ => Space::Memory,
        };
        let event = Event {
            len: asked.len,
            value: compares.then_some(asked.datamatch),
            eventfd: Shared::try_new(EventFd::take(asked.fd)?).map_err(no_memory)?,
        };
        Ok((
            Range::new(space, asked.addr, asked.len.max(1).into()),
            event,
        ))
    }

    /// Whether one write to one address could match both registrations.
    pub(crate) fn overlaps(&self, other: &Event) -> bool {
        (self.len == 0 || other.len == 0 || self.len == other.len)
            && match (self.value, other.value) {
                (Some(one), Some(another)) => one == another,
                _ => true,
            }
    }

    /// Whether `self` and `other`, which are for the same address, are the same registration.
    pub(crate) fn is(&self, other: &Event) -> bool {
        self.len == other.len && self.value == other.value && self.eventfd.is(&other.eventfd)
    }

    /// Replaces this registration's descriptor by the descriptor of `other`, if both descriptors refer to the same
    /// eventfd. Sharing saves descriptors: clients may have thousands of registrations.
    pub(crate) fn share_eventfd(&mut self, other: &Event) {
        if self.eventfd.is(&other.eventfd) {
            self.eventfd = other.eventfd.clone();
        }
    }

    /// Whether this registration matches a write of `data`.
    pub(crate) fn matches(&self, data: &[u8]) -> bool {
        (self.len == 0 || self.len as usize == data.len())
            && self.value.is_none_or(|value| {
                let mut written = [0; 8];
                written[..data.len()].copy_from_slice(data);
                u64::from_le_bytes(written) == value
            })
    }

    /// Signals the eventfd.
    pub(crate) fn signal(&self) {
        self.eventfd.signal();
    }
}
