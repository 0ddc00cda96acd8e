//! Saves the state by the client's interface, and restores it into a new GIC, in the order that KVM's documentation
//! gives.

use super::its_guest::Tables;
use super::{INTERRUPTS, Pair, VCPUS};
use crate::common::{self, place};
use slat_gic::gic::{Gic, Model};
use slat_gic::its::Its;
use slat_gic::registers::Frame;

/// Registers of a distributor or a redistributor: the offset, the bits of each interrupt, and the offset of the
/// register that clears the state before it is set.
const REGISTERS: [(u64, u32, Option<u64>); 6] = [
    (0x080, 1, None),
    (0xc00, 2, None),
    (0x100, 1, Some(0x180)),
    (0x200, 1, Some(0x280)),
    (0x300, 1, Some(0x380)),
    (0x400, 8, None),
];

/// The system registers that hold state. ICC_CTLR_EL1 comes before ICC_BPR1_EL1, which it changes.
const SYSTEM: [(u16, u16, u16); 9] = [
    (12, 12, 5),
    (12, 12, 4),
    (4, 6, 0),
    (12, 8, 3),
    (12, 12, 3),
    (12, 8, 4),
    (12, 9, 0),
    (12, 12, 6),
    (12, 12, 7),
];

pub fn system_register((crn, crm, op2): (u16, u16, u16)) -> u16 {
    3 << 14 | crn << 7 | crm << 3 | op2
}

impl Pair {
    /// Copies a register of 32 bits to another GIC, as a client saves and restores it.
    fn copy(&mut self, new: &mut Gic, vcpu: usize, (frame, offset): (Frame, u64)) {
        let value = self.gic.client_read(vcpu, frame, offset);
        new.client_write(vcpu, frame, offset, value, &self.memory)
            .unwrap();
    }

    fn copy_interrupts(&mut self, new: &mut Gic) {
        let model = self.model();
        for (offset, bits, clear) in REGISTERS {
            for vcpu in 0..VCPUS {
                for intid in (0..INTERRUPTS).step_by((32 / bits) as usize) {
                    if let Some(clear) = clear {
                        let (frame, offset) = place(model, vcpu, clear, bits, intid);
                        let all = u32::MAX;
                        new.client_write(vcpu, frame, offset, all, &self.memory)
                            .unwrap();
                    }
                    self.copy(new, vcpu, place(model, vcpu, offset, bits, intid));
                }
            }
        }
    }

    /// Continues with another GIC. Its signals may have changed several times while it was restored.
    fn replace(&mut self, mut new: Gic) {
        new.take_changed(|_| ());
        self.signals = (0..VCPUS).map(|vcpu| new.signals(vcpu)).collect();
        self.gic = new;
    }

    fn new_gic(&mut self) -> Gic {
        let mut new = Gic::new(self.model(), INTERRUPTS, &common::vcpus(VCPUS as u32)).unwrap();
        self.copy(&mut new, 0, (Frame::Distributor, 8));
        new
    }

    pub fn save_and_restore_v2(&mut self) {
        let mut new = self.new_gic();
        self.copy(&mut new, 0, (Frame::Distributor, 0));
        for intid in (0..INTERRUPTS).step_by(4) {
            self.copy(&mut new, 0, place(Model::V2, 0, 0x800, 8, intid));
        }
        self.copy_interrupts(&mut new);
        for vcpu in 0..VCPUS {
            for word in 0..4 {
                let clear = (Frame::Distributor, 0xf10 + 4 * word);
                new.client_write(vcpu, clear.0, clear.1, u32::MAX, &self.memory)
                    .unwrap();
                self.copy(&mut new, vcpu, (Frame::Distributor, 0xf20 + 4 * word));
            }
            for offset in [0x00, 0x04, 0x08, 0x1c, 0xd0, 0xd4] {
                self.copy(&mut new, vcpu, (Frame::CpuInterface, offset));
            }
        }
        // GICv2's client cannot save lines: a level becomes pending, and stays so when its line falls.
        for vcpu in 0..VCPUS {
            for intid in 0..INTERRUPTS {
                let irq = self.plain.irq(vcpu, intid).unwrap();
                irq.soft_pending = irq.pending();
                irq.line &= !irq.edge;
                let high = irq.line;
                match intid {
                    0..16 => Ok(()),
                    16..32 => new.set_ppi(vcpu, intid, high),
                    _ => new.set_spi(intid, high),
                }
                .unwrap();
            }
        }
        self.replace(new);
    }

    pub fn save_and_restore_v3(&mut self, tables: &mut Tables) {
        // The ITS and its tables are saved first, while the whole memory is unchanged.
        self.gic.save_pending_tables(&self.memory).unwrap();
        tables.its.save_tables(&self.gic, &self.memory).unwrap();
        tables.forget_unsaved(self);
        let mut new = self.new_gic();
        new.attach_its();
        self.copy(&mut new, 0, (Frame::Distributor, 0));
        for vcpu in 0..VCPUS {
            for offset in [0x70, 0x74, 0x78, 0x7c, 0x00] {
                self.copy(&mut new, vcpu, (Frame::Redistributor(vcpu), offset));
            }
        }
        for intid in 32..INTERRUPTS {
            self.copy(
                &mut new,
                0,
                (Frame::Distributor, 0x6000 + u64::from(intid) * 8),
            );
        }
        self.copy_interrupts(&mut new);
        for vcpu in 0..VCPUS {
            for first in (0..INTERRUPTS).step_by(32) {
                let lines = self.gic.client_read_lines(vcpu, first).unwrap();
                new.client_write_lines(vcpu, first, lines).unwrap();
            }
            for name in SYSTEM.map(system_register) {
                let value = self.gic.client_read_icc(vcpu, name).unwrap();
                new.client_write_icc(vcpu, name, value).unwrap();
            }
            // With a common binary point, the one of group 1 cannot be read.
            let cpu = &mut self.plain.cpus[vcpu];
            if cpu.cbpr {
                cpu.bpr[1] = 3;
            }
            for intid in 0..INTERRUPTS {
                let irq = self.plain.irq(vcpu, intid).unwrap();
                irq.line &= !irq.edge;
            }
        }
        let mut its = Its::new();
        for offset in [0x04, 0x80, 0x88, 0x90, 0x100, 0x108] {
            let value = tables.its.client_read(offset).unwrap();
            its.client_write(offset, value, &mut new, &self.memory)
                .unwrap();
        }
        its.restore_tables(&mut new, &self.memory).unwrap();
        let control = tables.its.client_read(0).unwrap();
        its.client_write(0, control, &mut new, &self.memory)
            .unwrap();
        tables.its = its;
        self.replace(new);
    }
}
