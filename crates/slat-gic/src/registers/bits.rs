//! The registers that have one or more bits for each interrupt. GICv2 and GICv3 have these registers in common.

use super::Access;
use super::region::Register;
use crate::gic::{Gic, Model};
use crate::interrupt::{Group, Interrupt, PRIORITIES, PRIVATE, SGIS, Trigger};

impl Gic {
    /// Calls `value` with each of the `count` interrupts from INTID `first` on. Returns all results in one number, in
    /// which each result has `bits` bits.
    fn collect(
        &self,
        vcpu: usize,
        first: u32,
        count: u32,
        bits: u32,
        value: impl Fn(&Interrupt) -> u64,
    ) -> u64 {
        let each = (0..count).map(|index| {
            let interrupt = self.interrupt(vcpu, first + index);
            interrupt.map_or(0, &value) << (index * bits)
        });
        each.sum()
    }

    /// Reads a register with bits of `count` interrupts from `first` on.
    pub(super) fn read_bits(
        &self,
        vcpu: usize,
        register: Register,
        first: u32,
        count: u32,
        access: Access,
    ) -> u64 {
        let is_client_of_v3 = access == Access::Client && self.model == Model::V3;
        self.collect(vcpu, first, count, 1, |interrupt| {
            u64::from(match register {
                Register::Group => interrupt.group == Group::One,
                Register::SetEnable | Register::ClearEnable => interrupt.enabled,
                Register::SetActive | Register::ClearActive => interrupt.active,
                // The VMM of a GICv3 reads only the latch here, because it reads the lines by another attribute.
                Register::SetPending if is_client_of_v3 => interrupt.latch,
                Register::ClearPending if is_client_of_v3 => false,
                Register::SetPending | Register::ClearPending => interrupt.is_pending(),
                _ => false,
            })
        })
    }

    /// Writes a register with bits of `count` interrupts from `first` on.
    pub(super) fn write_bits(
        &mut self,
        vcpu: usize,
        register: Register,
        first: u32,
        count: u32,
        value: u64,
        access: Access,
    ) {
        // A write of one of the following registers sets the state of all its interrupts, not only of those whose bit
        // is set. SetPending is such a register only for the VMM of a GICv3.
        let replaces_latch = access == Access::Client && self.model == Model::V3;
        let concerns_all = match register {
            Register::Group => true,
            Register::SetPending => replaces_latch,
            Register::ClearPending if replaces_latch => return,
            _ => false,
        };
        for index in 0..count {
            let bit = value >> index & 1 != 0;
            if bit || concerns_all {
                self.write_bit(vcpu, register, first + index, bit, access);
            }
        }
    }

    /// Applies one bit of a write to the interrupt to which the bit belongs.
    fn write_bit(
        &mut self,
        vcpu: usize,
        register: Register,
        intid: u32,
        bit: bool,
        access: Access,
    ) {
        let is_v2_sgi = self.is_v2_sgi(intid);
        // With GICv2, the guest uses other registers for the pending state of SGIs (IHI 0048, GICD_SPENDSGIR). The VMM
        // saves and restores the pending state by this register, which does not have the sources. So the VMM's write
        // makes the vCPU itself the source.
        let is_ignored = is_v2_sgi && access == Access::Guest;
        self.change(vcpu, intid, |interrupt| match register {
            Register::Group => interrupt.group = Group::of(bit),
            Register::SetEnable => interrupt.enabled = true,
            Register::ClearEnable => interrupt.enabled = false,
            Register::SetPending | Register::ClearPending if is_ignored => (),
            Register::SetPending => {
                interrupt.latch = bit;
                if is_v2_sgi {
                    interrupt.sources |= 1 << vcpu;
                }
            }
            Register::ClearPending => {
                interrupt.latch = false;
                interrupt.sources = 0;
            }
            Register::SetActive => interrupt.active = true,
            Register::ClearActive => interrupt.active = false,
            _ => (),
        });
    }

    pub(super) fn read_priorities(&self, vcpu: usize, first: u32, count: u32) -> u64 {
        self.collect(vcpu, first, count, 8, |interrupt| {
            u64::from(interrupt.priority)
        })
    }

    pub(super) fn write_priorities(&mut self, vcpu: usize, first: u32, count: u32, value: u64) {
        for index in 0..count {
            let priority = (value >> (8 * index)) as u8 & PRIORITIES;
            self.change(vcpu, first + index, |interrupt| {
                interrupt.priority = priority
            });
        }
    }

    pub(super) fn read_configuration(&self, vcpu: usize, first: u32, count: u32) -> u64 {
        self.collect(vcpu, first, count, 2, |interrupt| match interrupt.trigger {
            Trigger::Edge => 2,
            Trigger::Level => 0,
        })
    }

    /// Writes triggers. SGIs are edge-triggered and PPIs level-triggered, which the guest cannot change (IHI 0048,
    /// GICD_ICFGR).
    pub(super) fn write_configuration(&mut self, vcpu: usize, first: u32, count: u32, value: u64) {
        for index in (0..count).filter(|index| first + index >= PRIVATE) {
            let trigger = match value >> (2 * index) & 2 {
                0 => Trigger::Level,
                _ => Trigger::Edge,
            };
            self.change(vcpu, first + index, |interrupt| interrupt.trigger = trigger);
        }
    }

    /// Reads the lines of 32 interrupts for the VMM. A line of an edge-triggered interrupt, of an SGI, or of an
    /// interrupt that does not exist is low.
    pub(super) fn read_lines(&self, vcpu: usize, first: u32) -> u32 {
        let lines = self.collect(vcpu, first, 32, 1, |interrupt| {
            u64::from(interrupt.trigger == Trigger::Level && interrupt.line)
        });
        lines as u32
    }

    /// Writes the lines of 32 interrupts for the VMM. The written levels do not depend on the triggers, which the VMM
    /// may restore later.
    pub(super) fn write_lines(&mut self, vcpu: usize, first: u32, value: u32) {
        let existing = SGIS..self.interrupts();
        let lines = (0..32).map(|index| (first + index, value >> index & 1 != 0));
        for (intid, high) in lines.filter(|(intid, _)| existing.contains(intid)) {
            self.change(vcpu, intid, |interrupt| interrupt.line = high);
        }
    }
}
