//! The audit: checks the invariants of a live VM.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use crate::addr::{Gfn, Level};
use crate::format::{Entry, Format, Leaf, all_gfns};
use crate::old_pages::OldPages;
use crate::platform::Platform;
use crate::slots::{Memslot, Place};
use crate::table::{At, ByGfn, Next, Show, Walk};
use crate::vm::{DirtyLog, LogKind, RangeOp, Vm};

/// An invariant that does not hold, as a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditError(String);

impl fmt::Display for AuditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "audit: {}", self.0)
    }
}

impl core::error::Error for AuditError {}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Checks that
    /// * every leaf is in a memslot, at a level that slot and attributes allow, maps the frame that backs it, private
    ///   or shared, and is not writable if the slot is read-only;
    /// * no page of a slot that logs to a bitmap by write protection, for the client or for readers, is writable
    ///   without being marked, and no page of a slot that logs by buffers is dirty without being marked or in a buffer;
    /// * no page of a snapshot that was not given to [`Platform::keep`] is writable;
    /// * no huge leaf is executable with `nx_huge_pages` on;
    /// * every table counts its leaves correctly;
    /// * the indexes of slots by gfn, by backing and by id contain the same slots, and no two slots overlap;
    /// * if no CPU is in a reader section, the gauges `pages_4k`, `pages_2m` and `pages_1g` are equal to the numbers of
    ///   leaves.
    ///
    /// vCPUs may run during the audit; slot changes wait until it ends. Do not call `audit` while another operation on
    /// the VM runs: an operation that has zapped leaves corrects the gauges only after its TLB flush.
    ///
    /// # Errors
    /// [`AuditError`]: the first invariant that does not hold.
    pub fn audit(&self) -> Result<(), AuditError> {
        self.drain_walkers();
        let old_pages = self.old_pages();
        let mut leaves = [0u64; 3];
        for space in &self.spaces {
            // Take the lock before the reader section begins, because the holder of the lock may be waiting for
            // readers.
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
                        self.audit_leaf(slot, private, at, &leaf, old_pages.as_deref())
                    }
                    None => Err("it is in no memslot".into()),
                };
                match checked {
                    Ok(()) => Next::Pass,
                    Err(why) => {
                        let (level, gpa) = (at.level.0, F::GRANULE.gpa(at.gfn));
                        error.get_or_insert_with(|| {
                            alloc::format!("level {level} leaf at gpa {gpa}: {why}")
                        });
                        Next::Pass
                    }
                }
            };
            let mut op = RangeOp::begin(self, space);
            op.walk(&mut Walk::new(all_gfns::<F>()), |step, walk| {
                step.walk(walk, Show::default(), &mut audit);
            });
            drop(op);
            let section = self.section();
            let mmu = space.mmu.get(section.inside());
            if error.is_none() {
                error = mmu.check().err();
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
                    "the gauges pages_4k/2m/1g are {counted:?}, but there are {leaves:?} leaves"
                )));
            }
        }
        Ok(())
    }

    /// Checks `leaf`, found at `at`, which maps a frame of `slot`. `private`: whether the frame is private; `alike`:
    /// the frames around it with the same attribute. `old_pages`: the pages of a snapshot.
    fn audit_leaf(
        &self,
        slot: &Memslot,
        (private, alike): (bool, Range<Gfn>),
        at: &At<'_>,
        leaf: &Leaf,
        old_pages: Option<&OldPages>,
    ) -> Result<(), String> {
        let (gfn, level, gfns) = (at.gfn, at.level, slot.gfns());
        let block = F::GRANULE.block(gfn, level);
        if block.end > gfns.end || block.start < gfns.start {
            return Err(alloc::format!("it reaches out of {slot:?}"));
        }
        if block.end > alike.end {
            return Err("it is private in part".into());
        }
        let limits = slot.limits();
        let writes = leaf.write || leaf.may_write;
        let executes = leaf.execute || leaf.may_execute;
        if writes && !limits.rights.write || executes && !limits.rights.execute {
            return Err(alloc::format!("it exceeds the rights of {slot:?}"));
        }
        if leaf.memory.combined(limits.memory) != leaf.memory {
            return Err(alloc::format!("it is cached more than {slot:?}"));
        }
        let backing = match private {
            true => slot
                .private()
                .ok_or("it is private without private backing")?,
            false => slot.backing(),
        };
        let hva = F::GRANULE.add_pages(backing, gfn.0 - slot.base().0);
        let hvas = hva..F::GRANULE.add_pages(hva, F::GRANULE.pages(level));
        if leaf.write && old_pages.is_some_and(|old| !old.has(&hvas)) {
            return Err("it is writable, but the snapshot does not have all its pages".into());
        }
        let is_unmarked = |log: &DirtyLog| {
            let first = gfn.0 - gfns.start.0;
            (first..first + F::GRANULE.pages(level)).any(|page| !log.is_marked(page))
        };
        match slot.log().map(|log| (log, log.kind())) {
            Some((log, LogKind::Bitmap | LogKind::Rings))
                if leaf.write && log.has_bitmap() && is_unmarked(log) =>
            {
                return Err("it is writable, but not marked in the dirty log".into());
            }
            // The walker reports no write through a leaf that is already dirty or in a shadow page, and for a huge leaf
            // it reports only one page. So while such a leaf is writable, its pages must be marked.
            Some((log, LogKind::Buffers))
                if leaf.write
                    && (leaf.dirty || level > Level::PAGE || at.is_shadowed())
                    && is_unmarked(log) =>
            {
                return Err(
                    "it is writable, and dirty, huge or shadowed, but not marked in the dirty log"
                        .into(),
                );
            }
            _ => {}
        }
        let mut wrong = None;
        self.platform.resolve_resident(self.id, hvas, &mut |run| {
            let offset = F::GRANULE.pages_between(hva, run.backing);
            if run.first.pfn != leaf.pfn.add(offset) {
                wrong = Some(run.first.pfn);
            }
        });
        match wrong {
            Some(pfn) => Err(alloc::format!(
                "it maps {:?}, but its backing is {pfn:?}",
                leaf.pfn
            )),
            None if leaf.execute && level > Level::PAGE && self.policy.nx_huge_pages().is_on() => {
                Err("it is huge and executable under nx_huge_pages".into())
            }
            None => Ok(()),
        }
    }

    /// Checks that the indexes by gfn, by backing and by id contain the same slots, and that no two slots overlap.
    fn audit_slots(&self, change: &crate::slots::SlotsChange<'_>) -> Result<(), AuditError> {
        let set = change.set();
        // The index by backing address contains a slot once for each of its backings.
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
