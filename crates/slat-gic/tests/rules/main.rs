//! Each rule of the architecture and of KVM's interface, one by one.

mod client;
#[path = "../common/mod.rs"]
mod common;
mod its;
mod lines;
mod lpis;
mod priorities;
mod tables;
mod v2;
mod v3;

use common::{TestMemory, place, read32, vcpus, write32};
use slat_gic::gic::{Gic, Model, Signals};
use slat_gic::icc::Icc;
use slat_gic::interrupt::Group;
use slat_gic::memory::NoMemory;
use slat_gic::registers::Frame;

const DIST: Frame = Frame::Distributor;
const CPU: Frame = Frame::CpuInterface;

/// Registers with a bit for each interrupt.
const IGROUPR: u64 = 0x080;
const ISENABLER: u64 = 0x100;
const ICENABLER: u64 = 0x180;
const ISPENDR: u64 = 0x200;
const ICPENDR: u64 = 0x280;
const ISACTIVER: u64 = 0x300;
const ICACTIVER: u64 = 0x380;

const SPURIOUS: u32 = 1023;

/// A GIC of either model, and methods for the tests.
struct Guest {
    gic: Gic,
    model: Model,
}

impl Guest {
    /// Creates a GIC whose distributor and CPU interfaces let everything through.
    fn new(model: Model, count: u32) -> Self {
        let mut guest = Self::after_reset(model, count);
        match model {
            Model::V2 => {
                guest.write(0, DIST, 0, 1);
                for vcpu in 0..count as usize {
                    guest.write(vcpu, CPU, 0x00, 3);
                    guest.write(vcpu, CPU, 0x04, 0xff);
                }
            }
            Model::V3 => {
                guest.write(0, DIST, 0, 2);
                for vcpu in 0..count as usize {
                    guest.set(vcpu, Icc::Pmr, 0xff);
                    guest.set(vcpu, Icc::Igrpen(Group::Zero), 1);
                    guest.set(vcpu, Icc::Igrpen(Group::One), 1);
                }
            }
        }
        guest
    }

    fn after_reset(model: Model, count: u32) -> Self {
        let gic = Gic::new(model, 96, &vcpus(count)).unwrap();
        Guest { gic, model }
    }

    fn read(&mut self, vcpu: usize, frame: Frame, offset: u64) -> u32 {
        read32(&mut self.gic, vcpu, (frame, offset))
    }

    fn write(&mut self, vcpu: usize, frame: Frame, offset: u64, value: u32) {
        write32(&mut self.gic, vcpu, (frame, offset), value, &NoMemory);
    }

    fn get(&mut self, vcpu: usize, register: Icc) -> u64 {
        self.gic.read_icc(vcpu, register).unwrap()
    }

    fn set(&mut self, vcpu: usize, register: Icc, value: u64) {
        self.gic.write_icc(vcpu, register, value).unwrap();
    }

    /// Writes the bit of an interrupt to a register.
    fn set_bit(&mut self, vcpu: usize, register: u64, intid: u32) {
        let (frame, offset) = place(self.model, vcpu, register, 1, intid);
        self.write(vcpu, frame, offset, 1 << (intid % 32));
    }

    /// Reads the bit of an interrupt.
    fn bit(&mut self, vcpu: usize, register: u64, intid: u32) -> bool {
        let (frame, offset) = place(self.model, vcpu, register, 1, intid);
        self.read(vcpu, frame, offset) >> (intid % 32) & 1 != 0
    }

    fn set_group(&mut self, vcpu: usize, intid: u32, group: u32) {
        let (frame, offset) = place(self.model, vcpu, IGROUPR, 1, intid);
        let others = self.read(vcpu, frame, offset) & !(1 << (intid % 32));
        self.write(vcpu, frame, offset, others | group << (intid % 32));
    }

    fn set_priority(&mut self, vcpu: usize, intid: u32, priority: u8) {
        let (frame, word) = place(self.model, vcpu, 0x400, 8, intid);
        let offset = word + u64::from(intid % 4);
        self.gic.write(vcpu, frame, offset, &[priority], &NoMemory);
    }

    /// Makes the 16 interrupts of `intid`'s GICD_ICFGR edge-triggered, or level-sensitive.
    fn set_triggers(&mut self, intid: u32, are_edges: bool) {
        let offset = 0xc00 + u64::from(intid / 16 * 4);
        let value = if are_edges { 0xaaaa_aaaa } else { 0 };
        self.write(0, DIST, offset, value);
    }

    /// Enables an SPI with a level and a priority.
    fn enable_level(&mut self, intid: u32, priority: u8) {
        self.set_triggers(intid, false);
        self.set_priority(0, intid, priority);
        self.set_bit(0, ISENABLER, intid);
    }

    /// Makes an enabled interrupt pending by software.
    fn pend(&mut self, intid: u32, priority: u8) {
        self.set_priority(0, intid, priority);
        self.set_bit(0, ISENABLER, intid);
        self.set_bit(0, ISPENDR, intid);
    }

    /// Acknowledges an interrupt of group 0 or 1.
    fn ack(&mut self, vcpu: usize, group: u32) -> u32 {
        match (self.model, group) {
            (Model::V2, 0) => self.read(vcpu, CPU, 0x0c),
            (Model::V2, _) => self.read(vcpu, CPU, 0x20),
            (Model::V3, 0) => self.get(vcpu, Icc::Iar(Group::Zero)) as u32,
            (Model::V3, _) => self.get(vcpu, Icc::Iar(Group::One)) as u32,
        }
    }

    fn end(&mut self, vcpu: usize, group: u32, intid: u32) {
        match (self.model, group) {
            (Model::V2, 0) => self.write(vcpu, CPU, 0x10, intid),
            (Model::V2, _) => self.write(vcpu, CPU, 0x24, intid),
            (Model::V3, 0) => self.set(vcpu, Icc::Eoir(Group::Zero), intid.into()),
            (Model::V3, _) => self.set(vcpu, Icc::Eoir(Group::One), intid.into()),
        }
    }

    /// Makes an EOI only drop the priority (EOImode).
    fn separate_deactivation(&mut self, vcpu: usize) {
        match self.model {
            Model::V2 => self.write(vcpu, CPU, 0x00, 0x203),
            Model::V3 => self.set(vcpu, Icc::Ctlr, 2),
        }
    }

    fn deactivate(&mut self, vcpu: usize, intid: u32) {
        match self.model {
            Model::V2 => self.write(vcpu, CPU, 0x1000, intid),
            Model::V3 => self.set(vcpu, Icc::Dir, intid.into()),
        }
    }

    fn running(&mut self, vcpu: usize) -> u32 {
        match self.model {
            Model::V2 => self.read(vcpu, CPU, 0x14),
            Model::V3 => self.get(vcpu, Icc::Rpr) as u32,
        }
    }

    fn set_mask(&mut self, vcpu: usize, mask: u32) {
        match self.model {
            Model::V2 => self.write(vcpu, CPU, 0x04, mask),
            Model::V3 => self.set(vcpu, Icc::Pmr, mask.into()),
        }
    }

    /// Writes the binary point of a group.
    fn set_binary_point(&mut self, vcpu: usize, group: u32, value: u32) {
        match (self.model, group) {
            (Model::V2, 0) => self.write(vcpu, CPU, 0x08, value),
            (Model::V2, _) => self.write(vcpu, CPU, 0x1c, value),
            (Model::V3, 0) => self.set(vcpu, Icc::Bpr(Group::Zero), value.into()),
            (Model::V3, _) => self.set(vcpu, Icc::Bpr(Group::One), value.into()),
        }
    }

    fn irq(&self, vcpu: usize) -> bool {
        self.gic.signals(vcpu).irq
    }

    fn fiq(&self, vcpu: usize) -> bool {
        self.gic.signals(vcpu).fiq
    }

    fn is_quiet(&self, vcpu: usize) -> bool {
        self.gic.signals(vcpu) == Signals::default()
    }

    fn changed(&mut self) -> Vec<usize> {
        let mut changed = vec![];
        self.gic.take_changed(|vcpu| changed.push(vcpu));
        changed.sort_unstable();
        changed
    }
}

/// Runs a test with both models.
fn with_both(test: impl Fn(Guest)) {
    for model in [Model::V2, Model::V3] {
        test(Guest::new(model, 2));
    }
}

/// The group that interrupts have after reset.
fn reset_group(model: Model) -> u32 {
    match model {
        Model::V2 => 0,
        Model::V3 => 1,
    }
}
