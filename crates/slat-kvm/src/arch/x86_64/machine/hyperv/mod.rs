//! The operations of Hyper-V's interface for one vCPU. Only the thread that runs the vCPU calls them. The rules are in
//! `slat-hyperv`, and the state that vCPUs share is in [`crate::arch::x86_64::hyperv`].
//!
//! | file | idea |
//! |---|---|
//! | `msrs` | the synthetic MSRs |
//! | `clock` | the reference clock, and its page in guest memory |
//! | `timers` | the synthetic timers, and their messages |
//! | `hypercalls` | hypercalls: flushes of translations, interrupts, events, and calls that the client carries out |

mod clock;
pub(crate) mod hypercalls;
mod msrs;
mod timers;

use crate::arch::x86_64::hyperv::HypervExit;
use crate::arch::x86_64::machine::VcpuMachine;
use crate::thread::bits;
use slat_hyperv::cpuid::Privileges;

impl VcpuMachine {
    /// Makes the run loop exit to the client before the guest continues.
    fn exit_for_hyperv(&mut self, exit: HypervExit) {
        self.hyperv.exit = Some(exit);
        self.common.attention.raise(bits::IRQ);
    }

    /// Whether CPUID must hide the invariant-TSC bit from the guest. With Hyper-V's feature, the guest sees the bit
    /// only after it has asked for an invariant TSC.
    pub(crate) fn hides_invariant_tsc(&self) -> bool {
        let privileges = self.hyperv.privileges.as_ref();
        privileges.is_some_and(Privileges::controls_invariant_tsc)
            && !(self.vm.arch.hyperv).with_partition(|partition| partition.exposes_invariant_tsc())
    }

    /// Makes timers whose message waits for the SynIC source `sint` try again, and signals resampled irqfds. Call when
    /// the guest has read a message or events of the source: when it ends the source's interrupt, or writes EOM.
    fn acknowledge_source(&mut self, sint: u32) {
        self.hyperv.timers.acknowledged(sint);
        self.look_at_timers();
        let index = self.common.arch.vp.index();
        self.vm.interrupts.source_acknowledged(index, sint);
    }

    /// Acknowledges all SynIC sources that have this vector. Call after the guest has ended an interrupt with the
    /// vector.
    pub(super) fn acknowledge_vector(&mut self, vector: u8) {
        let sources = self.common.arch.vp.sources_of(vector);
        for sint in (0..u16::BITS).filter(|sint| sources >> sint & 1 != 0) {
            self.acknowledge_source(sint);
        }
    }
}
