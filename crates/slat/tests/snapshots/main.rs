//! Snapshots of a VM whose CPUs write all the time, compared with the VM's memory, byte for byte. Sometimes the CPUs
//! stop when the snapshot begins, so that there is a copy to compare with. Otherwise the memory itself shows whether it
//! is that of one moment ([`world`]). Some snapshots fail: the disk is full, the snapshot or a reader of the log is
//! dropped, there is no memory.
//!
//! `SLAT_SNAPSHOTS`: the number of snapshots of each format and MMU.

mod bytes;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/guest.rs"]
#[allow(unused_imports, reason = "the memory of guests has bytes of its own")]
mod guest;
mod world;

use std::sync::atomic::{AtomicBool, Ordering::*};
use std::thread;

use bytes::Saved;
use common::{direct, shadow, tdp};
use slat::format::{
    Ept5, Npt, Npt5, Stage2, Stage2Kib16, Stage2Kib64, Sv39x4, Sv48x4, Sv57x4, X86,
};
use slat::{Ept, Format, Granule, SnapshotError};
use slat_model::{FailingHeap, Rng};
use world::World;

#[global_allocator]
static HEAP: FailingHeap = FailingHeap;

/// What happens to a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Complete,
    /// It is dropped in the midst.
    Dropped,
    /// A page cannot be written to the disk, so the client drops the snapshot.
    DiskFull,
    /// A reader of the dirty log is dropped in the midst of an epoch.
    ReaderDropped,
    /// An allocation fails, and the call is repeated.
    NoMemory,
}

const FATES: [Fate; 8] = [
    Fate::Complete,
    Fate::Dropped,
    Fate::Complete,
    Fate::DiskFull,
    Fate::Complete,
    Fate::ReaderDropped,
    Fate::Complete,
    Fate::NoMemory,
];

/// Sets the flag when dropped, also if a check fails.
struct Stopper<'s>(&'s AtomicBool);

impl Drop for Stopper<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

fn save<F: Format>(world: &World<F>, fate: Fate, stopped: bool, rng: &mut Rng) {
    let room = match fate {
        Fate::DiskFull => rng.below(world.pages()),
        _ => world.pages(),
    };
    *world.saved.lock().unwrap() = Saved::new(&world.bytes, room);
    if fate == Fate::NoMemory {
        let begin = || world.vm.begin_snapshot().map(drop);
        let (refused, failed) = FailingHeap::failing(rng.below(4) as u32, false, begin);
        assert!(failed);
        assert_eq!(refused, Err(SnapshotError::OutOfMemory));
    }
    let mut reader = (fate == Fate::ReaderDropped).then(|| world.vm.log_reader().unwrap());
    let epoch = reader.as_mut().map(|reader| reader.begin());
    let before = world.written();
    let begin = || world.vm.begin_snapshot().unwrap();
    let (snapshot, reference) = match stopped {
        false => (begin(), None),
        true => world.while_stopped(|| {
            let reference = world.bytes.copy();
            (begin(), Some(reference))
        }),
    };
    let after = world.written();
    if fate == Fate::Dropped {
        let most = rng.below(world.pages());
        snapshot.keep_next(most);
        thread::yield_now();
    } else {
        while snapshot.keep_next(1 + rng.below(64)) > 0 && !world.saved.lock().unwrap().is_full {}
    }
    drop(epoch);
    drop(reader);
    let left = snapshot.pages_left();
    drop(snapshot);
    world.platform.take_kept(world.vm.id());

    let saved = world.saved.lock().unwrap();
    assert_eq!(saved.twice, None, "a page was given twice");
    let has_all = saved.given.iter().all(|given| *given);
    if !matches!(fate, Fate::Dropped | Fate::DiskFull) {
        assert!(has_all && left == 0 && !saved.is_full);
        world.check_moment(&saved, before, after);
    }
    if let (Some(reference), false) = (reference, saved.is_full) {
        for (page, words) in saved.pages() {
            let at = page as usize * words.len();
            assert_eq!(words, &reference[at..at + words.len()], "page {page}");
        }
    }
}

/// Saves a VM whose CPUs have `each` pages `times` times.
fn save_often<F: Format>(each: u64, is_nested: bool, times: u64) {
    let world = &World::<F>::new(each, is_nested);
    thread::scope(|scope| {
        let _stopper = Stopper(&world.stop);
        for cpu in 0..world::CPUS {
            scope.spawn(move || {
                let _stopper = Stopper(&world.stop);
                world.run_cpu(cpu);
            });
        }
        scope.spawn(|| world.keep_house(times));
        let mut rng = Rng::new(times);
        while world.written().contains(&0) && !world.stop.load(SeqCst) {
            thread::yield_now();
        }
        for time in 0..times {
            let fate = FATES[(time % 8) as usize];
            save(world, fate, time / 8 % 2 == 0, &mut rng);
        }
    });
    println!(
        "{}: {times} snapshots of {} pages while the CPUs made {:?} writes",
        F::NAME,
        world.pages(),
        world.written()
    );
    world.vm.audit().unwrap();
}

fn saves<F: Format>(is_nested: bool) {
    let told = std::env::var("SLAT_SNAPSHOTS");
    let times = told.map_or(48, |text| text.parse().expect("a number"));
    match F::GRANULE {
        Granule::Kib4 => {
            // In these the host has a huge page.
            save_often::<F>(270, is_nested, times / 8);
            save_often::<F>(24, is_nested, times - times / 8);
        }
        Granule::Kib16 => save_often::<F>(12, is_nested, times),
        _ => save_often::<F>(4, is_nested, times),
    }
}

macro_rules! on {
    ($($name:ident: $mmu:path, $format:ty, $nested:expr;)*) => {$(
        #[test]
        fn $name() {
            $mmu(|| saves::<$format>($nested));
        }
    )*};
}

mod a_snapshot_is_the_memory_of_one_moment {
    use super::*;
    on! {
        ept: tdp, Ept, false;
        ept_with_5_levels: tdp, Ept5, false;
        npt: tdp, Npt, false;
        npt_with_5_levels: tdp, Npt5, false;
        ept_direct: direct, Ept, false;
        ept_with_5_levels_direct: direct, Ept5, false;
        npt_direct: direct, Npt, false;
        ept_nested: tdp, Ept, true;
        npt_with_5_levels_nested: tdp, Npt5, true;
        x86_with_5_levels: tdp, X86<5>, false;
        x86_shadow: shadow, X86<5>, false;
        stage_2: tdp, Stage2<48>, false;
        stage_2_with_a_concatenated_root: tdp, Stage2<40>, false;
        stage_2_with_hardware_dirty_state: tdp, Stage2<48, true>, false;
        stage_2_with_52_bits: tdp, Stage2<52>, false;
        stage_2_of_16k: tdp, Stage2Kib16<48>, false;
        stage_2_of_64k: tdp, Stage2Kib64<52>, false;
        sv39x4: tdp, Sv39x4, false;
        sv48x4: tdp, Sv48x4, false;
        sv57x4: tdp, Sv57x4, false;
    }
}
