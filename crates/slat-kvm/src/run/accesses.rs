//! Port and MMIO accesses that need no client: those to interrupt controllers, and those that only signal an eventfd.

use crate::ioeventfd::{Bus, Place};
use crate::trace;
use crate::vcpu::{Inner, VcpuObject};
use kvm_bindings::*;
use slat_irqchip::lapic::Effect;
use slat_trace::{FastMmio, point};
use slat_x86::PORT_BYTES;

impl VcpuObject {
    /// Carries out an access to the APIC's page. Returns `false`, and does nothing, for any other address.
    pub(super) fn apic_access(
        &self,
        inner: &mut Inner,
        gpa: u64,
        len: u8,
        write: bool,
        data: [u8; 8],
    ) -> bool {
        inner.sync_cr8_to_lapic();
        let Some(mut lapic) = self
            .common()
            .lapic()
            .filter(|lapic| lapic.page() == Some(gpa & !0xfff))
        else {
            return false;
        };
        let now = self.vm.clock.now();
        let offset = (gpa & 0xfff) as u32;
        if write {
            // Registers are 4 bytes at multiples of 16; other writes have no effect.
            let effect = if len == 4 && offset & 15 == 0 {
                let value = u32::from_le_bytes([data[0], data[1], data[2], data[3]]);
                lapic.write(offset, value, now)
            } else {
                Effect::None
            };
            inner.cpu.state.cr8 = lapic.cr8();
            drop(lapic);
            inner.machine.carry_out(effect);
        } else {
            let value = lapic.read(offset & !3, now).to_le_bytes();
            drop(lapic);
            let mut answer = [0; 8];
            for (index, byte) in answer[..len.into()].iter_mut().enumerate() {
                *byte = value
                    .get((offset & 3) as usize + index)
                    .copied()
                    .unwrap_or(0);
            }
            trace::mmio_read(gpa, &answer[..len.into()]);
            inner.cpu.complete_mmio_read(&answer[..len.into()]);
        }
        true
    }

    /// Carries out an access to the address of the disabled APIC's page, where KVM's quirk reads all ones. Returns
    /// `false`, and does nothing, for any other address or without the quirk.
    pub(super) fn apic_hole(&self, inner: &mut Inner, gpa: u64, len: u8, write: bool) -> bool {
        let lapic = self.common().lapic();
        let hole = lapic.is_some_and(|lapic| lapic.is_hole(gpa))
            && self.vm.quirks.has(KVM_X86_QUIRK_LAPIC_MMIO_HOLE);
        if hole && !write {
            let ones = &[0xff; 8][..len.into()];
            trace::mmio_read(gpa, ones);
            inner.cpu.complete_mmio_read(ones);
        }
        hole
    }

    /// Carries out a port access that needs no client: to a controller of the VM, or to a port with an eventfd. Units
    /// have `size` bytes each, `len` together. Returns `false` if the client has to see it.
    pub(super) fn port_access(
        &self,
        inner: &mut Inner,
        port: u16,
        size: usize,
        write: bool,
        len: usize,
    ) -> bool {
        let interrupts = &self.vm.interrupts;
        if !write {
            let mut read = [0; PORT_BYTES];
            let read = &mut read[..len];
            let is_ours = (read.chunks_mut(size)).all(|unit| interrupts.read_port(port, unit));
            if is_ours {
                trace::port(false, port, size, read);
                inner.cpu.complete_io(read);
            }
            return is_ours;
        }
        let place = Place {
            bus: Bus::Ports,
            address: port.into(),
        };
        let Inner {
            cpu, known_events, ..
        } = inner;
        let units = cpu.output().chunks(size);
        let to_chips = (units.clone()).all(|unit| interrupts.write_port(port, unit));
        let is_ours = to_chips || known_events.signal(&self.vm.ioevents, place, units);
        if is_ours {
            cpu.complete_io(&[]);
        }
        is_ours
    }

    /// Carries out a memory access that needs no client: to the I/O APIC, or to an address with an eventfd. Returns
    /// `false` if the client has to see it.
    pub(super) fn memory_access(
        &self,
        inner: &mut Inner,
        gpa: u64,
        write: bool,
        data: &[u8],
    ) -> bool {
        let interrupts = &self.vm.interrupts;
        if write {
            let place = Place {
                bus: Bus::Memory,
                address: gpa,
            };
            let unit = std::iter::once(data);
            if interrupts.write_memory(gpa, data) {
                return true;
            }
            let is_ours = (inner.known_events).signal(&self.vm.ioevents, place, unit);
            if is_ours {
                point(|| FastMmio { gpa });
            }
            return is_ours;
        }
        let mut read = [0; 8];
        let read = &mut read[..data.len()];
        let is_ours = interrupts.read_memory(gpa, read);
        if is_ours {
            trace::mmio_read(gpa, read);
            inner.cpu.complete_mmio_read(read);
        }
        is_ours
    }
}
