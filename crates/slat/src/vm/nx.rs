//! NX huge pages: huge leaves are not executable. The policy mitigates a processor bug: on some CPUs an instruction
//! fetch through a huge page may hang the machine (CVE-2018-12207). The policy works on all other CPUs, too.
//!
//! A fetch through a huge leaf faults. The fault splits the leaf in place, down to 4 KiB at the fetched page. From then
//! on the pages of the last split are executable. The larger pieces beside it stay huge and not executable, and nothing
//! is unmapped (but see the policy `nx_huge_pages_split`). The tables that exist only for this are marked, and
//! `nx_lpage_splits` counts them. From time to time, recovery zaps a share of these tables. The next fault there
//! installs the huge leaf again, which stays unless the guest executes from it again.

use crate::sync::atomic::Ordering::*;

use super::{RangeOp, Vm};
use crate::addr::{Gfn, Level};
use crate::format::{Format, all_gfns};
use crate::platform::Platform;
use crate::policy::Setting;
use crate::table::Walk;

impl<P: Platform, F: Format> Vm<P, F> {
    /// Sets a policy, also while the VM runs. If that turns on `nx_huge_pages`, zaps all leaves of memslots, so that no
    /// huge leaf is executable when this returns.
    ///
    /// Do not call it for a vCPU between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    pub fn set_policy(&self, setting: Setting) {
        let was_nx = self.policy.nx_huge_pages().is_on();
        self.policy.set(setting);
        if self.policy.nx_huge_pages().is_on() && !was_nx {
            for space in 0..self.spaces.len() {
                self.zap(space, all_gfns::<F>());
            }
        }
    }

    /// Zaps a share of the tables that exist because of NX, and continues where the last call ended. The share is one
    /// in `nx_huge_pages_recovery_ratio`, rounded up: none if the ratio is 0, all if the policy `nx_huge_pages` is off.
    /// Leaves out tables in slots that log. Returns the number of tables zapped. Call every
    /// [`crate::Policy::nx_huge_pages_recovery_period_ms`].
    pub fn recover_nx_huge_pages(&self) -> u64 {
        let mut left = match (
            self.policy.nx_huge_pages().is_on(),
            self.policy.nx_huge_pages_recovery_ratio(),
        ) {
            (false, _) => u64::MAX,
            (true, 0) => 0,
            (true, ratio) => self.stats().nx_lpage_splits.div_ceil(ratio.into()),
        };
        let mut zapped = 0;
        for space in &self.spaces {
            let all = all_gfns::<F>();
            let start = Gfn(self.nx_cursor.load(Relaxed)).min(all.end);
            let mut cursor = start;
            let mut op = RangeOp::on(self, space, &all);
            // Walk from the cursor to the end, then from the start to the cursor.
            for range in [start..all.end, all.start..start] {
                op.walk(&mut Walk::new(range), |step, walk| {
                    let slots = space.slots.current(step.section());
                    step.zap_nx_tables(walk, |gfn, level| {
                        // Skip slots that log: no huge leaf would be installed there, and dirty bits would be lost.
                        let logs = |gfn| slots.find(gfn).is_some_and(|slot| slot.log().is_some());
                        let zap = left > 0 && level == Level::MEGA && !logs(gfn);
                        if zap {
                            left -= 1;
                            zapped += 1;
                            cursor = gfn.add(F::GRANULE.pages(level));
                        }
                        zap
                    });
                });
            }
            self.nx_cursor.store(cursor.0, Relaxed);
            op.finish();
        }
        zapped
    }
}
