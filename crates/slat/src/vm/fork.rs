//! Clones: a new VM gets the memory of another VM as of one moment. The two share each page until one of them writes to
//! it.
//!
//! # Who does what
//! *The platform* owns the pages. [`Platform::share`] tells it that from now on two VMs use every page that backs the
//! first VM. From then on [`Platform::resolve`] returns a page that has other users as not writable
//! ([`HostPage::with_writable`]). For a write, `resolve` first gives the asking VM a frame of its own. That changes the
//! backing of the page, for this VM alone, so the platform announces the change like any other ([`Vm::invalidate`]):
//! the old leaf is zapped and flushed before the page is copied, on every format, with break-before-make or without,
//! and wherever else the VM maps the same page. A frame with one remaining user is writable again, and the next write
//! fault makes its leaf writable in place.
//!
//! *The engine* ensures that no leaf allows a write that the platform has not granted. For both VMs this means: no leaf
//! is writable, and no leaf may become writable without asking the platform
//! ([`Leaf::may_write`](crate::format::Leaf::may_write)).
//!
//! # What is copied
//! * *The memslots* of all address spaces, with flags, backing addresses and private frames; the policies; and the kind
//!   of the dirty logs. The copy's dirty logs are new, like those of new slots. vCPUs, rings, counters and the limit of
//!   shadow pages are not copied.
//! * *The tables*, in the same pass in which the parent's leaves lose the right to write: each leaf that the walk
//!   visits is stored, under the lock of its table, in a table of the child, which no other thread can reach yet. So
//!   the child takes no fault to read what its parent had mapped. Accessed bits are copied. Dirty bits are not copied,
//!   because the child has written nothing. If there is no memory for more tables, the child lacks the remaining
//!   leaves, and faults there. Shadow pages are not copied. Shadow pages of the direct MMU would need a reverse-map
//!   node for each leaf. Shadow pages of the shadow MMU depend on the guest's tables, which the child reads itself.
//!
//! # The moment
//! The parent may run meanwhile. The copy is the parent's memory, for all its vCPUs, at the moment when the last flush
//! ends:
//!
//! 1. The slot writers' locks of all address spaces are taken, so that slots and attributes do not change. Leaves of
//!    deleted slots were zapped under these locks. The clone waits for a conversion that is still zapping.
//! 2. An invalidation of all backing addresses begins. It zaps nothing. Until step 6 no fault installs a leaf or adds
//!    rights to one ([`super::invalidate`]). A vCPU that needs to do so waits, outside its reader section.
//! 3. The platform shares the pages. After this nothing fails.
//! 4. The walk: leaves lose the right to write, and are copied.
//! 5. The flush. Until it ends, a vCPU that has a writable leaf in its TLB may write.
//! 6. The sequence is raised, so that no fault installs a page that was resolved before step 3. Then the invalidation
//!    ends.
//!
//! A write by a vCPU of the parent before step 5 ends is in the child. A write that faults is done after step 6, like
//! everything that depends on it. So the child never sees an effect without its cause.
//!
//! *Invalidations* between steps 1 and 6 are of the parent: they zap the parent's leaves, not the child's copies. The
//! copies are correct: the pages that backed the parent at step 3 back the child until an invalidation of the child. At
//! step 4, each leaf in the tables maps a page that backed the parent at step 3: no leaf was installed since step 2,
//! and an invalidation zaps before the backing changes.
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
    /// Makes a VM with the memslots of `parent`, and with its memory as it is now. The two VMs share each page until
    /// one of them writes to it, if the platform can share pages ([`Platform::share`]). The caller shares the VM
    /// between threads and makes its vCPUs, as after [`Vm::unshared`].
    ///
    /// Costs one walk over the parent's leaves, and as many tables as the parent has; copies no page. With
    /// [`MmuKind::Tdp`](crate::MmuKind) the new VM has all leaves of the parent, without the right to write. With the
    /// other kinds, the new VM begins without tables. The parent may run meanwhile: its vCPUs continue, but a vCPU that
    /// faults, or a change of the parent's slots, waits until this returns. The parent's next write to each page faults
    /// once.
    ///
    /// Do not call it for a vCPU between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`]. If an invalidation of the
    /// parent is in progress, the parent's vCPUs may wait for it as usual; this call does not.
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
        // Take the locks always in this order, as conversions do.
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

    /// Gives address space `space` of a new VM the memslots of `parent`, and its set of private frames: guest frames
    /// that `KVM_MEMORY_ATTRIBUTE_PRIVATE` makes private.
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
        // The parent's slots obey the rules, so the copies obey them, too.
        copied.map_err(|_| OutOfMemory)
    }

    /// Removes the right to write from every leaf of `space`, and stores each leaf in `copy`, as far as there is memory
    /// for the tables of `copy`, an empty tree that no other thread can reach. Returns the number of stored leaves by
    /// level. When this returns, no CPU uses a writable leaf of `space`.
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
        // Do not copy a leaf that is being replaced, or a leaf in a shadow page: the child faults there.
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

/// Returns the leaf `bits`, valid or broken by break-before-make, without the right to write. Also clears `MAY_WRITE`,
/// so that a fault has to ask the host before it gives the right back.
fn frozen<F: Format>(bits: u64) -> u64 {
    // Where walkers set no dirty bits, the right to write is the only sign that the page may have been written to.
    let written = !F::SETS_DIRTY && bits & (F::WRITE | F::MAY_WRITE) != 0;
    let dirty = if written { F::DIRTY } else { 0 };
    F::write_protect(bits) & !F::MAY_WRITE | dirty
}
