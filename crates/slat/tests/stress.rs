//! Many vCPUs, and threads that take away what they use. Each use of a translation is checked: a page
//! may be used until the vCPU quiesces, so whoever took it away must not have returned before.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::thread;
use std::time::{Duration, Instant};

use slat::{
    Access::{self, *},
    Attention, Config, Ept, Gpa, Level, Region, SlotFlags, Stop, Translation, Vcpu, Vm,
};
use slat_model::{Harvests, HostChange, HostMemory, Rng, SimPlatform, Witness};

type TestVm = Vm<SimPlatform, Ept>;

const HOST_PAGES: u64 = 4096;
const FRAMES: u64 = 8192;
/// Slot 0, for the whole test.
const STABLE: Range<u64> = 0..1024;
/// Slot 1, for the whole test; its log is taken all the time.
const LOGGED: Range<u64> = 1024..1536;
/// Where other slots come, go and move.
const BUSY: Range<u64> = 2048..6144;
/// Nothing is ever here.
const NOTHING: Range<u64> = 7000..8192;

struct World {
    platform: Arc<SimPlatform>,
    vm: Arc<TestVm>,
    witness: Witness,
    harvests: Harvests,
    stop: AtomicBool,
    accesses: AtomicU64,
    slot_changes: AtomicU64,
    invalidations: AtomicU64,
}

fn region(slot: u32, gfns: Range<u64>, host_page: u64, flags: SlotFlags) -> Region {
    Region {
        slot,
        flags,
        gpa: Gpa(gfns.start << 12),
        size: (gfns.end - gfns.start) << 12,
        backing: HostMemory::hva(host_page),
        private: None,
    }
}

const fn remap(level: Level) -> HostChange {
    HostChange::Remap {
        level,
        writable: true,
        device: false,
    }
}

impl World {
    fn new() -> Self {
        let platform = SimPlatform::new(HOST_PAGES);
        platform.host.change(&(0..HOST_PAGES), remap(Level::MEGA));
        let vm = Vm::new(platform.clone(), Config::default()).unwrap();
        let world = World {
            platform,
            vm,
            witness: Witness::new(FRAMES),
            harvests: Harvests::new(LOGGED.end - LOGGED.start),
            stop: AtomicBool::new(false),
            accesses: AtomicU64::new(0),
            slot_changes: AtomicU64::new(0),
            invalidations: AtomicU64::new(0),
        };
        world.set(0, STABLE, 0, SlotFlags::default(), 0..0);
        world.set(1, LOGGED, 1024, SlotFlags::LOG_DIRTY_PAGES, 0..0);
        world
    }

    /// Puts a slot at `gfns`, where it was at `from` before.
    fn set(&self, slot: u32, gfns: Range<u64>, page: u64, flags: SlotFlags, from: Range<u64>) {
        self.witness.allow(gfns.clone(), page);
        let region = region(slot, gfns.clone(), page, flags);
        self.vm.set_memory_region(0, &region).unwrap();
        self.witness.settle(from, gfns);
        self.slot_changes.fetch_add(1, Relaxed);
    }

    fn delete(&self, slot: u32, gfns: Range<u64>) {
        let region = region(slot, 0..0, 0, SlotFlags::default());
        self.vm.set_memory_region(0, &region).unwrap();
        self.witness.settle(gfns, 0..0);
        self.slot_changes.fetch_add(1, Relaxed);
    }

    /// Creates, moves, deletes slots and switches their logs, each in a quarter of its own; takes logs.
    fn change_slots(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        let mut slots: [Option<(Range<u64>, u64, SlotFlags)>; 4] = [const { None }; 4];
        let mut bitmap = [0; 8];
        while !self.stop.load(Relaxed) {
            let quarter = rng.below(4);
            let id = 2 + quarter as u32;
            let area = BUSY.start + quarter * 1024;
            let place = |rng: &mut Rng| area + rng.pick(&[0, 0, 1, 7, 300, 512]);
            match (slots[quarter as usize].take(), rng.below(5)) {
                (None, _) => {
                    let base = place(&mut rng);
                    let gfns = base..base + rng.pick(&[1, 9, 500, 512]);
                    let page = rng.below(7) * 512 + base % 512;
                    let flags = SlotFlags(rng.below(2) as u32);
                    self.set(id, gfns.clone(), page, flags, 0..0);
                    slots[quarter as usize] = Some((gfns, page, flags));
                }
                (Some((gfns, ..)), 0) => self.delete(id, gfns),
                (Some((gfns, page, flags)), 1..3) => {
                    let base = place(&mut rng);
                    let to = base..base + (gfns.end - gfns.start);
                    self.set(id, to.clone(), page, flags, gfns);
                    slots[quarter as usize] = Some((to, page, flags));
                }
                (Some((gfns, page, flags)), 3) => {
                    let flags = SlotFlags(flags.0 ^ 1);
                    self.set(id, gfns.clone(), page, flags, 0..0);
                    slots[quarter as usize] = Some((gfns, page, flags));
                }
                (slot, _) => {
                    slots[quarter as usize] = slot;
                    self.harvest(&mut bitmap);
                }
            }
        }
    }

    fn harvest(&self, bitmap: &mut [u64]) {
        self.harvests
            .harvest(bitmap, |b| self.vm.get_dirty_log(0, 1, b).unwrap());
    }

    fn invalidate(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        while !self.stop.load(Relaxed) {
            let pages = rng.pick(&[1, 5, 512, 1024]);
            let start = rng.below(HOST_PAGES - pages + 1);
            let start = if pages > 5 { start & !511 } else { start };
            let pages = start..start + pages;
            let guard = self.vm.invalidate(HostMemory::hvas(&pages));
            let level = rng.pick(&[Level::PAGE, Level::MEGA, Level::MEGA]);
            self.platform.host.change(&pages, remap(level));
            drop(guard);
            self.invalidations.fetch_add(1, Relaxed);
        }
    }

    /// A vCPU with a TLB, as a software CPU is.
    fn run_vcpu(&self, number: u64, pause: Option<Duration>) {
        let mut rng = Rng::new(number);
        let mut vcpu = self.vm.create_vcpu().unwrap();
        let mut tlb: HashMap<u64, Translation> = HashMap::new();
        let mut accesses = 0;
        vcpu.enter(number as usize);
        while !self.stop.load(Relaxed) {
            if vcpu.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
                tlb.clear();
                vcpu.quiesce();
            }
            if rng.one_in(64) {
                vcpu.leave();
                match pause {
                    Some(pause) => thread::sleep(pause),
                    None => thread::yield_now(),
                }
                // What it remembers is good unless it is told otherwise now.
                vcpu.enter(number as usize);
                continue;
            }
            let gfn = self.some_frame(&mut rng);
            let access = rng.pick(&[Read, Write, Execute]);
            accesses += 1;
            match vcpu.translate(Gpa(gfn << 12), access) {
                Ok(translation) => {
                    tlb.insert(gfn, translation);
                    self.use_page(gfn, &translation, access == Write);
                }
                Err(Stop::Retry) => {
                    tlb.clear();
                    vcpu.quiesce();
                }
                Err(Stop::Mmio { .. }) if gfn >= LOGGED.end => {}
                Err(other) => self.platform.note(other.to_string()),
            }
            for (gfn, translation) in tlb.iter().take(4) {
                self.use_page(*gfn, translation, translation.write);
            }
        }
        vcpu.leave();
        self.accesses.fetch_add(accesses, Relaxed);
        if accesses == 0 {
            self.platform.note(format!("vCPU {number} came nowhere"));
        }
    }

    fn some_frame(&self, rng: &mut Rng) -> u64 {
        let place = rng.pick(&[STABLE.start, LOGGED.start, BUSY.start, NOTHING.start]);
        let frames = if place == BUSY.start { 4096 } else { 512 };
        place + rng.below(frames)
    }

    fn use_page(&self, gfn: u64, translation: &Translation, write: bool) {
        let used = self
            .witness
            .check(&self.platform.host, gfn, translation, write);
        if let Err(why) = used {
            self.platform.note(why);
        }
        if write && LOGGED.contains(&gfn) {
            self.harvests.write(gfn - LOGGED.start);
        }
    }

    fn finish(self) {
        let mut bitmap = [0; 8];
        self.harvest(&mut bitmap);
        assert_eq!(self.harvests.lost(), None, "a write is in no dirty log");
        self.vm.audit().unwrap_or_else(|e| panic!("{e}"));
        self.platform.check();
        let World { platform, vm, .. } = self;
        drop(vm);
        platform.check();
        assert_eq!(platform.live_frames(), 0, "table frames were leaked");
    }
}

fn stress(vcpus: u64, duration: Duration, pause: Option<Duration>) {
    let world = World::new();
    thread::scope(|scope| {
        for number in 1..=vcpus {
            let world = &world;
            scope.spawn(move || world.run_vcpu(number, pause));
        }
        scope.spawn(|| world.change_slots(1));
        scope.spawn(|| world.invalidate(2));
        thread::sleep(duration);
        world.stop.store(true, SeqCst);
    });
    let counts = [&world.accesses, &world.slot_changes, &world.invalidations];
    let [accesses, changes, invalidations] = counts.map(|c| c.load(Relaxed));
    println!(
        "{vcpus} vCPUs: {accesses} accesses, {changes} slot changes, {invalidations} invalidations"
    );
    assert!(accesses > 1000 * vcpus.min(20));
    assert!(changes > 20 && invalidations > 20);
    world.finish();
}

#[test]
fn every_use_of_a_translation_can_be_explained() {
    stress(4, Duration::from_secs(2), None);
}

#[test]
fn ninety_six_vcpus_on_few_processors_make_progress_while_slots_move() {
    let begin = Instant::now();
    let pause = Some(Duration::from_micros(200));
    stress(96, Duration::from_secs(4), pause);
    assert!(begin.elapsed() < Duration::from_secs(20));
}

/// The window is two instructions of [`Vcpu::enter`], so this does nothing else.
#[test]
fn a_vcpu_that_comes_in_during_a_flush_is_told() {
    let platform = SimPlatform::new(1);
    let vm: Arc<TestVm> = Vm::new(platform.clone(), Config::default()).unwrap();
    let witness = Witness::new(1);
    witness.allow(0..1, 0);
    let slot = region(0, 0..1, 0, SlotFlags::default());
    vm.set_memory_region(0, &slot).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut vcpu = vm.create_vcpu().unwrap();
                let mut kept = None;
                while !stop.load(Relaxed) {
                    vcpu.enter(0);
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

/// A vCPU that has reached the gate, with what it will answer when the gate opens.
fn with_a_blocked_vcpu(act: impl FnOnce(&World, &mut Vcpu<SimPlatform, Ept>)) {
    let world = World::new();
    let blocked_gfn = STABLE.start + 5;
    // Another vCPU is inside and holds translations, so that there is something to flush.
    let mut other = world.vm.create_vcpu().unwrap();
    world.platform.close_gate(HostMemory::hvas(&(5..6)));
    thread::scope(|scope| {
        let blocked = scope.spawn(|| access(&world, blocked_gfn, Write));
        while world.platform.waiting_at_gate() == 0 {
            thread::yield_now();
        }
        let watchdog = Instant::now();
        act(&world, &mut other);
        assert!(watchdog.elapsed() < Duration::from_secs(5));
        assert_eq!(world.platform.waiting_at_gate(), 1);
        assert!(!blocked.is_finished());
        world.platform.open_gate();
        blocked.join().unwrap();
    });
    drop(other);
    world.finish();
}

fn access(world: &World, gfn: u64, access: Access) {
    let mut vcpu = world.vm.create_vcpu().unwrap();
    vcpu.enter(1);
    vcpu.quiesce();
    let translation = loop {
        match vcpu.translate(Gpa(gfn << 12), access) {
            Ok(translation) => break translation,
            Err(Stop::Retry) => vcpu.quiesce(),
            Err(Stop::Mmio { .. }) => return vcpu.leave(),
            Err(other) => panic!("{other}"),
        }
    };
    world.use_page(gfn, &translation, access == Write);
    vcpu.leave();
}

#[test]
fn a_vcpu_blocked_in_a_host_page_fault_holds_up_no_invalidation() {
    with_a_blocked_vcpu(|world, _| {
        // Of its own page, of the page beside it, of everything.
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
        // The slot it is in, too: away, and back with other memory behind it.
        world.delete(0, STABLE);
        world.set(0, STABLE, 2048, SlotFlags::default(), 0..0);
    });
}

#[test]
fn a_vcpu_blocked_in_a_host_page_fault_holds_up_no_flush_and_no_other_vcpu() {
    with_a_blocked_vcpu(|world, other| {
        other.enter(2);
        other.quiesce();
        other.translate(Gpa(LOGGED.start << 12), Write).unwrap();
        other.leave();
        let flushes = world.vm.stats().remote_tlb_flush;
        world.harvest(&mut [0; 8]);
        assert_eq!(world.vm.stats().remote_tlb_flush, flushes + 1);
        other.enter(2);
        assert_ne!(other.attention().flag().load(SeqCst) & Attention::FLUSH, 0);
        other.quiesce();
        other
            .translate(Gpa((STABLE.start + 700) << 12), Write)
            .unwrap();
        other.leave();
    });
}
