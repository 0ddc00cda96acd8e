//! The paging-structure cache of a vCPU: which look-ups begin in a cached table, and which events empty the cache. Also
//! tests that no page is used through a detached table for longer than the protocol allows.

#[macro_use]
mod common;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::thread;

use slat::{
    Access::{self, *},
    Format, Gfn, Gpa, Hpa, Hva, Level, MmuKind, Region, Stop, Translation, Vcpu, Vm,
};
use slat::{Prefetch, Setting};
use slat_model::{Event, HostChange, HostMemory, PageKind, SimPlatform};

on_every_format! {
    a_second_look_up_in_a_table_reads_no_other_table,
    a_leaf_that_is_not_ready_is_looked_up_from_the_root,
    the_cache_is_void_after_every_end_of_a_section,
    no_page_is_used_through_a_detached_table_after_the_quiescent_point,
    a_page_that_has_moved_is_not_found_in_its_old_table_again,
}

/// The number of pages that a level 1 table maps.
const TABLE: u64 = 512;
const PAGES: u64 = 4 * TABLE;

/// A VM with one slot and one vCPU, which is in its reader section.
struct World<F: Format> {
    vm: Arc<Vm<SimPlatform, F>>,
    vcpu: Vcpu<SimPlatform, F>,
    /// The number of tables that the engine has asked the platform for.
    reads: Arc<AtomicU64>,
}

fn region(gfn: u64, pages: u64) -> Region {
    Region::new(0, Gpa(gfn << 12), pages << 12, HostMemory::hva(0))
}

fn hvas(pages: Range<u64>) -> Range<Hva> {
    HostMemory::hva(pages.start)..HostMemory::hva(pages.end)
}

/// Translates like a guest that drops its translations whenever it is asked to.
fn touch<F: Format>(
    vcpu: &mut Vcpu<SimPlatform, F>,
    gfn: u64,
    access: Access,
) -> Result<Translation, Stop> {
    loop {
        match vcpu.translate(Gpa(gfn << 12), access) {
            Err(Stop::Retry) => vcpu.quiesce(),
            answer => return answer,
        }
    }
}

impl<F: Format> World<F> {
    fn new() -> Self {
        let platform = SimPlatform::new(PAGES);
        let reads = Arc::new(AtomicU64::new(0));
        let counter = reads.clone();
        platform.set_hook(move |event| {
            if matches!(event, Event::Entries(_)) {
                counter.fetch_add(1, SeqCst);
            }
        });
        let vm = Vm::new(platform, common::config()).unwrap();
        vm.set_policy(Setting::Prefetch(Prefetch::Off));
        vm.set_memory_region(0, &region(0, PAGES)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        vcpu.enter_unguarded(1);
        vcpu.quiesce();
        World { vm, vcpu, reads }
    }

    /// Translates. Returns the host page, the number of tables read, and the number of faults.
    fn try_look_up(&mut self, gfn: u64, access: Access) -> (Option<Hpa>, u64, u64) {
        let faults = self.vcpu.stats().pf_taken;
        let before = self.reads.load(SeqCst);
        let answer = self.vcpu.translate(Gpa(gfn << 12), access);
        let reads = self.reads.load(SeqCst) - before;
        let faults = self.vcpu.stats().pf_taken - faults;
        (answer.ok().map(|page| page.host), reads, faults)
    }

    /// Translates, and checks that this takes no fault. Returns the host page and the number of tables read.
    fn look_up(&mut self, gfn: u64, access: Access) -> (Hpa, u64) {
        let (host, reads, faults) = self.try_look_up(gfn, access);
        assert_eq!(faults, 0, "faults at {gfn:#x}");
        (host.unwrap(), reads)
    }

    fn reads(&mut self, gfn: u64) -> u64 {
        self.look_up(gfn, Read).1
    }

    /// Maps the pages `gfns`, and makes the vCPU cache the table of the first page.
    fn warm(&mut self, gfns: &[u64]) {
        for gfn in gfns {
            touch(&mut self.vcpu, *gfn, Write).unwrap();
        }
        self.reads(gfns[0]);
        assert_eq!(self.reads(gfns[0]), 1);
    }

    /// Waits until another thread waits for this vCPU's quiescent point.
    fn wait_for_a_flush(&self) {
        while self.vcpu.attention().flag().load(SeqCst) == 0 {
            thread::yield_now();
        }
    }

    fn check(self) {
        drop(self.vcpu);
        self.vm.audit().unwrap();
        self.vm.platform().check();
    }
}

/// Returns the number of tables on the path to a level 1 entry.
fn walk<F: Format>() -> u64 {
    F::TOP.0.into()
}

fn a_second_look_up_in_a_table_reads_no_other_table<F: Format>() {
    let mut world = World::<F>::new();
    for gfn in [0, 1, TABLE] {
        touch(&mut world.vcpu, gfn, Write).unwrap();
    }
    let reads = [0, 0, 1, TABLE, TABLE, 0].map(|gfn| world.reads(gfn));
    assert_eq!(reads, [walk::<F>(), 1, 1, walk::<F>(), 1, 1]);
    world.check();
}

fn a_leaf_that_is_not_ready_is_looked_up_from_the_root<F: Format>() {
    let mut world = World::<F>::new();
    world.warm(&[0, 1]);
    // The leaf's accessed bit is clear, so the next look-up has to set it, and walks from the root.
    assert_eq!(world.vm.age(hvas(1..2), true), 1);
    assert!(world.reads(1) > walk::<F>());
    assert_eq!(world.vm.age(hvas(1..2), false), 1);
    // The table was dropped from the cache. The next walk from the root puts it in again.
    assert_eq!([0, 1, 0].map(|gfn| world.reads(gfn)), [walk::<F>(), 1, 1]);
    world.check();
}

fn the_cache_is_void_after_every_end_of_a_section<F: Format>() {
    let mut world = World::<F>::new();
    type End<F> = fn(&mut Vcpu<SimPlatform, F>);
    let ends: [(&str, End<F>); 4] = [
        ("quiesce", |vcpu| vcpu.quiesce()),
        ("leave and enter", |vcpu| {
            vcpu.leave();
            vcpu.enter_unguarded(1);
        }),
        ("enter in a section", |vcpu| vcpu.enter_unguarded(1)),
        ("outside, for the host's page", |vcpu| {
            vcpu.translate(Gpa(5 << 12), Read).unwrap();
        }),
    ];
    for (name, end) in ends {
        world.warm(&[0, 1]);
        end(&mut world.vcpu);
        assert_eq!(world.reads(1), walk::<F>(), "{name}");
    }
    world.vcpu.leave();
    world.check();
}

/// A table with a leaf for a page of new memory is detached, and a huge leaf replaces it.
fn no_page_is_used_through_a_detached_table_after_the_quiescent_point<F: Format>() {
    if common::config().mmu == MmuKind::Direct {
        // The direct MMU detaches no table that contains leaves.
        return;
    }
    let mut world = World::<F>::new();
    world.warm(&[TABLE, TABLE + 1]);
    let old = world.look_up(TABLE + 1, Read).0;
    let vm = world.vm.clone();
    thread::scope(|scope| {
        let invalidation = scope.spawn(move || {
            let pages = TABLE..2 * TABLE;
            let invalidation = vm.invalidate(hvas(pages.clone()));
            let huge = HostChange::Remap {
                level: Level::MEGA,
                writable: true,
                kind: PageKind::Ordinary,
            };
            vm.platform().host.change(&pages, huge);
            drop(invalidation);
        });
        world.wait_for_a_flush();
        // Until the quiescent point the vCPU may use the old page, as through a TLB. The host has not reused the page
        // yet.
        let before = world.try_look_up(TABLE + 1, Read);
        world.vcpu.quiesce();
        assert_eq!(before, (Some(old), 1, 0));
        let new = touch(&mut world.vcpu, TABLE + 1, Read).unwrap();
        assert_ne!(new.host, old, "the old page after the quiescent point");
        assert_eq!(new.level, Level::MEGA);
        invalidation.join().unwrap();
    });
    let host = world.vm.platform().host.page(HostMemory::hva(TABLE + 1));
    let now = world.vm.platform().host.get(host.unwrap()).unwrap();
    assert_eq!(world.look_up(TABLE + 1, Read).0, now.pfn.hpa());
    world.check();
}

/// A slot moves to a range that overlaps its old one. While the move's flush waits for one vCPU, another vCPU maps the
/// new page for reading. The first vCPU finds the new page by a write. After that, the first vCPU must not find the old
/// page again.
fn a_page_that_has_moved_is_not_found_in_its_old_table_again<F: Format>() {
    if common::config().mmu == MmuKind::Direct {
        // The direct MMU detaches no table that contains leaves.
        return;
    }
    let mut world = World::<F>::new();
    world.warm(&[0]);
    world.vcpu.leave();
    // The zap flushes, so the slot's move waits for no reader before it publishes the new set.
    world.vm.zap(0, Gfn(0)..Gfn(1));
    world.vcpu.enter_unguarded(1);
    world.vcpu.quiesce();
    let gfn = TABLE + 1;
    // Map for reading only: then a write has to set the dirty bit.
    touch(&mut world.vcpu, gfn, Read).unwrap();
    world.reads(gfn);
    let (old, reads) = world.look_up(gfn, Read);
    assert_eq!(reads, 1);
    let vm = world.vm.clone();
    thread::scope(|scope| {
        let moved = scope.spawn(move || {
            vm.set_memory_region(0, &region(TABLE, PAGES)).unwrap();
        });
        world.wait_for_a_flush();
        let mut other = world.vm.create_vcpu().unwrap();
        other.enter_unguarded(2);
        // With break-before-make, the other vCPU also waits for the flush.
        let new = (!F::BREAK_BEFORE_MAKE).then(|| touch(&mut other, gfn, Read));
        other.leave();
        let look_ups = [Read, Write, Read].map(|access| world.try_look_up(gfn, access));
        world.vcpu.leave();
        moved.join().unwrap();
        if let Some(new) = new {
            let new = Some(new.unwrap().host);
            assert_ne!(new, Some(old));
            let hosts = look_ups.map(|(host, _, _)| host);
            assert_eq!(hosts, [Some(old), new, new], "{look_ups:?}");
        }
    });
    world.check();
}
