//! Promotion: small leaves become huge ones where that is possible now.
//!
//! A fault chooses the level of its leaf once. The table for small leaves stays after the reason for it has ended: the
//! host has merged the memory since (Linux: khugepaged, MADV_COLLAPSE), frames of which some were private are alike
//! again, slots have been merged, or the policy `huge_pages` was off. The guest takes no more faults there, so no fault
//! notices. A host that wants its huge pages back calls [`Vm::promote`] in the background, which does for some tables
//! what the end of a dirty log does for all ([`super::recover`]).

use super::slot_op::SlotOp;
use super::{Space, Vm};
use crate::addr::Gfn;
use crate::format::Format;
use crate::mmu::MmuKind;
use crate::platform::Platform;

/// The position at which the next [`Vm::promote`] continues: at first the beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Promotion {
    space: usize,
    gfn: Gfn,
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Replaces tables by huge leaves, in place, where memslot, host page and policies allow one. Asks the host for at
    /// most `most` tables, from where `promotion` is, and at the end of guest memory goes back to its beginning.
    /// Returns how many leaves it has installed: if there are few, wait longer before the next call.
    ///
    /// Each page stays mapped, to the same frame, so the guest takes no fault for it. The leaf is that of a write
    /// fault, so all that it maps looks used ([`Vm::age`]) and, where dirty bits are kept, written. It maps also pages
    /// that no leaf has mapped, which the host has nevertheless.
    ///
    /// Leaves out memslots that log, private memory, and tables that exist because of NX
    /// ([`Vm::recover_nx_huge_pages`]). With [`MmuKind::Direct`], zaps the tables instead, and the next fault installs
    /// the leaf. With [`MmuKind::Shadow`], does nothing: there the guest's own tables decide the size of a leaf.
    ///
    /// It works in steps: slot changes, faults and flushes wait no longer than for one. The caller is in no reader
    /// section.
    ///
    /// ```
    /// # use slat_model::{HostMemory, SimPlatform};
    /// # use slat::{Access, Config, Ept, Gpa, Level, Policy, Region, Setting, Vm};
    /// # let (platform, backing) = (SimPlatform::at_level(512, Level::MEGA), HostMemory::hva(0));
    /// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
    /// # vm.set_policy(Setting::parse("huge_pages", "off")?);
    /// vm.set_memory_region(0, &Region::new(0, Gpa(0), 0x20_0000, backing))?;
    /// vm.create_vcpu()?.hardware_fault(Gpa(0x3000), Access::Write)?;
    /// # vm.set_policy(Setting::parse("huge_pages", "on")?);
    /// assert!(vm.stats().pages_4k > 0);
    ///
    /// let mut promotion = slat::Promotion::default();
    /// assert_eq!(vm.promote(&mut promotion, 64), 1);
    /// assert_eq!((vm.stats().pages_4k, vm.stats().pages_2m), (0, 1));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn promote(&self, promotion: &mut Promotion, most: usize) -> u64 {
        let (mut left, mut leaves) = (most, 0);
        if self.mmu == MmuKind::Shadow {
            return 0;
        }
        while left > 0 {
            let Some(space) = self.spaces.get(promotion.space) else {
                *promotion = Promotion::default();
                break;
            };
            match self.slot_without_log(space, promotion.gfn) {
                Some((id, base)) => {
                    let start = promotion.gfn.max(base);
                    let change = space.slots.change(self.turn_wait());
                    let mut op = SlotOp::begin(self, space, change, id, None);
                    let mut at = start.0 - base.0;
                    while left > 0
                        && let Some(some) = op.recover_some(at, left)
                    {
                        at = some.next;
                        left = left.saturating_sub(some.tables);
                        leaves += some.leaves;
                    }
                    op.finish();
                    promotion.gfn = base.add(at);
                }
                None => {
                    promotion.space += 1;
                    promotion.gfn = Gfn(0);
                }
            }
        }
        leaves
    }

    /// Returns the id and the first frame of the first slot with frames from `gfn` on that does not log.
    fn slot_without_log(&self, space: &Space<P, F>, gfn: Gfn) -> Option<(u32, Gfn)> {
        let section = self.section();
        let mut found = None;
        let slots = space.slots.current(section.inside());
        slots.in_gfns(&(gfn..Gfn(u64::MAX)), |slot| {
            if slot.log().is_none() {
                found = Some((slot.id(), slot.base()));
            }
            found.is_none()
        });
        found
    }
}
