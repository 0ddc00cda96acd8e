//! NX huge pages: huge leaves are not executable. The policy `nx_huge_pages` mitigates a processor bug: on some CPUs an
//! instruction fetch through a huge page may hang the machine (CVE-2018-12207). It can also be used on other CPUs.
//!
//! A fetch through a huge leaf faults. The fault splits the leaf in place, down to 4 KiB at the fetched page. From then
//! on the 4 KiB pages of the same table are executable. The larger pieces stay huge and not executable, and no page is
//! unmapped (but see the policy `nx_huge_pages_split`). The level 1 tables that exist only for this reason are marked,
//! and `nx_lpage_splits` counts them. From time to time, *recovery* zaps a share of these tables. The next fault in the
//! region of such a table installs the huge leaf again, which stays until the guest executes from it again.

use crate::sync::atomic::Ordering::*;

use super::{RangeOp, Vm};
use crate::addr::{Gfn, Level};
use crate::format::{Format, all_gfns};
use crate::platform::Platform;
use crate::policy::Setting;
use crate::table::Walk;

impl<P: Platform, F: Format> Vm<P, F> {
    /// Sets a policy of the VM, which may be running. If this turns on `nx_huge_pages`, zaps all leaves of memslots, so
    /// that no huge leaf is executable when this returns.
    ///
    /// Do not call this while the calling thread's vCPU is between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    pub fn set_policy(&self, setting: Setting) {
        let was_nx = self.policy.nx_huge_pages().is_on();
        self.policy.set(setting);
        if self.policy.nx_huge_pages().is_on() && !was_nx {
            for space in 0..self.spaces.len() {
                self.zap(space, all_gfns::<F>());
            }
        }
    }

    /// Zaps a share of the tables that exist only because of `nx_huge_pages`. Continues where the last call ended. The
    /// share is 1/`nx_huge_pages_recovery_ratio`, rounded up; no table if the ratio is 0, all if the policy
    /// `nx_huge_pages` is off. Leaves out tables in slots that log. Returns the number of zapped tables. Call this once
    /// in each period of [`crate::Policy::nx_huge_pages_recovery_period_ms`].
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
            // Walk from the position where the last call ended to the end, then from the start to that position.
            for range in [start..all.end, all.start..start] {
                op.walk(&mut Walk::new(range), |step, walk| {
                    let slots = space.slots.current(step.section());
                    step.zap_nx_tables(walk, |gfn, level| {
                        // Skip slots that log: faults would install no huge leaf in them, and the zap would lose dirty
                        // bits.
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
