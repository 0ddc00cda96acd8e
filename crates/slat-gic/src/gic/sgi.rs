//! Software generated interrupts.

use super::{Gic, Model};
use crate::interrupt::Group;

/// Fields of GICD_SGIR.
const V2_INTID: u32 = 0xf;
const V2_TARGETS_SHIFT: u32 = 16;
const V2_FILTER_SHIFT: u32 = 24;

/// Fields of ICC_SGI1R_EL1.
const V3_INTID_SHIFT: u32 = 24;
const V3_BROADCAST: u64 = 1 << 40;
const V3_AFF1_SHIFT: u32 = 16;
const V3_AFF2_SHIFT: u32 = 32;
const V3_AFF3_SHIFT: u32 = 48;
/// The number of bits of the target list.
const V3_TARGETS: u32 = 16;

impl Gic {
    /// Generates an SGI of GICv2: the write of `value` to GICD_SGIR by the vCPU `source`.
    pub(crate) fn generate_v2_sgi(&mut self, source: usize, value: u32) {
        let all = (1u32 << self.vcpus.len()) - 1;
        let targets = match value >> V2_FILTER_SHIFT & 3 {
            0 => value >> V2_TARGETS_SHIFT & all,
            1 => all & !(1 << source),
            2 => 1 << source,
            _ => return,
        };
        for target in (0..self.vcpus.len()).filter(|target| targets & 1 << target != 0) {
            self.add_sgi_sources(target, value & V2_INTID, 1 << source);
        }
    }

    /// Makes an SGI of GICv2 pending from further sources (GICD_SPENDSGIR).
    pub(crate) fn add_sgi_sources(&mut self, vcpu: usize, intid: u32, sources: u8) {
        self.change(vcpu, intid, |sgi| {
            sgi.sources |= sources;
            sgi.latch |= sgi.sources != 0;
        });
    }

    /// Removes sources from an SGI of GICv2 (GICD_CPENDSGIR).
    pub(crate) fn remove_sgi_sources(&mut self, vcpu: usize, intid: u32, sources: u8) {
        self.change(vcpu, intid, |sgi| {
            sgi.sources &= !sources;
            sgi.latch &= sgi.sources != 0;
        });
    }

    /// Generates an SGI of GICv3: the write of `value` to a register of the vCPU `source`. `both_groups` says whether
    /// the register can generate interrupts of both groups, or only of group 0. (With one security state, ICC_SGI1R_EL1
    /// generates both, as in KVM; IHI 0069, 4.4.)
    pub(crate) fn generate_v3_sgi(&mut self, source: usize, value: u64, both_groups: bool) {
        if self.model != Model::V3 {
            return;
        }
        let intid = (value >> V3_INTID_SHIFT & 0xf) as u32;
        if value & V3_BROADCAST != 0 {
            for target in (0..self.vcpus.len()).filter(|target| *target != source) {
                self.send_v3_sgi(target, intid, both_groups);
            }
            return;
        }
        let field = |shift: u32, level: u32| (value >> shift & 0xff) << (8 * level);
        let cluster = field(V3_AFF3_SHIFT, 3) | field(V3_AFF2_SHIFT, 2) | field(V3_AFF1_SHIFT, 1);
        for aff0 in (0..V3_TARGETS).filter(|aff0| value & 1 << aff0 != 0) {
            if let Some(target) = self.vcpu_of(cluster as u32 | aff0) {
                self.send_v3_sgi(target, intid, both_groups);
            }
        }
    }

    fn send_v3_sgi(&mut self, target: usize, intid: u32, both_groups: bool) {
        self.change(target, intid, |sgi| {
            sgi.latch |= both_groups || sgi.group == Group::Zero;
        });
    }
}
