//! Clones: a VM whose memory is that of another one at one moment, shared page by page until one of the two writes.
//!
//! # Who does what
//! *The platform* owns the pages. [`Platform::share`] tells it that from now on two VMs use every page that backs the
//! first one. From then on [`Platform::resolve`] returns a page that has other users as not writable
//! ([`HostPage::with_writable`]), and when it is asked for a write it first gives the asking VM a frame of its own.
//! That is a change of what backs the page, for this VM alone, so it is announced as any other ([`Vm::invalidate`]):
//! the old leaf is zapped and flushed before the page is copied, on every format, with break-before-make or without,
//! and wherever else the VM maps the same page. A frame that has one user left is writable again, and the next write
//! fault widens its leaf in place.
//!
//! *The engine* sees to it that no leaf allows a write for which the platform was not asked. For both VMs that means
//! the same: no leaf is writable, or may become so without a question to the host
//! ([`Leaf::may_write`](crate::format::Leaf::may_write)).
//!
//! # What is copied
//! * *The memslots* of all address spaces, with flags, backing addresses and private frames; the policies,
//!   and how slots log. A dirty log begins anew, as that of a new slot. Not vCPUs, rings, counters, and the
//!   limit of shadow pages.
//! * *The tables*, in the same pass in which the parent's leaves lose the right to write: each leaf that the walk
//!   visits, under the lock of its table, is stored in a table of the child, which no other thread knows yet. So the
//!   child takes no fault to read what its parent had mapped. Accessed bits are copied, dirty bits are not: the child
//!   has written nothing. If there is no memory for another table, the child has none for the rest, and faults there.
//!   Shadow pages are not copied: those of the direct MMU would need a node of the reverse map for each leaf, and those
//!   of the shadow MMU belong to the state of the guest's tables, which the child finds out by itself.
//!
//! # The moment
//! The parent may run meanwhile. Its memory is copied as it is when the last flush ends, for all its vCPUs:
//!
//! 1. The slot writers' locks of all address spaces are taken, so that slots and attributes stay. Leaves of slots that
//!    were deleted have been zapped under these locks; a conversion that is still zapping is waited for.
//! 2. An invalidation of all backing addresses begins, which zaps nothing: until 6 no fault installs or widens a leaf
//!    ([`super::invalidate`]). A vCPU that needs one waits, outside its reader section.
//! 3. The platform shares the pages. After this nothing fails.
//! 4. The walk: leaves lose the right to write, and are copied.
//! 5. The flush. Until then a vCPU that has a writable leaf in its TLB may write.
//! 6. The sequence is raised, so that no fault installs a page that was resolved before 3, and the invalidation ends.
//!
//! What a vCPU of the parent writes before 5 is in the child. A write that faults is done after 6, and so is everything
//! that follows from it. So the child never has an effect without its cause.
//!
//! *Invalidations* between 1 and 6 are of the parent, and zap its leaves, not the child's copies. These are right: what
//! backed the parent at 3 backs the child until an invalidation of the child. At 4, each leaf in the tables maps what
//! backed the parent at 3: none was installed since 2, and an invalidation zaps before the backing changes.
//!
//! [`HostPage::with_writable`]: crate::HostPage::with_writable

use alloc::vec::Vec;

use super::{Config, RangeOp, Space, Vm};
use crate::format::{Entry, Format, all_gfns};
use crate::heap::OutOfMemory;
use crate::platform::{ForkError, Platform};
use crate::slots::SlotsChange;
use crate::sync::atomic::Ordering::SeqCst;
use crate::table::{At, LeafCounts, Next, Show, TableBuilder, Tree, Visit, Walk};

impl<P: Platform, F: Format> Vm<P, F> {
    /// Makes a VM with the memslots of `parent`, and with its memory as it is now. The two share each page until one of
    /// them writes to it, if the platform can do that ([`Platform::share`]). The caller shares the VM, as after
    /// [`Vm::unshared`], and makes its vCPUs.
    ///
    /// It costs the time of one walk over the parent's leaves, and as many tables as the parent has; no page is copied.
    /// With [`MmuKind::Tdp`](crate::MmuKind) the new VM has all leaves of the parent, without the right to write; with
    /// the others it begins without tables. The parent may run: its vCPUs go on, but those that fault wait until this
    /// returns, and so do changes of its slots. Its next write to each page faults once.
    ///
    /// Not for a vCPU between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`]. The range of an invalidation of the
    /// parent that is in progress may be waited for by its vCPUs, as ever, not by this.
    ///
    /// # Errors
    /// [`ForkError`]; nothing was changed.
    pub fn fork_from(parent: &Self) -> Result<Self, ForkError> {
        let mut child = Self::unshared(
            parent.platform.clone(),
            Config {
                spaces: parent.spaces.len(),
                policy: parent.policy(),
                mmu: parent.mmu,
                nested: parent.nested,
                ..Config::default()
            },
        )
        .map_err(|_| OutOfMemory)?;
        child.mmio_entries = parent.mmio_entries;
        child.log_mode.copy(&parent.log_mode);
        // Always in this order, as conversions take them.
        let mut slots = Vec::new();
        (slots.try_reserve_exact(parent.spaces.len())).map_err(|_| OutOfMemory)?;
        slots.extend((parent.spaces.iter()).map(|space| space.slots.change(parent.turn_wait())));
        let mut round = 0;
        while parent.in_progress.is_converting() {
            parent.turn_wait()(round);
            round += 1;
        }
        for (space, slots) in slots.iter().enumerate() {
            child.copy_slots(space, slots)?;
        }
        let suspended = parent.suspend_faults();
        parent.platform.share(parent.id, child.id)?;
        let mut copied = LeafCounts::default();
        for (own, space) in child.spaces.iter_mut().zip(&parent.spaces) {
            let leaves = parent.freeze(space, own.mmu.get_mut().tree_mut());
            copied.iter_mut().zip(leaves).for_each(|(sum, n)| *sum += n);
        }
        drop(suspended);
        let section = child.section();
        for (gauge, leaves) in section.counters().leaves().into_iter().zip(copied) {
            gauge.add(leaves);
        }
        drop(section);
        Ok(child)
    }

    /// Gives address space `space` of a new VM the private frames and the memslots of `parent`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    fn copy_slots(&self, space: usize, parent: &SlotsChange<'_>) -> Result<(), OutOfMemory> {
        let mut own = self.spaces[space].slots.change(self.turn_wait());
        own.set_private(parent.set().private.clone(), &self.readers);
        drop(own);
        let mut copied = Ok(());
        parent.set().in_gfns(&all_gfns::<F>(), |slot| {
            copied = self.set_memory_region(space, &slot.region());
            copied.is_ok()
        });
        // The rules that the slots of the parent keep are the same here.
        copied.map_err(|_| OutOfMemory)
    }

    /// Takes the right to write from every leaf of `space`, and stores each leaf in `copy`, an empty tree that no other
    /// thread knows, as far as there is memory for the tables of `copy`. Returns the number of stored leaves by level.
    /// When this returns, no CPU uses a writable leaf of `space`.
    fn freeze(&self, space: &Space<P, F>, copy: Option<&mut Tree<P, F>>) -> LeafCounts {
        let mut builder = copy.map(TableBuilder::new);
        let mut op = RangeOp::on(self, space, &all_gfns::<F>());
        op.walk(&mut Walk::new(all_gfns::<F>()), |step, walk| {
            let mut visitor = Freeze {
                copy: builder
                    .as_mut()
                    .and_then(|builder| builder.prepare().is_ok().then_some(builder)),
                changed: LeafCounts::default(),
            };
            step.walk(walk, Show::default(), &mut visitor);
            step.changed(&visitor.changed);
        });
        op.finish();
        builder.map_or_else(LeafCounts::default, TableBuilder::finish)
    }
}

impl super::LogMode {
    /// Makes the logs of a new VM work like the logs of `other`.
    fn copy(&self, other: &Self) {
        let pairs = [
            (&self.manual, &other.manual),
            (&self.initially_set, &other.initially_set),
            (&self.rings, &other.rings),
        ];
        for (own, other) in pairs {
            own.store(other.load(SeqCst), SeqCst);
        }
    }
}

/// The visitor of [`Vm::freeze`].
struct Freeze<'f, 't, P: Platform, F: Format> {
    copy: Option<&'f mut TableBuilder<'t, P, F>>,
    /// The number of leaves that have lost the right to write, by level.
    changed: LeafCounts,
}

impl<P: Platform, F: Format> Visit for Freeze<'_, '_, P, F> {
    fn visit(&mut self, at: &At<'_>) -> Next {
        let bits = frozen::<F>(at.bits);
        // A leaf that is being replaced is not copied: the child faults there. Nor is one in a shadow page.
        if let Some(copy) = &mut self.copy
            && at.is_in_tree()
            && let Entry::Leaf(_) = at.decode::<F>()
            && !copy.put(at.gfn, at.level, F::clear_dirty(bits))
        {
            return Next::Stop;
        }
        if bits != at.bits {
            at.update::<F>(frozen::<F>);
            self.changed[at.level.0 as usize - 1] += 1;
        }
        Next::Pass
    }
}

/// Returns the leaf `bits`, or one that is broken, without the right to write, and without that to get it back unasked.
fn frozen<F: Format>(bits: u64) -> u64 {
    // Where walkers set no dirty bits, only these rights tell that the page may have been written to.
    let written = !F::SETS_DIRTY && bits & (F::WRITE | F::MAY_WRITE) != 0;
    let dirty = if written { F::DIRTY } else { 0 };
    F::write_protect(bits) & !F::MAY_WRITE | dirty
}
