//! Checks, on every format and MMU, that the traced events agree with the counters.

#[macro_use]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use slat::{
    Access::*, Event, Format, Gpa, Level, MmuKind, Region, SlotFlags, Stats, Stop, Vcpu, Vm,
};
use slat_model::{HostMemory, SimPlatform};

on_every_format! {
    faults_and_what_they_change_are_traced_as_they_are_counted,
}

/// The number of events, by the names of their counters.
#[derive(Default)]
struct Traced {
    pf_taken: AtomicU64,
    pf_fast: AtomicU64,
    pf_mmio_spte_created: AtomicU64,
    mmio_cached: AtomicU64,
    splits: AtomicU64,
    mmu_cache_miss: AtomicU64,
    mmu_shadow_zapped: AtomicU64,
    remote_tlb_flush: AtomicU64,
    invalidations: AtomicU64,
    flushes_done: AtomicU64,
}

impl Traced {
    fn of(event: &Event, traced: &Traced) {
        let count = match event {
            Event::PageFault { .. } => &traced.pf_taken,
            Event::FastPageFault { .. } => &traced.pf_fast,
            Event::MarkMmioSpte { .. } => &traced.pf_mmio_spte_created,
            Event::HandleMmioPageFault { .. } => &traced.mmio_cached,
            Event::SplitHugePage { .. } => &traced.splits,
            Event::GetPage { created: true, .. } => &traced.mmu_cache_miss,
            Event::PrepareZapPage { .. } => &traced.mmu_shadow_zapped,
            Event::FlushBegin(_) => &traced.remote_tlb_flush,
            Event::FlushEnd(_) => &traced.flushes_done,
            Event::UnmapHvaRange(_) => &traced.invalidations,
            _ => return,
        };
        count.fetch_add(1, Relaxed);
    }

    fn check(&self, stats: &Stats) {
        for (name, traced, counted) in [
            ("pf_taken", &self.pf_taken, stats.pf_taken),
            ("pf_fast", &self.pf_fast, stats.pf_fast),
            (
                "pf_mmio_spte_created",
                &self.pf_mmio_spte_created,
                stats.pf_mmio_spte_created,
            ),
            ("mmio_cached", &self.mmio_cached, stats.mmio_cached),
            ("splits", &self.splits, stats.splits),
            ("mmu_cache_miss", &self.mmu_cache_miss, stats.mmu_cache_miss),
            (
                "mmu_shadow_zapped",
                &self.mmu_shadow_zapped,
                stats.mmu_shadow_zapped,
            ),
            (
                "remote_tlb_flush",
                &self.remote_tlb_flush,
                stats.remote_tlb_flush,
            ),
            ("flushes done", &self.flushes_done, stats.remote_tlb_flush),
            ("invalidations", &self.invalidations, stats.invalidations),
        ] {
            assert_eq!(traced.load(Relaxed), counted, "{name}");
        }
    }
}

fn touch<F: Format>(vcpu: &mut Vcpu<SimPlatform, F>, gfn: u64, access: slat::Access) {
    vcpu.enter_unguarded(0);
    loop {
        match vcpu.translate(Gpa(gfn << 12), access) {
            Err(Stop::Retry) => vcpu.quiesce(),
            Ok(_) | Err(Stop::Mmio { .. }) => break,
            Err(stop) => panic!("{stop}"),
        }
    }
    vcpu.leave();
}

fn faults_and_what_they_change_are_traced_as_they_are_counted<F: Format>() {
    const PAGES: u64 = 1024;
    let platform = SimPlatform::at_level(PAGES, Level::MEGA);
    let traced = Arc::<Traced>::default();
    let hook = traced.clone();
    platform.on_trace(move |event| Traced::of(&event, &hook));
    let vm = Vm::<_, F>::new(platform, common::config()).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let set = |flags| {
        let region = Region::new(0, Gpa(0), PAGES << 12, HostMemory::hva(0)).with_flags(flags);
        vm.set_memory_region(0, &region).unwrap();
    };
    set(SlotFlags::default());
    (0..PAGES)
        .step_by(512)
        .for_each(|gfn| touch(&mut vcpu, gfn, Write));
    // The frame is in no memslot. The second access finds an MMIO entry.
    touch(&mut vcpu, 4 * PAGES, Read);
    touch(&mut vcpu, 4 * PAGES, Read);
    set(SlotFlags::LOG_DIRTY_PAGES);
    (0..PAGES).for_each(|gfn| touch(&mut vcpu, gfn, Write));
    let mut bitmap = vec![0; PAGES as usize / 64];
    vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
    (0..PAGES).for_each(|gfn| touch(&mut vcpu, gfn, Write));
    drop(vm.invalidate(HostMemory::hva(7)..HostMemory::hva(9)));
    touch(&mut vcpu, 8, Write);
    set(SlotFlags::default());
    touch(&mut vcpu, 8, Execute);
    vm.remove_memory_region(0, 0).unwrap();
    let stats = vm.stats();
    assert!(
        stats.pf_taken > PAGES && stats.pf_fast > 0 && stats.splits > 0,
        "{stats:?}"
    );
    assert!(
        stats.mmio_cached > 0 || common::config().mmu == MmuKind::Shadow,
        "{stats:?}"
    );
    traced.check(&stats);
}
