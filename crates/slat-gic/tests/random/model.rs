//! A GIC as plainly as possible: an array of interrupts, and a scan of all of them for each question.

/// An SGI, PPI, SPI or LPI.
#[derive(Clone, Default)]
pub struct Irq {
    pub enabled: bool,
    pub group: usize,
    pub priority: u8,
    pub edge: bool,
    /// Pending by an edge, a message, or software.
    pub soft_pending: bool,
    pub line: bool,
    pub active: bool,
    /// GICv2: the sources of an SGI.
    pub sources: [bool; 8],
    /// The vCPU of an SPI or LPI.
    pub target: Option<usize>,
    /// LPIs: whether it exists.
    pub mapped: bool,
}

impl Irq {
    pub fn pending(&self) -> bool {
        if self.edge {
            self.soft_pending
        } else {
            self.soft_pending || self.line
        }
    }

    pub fn drive(&mut self, high: bool) {
        if !self.edge {
            self.line = high;
        } else if high {
            self.soft_pending = true;
        }
    }
}

#[derive(Clone)]
pub struct Cpu {
    pub pmr: u8,
    pub bpr: [u8; 2],
    pub group_enabled: [bool; 2],
    pub cbpr: bool,
    pub eoi_mode: bool,
    pub ack_ctl: bool,
    pub fiq_en: bool,
    pub lpis_enabled: bool,
    /// Group priorities of the interrupts that were acknowledged and not ended.
    pub running: Vec<u8>,
}

pub struct Model {
    pub v3: bool,
    pub dist_enabled: bool,
    pub private: Vec<Vec<Irq>>,
    /// From INTID 32 on.
    pub spis: Vec<Irq>,
    /// From INTID 8192 on.
    pub lpis: Vec<Irq>,
    pub cpus: Vec<Cpu>,
    /// The level-triggered SPIs that were deactivated.
    pub ended: Vec<u32>,
}

/// The interrupt that a vCPU would acknowledge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Best {
    pub intid: u32,
    pub priority: u8,
    pub group: usize,
}

pub const LPI: u32 = 8192;

impl Model {
    pub fn new(v3: bool, cpus: usize, spis: usize, lpis: usize) -> Self {
        let group = usize::from(v3);
        let private = |_| {
            let each = (0..32).map(|intid| Irq {
                enabled: intid < 16,
                edge: intid < 16,
                group,
                ..Irq::default()
            });
            each.collect()
        };
        let spi = Irq {
            edge: true,
            group,
            target: Some(0),
            ..Irq::default()
        };
        let lpi = Irq {
            edge: true,
            group: 1,
            ..Irq::default()
        };
        let cpu = Cpu {
            pmr: 0,
            bpr: [2, 3],
            group_enabled: [false; 2],
            cbpr: false,
            eoi_mode: false,
            ack_ctl: false,
            fiq_en: false,
            lpis_enabled: false,
            running: vec![],
        };
        Model {
            v3,
            dist_enabled: false,
            private: (0..cpus).map(private).collect(),
            spis: vec![spi; spis],
            lpis: vec![lpi; lpis],
            cpus: vec![cpu; cpus],
            ended: vec![],
        }
    }

    pub fn irq(&mut self, cpu: usize, intid: u32) -> Option<&mut Irq> {
        if intid < 32 {
            return self.private[cpu].get_mut(intid as usize);
        }
        if intid < LPI {
            return self.spis.get_mut(intid as usize - 32);
        }
        let lpi = self.lpis.get_mut((intid - LPI) as usize);
        lpi.filter(|lpi| lpi.mapped)
    }

    /// The binary point as the tables of the architecture have it: how many of the eight bits are the group priority.
    fn preemption(&self, cpu: usize, priority: u8, group: usize) -> u8 {
        let cpu = &self.cpus[cpu];
        let group_bits = if group == 0 || cpu.cbpr {
            7 - cpu.bpr[0]
        } else {
            8 - cpu.bpr[1]
        };
        let mut kept = 0;
        for bit in 0..group_bits {
            kept |= priority & 0x80 >> bit;
        }
        kept
    }

    pub fn running(&self, cpu: usize) -> u8 {
        self.cpus[cpu].running.iter().copied().min().unwrap_or(0xff)
    }

    /// The pending interrupt of the highest priority in the groups that `cpu` has enabled.
    pub fn highest(&self, cpu: usize) -> Option<Best> {
        let mut best: Option<Best> = None;
        let private = self.private[cpu]
            .iter()
            .zip(0u32..)
            .map(|(irq, intid)| (irq, intid, true));
        let spis = self.spis.iter().zip(32u32..);
        let spis = spis.map(|(irq, intid)| (irq, intid, irq.target == Some(cpu)));
        let lpis = self.lpis.iter().zip(LPI..);
        let enabled = self.cpus[cpu].lpis_enabled;
        let lpis =
            lpis.map(|(irq, intid)| (irq, intid, irq.mapped && enabled && irq.target == Some(cpu)));
        for (irq, intid, mine) in private.chain(spis).chain(lpis) {
            let candidate = mine
                && self.dist_enabled
                && irq.enabled
                && irq.pending()
                && !irq.active
                && self.cpus[cpu].group_enabled[irq.group];
            if candidate && best.is_none_or(|best| irq.priority < best.priority) {
                best = Some(Best {
                    intid,
                    priority: irq.priority,
                    group: irq.group,
                });
            }
        }
        best
    }

    /// The interrupt that is signaled to `cpu`.
    pub fn signaled(&self, cpu: usize) -> Option<Best> {
        let best = self.highest(cpu)?;
        let masked = best.priority >= self.cpus[cpu].pmr;
        let preempts = self.preemption(cpu, best.priority, best.group) < self.running(cpu);
        (!masked && preempts).then_some(best)
    }

    /// (IRQ, FIQ)
    pub fn signals(&self, cpu: usize) -> (bool, bool) {
        match self.signaled(cpu) {
            None => (false, false),
            Some(best) if best.group == 0 && (self.v3 || self.cpus[cpu].fiq_en) => (false, true),
            Some(_) => (true, false),
        }
    }

    /// Returns the value that an acknowledge register of `group` has.
    pub fn acknowledge(&mut self, cpu: usize, group: usize) -> u32 {
        let Some(best) = self.signaled(cpu) else {
            return 1023;
        };
        if let Some(special) = self.wrong_group(cpu, group, best.group) {
            return special;
        }
        let preemption = self.preemption(cpu, best.priority, best.group);
        self.cpus[cpu].running.push(preemption);
        let v2_sgi = !self.v3 && best.intid < 16;
        let irq = self.irq(cpu, best.intid).unwrap();
        irq.active = best.intid < LPI;
        let mut value = best.intid;
        if v2_sgi {
            let source = irq.sources.iter().position(|source| *source).unwrap_or(0);
            irq.sources[source] = false;
            irq.soft_pending = irq.sources.contains(&true);
            value |= (source as u32) << 10;
        } else {
            irq.soft_pending = false;
        }
        value
    }

    fn wrong_group(&self, cpu: usize, register: usize, interrupt: usize) -> Option<u32> {
        match (register, interrupt) {
            (0, 0) | (1, 1) => None,
            (0, _) if self.v3 => Some(1023),
            (0, _) if self.cpus[cpu].ack_ctl => None,
            (0, _) => Some(1022),
            _ => Some(1023),
        }
    }

    pub fn highest_register(&mut self, cpu: usize, group: usize) -> u32 {
        let Some(best) = self.highest(cpu) else {
            return 1023;
        };
        if let Some(special) = self.wrong_group(cpu, group, best.group) {
            return special;
        }
        let v2_sgi = !self.v3 && best.intid < 16;
        let irq = self.irq(cpu, best.intid).unwrap();
        let source = irq.sources.iter().position(|source| *source).unwrap_or(0) as u32;
        if v2_sgi {
            best.intid | source << 10
        } else {
            best.intid
        }
    }

    pub fn end(&mut self, cpu: usize, intid: u32) {
        if (1020..LPI).contains(&intid) {
            return;
        }
        let lowest = self.running(cpu);
        let running = &mut self.cpus[cpu].running;
        if let Some(at) = running.iter().position(|level| *level == lowest) {
            running.remove(at);
        }
        if !self.cpus[cpu].eoi_mode {
            self.deactivate(cpu, intid);
        }
    }

    pub fn deactivate(&mut self, cpu: usize, intid: u32) {
        if let Some(irq) = self.irq(cpu, intid)
            && irq.active
        {
            irq.active = false;
            if !irq.edge && (32..LPI).contains(&intid) {
                self.ended.push(intid);
            }
        }
    }
}
