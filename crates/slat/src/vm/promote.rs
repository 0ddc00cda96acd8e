//! Promotion replaces small leaves by huge leaves, where a huge leaf has become possible.
//!
//! A fault chooses the level of its leaf once. If it installs small leaves, their table stays even when the reason for
//! small leaves has ended: for example, the host has since merged the memory to a huge page (Linux: khugepaged,
//! MADV_COLLAPSE); frames that were partly private are all shared or all private again; slots have been merged; or the
//! policy `huge_pages` was off. The guest does not fault on mapped pages any more, so no fault installs a huge leaf. A
//! host that wants huge pages back calls [`Vm::promote`] in the background. Each call replaces some tables, in the same
//! way as the end of dirty logging replaces all tables of its slot ([`super::recover`]).

use super::slot_op::SlotOp;
use super::{Space, Vm};
use crate::addr::Gfn;
use crate::format::Format;
use crate::mmu::MmuKind;
use crate::platform::Platform;

/// The position at which the next [`Vm::promote`] continues. The default is the beginning of guest memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Promotion {
    space: usize,
    gfn: Gfn,
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Replaces tables by huge leaves, in place, where memslot, host page and policies allow a huge leaf. Asks the host
    /// about at most `most` tables, beginning at the position `promotion`; after the end of guest memory it continues
    /// at its beginning. Returns the number of huge leaves installed. If there were few, wait longer before the next
    /// call.
    ///
    /// Each page stays mapped to the same frame, so the guest takes no fault. The new leaf is the leaf that a write
    /// fault would install, so all its pages count as used ([`Vm::age`]), and, if the leaf has a dirty bit, as written.
    /// The leaf also maps pages that no small leaf mapped.
    ///
    /// Leaves out memslots that log, private memory, and tables that exist only because of `nx_huge_pages`
    /// ([`Vm::recover_nx_huge_pages`]). With [`MmuKind::Direct`], zaps the tables instead, and the next fault installs
    /// the leaf. With [`MmuKind::Shadow`], does nothing, because the guest's own tables decide the size of a leaf.
    ///
    /// Works in steps: a slot change, fault or flush waits for one step at most. The caller is in no reader section.
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
        // While there is a snapshot, no table is replaced ([`super::snapshot`]).
        while left > 0 && !self.is_saving(self.in_progress.sequence()) {
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

    /// Finds the first slot that does not log and has a frame at or after `gfn`. Returns the slot's id, and its first
    /// such frame.
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
