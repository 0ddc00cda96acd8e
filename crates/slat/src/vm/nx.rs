//! NX huge pages: the answer to a processor whose instruction fetch through a huge page may bring the
//! machine down (CVE-2018-12207), and a real policy elsewhere, too.
//!
//! Huge leaves are not executable. A fetch through one faults, and the leaf is split in place down to
//! 4 KiB within that fault: the 512 pages of the last split may be executed from then on, their larger
//! siblings stay huge and not executable, and nothing is unmapped. The tables that exist only for
//! this are marked; `nx_lpage_splits` counts them. Recovery takes away a share of them from time to
//! time: the next fault there finds room for the huge leaf again, and if nobody executes from it any
//! more, it stays.

use crate::sync::atomic::Ordering::*;

use super::{RangeOp, Vm};
use crate::addr::{Gfn, Level};
use crate::format::Format;
use crate::platform::Platform;
use crate::policy::PolicyError;
use crate::table::{Tree, Walk};

impl<P: Platform, F: Format> Vm<P, F> {
    /// Sets a policy of a VM that may be running, and does what that asks for: `nx_huge_pages=on` takes
    /// away the huge leaves that may be executed.
    ///
    /// The caller is no vCPU inside [`crate::Vcpu::enter`]/[`crate::Vcpu::leave`].
    ///
    /// # Errors
    /// As [`crate::Policy::set`].
    pub fn set_policy(&self, name: &str, value: &str) -> Result<(), PolicyError> {
        let was_nx = self.policy.huge_is_nx();
        self.policy.set(name, value)?;
        if self.policy.huge_is_nx() && !was_nx {
            for space in 0..self.spaces.len() {
                self.zap(space, Gfn(0)..Gfn(Tree::<P, F>::capacity()));
            }
        }
        Ok(())
    }

    /// Takes away one in `nx_huge_pages_recovery_ratio` of the tables that NX has split (rounded up;
    /// all, if the policy `nx_huge_pages` is off), beginning where the last call ended. Returns how many. To
    /// be called every [`crate::Policy::recovery_period_ms`].
    pub fn recover_nx_huge_pages(&self) -> u64 {
        let mut left = match (self.policy.huge_is_nx(), self.policy.recovery_ratio()) {
            (false, _) => u64::MAX,
            (true, 0) => 0,
            (true, ratio) => self.stats().nx_lpage_splits.div_ceil(ratio),
        };
        let mut taken = 0;
        for space in &self.spaces {
            let capacity = Gfn(Tree::<P, F>::capacity());
            let start = Gfn(self.nx_cursor.load(Relaxed)).min(capacity);
            let mut cursor = start;
            let mut op = RangeOp::on(self, space, &(Gfn(0)..capacity));
            // From the cursor to the end, then from the beginning to the cursor.
            for range in [start..capacity, Gfn(0)..start] {
                op.walk(&mut Walk::new(range), |tree, walk, op, inside| {
                    let slots = space.slots.current(inside);
                    tree.zap_tables(walk, &mut op.zapped, |gfn, level, table| {
                        // In a slot that logs nothing would become huge, and a dirty bit be lost.
                        let logs = |gfn| slots.find(gfn).is_some_and(|slot| slot.log().is_some());
                        let take = left > 0
                            && level == Level::MEGA
                            && tree.is_nx_table(table)
                            && !logs(gfn);
                        if take {
                            left -= 1;
                            taken += 1;
                            cursor = gfn.add(level.pages());
                        }
                        take
                    });
                });
            }
            self.nx_cursor.store(cursor.0, Relaxed);
            op.finish();
        }
        taken
    }
}
