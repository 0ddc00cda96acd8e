//! `KVM_IOEVENTFD`: guest writes to an address or a port that only signal an eventfd.
//!
//! # Concurrency
//! The registrations are an immutable [`Table`] that a change replaces whole. Each vCPU holds the table that it last
//! saw and compares one number to learn whether that table is still current, so that a write takes no lock. A change
//! publishes the new table, increments the number and then waits until every vCPU has passed a quiescent point of the
//! engine or has left it ([`slat::Vm::synchronize`]): a vCPU looks up the table and signals between two quiescent
//! points. So no eventfd is signalled after the call that removed it has returned, and a client that reads the eventfd
//! then misses nothing.

use crate::engine::EngineVm;
use crate::errno::{Result, fail, no_memory};
use crate::eventfd::EventFd;
use crate::heap;
use kvm_bindings::*;
use slat::Shared;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

const DATAMATCH: u32 = 1 << kvm_ioeventfd_flag_nr_datamatch;
const PIO: u32 = 1 << kvm_ioeventfd_flag_nr_pio;
const DEASSIGN: u32 = 1 << kvm_ioeventfd_flag_nr_deassign;
const VIRTIO_CCW: u32 = 1 << kvm_ioeventfd_flag_nr_virtio_ccw_notify;
/// KVM's internal flag, which clients may set without effect.
const FAST_MMIO: u32 = 1 << kvm_ioeventfd_flag_nr_fast_mmio;

/// The kind of address that a guest writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Bus {
    /// Guest-physical addresses.
    Memory,
    Ports,
    /// Another architecture's: an x86 guest cannot write there, but KVM accepts registrations.
    VirtioCcw,
}

/// The address or port that a guest writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) bus: Bus,
    pub(crate) address: u64,
}

/// One registration.
#[derive(Clone, Debug)]
struct Event {
    place: Place,
    /// Bytes of the write; 0 for any.
    len: u32,
    /// The value that is written; `None` for any.
    value: Option<u64>,
    eventfd: Shared<EventFd>,
}

impl Event {
    /// Whether one write could match both registrations.
    fn overlaps(&self, other: &Event) -> bool {
        self.place == other.place
            && (self.len == 0 || other.len == 0 || self.len == other.len)
            && match (self.value, other.value) {
                (Some(one), Some(another)) => one == another,
                _ => true,
            }
    }

    fn is(&self, other: &Event) -> bool {
        self.place == other.place
            && self.len == other.len
            && self.value == other.value
            && self.eventfd.is(&other.eventfd)
    }

    fn matches(&self, data: &[u8]) -> bool {
        (self.len == 0 || self.len as usize == data.len())
            && self.value.is_none_or(|value| {
                let mut written = [0; 8];
                written[..data.len()].copy_from_slice(data);
                u64::from_le_bytes(written) == value
            })
    }
}

/// All registrations, sorted by place.
#[derive(Debug)]
struct Table(Vec<Event>);

/// The registrations of a VM.
#[derive(Debug, Default)]
pub(crate) struct IoEvents {
    /// `None`: there was never any registration.
    table: Mutex<Option<Shared<Table>>>,
    /// How often the table was replaced.
    changes: AtomicU64,
}

/// The table that one vCPU saw last.
#[derive(Debug, Default)]
pub(crate) struct KnownEvents {
    table: Option<Shared<Table>>,
    changes: u64,
}

impl KnownEvents {
    /// Signals the eventfds that are registered for writes of `units` (1 to 8 bytes each) to one place, one after the
    /// other. Returns `false`, and signals nothing, if a unit has no registration. The vCPU is entered, and passes no
    /// quiescent point meanwhile.
    pub(crate) fn signal<'a>(
        &mut self,
        events: &IoEvents,
        place: Place,
        units: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> bool {
        let changes = events.changes.load(Ordering::SeqCst);
        if self.changes != changes {
            self.table = lock(&events.table).clone();
            self.changes = changes;
        }
        let Some(Table(table)) = self.table.as_deref() else {
            return false;
        };
        let first = table.partition_point(|event| event.place < place);
        let len = table[first..].partition_point(|event| event.place == place);
        let here = &table[first..first + len];
        let registered = |unit: &[u8]| here.iter().find(|event| event.matches(unit));
        let all = !here.is_empty() && units.clone().all(|unit| registered(unit).is_some());
        if all {
            (units.filter_map(registered)).for_each(|event| event.eventfd.signal());
        }
        all
    }
}

impl IoEvents {
    /// Carries out `KVM_IOEVENTFD` in the VM of `engine`.
    ///
    /// # Errors
    /// For a registration, `EINVAL` for unknown flags, a length that is none of 0, 1, 2, 4 and 8, a range that wraps
    /// around, and a value to compare without a length; `EEXIST` when a write could match another registration, too.
    /// For a removal, `ENOENT` when there is no such registration. For both, `EBADF`, `EINVAL` for a descriptor that is
    /// no eventfd, `ENOMEM`, `EMFILE`.
    pub(crate) fn change(&self, engine: &EngineVm, asked: &kvm_ioeventfd) -> Result<()> {
        let known = DATAMATCH | PIO | DEASSIGN | VIRTIO_CCW | FAST_MMIO;
        let compares = asked.flags & DATAMATCH != 0;
        let removes = asked.flags & DEASSIGN != 0;
        let wraps = asked.addr.checked_add(asked.len.into()).is_none();
        let valid = asked.flags & !known == 0
            && matches!(asked.len, 0 | 1 | 2 | 4 | 8)
            && !wraps
            && (asked.len != 0 || !compares);
        // As in KVM, a removal with invalid arguments fails with ENOENT: no registration has them.
        if !valid && !removes {
            return fail(libc::EINVAL);
        }
        let event = Event {
            place: Place {
                bus: match asked.flags {
                    flags if flags & PIO != 0 => Bus::Ports,
                    flags if flags & VIRTIO_CCW != 0 => Bus::VirtioCcw,
                    _ => Bus::Memory,
                },
                address: asked.addr,
            },
            len: asked.len,
            value: compares.then_some(asked.datamatch),
            eventfd: Shared::try_new(EventFd::take(asked.fd)?).map_err(no_memory)?,
        };
        match removes {
            false => self.add(event)?,
            true => self.remove(&event)?,
        }
        engine.synchronize();
        Ok(())
    }

    fn add(&self, mut event: Event) -> Result<()> {
        self.replace(|old| {
            if old.iter().any(|other| other.overlaps(&event)) {
                return fail(libc::EEXIST);
            }
            // All registrations of an eventfd share one descriptor, because clients may have thousands of
            // registrations.
            if let Some(other) = old.iter().find(|other| other.eventfd.is(&event.eventfd)) {
                event.eventfd = other.eventfd.clone();
            }
            let mut new = heap::with_room(old.len() + 1)?;
            let at = old.partition_point(|other| other.place <= event.place);
            new.extend_from_slice(&old[..at]);
            new.push(event);
            new.extend_from_slice(&old[at..]);
            Ok(new)
        })
    }

    fn remove(&self, event: &Event) -> Result<()> {
        self.replace(|old| {
            let Some(at) = old.iter().position(|other| other.is(event)) else {
                return fail(libc::ENOENT);
            };
            let mut new = heap::with_room(old.len())?;
            new.extend_from_slice(&old[..at]);
            new.extend_from_slice(&old[at + 1..]);
            Ok(new)
        })
    }

    fn replace(&self, change: impl FnOnce(&[Event]) -> Result<Vec<Event>>) -> Result<()> {
        let mut table = lock(&self.table);
        let old = table.as_ref().map_or(&[][..], |table| &table.0);
        let new = Table(change(old)?);
        *table = Some(Shared::try_new(new).map_err(no_memory)?);
        self.changes.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

fn lock<T>(table: &Mutex<T>) -> MutexGuard<'_, T> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}
