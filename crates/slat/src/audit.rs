//! Checks every invariant of a live VM.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use crate::addr::{Gfn, Level, PAGE_SHIFT};
use crate::format::{Entry, Format, Leaf};
use crate::platform::Platform;
use crate::slots::{Memslot, Place, SlotFlags};
use crate::table::{At, Next, Show, Tree, Walk};
use crate::vm::{LogKind, RangeOp, Vm};

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditError(String);

impl fmt::Display for AuditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "audit: {}", self.0)
    }
}

impl core::error::Error for AuditError {}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Checks that every leaf lies in a live slot, at a level that slot, attributes and host allow,
    /// translates to the frame that backs it, private or not, and allows no more than the slot does; that no
    /// page of a logged slot is writable without being marked; that every table counts its leaves right; and, if no CPU
    /// is inside, that the gauges count exactly the leaves there are.
    ///
    /// Slot changes wait meanwhile; CPUs may go on. To be called beside no other operation of the VM:
    /// one that has taken leaves away corrects the gauges only after its flush.
    ///
    /// # Errors
    /// The first invariant found broken.
    pub fn audit(&self) -> Result<(), AuditError> {
        let mut leaves = [0u64; 3];
        for space in &self.spaces {
            // Taken before the section begins: whoever holds the lock may be waiting for sections.
            let change = space.slots.change(self.turn_wait());
            let mut error = None;
            let mut audit = |at: &At<'_>| {
                let Entry::Leaf(leaf) = at.decode::<F>() else {
                    return Next::Pass;
                };
                leaves[at.level.0 as usize - 1] += 1;
                let checked = match change.set().find(at.gfn) {
                    Some(slot) => {
                        let private = change.set().private.around(at.gfn);
                        self.audit_leaf(slot, private, at.gfn, at.level, &leaf)
                    }
                    None => Err("it lies in no memslot".into()),
                };
                match checked {
                    Ok(()) => Next::Pass,
                    Err(why) => {
                        let (level, gpa) = (at.level.0, at.gfn.gpa());
                        error.get_or_insert_with(|| {
                            alloc::format!("level {level} leaf at gpa {gpa}: {why}")
                        });
                        Next::Pass
                    }
                }
            };
            let everything = Gfn(0)..Gfn(Tree::<P, F>::capacity());
            let mut op = RangeOp::begin(self, space);
            op.walk(&mut Walk::new(everything), |tree, walk, _, _| {
                tree.walk(walk, Show::default(), &mut audit);
            });
            drop(op);
            let section = self.section();
            let tree = space.tree.get(section.inside());
            if error.is_none()
                && let Some((level, counted, leaves)) = tree.miscounted()
            {
                error = Some(alloc::format!(
                    "a table of level {} counts {counted} leaves, there are {leaves}",
                    level.0
                ));
            }
            drop(section);
            if let Some(error) = error {
                return Err(AuditError(error));
            }
            self.audit_slots(&change)?;
        }
        if !self.readers.any_inside() {
            let stats = self.stats();
            let counted = [stats.pages_4k, stats.pages_2m, stats.pages_1g];
            if counted != leaves {
                return Err(AuditError(alloc::format!(
                    "the gauges pages_4k/2m/1g say {counted:?}, there are {leaves:?} leaves"
                )));
            }
        }
        Ok(())
    }

    fn audit_leaf(
        &self,
        slot: &Memslot,
        (private, alike): (bool, Range<Gfn>),
        gfn: Gfn,
        level: Level,
        leaf: &Leaf,
    ) -> Result<(), String> {
        let gfns = slot.gfns();
        let block = gfn.block(level);
        if block.end > gfns.end || block.start < gfns.start {
            return Err(alloc::format!("it reaches out of {slot:?}"));
        }
        if block.end > alike.end {
            return Err("it is private in part".into());
        }
        if leaf.write && slot.flags().has(SlotFlags::READONLY) {
            return Err(alloc::format!("it is writable in read-only {slot:?}"));
        }
        if let Some(log) = slot.log().filter(|log| log.kind() == LogKind::Bitmap) {
            let first = gfn.0 - gfns.start.0;
            let unmarked = (first..first + level.pages()).any(|page| !log.is_marked(page));
            if leaf.write && unmarked {
                return Err("it is writable, but not marked in the dirty log".into());
            }
        }
        let mut wrong = None;
        let backing = match private {
            true => slot
                .private()
                .ok_or("it is private without private backing")?,
            false => slot.backing(),
        };
        let hva = backing.add_pages(gfn.0 - slot.base().0);
        self.platform
            .resolve_resident(hva..hva.add_pages(level.pages()), &mut |run| {
                let offset = (run.backing.0 - hva.0) >> PAGE_SHIFT;
                if run.first.pfn != leaf.pfn.add(offset) {
                    wrong = Some(run.first.pfn);
                }
            });
        match wrong {
            Some(pfn) => Err(alloc::format!(
                "it leads to {:?}, its backing to {pfn:?}",
                leaf.pfn
            )),
            None if leaf.execute && level > Level::PAGE && self.policy.huge_is_nx() => {
                Err("it is huge and executable under nx_huge_pages".into())
            }
            None => Ok(()),
        }
    }

    /// The indexes of a slot set agree, and no two slots overlap.
    fn audit_slots(&self, change: &crate::slots::SlotsChange<'_>) -> Result<(), AuditError> {
        let set = change.set();
        // Once for each backing, the private one included.
        let mut by_gfn = Vec::new();
        let mut end = Gfn(0);
        let mut error = None;
        set.in_gfns(&(Gfn(0)..Gfn(1 << 48)), |slot| {
            if slot.base() < end {
                error.get_or_insert_with(|| alloc::format!("{slot:?} overlaps the one before it"));
            }
            end = slot.gfns().end;
            by_gfn.push(slot.id());
            by_gfn.extend(slot.private().map(|_| slot.id()));
            true
        });
        let mut by_hva = Vec::new();
        let all = crate::Hva(0)..crate::Hva(u64::MAX);
        set.backed_by(&all, Place::FIRST, |slot, _, _| {
            by_hva.push(slot.id());
            true
        });
        by_gfn.sort_unstable();
        by_hva.sort_unstable();
        let indexes_agree = by_gfn == by_hva;
        by_gfn.dedup();
        if error.is_none() && (!indexes_agree || by_gfn.len() != change.len()) {
            error = Some(alloc::format!(
                "{} slots by gfn, {} by backing, {} by id",
                by_gfn.len(),
                by_hva.len(),
                change.len()
            ));
        }
        error.map_or(Ok(()), |why| Err(AuditError(why)))
    }
}
