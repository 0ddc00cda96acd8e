//! Memory accesses that devices on the VM's bus serve, without an exit to the client.

use crate::io_bus::{Entry, Range, Space};
use crate::io_devices::{Device, signal};
use crate::trace;
use crate::vcpu::{Inner, VcpuObject};
use slat_trace::{FastMmio, point};

impl VcpuObject {
    /// Carries out a memory access that a device on the bus accepts. Returns `false` if the client has to see the
    /// access.
    pub(crate) fn memory_access(
        &self,
        inner: &mut Inner,
        gpa: u64,
        write: bool,
        data: &[u8],
    ) -> bool {
        let place = Range::new(Space::Memory, gpa, data.len() as u64);
        let Inner { cpu, known_bus, .. } = inner;
        let devices = known_bus.around(&self.vm.bus, place.space, place.start);
        if write {
            return self.write(devices, place, std::iter::once(data));
        }
        let mut read = [0; 8];
        let read = &mut read[..data.len()];
        let is_read = self.read(devices, place, read);
        if is_read {
            trace::mmio_read(gpa, read);
            cpu.complete_mmio_read(read);
        }
        is_read
    }

    /// Offers a read of the range `place` to `devices`. The device that accepts the read fills `data`. Returns whether
    /// a device has accepted the read.
    pub(crate) fn read(&self, devices: &[Entry<Device>], place: Range, data: &mut [u8]) -> bool {
        let (interrupts, vcpu) = (&self.vm.interrupts, &**self.common());
        devices.iter().any(|entry| {
            let mut units = data.chunks_mut(place.len());
            entry.range.contains(&place)
                && match entry.device {
                    Device::OfArch(device) => {
                        interrupts.read(vcpu, device, place.start, &mut units)
                    }
                    Device::Coalesced | Device::Event(_) => false,
                }
        })
    }

    /// Offers a write of `units` to the range `place` to `devices`. Returns whether a device has accepted all units.
    pub(crate) fn write<'a>(
        &self,
        devices: &[Entry<Device>],
        place: Range,
        units: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> bool {
        let (interrupts, vcpu) = (&self.vm.interrupts, &**self.common());
        // The eventfds are tried only once, for all units together, because each unit may signal another eventfd.
        let mut are_events_offered = false;
        devices.iter().any(|entry| {
            let mut units = units.clone();
            match entry.device {
                Device::Event(_) => {
                    let is_signalled = entry.range.start == place.start
                        && !std::mem::replace(&mut are_events_offered, true)
                        && signal(devices, place.start, units);
                    if is_signalled && place.space == Space::Memory {
                        point(|| FastMmio { gpa: place.start });
                    }
                    is_signalled
                }
                _ if !entry.range.contains(&place) => false,
                Device::OfArch(device) => interrupts.write(vcpu, device, place.start, &mut units),
                Device::Coalesced => {
                    let is_port = place.space == Space::Ports;
                    self.vm.coalesced.put(place.start, is_port, units)
                }
            }
        })
    }
}
