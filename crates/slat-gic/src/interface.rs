//! The registers of a vCPU's CPU interface, and its rules of priority.
//!
//! Five bits of priority exist, and all five can decide about preemption. So 32 preemption levels exist, and one active
//! priorities register holds them (IHI 0069, 4.8).

use crate::interrupt::{Group, PRIORITIES};

/// The running priority when no interrupt is active.
pub(crate) const IDLE: u8 = 0xff;
/// A group priority, shifted right by this number of bits, is the index of its bit in an active priorities register.
const LEVEL_SHIFT: u32 = 3;
/// The smallest binary points, by group: with them, all five bits are the group priority (IHI 0069, 4.8, priority
/// grouping).
pub(crate) const MIN_BINARY_POINTS: [u8; 2] = [2, 3];
const MAX_BINARY_POINT: u8 = 7;

/// The registers of a CPU interface. Arrays are indexed by group.
#[derive(Clone, Debug)]
pub(crate) struct CpuInterface {
    /// The priority mask: only interrupts of a higher priority are signaled.
    pub(crate) mask: u8,
    pub(crate) binary_points: [u8; 2],
    pub(crate) enabled: [bool; 2],
    /// CBPR: whether both groups use the binary point of group 0.
    pub(crate) common_binary_point: bool,
    /// EOImode: whether an EOI only drops the priority of an interrupt, so that the guest deactivates the interrupt by
    /// another write.
    pub(crate) separate_deactivation: bool,
    /// GICv2: whether GICC_IAR acknowledges interrupts of group 1, too.
    pub(crate) ack_control: bool,
    /// GICv2: whether interrupts of group 0 are signaled as FIQ.
    pub(crate) fiq_enable: bool,
    /// The active priorities registers. GICv2 has one for both groups, that of group 0.
    pub(crate) active: [u32; 2],
}

impl CpuInterface {
    /// Creates the CPU interface as after reset.
    pub(crate) const fn new() -> Self {
        CpuInterface {
            mask: 0,
            binary_points: MIN_BINARY_POINTS,
            enabled: [false; 2],
            common_binary_point: false,
            separate_deactivation: false,
            ack_control: false,
            fiq_enable: false,
            active: [0; 2],
        }
    }

    /// Returns the highest active priority, or [`IDLE`].
    pub(crate) fn running(&self) -> u8 {
        let active = self.active[0] | self.active[1];
        match active {
            0 => IDLE,
            _ => (active.trailing_zeros() << LEVEL_SHIFT) as u8,
        }
    }

    /// Returns the part of a priority that decides about preemption (IHI 0069, 4.8, priority grouping; IHI 0048,
    /// 3.3.3).
    pub(crate) fn group_priority(&self, priority: u8, group: Group) -> u8 {
        let subpriority_bits = match group {
            Group::One if !self.common_binary_point => self.binary_points[1],
            _ => self.binary_points[0] + 1,
        };
        priority & (0xff << u32::from(subpriority_bits)) as u8
    }

    /// Whether an interrupt of this priority is signaled now (IHI 0069, 4.8; IHI 0048, 3.3.1 and 3.3.2).
    pub(crate) fn lets_through(&self, priority: u8, group: Group) -> bool {
        priority < self.mask && self.group_priority(priority, group) < self.running()
    }

    /// Sets the bit of `priority`, the priority of an interrupt of `group`, in the active priorities register of the
    /// group `register`.
    pub(crate) fn activate(&mut self, priority: u8, group: Group, register: Group) {
        let level = self.group_priority(priority, group) >> LEVEL_SHIFT;
        self.active[register as usize] |= 1 << level;
    }

    /// Drops the running priority (IHI 0069, 4.1 and 4.8; IHI 0048, 3.2.1).
    pub(crate) fn drop_priority(&mut self) {
        let [zero, one] = &mut self.active;
        let register = match zero.trailing_zeros() < one.trailing_zeros() {
            true => zero,
            false => one,
        };
        *register &= register.wrapping_sub(1);
    }

    pub(crate) fn set_mask(&mut self, value: u64) {
        self.mask = value as u8 & PRIORITIES;
    }

    /// Writes a binary point. A value below the smallest one becomes the smallest one.
    pub(crate) fn set_binary_point(&mut self, group: Group, value: u64) {
        let value = value as u8 & MAX_BINARY_POINT;
        self.binary_points[group as usize] = value.max(MIN_BINARY_POINTS[group as usize]);
    }

    /// Returns the value of ICC_BPR1_EL1 and GICC_ABPR. With a common binary point, this is the binary point of group 0
    /// plus one (IHI 0069, ICC_BPR1_EL1).
    pub(crate) fn group_one_binary_point(&self) -> u8 {
        match self.common_binary_point {
            true => (self.binary_points[0] + 1).min(MAX_BINARY_POINT),
            false => self.binary_points[1],
        }
    }
}
