//! A CPU interface, which signals interrupts to its vCPU. By its registers, the guest acknowledges, ends and
//! deactivates interrupts.

use super::{Gic, Model, Signals};
use crate::interrupt::{Group, LPIS, PRIVATE, SGIS, SPECIAL, Trigger};
use crate::pending::Candidate;

/// The lowest bit of the field for an SGI's source vCPU, in GICv2's registers that return an interrupt's number.
const SOURCE_SHIFT: u32 = 10;

impl Gic {
    /// Returns the pending interrupt of the highest priority among the groups that the CPU interface has enabled. The
    /// priority mask and the running priority do not matter (IHI 0069, ICC_HPPIR1_EL1; IHI 0048, GICV_HPPIR).
    pub(crate) fn highest_pending(&self, vcpu: usize) -> Option<Candidate> {
        let vcpu = &self.vcpus[vcpu];
        let enabled = vcpu.interface.enabled;
        self.enabled
            .then(|| vcpu.pending.highest(enabled))
            .flatten()
    }

    /// Returns the interrupt that is signaled to a vCPU (IHI 0069, 4.8; IHI 0048, 3.3).
    pub(crate) fn signaled(&self, vcpu: usize) -> Option<Candidate> {
        let interface = &self.vcpus[vcpu].interface;
        let highest = self.highest_pending(vcpu);
        highest.filter(|highest| interface.lets_through(highest.priority, highest.group))
    }

    /// Computes the signals of a vCPU. GICv3 signals group 0 as FIQ (IHI 0069, 4.6), GICv2 only if GICC_CTLR.FIQEn is
    /// set (IHI 0048, GICV_CTLR).
    pub(super) fn compute_signals(&self, vcpu: usize) -> Signals {
        let fiq_enable = self.model == Model::V3 || self.vcpus[vcpu].interface.fiq_enable;
        let Some(signaled) = self.signaled(vcpu) else {
            return Signals::default();
        };
        let fiq = signaled.group == Group::Zero && fiq_enable;
        Signals { irq: !fiq, fiq }
    }

    /// Acknowledges an interrupt (IHI 0069, 4.1; IHI 0048, 3.2.4). Returns the value of the acknowledge register.
    pub(crate) fn acknowledge(&mut self, vcpu: usize, taken: Candidate) -> u32 {
        let register = match self.model {
            Model::V2 => Group::Zero,
            Model::V3 => taken.group,
        };
        let interface = &mut self.vcpus[vcpu].interface;
        interface.activate(taken.priority, taken.group, register);
        let is_v2_sgi = self.is_v2_sgi(taken.intid);
        let mut source = 0;
        self.change(vcpu, taken.intid, |interrupt| {
            source = interrupt.acknowledge();
            // LPIs have no active state (IHI 0069, 4.1).
            interrupt.active = taken.intid < LPIS;
        });
        self.touch(vcpu);
        match is_v2_sgi {
            true => taken.intid | u32::from(source) << SOURCE_SHIFT,
            false => taken.intid,
        }
    }

    /// Returns the value by which a register shows a pending interrupt: its INTID, and for an SGI of GICv2 its source.
    pub(crate) fn shown(&self, vcpu: usize, pending: Candidate) -> u32 {
        let sources = match self.is_v2_sgi(pending.intid) {
            true => self.vcpus[vcpu].private[pending.intid as usize].sources,
            false => 0,
        };
        match sources {
            0 => pending.intid,
            _ => pending.intid | sources.trailing_zeros() << SOURCE_SHIFT,
        }
    }

    pub(crate) fn is_v2_sgi(&self, intid: u32) -> bool {
        self.model == Model::V2 && intid < SGIS
    }

    /// Ends an interrupt: drops the running priority, and deactivates the interrupt, unless EOImode makes the
    /// deactivation a separate step (IHI 0069, 4.1; IHI 0048, 3.2.1).
    ///
    /// A guest has to end interrupts in the reverse order of their acknowledgement. If a guest does not, this drops the
    /// highest active priority, independently of `intid` and of the group of the written register. The list registers
    /// of hardware, which KVM uses, do the same.
    pub(crate) fn end(&mut self, vcpu: usize, intid: u32) {
        if (SPECIAL..LPIS).contains(&intid) {
            return;
        }
        let interface = &mut self.vcpus[vcpu].interface;
        interface.drop_priority();
        let is_deactivated = !interface.separate_deactivation;
        self.touch(vcpu);
        if is_deactivated {
            self.clear_active(vcpu, intid);
        }
    }

    /// Deactivates an interrupt (ICC_DIR_EL1, GICC_DIR). If EOImode is clear, the write has no effect (IHI 0069,
    /// ICC_DIR_EL1).
    pub(crate) fn deactivate(&mut self, vcpu: usize, intid: u32) {
        if self.vcpus[vcpu].interface.separate_deactivation {
            self.clear_active(vcpu, intid);
        }
    }

    fn clear_active(&mut self, vcpu: usize, intid: u32) {
        let Some(interrupt) = self
            .interrupt(vcpu, intid)
            .filter(|interrupt| interrupt.active)
        else {
            return;
        };
        let is_level = interrupt.trigger == Trigger::Level;
        if is_level && (PRIVATE..LPIS).contains(&intid) {
            self.report_end(intid);
        }
        self.change(vcpu, intid, |interrupt| interrupt.active = false);
    }
}
