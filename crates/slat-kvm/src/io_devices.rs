//! The devices on the bus of a VM: the architecture's own devices, eventfds that guest writes signal, and the ring of
//! coalesced I/O.

use crate::engine::EngineVm;
use crate::errno::{Result, fail};
use crate::io_bus::{Entry, IoBus, KnownBus};
use crate::ioeventfd::Event;
use crate::{arch, coalesced};
use kvm_bindings::{kvm_coalesced_mmio_zone, kvm_ioeventfd};

/// A device on the bus of a VM.
#[derive(Clone, Debug)]
pub(crate) enum Device {
    /// A device that the architecture's machines have.
    OfArch(arch::Device),
    /// The ring of coalesced I/O.
    Coalesced,
    /// An ioeventfd.
    Event(Event),
}

/// The bus of a VM.
pub(crate) type Bus = IoBus<Device>;
/// A vCPU's copy of the bus's current table.
pub(crate) type Known = KnownBus<Device>;

/// The greatest number of devices in one space, without eventfds: KVM's `NR_IOBUS_DEVS`.
const MOST: usize = 1000;

impl Bus {
    /// Carries out `KVM_REGISTER_COALESCED_MMIO`: adds the range of `zone`.
    ///
    /// # Errors
    /// `EINVAL` for a kind that is neither memory nor ports, `ENOSPC` for too many ranges, `ENOMEM`.
    pub(crate) fn add_zone(&self, engine: &EngineVm, zone: &kvm_coalesced_mmio_zone) -> Result<()> {
        let range = coalesced::range(zone)?;
        let make = |devices: &[Entry<Device>]| {
            let counts = |entry: &&Entry<Device>| {
                entry.range.space == range.space && !matches!(entry.device, Device::Event(_))
            };
            match devices.iter().filter(counts).count() {
                MOST.. => fail(libc::ENOSPC),
                _ => Ok([(range, Device::Coalesced)]),
            }
        };
        self.add(engine, make, || Ok(()))
    }

    /// Carries out `KVM_UNREGISTER_COALESCED_MMIO`: removes every registered range that contains the range of `zone`.
    ///
    /// # Errors
    /// `EINVAL` for a kind that is neither memory nor ports, `ENOMEM`.
    pub(crate) fn remove_zones(
        &self,
        engine: &EngineVm,
        zone: &kvm_coalesced_mmio_zone,
    ) -> Result<()> {
        let range = coalesced::range(zone)?;
        let is_removed = |entry: &Entry<Device>| {
            matches!(entry.device, Device::Coalesced) && entry.range.contains(&range)
        };
        self.remove(engine, is_removed).map(|_| ())
    }

    /// Carries out `KVM_IOEVENTFD`: adds or removes a registration.
    ///
    /// # Errors
    /// For a registration: `EINVAL` for unknown flags, a length other than 0, 1, 2, 4 and 8, a range that wraps around,
    /// and a value to compare without a length; `EEXIST` if one write could match this registration and an earlier
    /// registration. For a removal: `ENOENT` if there is no such registration. For both: `EBADF`, `EINVAL` for a
    /// descriptor that is no eventfd, `ENOMEM`, `EMFILE`.
    pub(crate) fn change_event(&self, engine: &EngineVm, asked: &kvm_ioeventfd) -> Result<()> {
        let (range, mut event) = Event::new(asked)?;
        if Event::is_removal(asked) {
            let is_removed = |entry: &Entry<Device>| match &entry.device {
                Device::Event(other) => entry.range == range && other.is(&event),
                _ => false,
            };
            return match self.remove(engine, is_removed)? {
                0 => fail(libc::ENOENT),
                _ => Ok(()),
            };
        }
        let make = |devices: &[Entry<Device>]| {
            for entry in devices {
                if let Device::Event(other) = &entry.device {
                    let is_here =
                        (entry.range.space, entry.range.start) == (range.space, range.start);
                    if is_here && other.overlaps(&event) {
                        return fail(libc::EEXIST);
                    }
                    event.share_eventfd(other);
                }
            }
            Ok([(range, Device::Event(event))])
        };
        self.add(engine, make, || Ok(()))
    }
}

/// Signals the eventfds that are registered for writes of `units` (1 to 8 bytes each) to `address`, one after the
/// other. If any unit has no registration, signals no eventfd and returns `false`.
pub(crate) fn signal<'a>(
    devices: &[Entry<Device>],
    address: u64,
    units: impl Iterator<Item = &'a [u8]> + Clone,
) -> bool {
    let registered = |unit: &[u8]| {
        devices.iter().find_map(|entry| match &entry.device {
            Device::Event(event) if entry.range.start == address && event.matches(unit) => {
                Some(event)
            }
            _ => None,
        })
    };
    let all = units.clone().all(|unit| registered(unit).is_some());
    if all {
        (units.filter_map(registered)).for_each(Event::signal);
    }
    all
}
