//! GICv2's operations.

use super::*;

fn interface(offset: u64) -> (Frame, u64) {
    (Frame::CpuInterface, offset)
}

impl Pair {
    fn v2_operation(&mut self) {
        match self.random.below(100) {
            0..20 => self.write_bits(),
            20..24 => self.write_priority(),
            24..26 => self.write_configuration(),
            26..37 => self.drive(),
            37..42 => self.write_targets(),
            42..49 => self.generate_sgi(),
            49..52 => self.write_sgi_sources(),
            52..59 => self.write_interface(),
            59..60 => self.write_enable(0),
            60..80 => self.acknowledge_v2(),
            80..97 => self.end_v2(),
            _ => self.read_interface(),
        }
    }

    fn write_enable(&mut self, bit: u32) {
        let enabled = !self.random.once_in(8);
        let at = (Frame::Distributor, 0);
        write32(
            &mut self.gic,
            0,
            at,
            u32::from(enabled) << bit,
            &self.memory,
        );
        self.plain.dist_enabled = enabled;
    }

    fn write_targets(&mut self) {
        let intid = self.intid();
        let value = self.random.next() as u8;
        let (frame, word) = place(Model::V2, 0, 0x800, 8, intid);
        let offset = word + u64::from(intid % 4);
        self.gic.write(0, frame, offset, &[value], &self.memory);
        let mut data = [0];
        self.gic.read(1, frame, offset, &mut data);
        if intid < 32 {
            assert_eq!(data[0], 1 << 1);
            return;
        }
        assert_eq!(data[0], value & 0b111);
        let first = (0..VCPUS).find(|vcpu| value >> vcpu & 1 != 0);
        self.plain.irq(0, intid).unwrap().target = Some(first.unwrap_or(0));
    }

    fn generate_sgi(&mut self) {
        let (source, intid) = (self.vcpu(), self.random.below(16) as u32);
        let (filter, list) = (self.random.below(4) as u32, self.random.below(256) as u32);
        let value = filter << 24 | list << 16 | intid;
        write32(
            &mut self.gic,
            source,
            (Frame::Distributor, 0xf00),
            value,
            &self.memory,
        );
        for vcpu in 0..VCPUS {
            let is_target = match filter {
                0 => list >> vcpu & 1 != 0,
                1 => vcpu != source,
                2 => vcpu == source,
                _ => false,
            };
            if is_target {
                let irq = self.plain.irq(vcpu, intid).unwrap();
                irq.sources[source] = true;
                irq.soft_pending = true;
            }
        }
    }

    fn write_sgi_sources(&mut self) {
        let (vcpu, intid) = (self.vcpu(), self.random.below(16) as u32);
        let value = self.random.next() as u8;
        let set = self.random.once_in(2);
        let offset = if set { 0xf20 } else { 0xf10 } + u64::from(intid);
        self.gic
            .write(vcpu, Frame::Distributor, offset, &[value], &self.memory);
        let irq = self.plain.irq(vcpu, intid).unwrap();
        for (source, is_source) in irq.sources.iter_mut().enumerate() {
            if value >> source & 1 != 0 {
                *is_source = set;
            }
        }
        irq.soft_pending = irq.sources.contains(&true);
        let expected = (0..8)
            .map(|source| u8::from(irq.sources[source]) << source)
            .sum::<u8>();
        let mut data = [0];
        self.gic.read(vcpu, Frame::Distributor, offset, &mut data);
        assert_eq!(data[0], expected);
    }

    fn write_interface(&mut self) {
        let vcpu = self.vcpu();
        let value = self.random.next() as u32;
        let cpu = &mut self.plain.cpus[vcpu];
        let (offset, value) = match self.random.below(7) {
            0..2 => {
                // Both groups are usually enabled.
                let value = if value & 0x8000 == 0 {
                    value | 3
                } else {
                    value
                };
                cpu.group_enabled = [value & 1 != 0, value & 2 != 0];
                cpu.ack_ctl = value & 4 != 0;
                cpu.fiq_en = value & 8 != 0;
                cpu.cbpr = value & 16 != 0;
                cpu.eoi_mode = value & 0x200 != 0;
                (0x00, value)
            }
            2..5 => {
                let value = if value & 0x700 == 0 {
                    value
                } else {
                    value | 0xf0
                };
                cpu.pmr = value as u8 & 0xf8;
                (0x04, value)
            }
            5 => {
                cpu.bpr[0] = (value as u8 & 7).max(2);
                (0x08, value)
            }
            _ => {
                cpu.bpr[1] = (value as u8 & 7).max(3);
                (0x1c, value)
            }
        };
        write32(&mut self.gic, vcpu, interface(offset), value, &self.memory);
    }

    fn acknowledge_v2(&mut self) {
        let vcpu = self.vcpu();
        let group = usize::from(self.random.once_in(3));
        let offset = [0x0c, 0x20][group];
        let value = read32(&mut self.gic, vcpu, interface(offset));
        assert_eq!(
            value,
            self.plain.acknowledge(vcpu, group),
            "vCPU {vcpu}, group {group}"
        );
        if value & 0x3ff < 1020 {
            self.taken[vcpu].push(value);
            self.acknowledged += 1;
        }
    }

    fn end_v2(&mut self) {
        let vcpu = self.vcpu();
        let value = match self.random.once_in(20) {
            true => self.random.below(1024) as u32,
            false => match self.taken[vcpu].pop() {
                Some(value) => value,
                None => return,
            },
        };
        let offset = if self.random.once_in(3) { 0x24 } else { 0x10 };
        write32(&mut self.gic, vcpu, interface(offset), value, &self.memory);
        self.plain.end(vcpu, value & 0x3ff);
        if self.random.below(4) != 0 {
            self.check();
            write32(&mut self.gic, vcpu, interface(0x1000), value, &self.memory);
            if self.plain.cpus[vcpu].eoi_mode {
                self.plain.deactivate(vcpu, value & 0x3ff);
            }
        }
    }

    fn read_interface(&mut self) {
        let vcpu = self.vcpu();
        let mut read = |offset| read32(&mut self.gic, vcpu, interface(offset));
        assert_eq!(read(0x14), self.plain.running(vcpu).into());
        assert_eq!(read(0x18), self.plain.highest_register(vcpu, 0));
        assert_eq!(read(0x28), self.plain.highest_register(vcpu, 1));
        let cpu = &self.plain.cpus[vcpu];
        assert_eq!(read(0x04), cpu.pmr.into());
        assert_eq!(read(0x08), cpu.bpr[0].into());
        assert_eq!(read(0x1c), cpu.bpr[1].into());
        let levels = cpu
            .running
            .iter()
            .fold(0, |levels, level| levels | 1u32 << (level >> 3));
        assert_eq!(read(0xd0), levels);
    }
}

#[test]
fn v2_is_its_model() {
    let mut pair = Pair {
        gic: Gic::new(Model::V2, INTERRUPTS, &common::vcpus(VCPUS as u32)).unwrap(),
        plain: Plain::new(false, VCPUS, INTERRUPTS as usize - 32, 0),
        memory: TestMemory::new(0, 0),
        random: Random(2),
        signals: vec![Signals::default(); VCPUS],
        taken: vec![vec![]; VCPUS],
        acknowledged: 0,
        acknowledged_lpis: 0,
    };
    for _ in 0..OPERATIONS {
        pair.v2_operation();
        pair.check();
        if pair.random.once_in(500) {
            pair.save_and_restore_v2();
            pair.check();
        }
    }
    println!("{} interrupts acknowledged", pair.acknowledged);
    assert!(pair.acknowledged > OPERATIONS / 50, "{}", pair.acknowledged);
}
