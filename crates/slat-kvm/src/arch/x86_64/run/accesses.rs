//! Port accesses, and accesses to the local APIC, that do not exit to the client. As in KVM, an access reaches the
//! local APIC first, and then the devices on the VM's bus.

use crate::arch::x86_64::trace::port as trace_port;
use crate::io_bus::{Range, Space};
use crate::trace;
use crate::vcpu::{Inner, VcpuObject};
use kvm_bindings::KVM_X86_QUIRK_LAPIC_MMIO_HOLE;
use slat_irqchip::lapic::Effect;
use slat_x86::PORT_BYTES;

impl VcpuObject {
    /// Carries out an access to the local APIC's page. If the APIC's registers are not mapped in this page now, a quirk
    /// of KVM makes the page read as all ones. For any other address, does nothing and returns `false`.
    pub(crate) fn apic_access(
        &self,
        inner: &mut Inner,
        gpa: u64,
        len: u8,
        write: bool,
        data: [u8; 8],
    ) -> bool {
        let Some(mut lapic) = self.common().lapic() else {
            return false;
        };
        if lapic.page() != Some(gpa & !0xfff) {
            let is_hole =
                lapic.is_hole(gpa) && self.vm.arch.quirks.has(KVM_X86_QUIRK_LAPIC_MMIO_HOLE);
            if is_hole && !write {
                let ones = &[0xff; 8][..len.into()];
                trace::mmio_read(gpa, ones);
                inner.cpu.complete_mmio_read(ones);
            }
            return is_hole;
        }
        if lapic.cr8() != inner.cpu.state.cr8 {
            lapic.set_cr8(inner.cpu.state.cr8);
        }
        let now = self.vm.arch.clock.now();
        let offset = (gpa & 0xfff) as u32;
        if write {
            // A register has 4 bytes at a multiple of 16. A write of another size or to another offset has no effect.
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

    /// Carries out a port access that a device on the bus accepts. Each unit has `size` bytes, and all units together
    /// have `len` bytes. Returns `false` if no device accepts the access, which then exits to the client.
    pub(crate) fn port_access(
        &self,
        inner: &mut Inner,
        port: u16,
        size: usize,
        write: bool,
        len: usize,
    ) -> bool {
        let place = Range::new(Space::Ports, port.into(), size as u64);
        let Inner { cpu, known_bus, .. } = inner;
        let devices = known_bus.around(&self.vm.bus, place.space, place.start);
        if write {
            let is_written = self.write(devices, place, cpu.output().chunks(size));
            if is_written {
                cpu.complete_io(&[]);
            }
            return is_written;
        }
        let mut read = [0; PORT_BYTES];
        let read = &mut read[..len];
        let is_read = self.read(devices, place, read);
        if is_read {
            trace_port(false, port, size, read);
            cpu.complete_io(read);
        }
        is_read
    }
}
