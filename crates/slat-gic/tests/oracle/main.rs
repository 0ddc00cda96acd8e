//! Random accesses on this crate's GICs and on QEMU's: both read the same.
//!
//! Left out is what KVM's GICs and QEMU's do differently, and what is UNPREDICTABLE: interrupts end in the reverse
//! order of their acknowledgement; groups are enabled together; binary points mean the same for both groups, and change
//! while nothing is active; priorities have five bits; triggers of PPIs and the enable bits of SGIs do not change; an
//! SGI is generated in its group. Lines are those of the two timers.

#[path = "../common/mod.rs"]
mod common;
mod qemu;

use common::{Random, vcpus};
use qemu::{Access, Qemu};
use slat_gic::gic::{Gic, Model};
use slat_gic::icc::Icc;
use slat_gic::interrupt::Group;
use slat_gic::memory::NoMemory;
use slat_gic::registers::Frame;

const DISTRIBUTOR: u64 = 0x0800_0000;
const CPU_INTERFACE: u64 = 0x0801_0000;
const REDISTRIBUTOR: u64 = 0x080a_0000;

/// The system registers of the payload's list. After them come ISR_EL1 and the timers' registers.
const REGISTERS: [Icc; 18] = [
    Icc::Pmr,
    Icc::Iar(Group::Zero),
    Icc::Eoir(Group::Zero),
    Icc::Hppir(Group::Zero),
    Icc::Bpr(Group::Zero),
    Icc::Apr(Group::Zero, 0),
    Icc::Apr(Group::One, 0),
    Icc::Dir,
    Icc::Rpr,
    Icc::Sgi1r,
    Icc::Sgi0r,
    Icc::Iar(Group::One),
    Icc::Eoir(Group::One),
    Icc::Hppir(Group::One),
    Icc::Bpr(Group::One),
    Icc::Ctlr,
    Icc::Igrpen(Group::Zero),
    Icc::Igrpen(Group::One),
];
const ISR: u64 = 18;
/// CNTV_CTL_EL0 and CNTP_CTL_EL0, and the PPIs of the timers.
const TIMERS: [(u64, u32); 2] = [(19, 27), (21, 30)];
const COMPARE: [u64; 2] = [20, 22];

/// Interrupts that the test uses.
const INTERRUPTS: u32 = 96;

/// A list of accesses, and the values that this crate's GIC returns for its reads.
struct List {
    model: Model,
    gic: Gic,
    random: Random,
    accesses: Vec<Access>,
    results: Vec<u64>,
    /// The interrupts that were acknowledged, with their groups.
    taken: Vec<(u32, Group)>,
    /// Interrupts that were ended and not deactivated.
    ended: Vec<u32>,
    acknowledged: u64,
}

impl List {
    fn new(model: Model, seed: u64) -> Self {
        let mut list = List {
            model,
            gic: Gic::new(model, 288, &vcpus(1)).unwrap(),
            random: Random(seed),
            accesses: vec![],
            results: vec![],
            taken: vec![],
            ended: vec![],
            acknowledged: 0,
        };
        list.begin();
        list
    }

    /// Makes both GICs begin alike: their states after reset differ.
    fn begin(&mut self) {
        for compare in COMPARE {
            self.accesses.push(Access::WriteRegister(compare, 0));
        }
        for first in (0..INTERRUPTS).step_by(32) {
            self.write_bits(0x080, first, 0);
            self.write_bits(
                0x180,
                first,
                if first == 0 { 0xffff_0000 } else { u32::MAX },
            );
        }
        self.write_bits(0x100, 0, 0xffff);
        for intid in (32..INTERRUPTS).step_by(16) {
            self.write(4, DISTRIBUTOR + 0xc00 + u64::from(intid / 4), 0);
        }
        for intid in 0..INTERRUPTS {
            self.write_priority(intid, 0xa0);
        }
        self.enable(true);
        self.enable_groups(true);
        self.set_mask(0xf8);
        if self.model == Model::V2 {
            self.write(4, CPU_INTERFACE + 0x08, 2);
            self.write(4, CPU_INTERFACE + 0x1c, 3);
        }
    }

    fn write(&mut self, width: usize, address: u64, value: u64) {
        self.accesses.push(Access::Write(width, address, value));
        let (frame, offset) = frame(address);
        self.gic
            .write(0, frame, offset, &value.to_le_bytes()[..width], &NoMemory);
    }

    fn read(&mut self, width: usize, address: u64) -> u64 {
        self.accesses.push(Access::Read(width, address));
        let (frame, offset) = frame(address);
        let mut data = [0; 8];
        self.gic.read(0, frame, offset, &mut data[..width]);
        let value = u64::from_le_bytes(data);
        self.results.push(value);
        value
    }

    fn write_register(&mut self, register: Icc, value: u64) {
        self.accesses
            .push(Access::WriteRegister(index(register), value));
        self.gic.write_icc(0, register, value).unwrap();
    }

    fn read_register(&mut self, register: Icc) -> u64 {
        self.accesses.push(Access::ReadRegister(index(register)));
        let value = self.gic.read_icc(0, register).unwrap();
        self.results.push(value);
        value
    }

    /// Returns the address of the register at `offset` that has the bits of an interrupt.
    fn address(&self, offset: u64, bits: u32, intid: u32) -> u64 {
        let base = match (self.model, intid) {
            (Model::V3, 0..32) => REDISTRIBUTOR + 0x1_0000,
            _ => DISTRIBUTOR,
        };
        base + offset + u64::from(intid * bits / 32 * 4)
    }

    fn write_bits(&mut self, offset: u64, first: u32, bits: u32) {
        self.write(4, self.address(offset, 1, first), bits.into());
    }

    fn write_priority(&mut self, intid: u32, priority: u8) {
        let word = self.address(0x400, 8, intid);
        self.write(1, word + u64::from(intid % 4), priority.into());
    }

    fn enable(&mut self, on: bool) {
        let value = match (on, self.model) {
            (false, _) => 0,
            (true, Model::V2) => 0b11,
            (true, Model::V3) => 0b1_0011,
        };
        self.write(4, DISTRIBUTOR, value);
    }

    /// Enables or disables both groups at the CPU interface. GICv2's register has other bits, too.
    fn enable_groups(&mut self, on: bool) {
        match self.model {
            Model::V2 => self.write(4, CPU_INTERFACE, if on { 7 } else { 4 }),
            Model::V3 => {
                for group in [Group::Zero, Group::One] {
                    self.write_register(Icc::Igrpen(group), on.into());
                }
            }
        }
    }

    fn set_mask(&mut self, mask: u8) {
        match self.model {
            Model::V2 => self.write(4, CPU_INTERFACE + 4, mask.into()),
            Model::V3 => self.write_register(Icc::Pmr, mask.into()),
        }
    }

    /// Makes a random access that means the same to both GICs.
    fn operation(&mut self) {
        let intid = self.random.below(INTERRUPTS.into()) as u32;
        let first = intid & !31;
        match self.random.below(100) {
            0..5 => {
                // The group of an active interrupt does not change.
                if !self.is_idle() {
                    return;
                }
                let groups = self.random.next() as u32;
                self.write_bits(0x080, first, groups);
            }
            5..18 => {
                let bits = self.random.few_bits();
                self.write_bits(0x100, first, bits);
            }
            18..21 => {
                let sgis = if first == 0 { 0xffff } else { 0 };
                let bits = self.random.few_bits() & !sgis;
                self.write_bits(0x180, first, bits);
            }
            21..36 => {
                let bits = self.random.few_bits();
                self.write_bits(0x200, first, bits);
            }
            36..39 => {
                let bits = self.random.few_bits();
                self.write_bits(0x280, first, bits);
            }
            39..40 => {
                // QEMU's GICC_DIR does not undo GICD_ISACTIVER of an SPI.
                let sets = self.random.once_in(3) && (self.model == Model::V3 || first == 0);
                let bits = self.random.few_bits();
                self.write_bits(if sets { 0x300 } else { 0x380 }, first, bits);
            }
            40..45 => {
                let priority = self.random.next() as u8 & 0xf8;
                self.write_priority(intid, priority);
            }
            45..47 if intid >= 32 => {
                let triggers = self.random.next() & 0xaaaa_aaaa;
                self.write(4, DISTRIBUTOR + 0xc00 + u64::from(intid / 16 * 4), triggers);
            }
            45..52 => self.switch_timer(),
            52..56 => self.generate_sgi(intid % 16),
            56..60 => self.control(),
            60..75 => self.acknowledge(),
            75..90 => self.end(),
            _ => self.look(first),
        }
        self.signals();
    }

    fn switch_timer(&mut self) {
        let (register, ppi) = TIMERS[self.random.below(2) as usize];
        let on = self.random.once_in(2);
        self.accesses
            .push(Access::WriteRegister(register, on.into()));
        self.gic.set_ppi(0, ppi, on).unwrap();
    }

    fn generate_sgi(&mut self, intid: u32) {
        let mut groups = [0; 4];
        let (frame, offset) = frame(self.address(0x080, 1, 0));
        self.gic.read(0, frame, offset, &mut groups);
        let is_group_one = u32::from_le_bytes(groups) >> intid & 1 != 0;
        let to_itself = u64::from(intid) << 24 | 1;
        match (self.model, is_group_one) {
            (Model::V2, _) => self.write(4, DISTRIBUTOR + 0xf00, 1 << 16 | u64::from(intid)),
            (Model::V3, true) => self.write_register(Icc::Sgi1r, to_itself),
            (Model::V3, false) => self.write_register(Icc::Sgi0r, to_itself),
        }
    }

    fn is_idle(&self) -> bool {
        self.taken.is_empty() && self.ended.is_empty()
    }

    fn control(&mut self) {
        let value = self.random.next();
        let is_idle = self.is_idle();
        match self.random.below(12) {
            0..5 => {
                let mask = if value & 7 == 0 {
                    value as u8 & 0xf8
                } else {
                    0xf8
                };
                self.set_mask(mask);
            }
            5 => {
                let on = !self.random.once_in(3);
                self.enable(on);
                if !on {
                    self.signals();
                    self.enable(true);
                }
            }
            6 if self.model == Model::V3 => {
                self.enable_groups(false);
                self.signals();
                self.enable_groups(true);
            }
            6..9 if is_idle => {
                // QEMU masks the running priority by the binary point of the pending interrupt's group.
                let point = 2 + value % 5;
                match self.model {
                    Model::V2 => {
                        self.write(4, CPU_INTERFACE + 0x08, point);
                        self.write(4, CPU_INTERFACE + 0x1c, point + 1);
                    }
                    Model::V3 => {
                        // While ICC_CTLR.CBPR is set, ICC_BPR1 cannot be written: it is cleared.
                        let control = self.gic.read_icc(0, Icc::Ctlr).unwrap();
                        self.write_register(Icc::Ctlr, control & 2);
                        self.write_register(Icc::Bpr(Group::Zero), point);
                        self.write_register(Icc::Bpr(Group::One), point + 1);
                    }
                }
            }
            9.. if is_idle => match self.model {
                // AckCtl is always set, as QEMU has no GICC_AIAR.
                Model::V2 => self.write(4, CPU_INTERFACE, value & 0x218 | 7),
                Model::V3 => self.write_register(Icc::Ctlr, value & 3),
            },
            _ => (),
        }
    }

    fn acknowledge(&mut self) {
        let group = match self.random.once_in(3) {
            true => Group::One,
            false => Group::Zero,
        };
        let value = match self.model {
            Model::V2 => self.read(4, CPU_INTERFACE + 0x0c),
            Model::V3 => self.read_register(Icc::Iar(group)),
        };
        if value & 0x3ff < 1020 {
            self.taken.push((value as u32, group));
            self.acknowledged += 1;
        }
    }

    /// Ends the last interrupt that was acknowledged, or deactivates one that was ended.
    fn end(&mut self) {
        if !self.ended.is_empty() && self.random.once_in(2) {
            let at = self.random.below(self.ended.len() as u64) as usize;
            let intid = self.ended.swap_remove(at).into();
            match self.model {
                Model::V2 => self.write(4, CPU_INTERFACE + 0x1000, intid),
                Model::V3 => self.write_register(Icc::Dir, intid),
            }
            return;
        }
        let Some((intid, group)) = self.taken.pop() else {
            return;
        };
        match self.model {
            Model::V2 => self.write(4, CPU_INTERFACE + 0x10, intid.into()),
            Model::V3 => self.write_register(Icc::Eoir(group), intid.into()),
        }
        if self.is_separate() {
            self.ended.push(intid);
        }
    }

    /// Whether EOImode is set.
    fn is_separate(&mut self) -> bool {
        match self.model {
            Model::V2 => self.gic.client_read(0, Frame::CpuInterface, 0) & 0x200 != 0,
            Model::V3 => self.gic.read_icc(0, Icc::Ctlr).unwrap() & 2 != 0,
        }
    }

    /// Reads registers that change nothing.
    fn look(&mut self, first: u32) {
        for offset in [0x080, 0x100, 0x180, 0x200, 0x280, 0x300, 0x380] {
            self.read(4, self.address(offset, 1, first));
        }
        let intid = first + self.random.below(8) as u32 * 4;
        let word = self.address(0x400, 8, intid);
        self.read(4, word);
        match self.model {
            Model::V2 => {
                for offset in [0x04, 0x08, 0x14, 0x1c] {
                    self.read(4, CPU_INTERFACE + offset);
                }
            }
            Model::V3 => {
                for group in [Group::Zero, Group::One] {
                    self.read_register(Icc::Hppir(group));
                    self.read_register(Icc::Bpr(group));
                    self.read_register(Icc::Apr(group, 0));
                }
                self.read_register(Icc::Rpr);
                self.read_register(Icc::Pmr);
            }
        }
    }

    /// Reads ISR_EL1, which shows the processor's inputs.
    fn signals(&mut self) {
        self.accesses.push(Access::ReadRegister(ISR));
        let signals = self.gic.signals(0);
        self.results
            .push(u64::from(signals.irq) << 7 | u64::from(signals.fiq) << 6);
    }

    /// Compares the results with QEMU's.
    fn compare(&self, theirs: &[u64]) {
        let (mut ours, mut others) = (self.results.iter(), theirs.iter());
        let mut trace: Vec<String> = vec![];
        for access in &self.accesses {
            let (Access::Read(..) | Access::ReadRegister(_)) = access else {
                trace.push(format!("{access:x?}"));
                continue;
            };
            let (ours, other) = (ours.next(), others.next());
            let last = trace.len().saturating_sub(25);
            let before = || trace[last..].join("\n");
            assert_eq!(ours, other, "{access:x?} after\n{}", before());
            trace.push(format!("{access:x?} = {:x}", ours.unwrap()));
        }
        assert_eq!(self.results.len(), theirs.len());
    }
}

fn index(register: Icc) -> u64 {
    REGISTERS
        .iter()
        .position(|known| *known == register)
        .unwrap() as u64
}

fn frame(address: u64) -> (Frame, u64) {
    match address {
        REDISTRIBUTOR.. => (Frame::Redistributor(0), address - REDISTRIBUTOR),
        CPU_INTERFACE.. => (Frame::CpuInterface, address - CPU_INTERFACE),
        _ => (Frame::Distributor, address - DISTRIBUTOR),
    }
}

fn number(name: &str, default: u64) -> u64 {
    let value = std::env::var(name).ok();
    value.map_or(default, |value| value.parse().unwrap())
}

/// Compares `SLAT_ORACLE_ROUNDS` lists of accesses, from `SLAT_ORACLE_SEED` on.
fn compare(model: Model, version: &'static str) {
    let Some(qemu) = Qemu::new(version) else {
        return;
    };
    let seed = number("SLAT_ORACLE_SEED", 1);
    let (mut accesses, mut acknowledged) = (0, 0);
    for round in 0..number("SLAT_ORACLE_ROUNDS", 3) {
        let mut list = List::new(model, seed.wrapping_mul(1000).wrapping_add(round));
        for _ in 0..5_000 {
            list.operation();
        }
        let theirs = qemu.execute(&list.accesses);
        list.compare(&theirs);
        accesses += list.accesses.len();
        acknowledged += list.acknowledged;
    }
    println!("GICv{version}: {accesses} accesses, {acknowledged} interrupts, 0 differences");
    assert!(acknowledged > 0);
}

#[test]
fn v2_reads_what_qemu_reads() {
    compare(Model::V2, "2");
}

#[test]
fn v3_reads_what_qemu_reads() {
    compare(Model::V3, "3");
}
