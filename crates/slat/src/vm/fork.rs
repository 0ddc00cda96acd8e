//! Clones: a new VM, the *child*, gets a copy of the memory of another VM, the *parent*, as it is at one moment. The
//! two VMs share each page until one of them writes to it.
//!
//! # Who does what
//! *The platform* owns the pages. [`Platform::share`] tells it that from now on two VMs use every page that backs the
//! first VM. From then on [`Platform::resolve`] returns a page that several VMs use as not writable
//! ([`HostPage::with_writable`]). For a write, `resolve` first gives the requesting VM its own copy of the page. This
//! changes the backing of the page for this VM, so the platform announces the change like any other change
//! ([`Vm::invalidate_exact`]): before the copy backs the page, all leaves of the VM that map the old page are zapped and
//! flushed, on every format. A huge leaf is split, so the pages beside it stay mapped. A page that only one VM still uses
//! may be writable again, and the next write fault makes its leaf writable in place. [`crate::layers`] keeps such
//! records for a platform.
//!
//! *The engine* ensures that no leaf allows a write that the platform has not granted. So after a clone no leaf of
//! either VM is writable, and none may become writable without asking the platform
//! ([`Leaf::may_write`](crate::format::Leaf::may_write)).
//!
//! # What is copied
//! * *The memslots* of all address spaces, with flags, backing addresses and private frames; the policies; and the
//!   settings of dirty logs. The child's dirty logs are new, like those of new slots. vCPUs, dirty rings, counters and
//!   the limit of shadow pages are not copied.
//! * *The tables*: the walk that removes the right to write from the parent's leaves also stores each leaf, under the
//!   lock of its table, in a table of the child, which no other thread can reach yet. So the child can read what its
//!   parent had mapped without a fault. Accessed bits are copied. Dirty bits are not copied, because the child has not
//!   written yet. If there is no memory for more tables, the child lacks the remaining leaves, and accesses to their
//!   pages fault. Shadow pages are not copied: those of the direct MMU would need a reverse-map node for each leaf, and
//!   those of the shadow MMU are made from the guest's tables, which the child reads itself.
//!
//! # The moment
//! The parent may run during the clone. The child's memory is the parent's memory, as all its vCPUs see it, at the
//! moment when the flush in step 5 ends:
//!
//! 1. The slot writers' locks of all address spaces are taken, so that slots and attributes do not change. No leaves of
//!    deleted slots exist, because they are zapped under these locks. The clone also waits for a conversion that is
//!    still zapping.
//! 2. An invalidation of all backing addresses begins. It zaps nothing, but until step 6 no fault installs a leaf or
//!    adds rights to a leaf ([`super::invalidate`]). A vCPU that needs this waits, outside its reader section.
//! 3. The platform shares the pages. From here on nothing can fail.
//! 4. The walk removes the right to write from the leaves, and copies them.
//! 5. TLBs are flushed. Until the flush ends, a vCPU that has a writable leaf in its TLB may write.
//! 6. The invalidation sequence is raised, so that no fault installs a page that was resolved before step 3. Then the
//!    invalidation ends.
//!
//! The child has every write that a vCPU of the parent makes before step 5 ends. A write that faults is made after step
//! 6, and so is everything that depends on that write. So the child never has an effect of a write without the write.
//!
//! *Invalidations* of the parent between steps 1 and 6 zap the parent's leaves, not the child's copies. The copies are
//! correct nevertheless: the pages that backed the parent at step 3 back the child until the child's memory is
//! invalidated, and each leaf that step 4 copies maps such a page, because no leaf was installed since step 2, and an
//! invalidation zaps leaves before it changes the backing.
//!
//! [`HostPage::with_writable`]: crate::HostPage::with_writable

use alloc::vec::Vec;

use super::{Config, RangeOp, Space, Vm};
use crate::format::{Entry, Format, all_gfns};
use crate::heap::OutOfMemory;
use crate::platform::{ForkError, Platform};
use crate::slots::SlotsChange;
use crate::sync::atomic::Ordering::SeqCst;
use crate::sync::wait_while;
use crate::table::{At, LeafCounts, Next, Show, TableBuilder, Tree, Visit, Walk};

impl<P: Platform, F: Format> Vm<P, F> {
    /// Makes a VM with the memslots of `parent`, and with its memory as it is now. The two VMs share each page until
    /// one of them writes to it, if the platform can share pages ([`Platform::share`]). As with [`Vm::unshared`], the
    /// caller puts the new VM in an `Arc` and makes its vCPUs.
    ///
    /// The cost is one walk over the parent's leaves, and as many tables as the parent has; no page is copied. With
    /// [`MmuKind::Tdp`](crate::MmuKind) the new VM has all leaves of the parent, without the right to write. With the
    /// other kinds, the new VM begins without tables. The parent's vCPUs may run during the call, but a vCPU that
    /// faults waits until the call returns, and so does a change of the parent's slots. Afterwards the parent's next
    /// write to each page faults once.
    ///
    /// Do not call this while the calling thread's vCPU is between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    /// This call does not wait for invalidations of the parent that are in progress.
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
        let slots = parent.stop_changes()?;
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

    /// Takes the slot writers' locks of all address spaces, and waits for a conversion that is still zapping.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(super) fn stop_changes(&self) -> Result<Vec<SlotsChange<'_>>, OutOfMemory> {
        let mut slots = Vec::new();
        (slots.try_reserve_exact(self.spaces.len())).map_err(|_| OutOfMemory)?;
        // Always in this order, as conversions do.
        slots.extend((self.spaces.iter()).map(|space| space.slots.change(self.turn_wait())));
        wait_while(|| self.in_progress.is_converting(), self.turn_wait());
        Ok(slots)
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
        // The parent's slots obey the rules for regions, so the copies do, too: only memory can be missing.
        copied.map_err(|_| OutOfMemory)
    }

    /// Removes the right to write from every leaf of `space`. Stores a copy of each leaf in `copy`, an empty tree that
    /// no other thread can reach, as long as there is memory for tables. Returns the number of copied leaves by level.
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
    /// Copies the settings of dirty logs from `other`, for a new VM.
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
        // Copy neither a leaf that is being replaced (broken) nor a leaf in a shadow page: the child will fault on it.
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

/// Returns the leaf `bits` without the right to write and without `MAY_WRITE`, so that a fault must ask the platform
/// before it gives the right back. The leaf may be valid, or broken by break-before-make.
fn frozen<F: Format>(bits: u64) -> u64 {
    // If walkers set no dirty bits, a writable page may have been written: set the dirty bit before the right is
    // removed.
    let written = !F::SETS_DIRTY && bits & (F::WRITE | F::MAY_WRITE) != 0;
    let dirty = if written { F::DIRTY } else { 0 };
    F::write_protect(bits) & !F::MAY_WRITE | dirty
}
