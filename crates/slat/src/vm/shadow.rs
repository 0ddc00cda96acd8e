//! Operations, other than faults, that keep shadow pages consistent with the guest's tables ([`crate::shadow`]).

use core::ops::Range;

use super::{RangeOp, Space, Vm};
use crate::addr::{Gfn, Gpa, Level};
use crate::format::{Format, all_gfns};
use crate::platform::Platform;
use crate::shadow::trail::{PageOf, Role};
use crate::shadow::{Followed, ReadEntries, ShadowMmu};
use crate::stats::Counters;
use crate::sync::InSection;
use crate::sync::atomic::Ordering::SeqCst;
use crate::table::{Detached, Flushed, Key};

impl<P: Platform, F: Format> Vm<P, F> {
    /// Call after the client has written to guest memory that may contain the guest's tables (as a VMM does when it
    /// restores a VM), and before the guest runs again. Like KVM, the engine does not notice stores of the client.
    /// After this call, the client must make each vCPU flush ([`Vcpu::flush_guest`](crate::Vcpu)): this flush compares
    /// the guest's tables with their shadow pages. If there are no shadow pages of guest tables, this does nothing.
    pub fn guest_memory_changed(&self) {
        let section = self.section();
        for space in &self.spaces {
            space.distrust(section.inside(), section.counters());
        }
    }

    /// Call when a vCPU changes from address space `from` to address space `to`. `from` is `None` for a new vCPU, and
    /// `to` is `None` for a vCPU that is dropped. `section` is a reader section of the caller.
    ///
    /// The engine notices a vCPU's stores to tables that are shadowed in the vCPU's own address space. But the same
    /// memory may contain tables that are shadowed in another address space. So while vCPUs use different address
    /// spaces, as when one of them is in SMM, each flush of the guest compares all tables
    /// ([`Self::distrust_stores_elsewhere`]). When a vCPU leaves an address space, the next flush in every other one
    /// also compares all tables, because of the vCPU's earlier stores.
    pub(crate) fn vcpu_moves(
        &self,
        from: Option<usize>,
        to: Option<usize>,
        (section, counters): (InSection<'_>, &Counters),
    ) {
        // Mark the tables before the vCPU leaves `from`: so a flush in another address space finds either the vCPU
        // still in `from`, or the tables marked for comparison.
        if let Some(from) = from {
            self.spaces_but(from)
                .for_each(|space| space.distrust(section, counters));
        }
        if let Some(to) = to {
            self.spaces[to].vcpus.fetch_add(1, SeqCst);
        }
        if let Some(from) = from {
            self.spaces[from].vcpus.fetch_sub(1, SeqCst);
        }
    }

    /// Call when the guest flushes in address space `space`. If vCPUs use other address spaces, marks all shadow pages
    /// of `space` for comparison with the guest's tables, and returns `true`. `section` is a reader section of the
    /// caller.
    pub(crate) fn distrust_stores_elsewhere(
        &self,
        space: usize,
        (section, counters): (InSection<'_>, &Counters),
    ) -> bool {
        let is_used = |other: &Space<P, F>| other.vcpus.load(SeqCst) > 0;
        let used = self.has_several_spaces() && self.spaces_but(space).any(is_used);
        if used {
            self.spaces[space].distrust(section, counters);
        }
        used
    }

    pub(crate) fn has_several_spaces(&self) -> bool {
        self.spaces.len() > 1
    }

    fn spaces_but(&self, index: usize) -> impl Iterator<Item = &Space<P, F>> {
        let all = self.spaces.iter().enumerate();
        all.filter(move |(at, _)| *at != index)
            .map(|(_, space)| space)
    }

    /// Makes operations on ranges of gfns also search the shadow pages of nested tables in `space`, not only its tree.
    /// Call before the first such page is made ([`crate::shadow`]). The caller is in no reader section.
    pub(crate) fn begin_shadowing(&self, space: &Space<P, F>) {
        let tell = |tell: fn(&ShadowMmu<P, F>)| {
            let section = self.section();
            space.mmu.get(section.inside()).shadow().map(tell);
        };
        tell(ShadowMmu::announce);
        self.readers.synchronize(self.reader_wait());
        tell(ShadowMmu::begin);
    }

    /// Zaps the shadow entries that were made from the guest's entries in `range`, to which a store was noticed, and
    /// the shadow pages below these entries. The caller is in no reader section.
    pub(crate) fn follow(&self, space: &Space<P, F>, range: &Range<Gpa>) {
        // The operation must cover all frames: which frames the entries map is unknown until the entries are zapped.
        let mut op = RangeOp::on(self, space, &all_gfns::<F>());
        op.on_shadow(|mmu, detached, zapped| mmu.follow(range, detached, zapped));
        op.finish();
    }

    /// Zaps the shadow entry of `level` on the path to `key`, because the guest's tables have changed. The caller is in
    /// no reader section.
    pub(crate) fn zap_entry(&self, space: &Space<P, F>, key: Key, root: (Gfn, Role), level: Level) {
        let mut op = RangeOp::on(self, space, &all_gfns::<F>());
        op.on_shadow(|mmu, _, zapped| mmu.zap_entry(key, root, level, zapped));
        op.finish();
    }

    /// Write-protects unsynced guest tables, so that stores to them are noticed again
    /// ([`ShadowMmu::begin_sync`](crate::shadow::ShadowMmu)), and flushes TLBs. Returns the flush. The caller is in no
    /// reader section.
    pub(crate) fn begin_sync(
        &self,
        space: &Space<P, F>,
        take: impl FnMut(PageOf) -> bool,
    ) -> Flushed {
        let mut op = RangeOp::on(self, space, &all_gfns::<F>());
        op.on_shadow(|mmu, _, _| mmu.begin_sync(take));
        op.finish()
    }

    /// Zaps the shadow entries that the guest's entries, in `read`, do not grant any more. The caller is in no reader
    /// section.
    pub(crate) fn zap_ungranted(&self, space: &Space<P, F>, read: &ReadEntries<'_>) {
        let mut op = RangeOp::on(self, space, &all_gfns::<F>());
        op.on_shadow(|mmu, _, zapped| mmu.zap_ungranted(read, zapped));
        op.finish();
    }

    /// Zaps the shadow pages of guest tables in the frames `range`. The caller is in no reader section.
    pub(crate) fn forget_tables(&self, space: &Space<P, F>, range: &Range<Gfn>) {
        let mut op = RangeOp::on(self, space, &all_gfns::<F>());
        op.forget_tables(range);
        op.finish();
    }
}

impl<P: Platform, F: Format> Space<P, F> {
    /// Marks all shadow pages as unsynced, so that the guest's next flush compares them with the guest's tables.
    fn distrust(&self, section: InSection<'_>, counters: &Counters) {
        if let Some(mmu) = self.mmu.get(section).shadow() {
            counters.mmu_unsync.add(mmu.distrust_all());
        }
    }
}

impl<P: Platform, F: Format> RangeOp<'_, P, F> {
    /// If the MMU shadows the guest's tables, runs `work` on it, in a new reader section. `work` gets the list of
    /// detached tables, and a function that it must call for each leaf that it zaps. Adds the numbers that `work`
    /// returns to the counters.
    fn on_shadow(
        &mut self,
        work: impl FnOnce(&ShadowMmu<P, F>, &mut Detached, &mut dyn FnMut(Gfn, Level, u64)) -> Followed,
    ) {
        let counters = self.counters();
        self.alone(|step, slots, mmu| {
            let Some(mmu) = mmu.shadow() else {
                return;
            };
            let followed = step.noting(slots, |unflushed, noted| {
                let followed = work(mmu, &mut unflushed.detached, noted);
                for (zapped, more) in unflushed.zapped.iter_mut().zip(followed.zapped) {
                    *zapped += more;
                }
                for (changed, more) in unflushed.changed.iter_mut().zip(followed.protected) {
                    *changed += more;
                }
                followed
            });
            counters.mmu_pde_zapped.add(followed.tables);
            counters.mmu_flooded.add(followed.flooded);
            counters.mmu_unsync.sub(followed.synced);
        });
    }

    /// Zaps the shadow pages of guest tables in the frames `range`, whose memory was replaced or removed.
    pub(super) fn forget_tables(&mut self, range: &Range<Gfn>) {
        while self.has_table(range) {
            // The operation must cover all frames: which frames the entries map is unknown until the entries are
            // zapped.
            self.covers(&all_gfns::<F>());
            self.on_shadow(|mmu, detached, zapped| {
                mmu.forget_table(range, detached, zapped);
                Followed::default()
            });
        }
    }

    /// Returns whether there are shadow pages of a guest table in the frames `range`.
    fn has_table(&self, range: &Range<Gfn>) -> bool {
        let mmu = self.space.mmu.get(self.section.inside());
        mmu.shadow().is_some_and(|mmu| mmu.has_table(range))
    }
}
