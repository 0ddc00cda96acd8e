//! Many vCPUs use memory, and other threads unmap it. Each use of a translation is checked: a vCPU may use a page until
//! it quiesces, so the operation that unmapped the page must not have returned before.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/guest.rs"]
mod guest;
mod world;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::thread;
use std::time::{Duration, Instant};

use common::{direct, shadow, tdp};
use slat::format::{
    Ept5, Npt, Npt5, Stage2, Stage2Kib16, Stage2Kib64, Sv39x4, Sv48x4, Sv57x4, X86,
};
use slat::{
    Access::{self, *},
    Attention, Config, Ept, Format, Gpa, Level, SlotFlags, Stop, Vcpu, Vm,
};
use slat_model::{HostMemory, SimPlatform, Witness};
use world::{HOST_PAGES, LOGGED, Logs, STABLE, World, region, remap};

/// The time in which each thread must have made progress, on a machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(60);

fn stress<F: Format>(world: World<F>, vcpus: u64, duration: Duration, pause: Option<Duration>) {
    thread::scope(|scope| {
        for number in 1..=vcpus {
            let world = &world;
            scope.spawn(move || world.run_vcpu(number, pause));
        }
        scope.spawn(|| world.change_slots(1));
        scope.spawn(|| world.invalidate(2));
        scope.spawn(|| world.keep_house(3));
        // On a busy machine it takes longer until each thread has made progress.
        let begin = Instant::now();
        while begin.elapsed() < duration
            || !world.has_progressed(vcpus) && begin.elapsed() < PATIENCE.max(duration)
        {
            thread::sleep(Duration::from_millis(20));
        }
        world.stop.store(true, SeqCst);
    });
    world.check_progress(vcpus);
    world.finish();
}

macro_rules! on_every_format {
    ($($name:ident: $mmu:path, $format:ty,)*) => {$(
        #[test]
        fn $name() {
            $mmu(all_logs::<$format>);
        }
    )*};
}

/// Returns how long each world is stressed: SLAT_STRESS_MILLISECONDS, or 250.
fn time_of_each() -> Duration {
    let told = std::env::var("SLAT_STRESS_MILLISECONDS");
    Duration::from_millis(told.map_or(250, |text| text.parse().expect("a number")))
}

fn all_logs<F: Format>() {
    for logs in [
        Logs::Bitmap,
        Logs::Manual,
        Logs::DirtyBits,
        Logs::Buffers,
        Logs::Rings,
    ] {
        for world in [World::new, World::with_walkers] {
            stress::<F>(world(logs), 4, time_of_each(), None);
        }
    }
}

mod every_use_of_a_translation_can_be_explained {
    use super::*;
    on_every_format! {
        ept: tdp, Ept,
        ept_with_5_levels: tdp, Ept5,
        npt: tdp, Npt,
        npt_with_5_levels: tdp, Npt5,
        ept_direct: direct, Ept,
        ept_with_5_levels_direct: direct, Ept5,
        npt_direct: direct, Npt,
        x86_with_5_levels: tdp, X86<5>,
        x86_shadow: shadow, X86<5>,
        stage_2: tdp, Stage2<48>,
        stage_2_with_a_concatenated_root: tdp, Stage2<40>,
        stage_2_with_hardware_dirty_state: tdp, Stage2<48, true>,
        stage_2_with_52_bits: tdp, Stage2<52>,
        stage_2_of_16k: tdp, Stage2Kib16<48>,
        stage_2_of_64k: tdp, Stage2Kib64<52>,
        sv39x4: tdp, Sv39x4,
        sv48x4: tdp, Sv48x4,
        sv57x4: tdp, Sv57x4,
    }
}

#[test]
fn ninety_six_vcpus_on_few_processors_make_progress_while_slots_move() {
    let begin = Instant::now();
    let pause = Some(Duration::from_micros(200));
    stress::<Ept>(World::new(Logs::Bitmap), 96, Duration::from_secs(4), pause);
    stress::<Stage2<48>>(World::new(Logs::Bitmap), 96, Duration::from_secs(4), pause);
    assert!(begin.elapsed() < 3 * PATIENCE);
}

/// The error that this test looks for could occur only between two instructions of [`Vcpu::enter`], so the thread does
/// nothing else.
#[test]
fn a_vcpu_that_comes_in_during_a_flush_is_told() {
    let platform = SimPlatform::new(1);
    let vm: Arc<Vm<SimPlatform, Ept>> = Vm::new(platform.clone(), Config::default()).unwrap();
    let witness = Witness::new(1);
    witness.allow(0..1, 0);
    let slot = region::<Ept>(0, 0..1, 0, SlotFlags::default());
    vm.set_memory_region(0, &slot).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut vcpu = vm.create_vcpu().unwrap();
                let mut kept = None;
                while !stop.load(Relaxed) {
                    vcpu.enter_unguarded(0);
                    if vcpu.attention().flag().load(SeqCst) & Attention::FLUSH != 0 {
                        kept = None;
                        vcpu.quiesce();
                    }
                    if kept.is_none() {
                        kept = vcpu.translate(Gpa(0), Write).ok();
                    }
                    if let Some(kept) = &kept
                        && let Err(why) = witness.check(&platform.host, 0, kept, true)
                    {
                        platform.note(why);
                    }
                    vcpu.leave();
                }
            });
        }
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(1) {
            let guard = vm.invalidate(HostMemory::hvas(&(0..1)));
            platform.host.change(&(0..1), remap(Level::PAGE));
            drop(guard);
        }
        stop.store(true, SeqCst);
    });
    platform.check();
}

/// Calls `act` while a vCPU waits at the platform's gate, in a fault. Passes the vCPU that is not blocked.
fn with_a_blocked_vcpu(act: impl FnOnce(&World<Ept>, &mut Vcpu<SimPlatform, Ept>)) {
    let world = World::<Ept>::new(Logs::Bitmap);
    let blocked_gfn = STABLE.start + 5;
    // Another vCPU is in its reader section and has translations, so that a flush is necessary.
    let mut other = world.vm.create_vcpu().unwrap();
    world.platform.close_gate(HostMemory::hvas(&(5..6)));
    thread::scope(|scope| {
        let blocked = scope.spawn(|| access(&world, blocked_gfn, Write));
        while world.platform.waiting_at_gate() == 0 {
            thread::yield_now();
        }
        let watchdog = Instant::now();
        act(&world, &mut other);
        assert!(watchdog.elapsed() < PATIENCE);
        assert_eq!(world.platform.waiting_at_gate(), 1);
        assert!(!blocked.is_finished());
        world.platform.open_gate();
        blocked.join().unwrap();
    });
    drop(other);
    world.finish();
}

fn access(world: &World<Ept>, gfn: u64, access: Access) {
    let mut vcpu = world.vm.create_vcpu().unwrap();
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    let translation = loop {
        match vcpu.translate(Gpa(gfn << 12), access) {
            Ok(translation) => break translation,
            Err(Stop::Retry) => vcpu.quiesce(),
            Err(Stop::Mmio { .. }) => return vcpu.leave(),
            Err(other) => panic!("{other}"),
        }
    };
    world.use_page(0, gfn, &translation, access == Write);
    vcpu.leave();
}

#[test]
fn a_vcpu_blocked_in_a_host_page_fault_holds_up_no_invalidation() {
    with_a_blocked_vcpu(|world, _| {
        // Invalidates the vCPU's page, the page beside it, and all pages.
        for pages in [5..6, 6..7, 0..HOST_PAGES] {
            let guard = world.vm.invalidate(HostMemory::hvas(&pages));
            world.platform.host.change(&pages, remap(Level::PAGE));
            drop(guard);
        }
    });
}

#[test]
fn a_vcpu_blocked_in_a_host_page_fault_holds_up_no_slot_change() {
    with_a_blocked_vcpu(|world, _| {
        world.set(2, 3000..3100, 0, SlotFlags::default(), 0..0);
        world.set(2, 3050..3150, 0, SlotFlags::default(), 3000..3100);
        world.set(2, 3050..3150, 0, SlotFlags::LOG_DIRTY_PAGES, 0..0);
        world.delete(2, 3050..3150);
        // Also deletes the slot that contains the page, and creates it again with other memory.
        world.delete(0, STABLE);
        world.set(0, STABLE, 2048, SlotFlags::default(), 0..0);
    });
}

#[test]
fn a_vcpu_blocked_in_a_host_page_fault_holds_up_no_flush_and_no_other_vcpu() {
    with_a_blocked_vcpu(|world, other| {
        other.enter_unguarded(2);
        other.quiesce();
        other.translate(Gpa(LOGGED.start << 12), Write).unwrap();
        other.leave();
        let flushes = world.vm.stats().remote_tlb_flush;
        world.harvest();
        assert_eq!(world.vm.stats().remote_tlb_flush, flushes + 1);
        other.enter_unguarded(2);
        assert_ne!(other.attention().flag().load(SeqCst) & Attention::FLUSH, 0);
        other.quiesce();
        other
            .translate(Gpa((STABLE.start + 700) << 12), Write)
            .unwrap();
        other.leave();
    });
}
