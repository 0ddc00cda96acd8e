//! Random operations on a GIC and on a plain model of it. After each operation both have the same signals, registers,
//! acknowledged interrupts and running priorities; and sometimes the state is saved and restored into another GIC.

#[path = "../common/mod.rs"]
mod common;
mod hostile;
mod its_guest;
mod model;
mod saving;
mod v2;
mod v3;

use common::{Random, TestMemory, place, read32, write32};
use model::Model as Plain;
use slat_gic::gic::{Gic, Model, Signals};
use slat_gic::icc::Icc;
use slat_gic::registers::Frame;

/// Operations of each test.
const OPERATIONS: u64 = 150_000;
const VCPUS: usize = 3;
const INTERRUPTS: u32 = 96;

/// A GIC beside its model.
struct Pair {
    gic: Gic,
    plain: Plain,
    memory: TestMemory,
    random: Random,
    /// The signals after the last operation.
    signals: Vec<Signals>,
    /// The interrupts of each vCPU that were acknowledged and not ended, as the register returned them.
    taken: Vec<Vec<u32>>,
    /// The number of acknowledgements that returned an interrupt, and the number that returned an LPI.
    acknowledged: u64,
    acknowledged_lpis: u64,
}

impl Pair {
    fn vcpu(&mut self) -> usize {
        self.random.below(VCPUS as u64) as usize
    }

    /// Returns an INTID, the private ones more often.
    fn intid(&mut self) -> u32 {
        let limit = if self.random.once_in(3) {
            32
        } else {
            INTERRUPTS
        };
        self.random.below(limit.into()) as u32
    }

    fn model(&self) -> Model {
        self.gic.model()
    }

    /// Writes a register with a bit for each interrupt, to both.
    fn write_bits(&mut self) {
        let vcpu = self.vcpu();
        let first = self.intid() & !31;
        // Pending and enabled interrupts have to be more frequent than the opposite.
        let (offset, value) = match self.random.below(12) {
            0 => (0x080, self.random.next() as u32),
            1..4 => (0x100, self.random.few_bits()),
            4 => (0x180, self.random.few_bits()),
            5..9 => (0x200, self.random.few_bits()),
            9 => (0x280, self.random.few_bits()),
            10 => (0x300, 1 << self.random.below(32)),
            _ => (0x380, self.random.few_bits()),
        };
        let at = place(self.model(), vcpu, offset, 1, first);
        write32(&mut self.gic, vcpu, at, value, &self.memory);
        let v2 = self.model() == Model::V2;
        for bit in 0..32 {
            let intid = first + bit;
            let set = value >> bit & 1 != 0;
            let Some(irq) = self.plain.irq(vcpu, intid) else {
                continue;
            };
            match offset {
                0x080 => irq.group = usize::from(set),
                0x100 if set => irq.enabled = true,
                0x180 if set => irq.enabled = false,
                0x200 if set && !(v2 && intid < 16) => irq.soft_pending = true,
                0x280 if set && !(v2 && intid < 16) => irq.soft_pending = false,
                0x300 if set => irq.active = true,
                0x380 if set => irq.active = false,
                _ => (),
            }
        }
    }

    fn write_priority(&mut self) {
        let (vcpu, intid) = (self.vcpu(), self.intid());
        let value = self.random.next() as u8;
        let (frame, word) = place(self.model(), vcpu, 0x400, 8, intid);
        let offset = word + u64::from(intid % 4);
        self.gic.write(vcpu, frame, offset, &[value], &self.memory);
        self.plain.irq(vcpu, intid).unwrap().priority = value & 0xf8;
    }

    fn write_configuration(&mut self) {
        let (vcpu, intid) = (self.vcpu(), self.intid());
        let value = self.random.next() as u32;
        let at = place(self.model(), vcpu, 0xc00, 2, intid);
        write32(&mut self.gic, vcpu, at, value, &self.memory);
        let first = intid & !15;
        for index in (0..16).filter(|index| first + index >= 32) {
            let edge = value >> (2 * index + 1) & 1 != 0;
            self.plain.irq(vcpu, first + index).unwrap().edge = edge;
        }
    }

    fn drive(&mut self) {
        let (vcpu, intid) = (self.vcpu(), self.intid());
        let high = self.random.below(3) != 0;
        let driven = match intid {
            0..16 => {
                assert!(self.gic.set_ppi(vcpu, intid, high).is_err());
                return;
            }
            16..32 => self.gic.set_ppi(vcpu, intid, high),
            _ => self.gic.set_spi(intid, high),
        };
        driven.unwrap();
        self.plain.irq(vcpu, intid).unwrap().drive(high);
    }

    /// Compares the results of an operation: signals, and the lists of changed vCPUs and of ended interrupts.
    fn check(&mut self) {
        let mut changed = vec![];
        self.gic.take_changed(|vcpu| changed.push(vcpu));
        changed.sort_unstable();
        let mut expected = vec![];
        for vcpu in 0..VCPUS {
            let signals = self.gic.signals(vcpu);
            let (irq, fiq) = self.plain.signals(vcpu);
            assert_eq!(signals, Signals { irq, fiq }, "vCPU {vcpu}");
            if signals != self.signals[vcpu] {
                expected.push(vcpu);
            }
            self.signals[vcpu] = signals;
        }
        assert_eq!(changed, expected);
        let mut ended = vec![];
        self.gic.take_ended(|intid| ended.push(intid));
        assert_eq!(ended, std::mem::take(&mut self.plain.ended));
        for vcpu in 0..VCPUS {
            assert_eq!(self.running(vcpu), self.plain.running(vcpu).into());
            self.check_word(vcpu, 0);
        }
        for first in (32..INTERRUPTS).step_by(32) {
            self.check_word(0, first);
        }
    }

    fn running(&mut self, vcpu: usize) -> u32 {
        match self.model() {
            Model::V2 => read32(&mut self.gic, vcpu, (Frame::CpuInterface, 0x14)),
            Model::V3 => self.gic.read_icc(vcpu, Icc::Rpr).unwrap() as u32,
        }
    }

    /// Compares the registers of 32 interrupts.
    fn check_word(&mut self, vcpu: usize, first: u32) {
        let model = self.model();
        let mut expected = [0u32; 4];
        for bit in 0..32 {
            let irq = self.plain.irq(vcpu, first + bit).unwrap();
            let bits = [irq.group == 1, irq.enabled, irq.pending(), irq.active];
            for (word, set) in expected.iter_mut().zip(bits) {
                *word |= u32::from(set) << bit;
            }
        }
        let mut read = |offset| read32(&mut self.gic, vcpu, place(model, vcpu, offset, 1, first));
        assert_eq!([0x080, 0x100, 0x200, 0x300].map(&mut read), expected);
        assert_eq!([0x080, 0x180, 0x280, 0x380].map(read), expected);
        let word = first + self.random.below(8) as u32 * 4;
        let at = place(model, vcpu, 0x400, 8, word);
        let priorities = read32(&mut self.gic, vcpu, at).to_le_bytes();
        for (priority, intid) in priorities.into_iter().zip(word..) {
            assert_eq!(priority, self.plain.irq(vcpu, intid).unwrap().priority);
        }
    }
}
