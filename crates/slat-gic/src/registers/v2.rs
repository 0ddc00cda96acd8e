//! The registers that only GICv2 has: targets of SPIs, and the CPU interface in memory.

use super::Access;
use super::region::Register;
use crate::gic::Gic;
use crate::identity::{IMPLEMENTER, PRODUCT};
use crate::interrupt::{Group, OTHER_GROUP, PRIVATE, SPURIOUS};

/// GICC_IIDR: the version of the architecture.
const ARCHITECTURE: u32 = 2 << 16;
const CPU_PRODUCT_SHIFT: u32 = 20;

/// Bits of GICC_CTLR (IHI 0048, GICV_CTLR).
const ENABLE: [u32; 2] = [1 << 0, 1 << 1];
const ACK_CONTROL: u32 = 1 << 2;
const FIQ_ENABLE: u32 = 1 << 3;
const COMMON_BINARY_POINT: u32 = 1 << 4;
const SEPARATE_DEACTIVATION: u32 = 1 << 9;

/// The VMM sees only those five bits of the priority mask that exist, as the lowest bits of the register.
const CLIENT_MASK_SHIFT: u32 = 3;

impl Gic {
    pub(super) fn read_targets(&self, vcpu: usize, first: u32, count: u32) -> u64 {
        let targets = (0..count).map(|index| {
            let route = self.interrupt(vcpu, first + index).map_or(0, |of| of.route);
            u64::from(route as u8) << (8 * index)
        });
        targets.sum()
    }

    /// Writes the targets of SPIs. As in KVM, the first of several targets gets the interrupt, and without any target
    /// it goes to the first vCPU.
    pub(super) fn write_targets(&mut self, first: u32, count: u32, value: u64) {
        let existing = ((1u32 << self.vcpus.len()) - 1) as u8;
        for index in (0..count).filter(|index| first + index >= PRIVATE) {
            let targets = (value >> (8 * index)) as u8 & existing;
            let target = match targets {
                0 => 0,
                _ => targets.trailing_zeros() as usize,
            };
            self.change(0, first + index, |spi| {
                spi.route = u32::from(targets);
                spi.target = Some(target);
            });
        }
    }

    pub(super) fn read_sgi_sources(&self, vcpu: usize, first: u32, count: u32) -> u64 {
        let sources = (0..count).map(|index| {
            let sources = self
                .interrupt(vcpu, first + index)
                .map_or(0, |sgi| sgi.sources);
            u64::from(sources) << (8 * index)
        });
        sources.sum()
    }

    pub(super) fn write_sgi_sources(
        &mut self,
        vcpu: usize,
        register: Register,
        first: u32,
        count: u32,
        value: u64,
    ) {
        for index in 0..count {
            let sources = (value >> (8 * index)) as u8;
            match register {
                Register::SetSgiSources => self.add_sgi_sources(vcpu, first + index, sources),
                _ => self.remove_sgi_sources(vcpu, first + index, sources),
            }
        }
    }

    /// Reads a register of the CPU interface of a vCPU. The VMM can read only the registers that hold state.
    pub(super) fn read_cpu_interface(
        &mut self,
        vcpu: usize,
        register: Register,
        offset: u32,
        access: Access,
    ) -> u32 {
        let interface = &self.vcpus[vcpu].interface;
        match register {
            Register::CpuControl => self.cpu_control(vcpu),
            Register::Mask => match access {
                Access::Guest => u32::from(interface.mask),
                Access::Client => u32::from(interface.mask) >> CLIENT_MASK_SHIFT,
            },
            Register::BinaryPoint => u32::from(interface.binary_points[0]),
            Register::AliasedBinaryPoint => u32::from(interface.binary_points[1]),
            // The four active priorities registers have one bit for each of 128 preemption levels. Only 32 levels
            // exist, all in the first register.
            Register::ActivePriorities if offset & 0xc == 0 => interface.active[0],
            Register::Implementer => PRODUCT << CPU_PRODUCT_SHIFT | ARCHITECTURE | IMPLEMENTER,
            _ if access == Access::Client => 0,
            Register::Running => u32::from(interface.running()),
            Register::Acknowledge => self.acknowledge_v2(vcpu, Group::Zero),
            Register::AliasedAcknowledge => self.acknowledge_v2(vcpu, Group::One),
            Register::HighestPending => self.highest_v2(vcpu, Group::Zero),
            Register::AliasedHighestPending => self.highest_v2(vcpu, Group::One),
            _ => 0,
        }
    }

    fn cpu_control(&self, vcpu: usize) -> u32 {
        let interface = &self.vcpus[vcpu].interface;
        let bits = [
            (interface.enabled[0], ENABLE[0]),
            (interface.enabled[1], ENABLE[1]),
            (interface.ack_control, ACK_CONTROL),
            (interface.fiq_enable, FIQ_ENABLE),
            (interface.common_binary_point, COMMON_BINARY_POINT),
            (interface.separate_deactivation, SEPARATE_DEACTIVATION),
        ];
        bits.iter()
            .filter(|(is_set, _)| *is_set)
            .map(|(_, bit)| bit)
            .sum()
    }

    /// Returns the special INTID that a register of `group` shows instead of an interrupt of the group `of`. `None`:
    /// the register shows the interrupt (IHI 0048, GICV_IAR and GICV_AIAR).
    fn hidden_v2(&self, vcpu: usize, group: Group, of: Group) -> Option<u32> {
        match (group, of) {
            (Group::Zero, Group::One) if !self.vcpus[vcpu].interface.ack_control => {
                Some(OTHER_GROUP)
            }
            (Group::One, Group::Zero) => Some(SPURIOUS),
            _ => None,
        }
    }

    fn acknowledge_v2(&mut self, vcpu: usize, group: Group) -> u32 {
        let Some(signaled) = self.signaled(vcpu) else {
            return SPURIOUS;
        };
        match self.hidden_v2(vcpu, group, signaled.group) {
            Some(special) => special,
            None => self.acknowledge(vcpu, signaled),
        }
    }

    fn highest_v2(&self, vcpu: usize, group: Group) -> u32 {
        let Some(highest) = self.highest_pending(vcpu) else {
            return SPURIOUS;
        };
        let hidden = self.hidden_v2(vcpu, group, highest.group);
        hidden.unwrap_or_else(|| self.shown(vcpu, highest))
    }

    /// Writes a register of the CPU interface of a vCPU. The VMM can write only registers that hold state.
    pub(super) fn write_cpu_interface(
        &mut self,
        vcpu: usize,
        register: Register,
        offset: u32,
        value: u32,
        access: Access,
    ) {
        // The written value also has the source of an SGI, which is not needed: the interrupt knows its source.
        let intid = value & 0x3ff;
        let interface = &mut self.vcpus[vcpu].interface;
        match register {
            Register::CpuControl => {
                interface.enabled = ENABLE.map(|bit| value & bit != 0);
                interface.ack_control = value & ACK_CONTROL != 0;
                interface.fiq_enable = value & FIQ_ENABLE != 0;
                interface.common_binary_point = value & COMMON_BINARY_POINT != 0;
                interface.separate_deactivation = value & SEPARATE_DEACTIVATION != 0;
            }
            Register::Mask => interface.set_mask(match access {
                Access::Guest => u64::from(value),
                Access::Client => u64::from(value) << CLIENT_MASK_SHIFT,
            }),
            Register::BinaryPoint => interface.set_binary_point(Group::Zero, value.into()),
            Register::AliasedBinaryPoint => interface.set_binary_point(Group::One, value.into()),
            Register::ActivePriorities if offset & 0xc == 0 => interface.active[0] = value,
            _ if access == Access::Client => (),
            Register::End | Register::AliasedEnd => self.end(vcpu, intid),
            Register::Deactivate => self.deactivate(vcpu, intid),
            _ => (),
        }
        self.touch(vcpu);
    }
}
