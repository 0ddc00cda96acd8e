//! GICv3's operations.

use super::its_guest::{LPIS, Tables};
use super::*;
use slat_gic::interrupt::Group;

const GROUPS: [Group; 2] = [Group::Zero, Group::One];

impl Pair {
    fn v3_operation(&mut self, tables: &mut Tables) {
        match self.random.below(100) {
            0..15 => self.write_bits(),
            15..19 => self.write_priority(),
            19..20 => self.write_configuration(),
            20..28 => self.drive(),
            28..31 => self.write_route(),
            31..36 => self.send_sgi(),
            36..42 => self.write_icc(),
            42..43 => self.write_enable_v3(),
            43..63 => self.acknowledge_v3(),
            63..80 => self.end_v3(),
            80..98 => tables.operation(self),
            _ => self.read_icc(),
        }
    }

    fn write_enable_v3(&mut self) {
        let enabled = !self.random.once_in(8);
        let value = u32::from(enabled) << 1;
        write32(
            &mut self.gic,
            0,
            (Frame::Distributor, 0),
            value,
            &self.memory,
        );
        self.plain.dist_enabled = enabled;
    }

    fn write_route(&mut self) {
        let intid = 32 + self.random.below(u64::from(INTERRUPTS) - 32) as u32;
        // Some affinities belong to no vCPU; the routing mode does not exist.
        let affinity = self.random.below(VCPUS as u64 + 1);
        let extra = if self.random.once_in(10) { 1 << 31 } else { 0 };
        let offset = 0x6000 + u64::from(intid) * 8;
        let value = affinity | extra;
        match self.random.once_in(2) {
            true => {
                self.gic.write(
                    0,
                    Frame::Distributor,
                    offset,
                    &value.to_le_bytes(),
                    &self.memory,
                );
            }
            false => {
                let at = (Frame::Distributor, offset);
                write32(&mut self.gic, 0, at, value as u32, &self.memory);
            }
        }
        let mut data = [0xff; 8];
        self.gic.read(0, Frame::Distributor, offset, &mut data);
        assert_eq!(u64::from_le_bytes(data), affinity);
        let target = Some(affinity as usize).filter(|vcpu| *vcpu < VCPUS);
        self.plain.irq(0, intid).unwrap().target = target;
    }

    fn send_sgi(&mut self) {
        let (source, intid) = (self.vcpu(), self.random.below(16));
        let broadcast = self.random.once_in(3);
        let cluster = u64::from(self.random.once_in(8));
        let list = self.random.next() & 0xffff;
        let value = list | cluster << 16 | intid << 24 | u64::from(broadcast) << 40;
        let (register, both_groups) = match self.random.below(3) {
            0 => (Icc::Sgi1r, true),
            1 => (Icc::Asgi1r, false),
            _ => (Icc::Sgi0r, false),
        };
        self.gic.write_icc(source, register, value).unwrap();
        for vcpu in 0..VCPUS {
            let is_target = match broadcast {
                true => vcpu != source,
                false => cluster == 0 && list >> vcpu & 1 != 0,
            };
            let irq = self.plain.irq(vcpu, intid as u32).unwrap();
            if is_target && (both_groups || irq.group == 0) {
                irq.soft_pending = true;
            }
        }
    }

    fn write_icc(&mut self) {
        let vcpu = self.vcpu();
        let mut value = self.random.next();
        let cpu = &mut self.plain.cpus[vcpu];
        let register = match self.random.below(10) {
            0..4 => {
                if value & 0x700 != 0 {
                    value |= 0xf0;
                }
                cpu.pmr = value as u8 & 0xf8;
                Icc::Pmr
            }
            4 => {
                cpu.bpr[0] = (value as u8 & 7).max(2);
                Icc::Bpr(Group::Zero)
            }
            5 => {
                if !cpu.cbpr {
                    cpu.bpr[1] = (value as u8 & 7).max(3);
                }
                Icc::Bpr(Group::One)
            }
            6 => {
                cpu.cbpr = value & 1 != 0;
                cpu.eoi_mode = value & 2 != 0;
                Icc::Ctlr
            }
            _ => {
                let group = (value >> 32 & 1) as usize;
                value |= u64::from(value & 0xf0 != 0);
                cpu.group_enabled[group] = value & 1 != 0;
                Icc::Igrpen(GROUPS[group])
            }
        };
        self.gic.write_icc(vcpu, register, value).unwrap();
    }

    fn acknowledge_v3(&mut self) {
        let vcpu = self.vcpu();
        let group = self.random.below(2) as usize;
        let value = self.gic.read_icc(vcpu, Icc::Iar(GROUPS[group])).unwrap();
        assert_eq!(
            value,
            u64::from(self.plain.acknowledge(vcpu, group)),
            "vCPU {vcpu}"
        );
        if !(1020..8192).contains(&value) {
            self.taken[vcpu].push(value as u32);
            self.acknowledged += 1;
            self.acknowledged_lpis += u64::from(value >= 8192);
        }
    }

    fn end_v3(&mut self) {
        let vcpu = self.vcpu();
        let value = match self.random.once_in(20) {
            true => self.random.below(8192 + u64::from(LPIS)) as u32,
            false => match self.taken[vcpu].pop() {
                Some(value) => value,
                None => return,
            },
        };
        let register = Icc::Eoir(GROUPS[self.random.below(2) as usize]);
        self.gic.write_icc(vcpu, register, value.into()).unwrap();
        self.plain.end(vcpu, value);
        if self.random.below(4) != 0 {
            self.check();
            self.gic.write_icc(vcpu, Icc::Dir, value.into()).unwrap();
            if self.plain.cpus[vcpu].eoi_mode {
                self.plain.deactivate(vcpu, value);
            }
        }
    }

    fn read_icc(&mut self) {
        let vcpu = self.vcpu();
        let mut read = |register| self.gic.read_icc(vcpu, register).unwrap() as u32;
        assert_eq!(read(Icc::Rpr), self.plain.running(vcpu).into());
        assert_eq!(
            read(Icc::Hppir(Group::Zero)),
            self.plain.highest_register(vcpu, 0)
        );
        assert_eq!(
            read(Icc::Hppir(Group::One)),
            self.plain.highest_register(vcpu, 1)
        );
        let cpu = &self.plain.cpus[vcpu];
        assert_eq!(read(Icc::Pmr), cpu.pmr.into());
        assert_eq!(read(Icc::Bpr(Group::Zero)), cpu.bpr[0].into());
        let one = if cpu.cbpr {
            (cpu.bpr[0] + 1).min(7)
        } else {
            cpu.bpr[1]
        };
        assert_eq!(read(Icc::Bpr(Group::One)), one.into());
        let levels = cpu
            .running
            .iter()
            .fold(0, |levels, level| levels | 1u32 << (level >> 3));
        assert_eq!(
            read(Icc::Apr(Group::Zero, 0)) | read(Icc::Apr(Group::One, 0)),
            levels
        );
        let control = 0x8400 | u32::from(cpu.cbpr) | u32::from(cpu.eoi_mode) << 1;
        assert_eq!(read(Icc::Ctlr), control);
    }
}

#[test]
fn v3_is_its_model() {
    let mut pair = Pair {
        gic: Gic::new(Model::V3, INTERRUPTS, &common::vcpus(VCPUS as u32)).unwrap(),
        plain: Plain::new(true, VCPUS, INTERRUPTS as usize - 32, LPIS as usize),
        memory: TestMemory::new(its_guest::MEMORY, its_guest::MEMORY_SIZE),
        random: Random(3),
        signals: vec![Signals::default(); VCPUS],
        taken: vec![vec![]; VCPUS],
        acknowledged: 0,
        acknowledged_lpis: 0,
    };
    let mut tables = Tables::new(&mut pair);
    for _ in 0..OPERATIONS {
        pair.v3_operation(&mut tables);
        pair.check();
        if pair.random.once_in(500) {
            pair.save_and_restore_v3(&mut tables);
            pair.check();
        }
    }
    let (all, lpis) = (pair.acknowledged, pair.acknowledged_lpis);
    println!("{all} interrupts acknowledged, {lpis} of them LPIs");
    assert!(
        all > OPERATIONS / 50 && lpis > OPERATIONS / 500,
        "{all}, {lpis}"
    );
}
