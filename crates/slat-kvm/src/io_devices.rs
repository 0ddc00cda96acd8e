//! The devices on the bus of a VM: the interrupt controllers and the timer of a PC, writes that signal eventfds, and
//! writes that go into the ring of coalesced I/O. (The local APIC is not on the bus: each vCPU has a local APIC, which
//! the vCPU's accesses reach first.)

use crate::coalesced;
use crate::engine::EngineVm;
use crate::errno::{Result, fail};
use crate::io_bus::{Entry, IoBus, KnownBus, Range, Space};
use crate::ioeventfd::Event;
use kvm_bindings::{kvm_coalesced_mmio_zone, kvm_ioeventfd};
use slat_irqchip::ioapic;

/// A device.
#[derive(Clone, Debug)]
pub(crate) enum Device {
    /// The 8259 pair.
    Pics,
    /// The 8254.
    Timer,
    /// The 8254's port 0x61.
    Speaker,
    IoApic,
    /// The ring of coalesced I/O.
    Coalesced,
    /// An eventfd.
    Event(Event),
}

/// The bus of a VM.
pub(crate) type Bus = IoBus<Device>;
/// The bus as one vCPU saw it last.
pub(crate) type Known = KnownBus<Device>;

/// The most devices in one space, without eventfds: KVM's `NR_IOBUS_DEVS`.
const MOST: usize = 1000;

/// The port of [`Device::Speaker`]. The device's range on KVM's bus is longer, but the device serves only this port.
pub(crate) const SPEAKER: u64 = 0x61;

/// The devices of `KVM_CREATE_IRQCHIP`. If `KVM_SET_IRQCHIP` moves the I/O APIC to another address, it is not found
/// there, as in KVM.
const PC: [(Range, Device); 4] = [
    (Range::new(Space::Ports, 0x20, 2), Device::Pics),
    (Range::new(Space::Ports, 0xa0, 2), Device::Pics),
    (Range::new(Space::Ports, 0x4d0, 2), Device::Pics),
    (
        Range::new(Space::Memory, ioapic::DEFAULT_BASE, ioapic::WINDOW),
        Device::IoApic,
    ),
];
/// The devices of `KVM_CREATE_PIT2`.
const TIMER: (Range, Device) = (Range::new(Space::Ports, 0x40, 4), Device::Timer);
const TIMERS_PORT: (Range, Device) = (Range::new(Space::Ports, SPEAKER, 4), Device::Speaker);

impl Bus {
    /// Adds the 8259 pair and the I/O APIC, which `create` makes.
    ///
    /// # Errors
    /// The errors of `create`; `ENOMEM`.
    pub(crate) fn add_pc(
        &self,
        engine: &EngineVm,
        create: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.add(engine, |_| Ok(PC), create)
    }

    /// Adds the 8254, which `create` makes. `speaker`: the 8254 also has port 0x61.
    ///
    /// # Errors
    /// The errors of `create`; `ENOMEM`.
    pub(crate) fn add_timer(
        &self,
        engine: &EngineVm,
        speaker: bool,
        create: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        match speaker {
            true => self.add(engine, |_| Ok([TIMER, TIMERS_PORT]), create),
            false => self.add(engine, |_| Ok([TIMER]), create),
        }
    }

    /// Carries out `KVM_REGISTER_COALESCED_MMIO`.
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

    /// Carries out `KVM_UNREGISTER_COALESCED_MMIO`: removes every registered range that contains the given one.
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

    /// Carries out `KVM_IOEVENTFD`.
    ///
    /// # Errors
    /// For a registration: `EINVAL` for unknown flags, a length other than 0, 1, 2, 4 and 8, a range that wraps around,
    /// and a value to compare without a length; `EEXIST` if one write could match this registration and an earlier one.
    /// For a removal: `ENOENT` if there is no such registration. For both: `EBADF`, `EINVAL` for a descriptor that is
    /// no eventfd, `ENOMEM`, `EMFILE`.
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
/// other. Returns `false`, and signals no eventfd, if a unit has no registration.
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
