//! Pairs of operations, the second of which runs at every step of the first. Results stay true, and no write is lost.

use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use slat::{Access::*, Format, Level};
use slat::{DirtyLogMethod, Setting, Switch};
use slat_model::{Event, HostChange, PageKind};

use crate::harness::{Act, LOGGED, NONE, Prepare, World};
use crate::interleave::{Progress, Scene, interleave};

impl<F: Format> World<F> {
    pub fn a_fault_and_an_invalidation_of_its_page() {
        for world in [Self::SMALL, Self::HUGE, Self::LOGGED_WORLD] {
            for victim in [Self::WRITE_1, Self::READ_1] {
                interleave(world, &[], victim, Self::REMAP_1);
                interleave(world, &[(3, Read)], victim, Self::REMAP_HUGE);
            }
        }
    }

    pub fn a_fault_and_an_invalidation_of_another_page_of_its_leaf() {
        interleave(Self::HUGE, &[], |w| w.touch(300, Write), Self::REMAP_1);
        interleave(Self::MAPPED, &[(9, Write)], Self::REMAP_1, |w| {
            w.touch(300, Write)
        });
    }

    pub fn a_fault_that_begins_during_an_invalidation() {
        for world in [Self::SMALL, Self::HUGE, Self::LOGGED_WORLD] {
            interleave(world, &[(1, Read)], Self::REMAP_1, Self::WRITE_1);
            interleave(world, &[(1, Read)], Self::REMAP_HUGE, Self::WRITE_1);
        }
    }

    pub fn a_fault_and_the_replacement_of_its_slot() {
        for world in [Self::SMALL, Self::HUGE, Self::LOGGED_WORLD] {
            interleave(world, &[], Self::WRITE_1, Self::REPLACE);
            interleave(world, &[(1, Read)], Self::REPLACE, Self::WRITE_1);
        }
    }

    pub fn a_slot_that_leaves_while_its_backing_is_invalidated() {
        let delete: Act<F> = |w| w.delete();
        let elsewhere: Act<F> = |w| w.shift(2048);
        for leave in [delete, elsewhere] {
            interleave(
                Self::MAPPED,
                &[(1, Write), (700, Read)],
                leave,
                Self::REMAP_1,
            );
            interleave(
                Self::MAPPED,
                &[(1, Write), (700, Read)],
                Self::REMAP_1,
                leave,
            );
        }
    }

    pub fn a_fault_and_a_slot_that_moves_over_itself() {
        for world in [Self::SMALL, Self::HUGE, Self::LOGGED_WORLD] {
            interleave(world, &[], Self::WRITE_1, Self::SHIFT);
            interleave(world, &[], |w| w.touch(2, Write), Self::SHIFT);
            interleave(world, &[(5, Read)], Self::SHIFT, |w| w.touch(2, Write));
        }
    }

    pub fn a_write_and_a_harvest_of_its_log() {
        interleave(
            Self::LOGGED_WORLD,
            &[(2, Write)],
            Self::WRITE_1,
            Self::HARVEST,
        );
        interleave(
            Self::LOGGED_WORLD,
            &[(2, Write)],
            Self::HARVEST,
            Self::WRITE_1,
        );
        interleave(
            Self::LOGGED_WORLD,
            &[(1, Write)],
            Self::HARVEST,
            Self::WRITE_1,
        );
    }

    pub fn an_invalidation_that_finds_nothing_waits_for_whoever_is_zapping() {
        for world in [Self::SMALL, Self::HUGE] {
            interleave(
                world,
                &[(1, Read), (700, Read)],
                Self::REMAP_ALL_BUT_ENDS,
                Self::REMAP_1,
            );
        }
    }

    pub fn a_log_taken_while_its_pages_are_zapped_loses_no_write() {
        let held = [(1, Write), (700, Write)];
        interleave(
            Self::LOGGED_WORLD,
            &held,
            Self::REMAP_ALL_BUT_ENDS,
            Self::HARVEST,
        );
        interleave(
            Self::LOGGED_WORLD,
            &held,
            Self::HARVEST,
            Self::REMAP_ALL_BUT_ENDS,
        );
    }

    pub fn the_begin_and_the_end_of_logging_beside_faults_and_invalidations() {
        let begin: Act<F> = |w| w.flags(LOGGED);
        let end: Act<F> = |w| w.flags(NONE);
        for other in [Self::WRITE_1, Self::READ_1, Self::REMAP_1, Self::REMAP_HUGE] {
            interleave(Self::HUGE, &[], other, begin);
            interleave(Self::MAPPED, &[], other, begin);
            interleave(Self::MAPPED, &[(3, Write)], begin, other);
            interleave(Self::HUGE, &[(3, Read)], begin, other);
            interleave(Self::LOGGED_WORLD, &[], other, end);
            interleave(Self::LOGGED_WORLD, &[(3, Read)], end, other);
        }
    }

    /// Returns the world `MAPPED` with the given policies, which decide which operations zap a huge leaf, and how
    /// writes are detected.
    fn mapped_with(policies: &[(&'static str, &'static str)]) -> Arc<Self> {
        let world = Self::HUGE();
        for (name, value) in policies {
            world.vm.set_policy(Setting::parse(name, value).unwrap());
        }
        world.touch(1, Write);
        world.touch(700, Write);
        world
    }

    /// Dirty logging starts while another operation zaps entries that it looked up before, and the guest writes. With
    /// each combination of policies, the log has the write.
    pub fn a_write_after_logging_began_is_in_the_log_whatever_is_zapped_meanwhile() {
        const WHOLE: &[(&str, &str)] = &[("nx_huge_pages", "on"), ("nx_huge_pages_split", "off")];
        const SPLIT: &[(&str, &str)] = &[("nx_huge_pages", "on"), ("nx_huge_pages_split", "on")];
        const OFF: &[(&str, &str)] = &[("nx_huge_pages", "off")];
        const LATE: [&[(&str, &str)]; 2] = [
            &[("dirty_log", "dirty-bit"), ("eager_page_split", "off")],
            &[("dirty_log", "write-protect"), ("eager_page_split", "off")],
        ];
        let begin_and_write: Act<F> = |w| {
            w.flags(LOGGED);
            w.touch(3, Write);
        };
        let victims: [Act<F>; 6] = [
            |w| w.touch(1, Execute),
            |w| w.touch(1, Write),
            |w| w.vm.zap(0, Self::frames(0..512)),
            |w| _ = w.vm.recover_nx_huge_pages(),
            |w| w.vm.zap(0, Self::frames(300..301)),
            Self::REMAP_HUGE,
        ];
        let turn_nx_on: Act<F> = |w| w.vm.set_policy(Setting::NxHugePages(Switch::On));
        for huge in [WHOLE, SPLIT, OFF] {
            for log in LATE {
                let policies = [huge, log].concat();
                let prepare = || Self::mapped_with(&policies);
                for victim in victims {
                    interleave(prepare, &[], victim, begin_and_write);
                }
                if huge == OFF {
                    interleave(prepare, &[], turn_nx_on, begin_and_write);
                }
            }
        }
    }

    /// A client changes "initially set" while dirty logging starts.
    pub fn a_log_that_begins_while_initially_set_is_switched_names_every_write() {
        let begin_and_write: Act<F> = |w| {
            w.flags(LOGGED);
            w.touch(3, Write);
        };
        let switch_on: Act<F> = |w| w.vm.set_manual_dirty_log(true, true);
        let switch_off: Act<F> = |w| w.vm.set_manual_dirty_log(false, false);
        let initially_set: Prepare<F> = || {
            let world = Self::MAPPED();
            world.vm.set_manual_dirty_log(true, true);
            world
        };
        // Because of the holder, the change waits after it has made the log and before it visits the leaves.
        interleave(Self::MAPPED, &[(700, Read)], begin_and_write, switch_on);
        interleave(initially_set, &[(700, Read)], begin_and_write, switch_off);
    }

    /// A slot's log moves with the slot. At the slot's new frames, a fault may find one of its old leaves, whose dirty
    /// bit belongs to another page.
    pub fn a_slot_that_moves_over_itself_takes_its_dirty_bits_along() {
        let written: Prepare<F> = || {
            let world = Self::new(Level::PAGE, NONE);
            // The page's old leaf allows less than the new leaf of its neighbour.
            let device = HostChange::Remap {
                level: Level::PAGE,
                writable: true,
                kind: PageKind::Device,
            };
            world.vm.platform().host.change(&(2..3), device);
            world
                .vm
                .set_policy(Setting::DirtyLog(DirtyLogMethod::DirtyBit));
            world.flags(LOGGED);
            for gfn in 1..9 {
                world.touch(gfn, Write);
            }
            world
        };
        let intruders: [Act<F>; 3] = [Self::READ_1, |w| w.touch(2, Read), |w| w.touch(2, Execute)];
        for intruder in intruders {
            interleave(written, &[], Self::SHIFT, intruder);
        }
    }

    pub fn two_faults_on_one_page() {
        let huge_where_small_are: Prepare<F> = || {
            let world = Self::new(Level::MEGA, NONE);
            world.vm.set_policy(Setting::HugePages(Switch::Off));
            world.touch(1, Write);
            world.touch(2, Write);
            world.vm.set_policy(Setting::HugePages(Switch::On));
            world
        };
        for world in [
            Self::SMALL,
            Self::HUGE,
            Self::LOGGED_WORLD,
            huge_where_small_are,
        ] {
            interleave(world, &[], Self::WRITE_1, Self::READ_1);
            interleave(world, &[], Self::READ_1, Self::WRITE_1);
        }
        // One thread installs the huge leaf. The other has found the table that the huge leaf replaces.
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
            Self::REMAP_1,
        );
    }

    pub fn an_mmio_access_and_a_slot_that_appears_there() {
        let create: Act<F> = |w| w.create(0);
        let create_and_touch: Act<F> = |w| {
            w.create(0);
            w.touch(5, Write);
        };
        let empty: Prepare<F> = || {
            let world = Self::new(Level::MEGA, NONE);
            world.touch(700, Read);
            world.delete();
            world
        };
        interleave(empty, &[], Self::WRITE_1, create);
        interleave(empty, &[], Self::WRITE_1, create_and_touch);
        interleave(empty, &[], create_and_touch, Self::WRITE_1);
    }

    /// Three phases: the move publishes the slot at its new frames, where the old leaves are still mapped; the fault
    /// runs up to its n-th step, and finds these leaves; the move zaps them, and the fault continues.
    pub fn a_fault_that_sees_old_leaves_of_a_slot_that_moves_over_itself() {
        for step in 1.. {
            let world = Self::LOGGED_WORLD();
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
                        // The thread that moves the slot pauses once, at the root of its zap: from `paused` to
                        // `resumed`.
                        (Some("mover"), Event::Entries(_)) if !now.paused => {
                            now.paused = true;
                            progress.1.notify_all();
                            while !now.resumed {
                                now = progress.1.wait(now).unwrap();
                            }
                        }
                        (Some("mover"), Event::Wait(_)) => now.holder_may_quiesce = true,
                        // The fault waits for the move's flush, or for the lock of a table that the move holds.
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
                let start = |name: &str, act: Act<F>| {
                    let (world, progress) = (&world, &progress);
                    let run = move || {
                        act(world);
                        let mut now = progress.0.lock().unwrap();
                        // When a thread is done, no other thread waits for it any more.
                        let fault = thread::current().name() == Some("fault");
                        now.victim_done |= fault;
                        now.holder_may_quiesce |= !fault;
                        progress.1.notify_all();
                    };
                    let thread = thread::Builder::new().name(name.into());
                    thread.spawn_scoped(scope, run).unwrap()
                };
                let mover = start("mover", Self::SHIFT);
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
}
