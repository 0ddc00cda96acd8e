//! Two clients change slots, logs or attributes at the same time. Each relies on the result of its own call, even if
//! the other's operation is not finished.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;

use slat::{Access::*, Format, Level, MemoryAttributes, SlotFlags, WaitFor};
use slat::{DirtyLogMethod, MmuKind, Setting};
use slat_model::Event;

use crate::common::config;
use crate::harness::{Act, LOGGED, NONE, Prepare, SLOT_PAGES, World};
use crate::interleave::{Scene, interleave};

impl<F: Format> World<F> {
    /// The slot's new position, in another GiB than the old one.
    const FAR: u64 = 1 << 18;

    fn roomy(level: Level, flags: SlotFlags) -> Arc<Self> {
        Self::with_frames(level, flags, Self::FAR + SLOT_PAGES)
    }

    /// A TLB may still contain a leaf of the slot's old position when the slot's log is taken.
    pub fn a_log_taken_while_its_slot_moves_loses_no_write() {
        let far: Act<F> = |w| w.shift(Self::FAR);
        let dirty_bits: Prepare<F> = || {
            let world = Self::roomy(Level::PAGE, NONE);
            world
                .vm
                .set_policy(Setting::DirtyLog(DirtyLogMethod::DirtyBit));
            world.flags(LOGGED);
            world.touch(2, Write);
            world
        };
        let protected: Prepare<F> = || {
            let world = Self::roomy(Level::PAGE, LOGGED);
            (0..70).for_each(|gfn| world.touch(gfn, Write));
            world
        };
        for world in [dirty_bits, protected] {
            let held = [(2, Write), (700, Write)];
            interleave(world, &held, far, Self::HARVEST);
            interleave(world, &held, Self::HARVEST, far);
            interleave(world, &held, Self::SHIFT, Self::HARVEST);
            interleave(world, &held, Self::HARVEST, Self::SHIFT);
        }
    }

    pub fn logging_that_begins_beside_a_move_misses_no_write() {
        let mapped: Prepare<F> = || {
            let world = Self::roomy(Level::MEGA, NONE);
            world.touch(1, Write);
            world
        };
        let far: Act<F> = |w| w.shift(Self::FAR);
        let begin: Act<F> = |w| {
            w.flags(LOGGED);
            w.expect(
                w.vm.platform()
                    .tlb
                    .check_gone(0, &(0..Self::at(SLOT_PAGES))),
            );
        };
        interleave(mapped, &[(1, Write), (700, Write)], far, begin);
    }

    /// After the creation of a slot has returned, no access may find the pages of the slot that was there before.
    pub fn a_slot_that_appears_where_another_leaves_is_all_that_is_seen_there() {
        let create: Act<F> = |w| {
            let region = Self::region(1, 0..SLOT_PAGES, SLOT_PAGES);
            w.allow(0..SLOT_PAGES, SLOT_PAGES);
            // The old slot may still exist: then the creation fails.
            if w.vm.set_memory_region(0, &region).is_ok() {
                w.expect(
                    w.vm.platform()
                        .tlb
                        .check_backing(&(0..Self::at(SLOT_PAGES))),
                );
            }
        };
        let delete: Act<F> = |w| w.set(0..0, 0);
        let elsewhere: Act<F> = |w| {
            w.allow(2048..2048 + SLOT_PAGES, 0);
            w.set(2048..2048 + SLOT_PAGES, 0);
        };
        for leave in [delete, elsewhere] {
            interleave(Self::MAPPED, &[(1, Write), (700, Read)], leave, create);
        }
    }

    /// Like the test above of a slot that is created, but an existing slot moves to these frames.
    pub fn a_slot_that_moves_to_where_another_leaves_is_all_that_is_seen_there() {
        const OTHER: u64 = 4096 - SLOT_PAGES;
        let with_another = || {
            let world = Self::MAPPED();
            world.allow(OTHER..OTHER + SLOT_PAGES, SLOT_PAGES);
            world
                .vm
                .set_memory_region(0, &Self::region(1, OTHER..OTHER + SLOT_PAGES, SLOT_PAGES))
                .unwrap();
            world.touch(OTHER, Write);
            world
        };
        let come: Act<F> = |w| {
            w.allow(0..SLOT_PAGES, SLOT_PAGES);
            // The old slot may still exist: then the move fails.
            let here = Self::region(1, 0..SLOT_PAGES, SLOT_PAGES);
            if w.vm.set_memory_region(0, &here).is_ok() {
                w.expect(
                    w.vm.platform()
                        .tlb
                        .check_backing(&(0..Self::at(SLOT_PAGES))),
                );
            }
        };
        let delete: Act<F> = |w| w.set(0..0, 0);
        // Without a holder the move waits for no CPU, and returns before the flush of the other slot's deletion.
        for held in [&[][..], &[(1, Write), (700, Read)]] {
            interleave(with_another, held, delete, come);
        }
    }

    /// After a conversion to private has returned, no access may find the frames' shared pages, even if another thread
    /// made the conversion.
    pub fn a_conversion_to_what_is_being_converted_to() {
        let convert: Act<F> = |w| {
            w.allow(0..512, SLOT_PAGES);
            let private = MemoryAttributes::PRIVATE;
            w.vm.set_memory_attributes(Self::frames(0..512), private)
                .unwrap();
            w.expect(w.vm.platform().tlb.check_backing(&(0..Self::at(512))));
        };
        interleave(Self::two_backings, &[(1, Write)], convert, convert);
    }

    /// A zap looks up a slot. Then the slot moves to a range that overlaps its old one, and a leaf is installed there.
    /// The zap finds this leaf. The dirty bit of the leaf must be logged for the page at the new position of the slot,
    /// and not for the page that the old position gives.
    pub fn a_zap_that_knows_the_old_place_of_a_slot_notes_no_other_page() {
        if config().mmu == MmuKind::Direct {
            // With the direct MMU this cannot happen: the walk reaches no table for a frame that nothing maps, and
            // reads all other tables under the lock that the move needs.
            return;
        }
        const BUSY: u32 = 1 << 8;
        let world = Self::new(Level::PAGE, NONE);
        world
            .vm
            .set_policy(Setting::DirtyLog(DirtyLogMethod::DirtyBit));
        world.flags(LOGGED);
        // The zap flushes, so the move does not begin by waiting for it.
        world.touch(700, Write);
        world.vm.zap(0, Self::frames(700..701));
        let (moving, mover) = (AtomicBool::new(false), AtomicBool::new(false));
        let (moving, mover) = (Arc::new(moving), Arc::new(mover));
        let thread = Arc::new(Mutex::new(None));
        world.vm.platform().set_hook({
            let (world, thread, zap) = (world.clone(), thread.clone(), thread::current().id());
            let moves = mover.clone();
            move |event| {
                if matches!(event, Event::Wait(WaitFor::Reader(_))) {
                    moves.store(true, SeqCst);
                }
                // The zap reads the root of the tables.
                let walks = matches!(event, Event::Entries(_)) && thread::current().id() == zap;
                if !walks || moving.swap(true, SeqCst) {
                    return;
                }
                let other = world.clone();
                *thread.lock().unwrap() = Some(thread::spawn(move || other.shift(1)));
                while !moves.load(SeqCst) {
                    thread::yield_now();
                }
                // A vCPU that has to wait for the move leaves the wait, because its attention word is set.
                let mut vcpu = world.vm.create_vcpu().unwrap();
                vcpu.attention().raise(BUSY);
                vcpu.enter_unguarded(1);
                if let Ok(translation) = vcpu.translate(Self::gpa(2), Write) {
                    world.wrote(&translation);
                }
                vcpu.leave();
            }
        });
        world.vm.zap(0, Self::frames(2..3));
        thread.lock().unwrap().take().unwrap().join().unwrap();
        world.vm.platform().clear_hook();
        world.check();
    }
}
