//! Two operations, interleaved at every step of the first: the *victim* is stopped at its n-th step (a
//! table reached, a page resolved, a frame allocated, a wait), the *intruder* runs until it is done or
//! must wait, then the victim goes on; for every n. Meanwhile a *holder*, a vCPU that acknowledges
//! flushes only when it must, uses the translations it was given before, and checks each use.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use slat::{
    Access::{self, *},
    Attention, Config, Ept, Gpa, Level, Region, SlotFlags, Stop, Vcpu, Vm,
};
use slat_model::{Event, Harvests, HostChange, HostMemory, SimPlatform, Witness};

type TestVm = Vm<SimPlatform, Ept>;

const PAGES: u64 = 2048;
const NONE: SlotFlags = SlotFlags(0);
const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;

/// A VM with one slot, and what is known about it.
struct World {
    vm: Arc<TestVm>,
    witness: Witness,
    /// Writes to pages of the slot, by their number in it.
    harvests: Harvests,
    base: Mutex<u64>,
    flags: Mutex<SlotFlags>,
    /// Every write must be in the log.
    logging: AtomicBool,
}

impl World {
    /// Host pages 0..1024 stand behind the slot at frame `base`.
    const SLOT_PAGES: u64 = 1024;

    fn new(level: Level, flags: SlotFlags) -> Arc<World> {
        let platform = SimPlatform::new(PAGES);
        platform.host.change(&(0..PAGES), remap(level));
        let world = World {
            vm: Vm::new(platform, Config::default()).unwrap(),
            witness: Witness::new(4096),
            harvests: Harvests::new(Self::SLOT_PAGES),
            base: Mutex::new(0),
            flags: Mutex::new(flags),
            logging: AtomicBool::new(flags == LOGGED),
        };
        world.create(0);
        Arc::new(world)
    }

    fn gfns(&self) -> Range<u64> {
        let base = *self.base.lock().unwrap();
        base..base + Self::SLOT_PAGES
    }

    fn set(&self, gfns: Range<u64>, host_page: u64) {
        let region = Region {
            slot: 0,
            flags: *self.flags.lock().unwrap(),
            gpa: Gpa(gfns.start << 12),
            size: (gfns.end - gfns.start) << 12,
            backing: HostMemory::hva(host_page),
            private: None,
        };
        self.vm.set_memory_region(0, &region).unwrap();
    }

    fn create(&self, host_page: u64) {
        self.witness.allow(self.gfns(), host_page);
        self.set(self.gfns(), host_page);
        self.witness.settle(0..0, self.gfns());
    }

    fn delete(&self) {
        self.set(0..0, 0);
        self.witness.settle(self.gfns(), 0..0);
        self.harvests.forget();
    }

    fn shift(&self, base: u64) {
        let from = self.gfns();
        *self.base.lock().unwrap() = base;
        self.witness.allow(self.gfns(), 0);
        self.set(self.gfns(), 0);
        self.witness.settle(from, self.gfns());
    }

    fn flags(&self, flags: SlotFlags) {
        *self.flags.lock().unwrap() = flags;
        self.logging.store(false, SeqCst);
        self.set(self.gfns(), 0);
        self.logging.store(flags == LOGGED, SeqCst);
    }

    fn invalidate(&self, pages: Range<u64>, change: HostChange) {
        let guard = self.vm.invalidate(HostMemory::hvas(&pages));
        self.vm.platform().host.change(&pages, change);
        drop(guard);
    }

    fn harvest(&self) {
        let mut bitmap = [0; World::SLOT_PAGES as usize / 64];
        self.harvests
            .harvest(&mut bitmap, |b| self.vm.get_dirty_log(0, 0, b).unwrap());
    }

    /// One access by a vCPU of its own, with one use of what it was given.
    fn touch(&self, gfn: u64, access: Access) {
        let mut vcpu = self.vm.create_vcpu().unwrap();
        vcpu.enter(1);
        vcpu.quiesce();
        self.access(&mut vcpu, gfn, access);
        vcpu.leave();
    }

    /// The same by a vCPU that is inside and remembers nothing.
    fn access(&self, vcpu: &mut Vcpu<SimPlatform, Ept>, gfn: u64, access: Access) {
        loop {
            match vcpu.translate(Gpa(gfn << 12), access) {
                Ok(translation) => {
                    self.use_page(gfn, &translation, access);
                    if access == Write {
                        self.wrote(gfn);
                    }
                    return;
                }
                Err(Stop::Retry) => vcpu.quiesce(),
                Err(Stop::Mmio { .. }) => return,
                Err(other) => panic!("{other}"),
            }
        }
    }

    fn wrote(&self, gfn: u64) {
        if self.logging.load(SeqCst) {
            self.harvests.write(gfn - self.gfns().start);
        }
    }

    fn use_page(&self, gfn: u64, translation: &slat::Translation, access: Access) {
        let platform = self.vm.platform();
        let used = self
            .witness
            .check(&platform.host, gfn, translation, access == Write);
        if let Err(why) = used {
            platform.note(why);
        }
    }

    /// When all is quiet.
    fn check(&self) {
        let platform = self.vm.platform();
        platform.check();
        self.vm.audit().unwrap_or_else(|e| panic!("{e}"));
        for gfn in [0, 1, 2, 7, 8, 511, 512, 700, 1023, 1024, 1030] {
            self.touch(gfn, Read);
        }
        if self.logging.load(SeqCst) {
            self.harvest();
            assert_eq!(self.harvests.lost(), None, "a write is in no dirty log");
        }
        self.vm.audit().unwrap_or_else(|e| panic!("{e}"));
        platform.check();
    }
}

const fn remap(level: Level) -> HostChange {
    HostChange::Remap {
        level,
        writable: true,
        device: false,
    }
}

#[derive(Default)]
struct Progress {
    steps: usize,
    paused: bool,
    resumed: bool,
    victim_done: bool,
    /// Both have done what they can without the holder.
    holder_may_quiesce: bool,
}

type Act = fn(&World);

/// Runs `victim` once for each of its steps, with `intruder` in between. `held`: what the holder uses.
fn interleave(
    prepare: impl Fn() -> Arc<World>,
    held: &[(u64, Access)],
    victim: Act,
    intruder: Act,
) {
    for step in 1.. {
        let world = prepare();
        let progress = Arc::new((Mutex::new(Progress::default()), Condvar::new()));
        world.vm.platform().set_hook({
            let progress = progress.clone();
            move |event| on_event(&progress, event, step)
        });
        let stop = AtomicBool::new(false);
        let ready = AtomicBool::new(held.is_empty());
        let mut steps_left = false;
        thread::scope(|scope| {
            if !held.is_empty() {
                scope.spawn(|| hold(&world, held, &ready, &stop, &progress.0));
            }
            while !ready.load(SeqCst) {
                thread::yield_now();
            }
            let start = |name: &str, act: Act| {
                let (world, progress) = (world.clone(), progress.clone());
                let done_as_victim = name == "victim";
                let run = move || {
                    act(&world);
                    let mut now = progress.0.lock().unwrap();
                    now.victim_done |= done_as_victim;
                    now.resumed |= !done_as_victim;
                    now.holder_may_quiesce |= now.resumed;
                    progress.1.notify_all();
                };
                let thread = thread::Builder::new().name(name.into());
                thread.spawn_scoped(scope, run).unwrap()
            };
            let victim = start("victim", victim);
            {
                let mut now = progress.0.lock().unwrap();
                while !now.paused && !now.victim_done {
                    now = progress.1.wait(now).unwrap();
                }
                steps_left = now.paused;
            }
            let intruder = start("intruder", intruder);
            intruder.join().unwrap();
            victim.join().unwrap();
            stop.store(true, SeqCst);
        });
        world.vm.platform().clear_hook();
        world.check();
        if !steps_left {
            assert!(step > 1, "the victim had hardly a step");
            return;
        }
    }
}

fn on_event(progress: &(Mutex<Progress>, Condvar), event: Event, step: usize) {
    let thread = thread::current();
    let waits = matches!(event, Event::Wait(_));
    match thread.name() {
        Some("victim") => {
            let mut now = progress.0.lock().unwrap();
            now.steps += 1;
            if now.steps == step {
                now.paused = true;
                progress.1.notify_all();
                while !now.resumed {
                    now = progress.1.wait(now).unwrap();
                }
            }
            now.holder_may_quiesce |= waits;
        }
        Some("intruder") if waits => {
            let mut now = progress.0.lock().unwrap();
            now.resumed = true;
            now.holder_may_quiesce = true;
            progress.1.notify_all();
        }
        _ => {}
    }
}

/// Gets translations, and uses them until a flush is asked for and nobody can go on without it.
fn hold(
    world: &World,
    held: &[(u64, Access)],
    ready: &AtomicBool,
    stop: &AtomicBool,
    progress: &Mutex<Progress>,
) {
    let mut vcpu = world.vm.create_vcpu().unwrap();
    vcpu.enter(2);
    vcpu.quiesce();
    let mut tlb = Vec::new();
    let get = |vcpu: &mut Vcpu<SimPlatform, Ept>, tlb: &mut Vec<_>| {
        for &(gfn, access) in held {
            match vcpu.translate(Gpa(gfn << 12), access) {
                Ok(translation) => tlb.push((gfn, access, translation)),
                Err(Stop::Retry) => {
                    tlb.clear();
                    vcpu.quiesce();
                }
                Err(_) => {}
            }
        }
    };
    while tlb.len() < held.len() {
        tlb.clear();
        get(&mut vcpu, &mut tlb);
    }
    ready.store(true, SeqCst);
    while !stop.load(SeqCst) {
        for (gfn, access, translation) in &tlb {
            world.use_page(*gfn, translation, *access);
            if *access == Write {
                world.wrote(*gfn);
            }
        }
        let asked = vcpu.attention().flag().load(SeqCst) & Attention::FLUSH != 0;
        if asked && progress.lock().unwrap().holder_may_quiesce {
            tlb.clear();
            vcpu.quiesce();
            // It goes on at once: what is still in the tables is used again.
            get(&mut vcpu, &mut tlb);
        }
        thread::yield_now();
    }
    vcpu.leave();
}

const SMALL: fn() -> Arc<World> = || World::new(Level::PAGE, NONE);
const HUGE: fn() -> Arc<World> = || World::new(Level::MEGA, NONE);

/// Every page mapped and writable, by huge leaves.
const MAPPED: fn() -> Arc<World> = || {
    let world = HUGE();
    world.touch(1, Write);
    world.touch(700, Write);
    world
};

/// Logged, pages 1 and 2 write-protected for the log.
const LOGGED_WORLD: fn() -> Arc<World> = || {
    let world = World::new(Level::MEGA, LOGGED);
    world.touch(1, Read);
    world.touch(2, Write);
    world.harvest();
    world
};

const WRITE_1: Act = |w| w.touch(1, Write);
const READ_1: Act = |w| w.touch(1, Read);
const REMAP_1: Act = |w| w.invalidate(1..2, remap(Level::PAGE));
const REMAP_ALL_BUT_ENDS: Act = |w| w.invalidate(1..1023, remap(Level::PAGE));
const REMAP_HUGE: Act = |w| w.invalidate(0..1024, remap(Level::MEGA));
const REPLACE: Act = |w| {
    w.delete();
    w.create(1024);
};
const SHIFT: Act = |w| w.shift(1);
const HARVEST: Act = |w| w.harvest();

#[test]
fn a_fault_and_an_invalidation_of_its_page() {
    for world in [SMALL, HUGE, LOGGED_WORLD] {
        for victim in [WRITE_1, READ_1] {
            interleave(world, &[], victim, REMAP_1);
            interleave(world, &[(3, Read)], victim, REMAP_HUGE);
        }
    }
}

#[test]
fn a_fault_and_an_invalidation_of_another_page_of_its_leaf() {
    interleave(HUGE, &[], |w| w.touch(300, Write), REMAP_1);
    interleave(MAPPED, &[(9, Write)], REMAP_1, |w| w.touch(300, Write));
}

#[test]
fn a_fault_that_begins_during_an_invalidation() {
    for world in [SMALL, HUGE, LOGGED_WORLD] {
        interleave(world, &[(1, Read)], REMAP_1, WRITE_1);
        interleave(world, &[(1, Read)], REMAP_HUGE, WRITE_1);
    }
}

#[test]
fn a_fault_and_the_replacement_of_its_slot() {
    for world in [SMALL, HUGE, LOGGED_WORLD] {
        interleave(world, &[], WRITE_1, REPLACE);
        interleave(world, &[(1, Read)], REPLACE, WRITE_1);
    }
}

#[test]
fn a_slot_that_leaves_while_its_backing_is_invalidated() {
    let delete: Act = |w| w.delete();
    let elsewhere: Act = |w| w.shift(2048);
    for leave in [delete, elsewhere] {
        interleave(MAPPED, &[(1, Write), (700, Read)], leave, REMAP_1);
        interleave(MAPPED, &[(1, Write), (700, Read)], REMAP_1, leave);
    }
}

#[test]
fn a_fault_and_a_slot_that_moves_over_itself() {
    for world in [SMALL, HUGE, LOGGED_WORLD] {
        interleave(world, &[], WRITE_1, SHIFT);
        interleave(world, &[], |w| w.touch(2, Write), SHIFT);
        interleave(world, &[(5, Read)], SHIFT, |w| w.touch(2, Write));
    }
}

#[test]
fn a_write_and_a_harvest_of_its_log() {
    interleave(LOGGED_WORLD, &[(2, Write)], WRITE_1, HARVEST);
    interleave(LOGGED_WORLD, &[(2, Write)], HARVEST, WRITE_1);
    interleave(LOGGED_WORLD, &[(1, Write)], HARVEST, WRITE_1);
}

#[test]
fn an_invalidation_that_finds_nothing_waits_for_whoever_is_zapping() {
    for world in [SMALL, HUGE] {
        interleave(
            world,
            &[(1, Read), (700, Read)],
            REMAP_ALL_BUT_ENDS,
            REMAP_1,
        );
    }
}

#[test]
fn a_log_taken_while_its_pages_are_zapped_loses_no_write() {
    let held = [(1, Write), (700, Write)];
    interleave(LOGGED_WORLD, &held, REMAP_ALL_BUT_ENDS, HARVEST);
    interleave(LOGGED_WORLD, &held, HARVEST, REMAP_ALL_BUT_ENDS);
}

#[test]
fn the_begin_and_the_end_of_logging_beside_faults_and_invalidations() {
    let begin: Act = |w| w.flags(LOGGED);
    let end: Act = |w| w.flags(NONE);
    for other in [WRITE_1, READ_1, REMAP_1, REMAP_HUGE] {
        interleave(HUGE, &[], other, begin);
        interleave(MAPPED, &[], other, begin);
        interleave(MAPPED, &[(3, Write)], begin, other);
        interleave(HUGE, &[(3, Read)], begin, other);
        interleave(LOGGED_WORLD, &[], other, end);
        interleave(LOGGED_WORLD, &[(3, Read)], end, other);
    }
}

/// `MAPPED` under the policies that decide who may take a huge leaf away, and how writes are told.
fn mapped_with(policies: &'static [(&'static str, &'static str)]) -> impl Fn() -> Arc<World> {
    move || {
        let world = HUGE();
        for (name, value) in policies {
            world.vm.set_policy(name, value).unwrap();
        }
        world.touch(1, Write);
        world.touch(700, Write);
        world
    }
}

/// Logging begins while something else takes translations away by what it knew before, and the guest
/// writes: whatever the policies, the log names the page.
#[test]
fn a_write_after_logging_began_is_in_the_log_whatever_is_zapped_meanwhile() {
    const WHOLE: &[(&str, &str)] = &[("nx_huge_pages", "on"), ("nx_huge_pages_split", "off")];
    const SPLIT: &[(&str, &str)] = &[("nx_huge_pages", "on"), ("nx_huge_pages_split", "on")];
    const OFF: &[(&str, &str)] = &[("nx_huge_pages", "off")];
    const LATE: [&[(&str, &str)]; 2] = [
        &[("dirty_log", "dirty-bit"), ("eager_page_split", "off")],
        &[("dirty_log", "write-protect"), ("eager_page_split", "off")],
    ];
    let begin_and_write: Act = |w| {
        w.flags(LOGGED);
        w.touch(3, Write);
    };
    let victims: [Act; 6] = [
        |w| w.touch(1, Execute),
        |w| w.touch(1, Write),
        |w| w.vm.zap(0, slat::Gfn(0)..slat::Gfn(512)),
        |w| _ = w.vm.recover_nx_huge_pages(),
        |w| w.vm.zap(0, slat::Gfn(300)..slat::Gfn(301)),
        REMAP_HUGE,
    ];
    let turn_nx_on: Act = |w| w.vm.set_policy("nx_huge_pages", "on").unwrap();
    for huge in [WHOLE, SPLIT, OFF] {
        for log in LATE {
            let policies: &'static [_] = Vec::leak([huge, log].concat());
            let prepare = mapped_with(policies);
            for victim in victims {
                interleave(&prepare, &[], victim, begin_and_write);
            }
            if huge == OFF {
                interleave(&prepare, &[], turn_nx_on, begin_and_write);
            }
        }
    }
}

/// A client says how logs are to begin while one does.
#[test]
fn a_log_that_begins_while_initially_set_is_switched_names_every_write() {
    let begin_and_write: Act = |w| {
        w.flags(LOGGED);
        w.touch(3, Write);
    };
    let switch_on: Act = |w| w.vm.set_manual_dirty_log(true, true);
    let switch_off: Act = |w| w.vm.set_manual_dirty_log(false, false);
    let initially_set: fn() -> Arc<World> = || {
        let world = MAPPED();
        world.vm.set_manual_dirty_log(true, true);
        world
    };
    // The holder makes the change wait between the making of the log and the look at the leaves.
    interleave(MAPPED, &[(700, Read)], begin_and_write, switch_on);
    interleave(initially_set, &[(700, Read)], begin_and_write, switch_off);
}

/// The log of a slot goes with it. What a fault finds at the slot's new place may be a leaf of its old
/// one, whose dirty bit says that another page was written.
#[test]
fn a_slot_that_moves_over_itself_takes_its_dirty_bits_along() {
    let written: fn() -> Arc<World> = || {
        let world = World::new(Level::PAGE, NONE);
        // Its old leaf does not allow what its neighbour's new one does.
        let device = HostChange::Remap {
            level: Level::PAGE,
            writable: true,
            device: true,
        };
        world.vm.platform().host.change(&(2..3), device);
        world.vm.set_policy("dirty_log", "dirty-bit").unwrap();
        world.flags(LOGGED);
        for gfn in 1..9 {
            world.touch(gfn, Write);
        }
        world
    };
    for intruder in [READ_1, |w| w.touch(2, Read), |w| w.touch(2, Execute)] {
        interleave(written, &[], SHIFT, intruder);
    }
}

#[test]
fn two_faults_on_one_page() {
    let huge_where_small_are: fn() -> Arc<World> = || {
        let world = World::new(Level::MEGA, NONE);
        world.vm.policy().set("huge_pages", "off").unwrap();
        world.touch(1, Write);
        world.touch(2, Write);
        world.vm.policy().set("huge_pages", "on").unwrap();
        world
    };
    for world in [SMALL, HUGE, LOGGED_WORLD, huge_where_small_are] {
        interleave(world, &[], WRITE_1, READ_1);
        interleave(world, &[], READ_1, WRITE_1);
    }
    // One installs the huge leaf, the other had the table that it replaces.
    interleave(
        huge_where_small_are,
        &[(2, Write)],
        |w| w.touch(9, Read),
        |w| w.touch(10, Write),
    );
    interleave(
        huge_where_small_are,
        &[(2, Write)],
        |w| w.touch(9, Read),
        REMAP_1,
    );
}

#[test]
fn an_mmio_access_and_a_slot_that_appears_there() {
    let create: Act = |w| w.create(0);
    let create_and_touch: Act = |w| {
        w.create(0);
        w.touch(5, Write);
    };
    let empty: fn() -> Arc<World> = || {
        let world = World::new(Level::MEGA, NONE);
        world.touch(700, Read);
        world.delete();
        world
    };
    interleave(empty, &[], WRITE_1, create);
    interleave(empty, &[], WRITE_1, create_and_touch);
    interleave(empty, &[], create_and_touch, WRITE_1);
}

/// Three phases: the slot is published at its new place and its old leaves still stand; the fault looks
/// at them, up to its n-th step; they are zapped; the fault goes on.
#[test]
fn a_fault_that_sees_old_leaves_of_a_slot_that_moves_over_itself() {
    for step in 1.. {
        let world = LOGGED_WORLD();
        let progress = Arc::new((Mutex::new(Progress::default()), Condvar::new()));
        let until = |reached: &dyn Fn(&Progress) -> bool| {
            let mut now = progress.0.lock().unwrap();
            while !reached(&now) {
                now = progress.1.wait(now).unwrap();
            }
            now
        };
        world.vm.platform().set_hook({
            let progress = progress.clone();
            move |event| {
                let mut now = progress.0.lock().unwrap();
                match (thread::current().name(), event) {
                    // The mover stops once, at the root of its zap: `paused` until `resumed`.
                    (Some("mover"), Event::Entries(_)) if !now.paused => {
                        now.paused = true;
                        progress.1.notify_all();
                        while !now.resumed {
                            now = progress.1.wait(now).unwrap();
                        }
                    }
                    (Some("mover"), Event::Wait(_)) => now.holder_may_quiesce = true,
                    // It waits for the mover to get on: for its flush, or a table's lock.
                    (Some("fault"), Event::Wait(_)) => now.resumed = true,
                    (Some("fault"), _) => {
                        now.steps += 1;
                        let stop = now.steps == step;
                        progress.1.notify_all();
                        while stop && !now.holder_may_quiesce {
                            now = progress.1.wait(now).unwrap();
                        }
                    }
                    _ => {}
                }
                progress.1.notify_all();
            }
        });
        let steps = thread::scope(|scope| {
            let start = |name: &str, act: Act| {
                let (world, progress) = (&world, &progress);
                let run = move || {
                    act(world);
                    let mut now = progress.0.lock().unwrap();
                    // Whoever is done keeps nobody waiting.
                    let fault = thread::current().name() == Some("fault");
                    now.victim_done |= fault;
                    now.holder_may_quiesce |= !fault;
                    progress.1.notify_all();
                };
                let thread = thread::Builder::new().name(name.into());
                thread.spawn_scoped(scope, run).unwrap()
            };
            let mover = start("mover", SHIFT);
            drop(until(&|now| now.paused));
            let fault = start("fault", |w| w.touch(2, Write));
            let mut now = until(&|now| now.steps >= step || now.victim_done || now.resumed);
            now.resumed = true;
            progress.1.notify_all();
            drop(now);
            mover.join().unwrap();
            fault.join().unwrap();
            progress.0.lock().unwrap().steps
        });
        world.vm.platform().clear_hook();
        world.check();
        if steps < step {
            return;
        }
    }
}
