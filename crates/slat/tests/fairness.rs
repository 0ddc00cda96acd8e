//! A slot change waits for its turn while other threads take dirty logs as fast as they can.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use slat::{Access, Config, Ept, Gpa, Level, Region, SlotFlags, Stop, Vm};
use slat::{DirtyLogMethod, Setting};
use slat_model::{Event, HostChange, HostMemory, PageKind, SimPlatform};

const PAGES: u64 = 1 << 14;
const HARVESTERS: u64 = 8;
/// The number of changes that had to wait.
const WAITS: usize = 20;

/// The progress of the thread that changes slots, in its current change.
#[derive(Clone, Copy)]
enum Change {
    /// The change has not waited yet.
    Begun,
    /// The change has been waiting since this number of logs had been taken.
    Waits(u64),
    /// The change holds the lock.
    Goes,
}

/// Returns, for each change that waited, the number of logs taken between the begin of its wait and its turn.
fn overtaken() -> Vec<u64> {
    let platform = SimPlatform::new(PAGES + 1);
    let small = HostChange::Remap {
        level: Level::PAGE,
        writable: true,
        kind: PageKind::Ordinary,
    };
    platform.host.change(&(0..PAGES + 1), small);
    let vm: Arc<Vm<SimPlatform, Ept>> = Vm::new(platform, Config::default()).unwrap();
    vm.set_policy(Setting::DirtyLog(DirtyLogMethod::DirtyBit));
    let set = |slot, pages, flags| {
        let first = u64::from(slot) * PAGES;
        let region = Region::new(slot, Gpa(first << 12), pages << 12, HostMemory::hva(first))
            .with_flags(flags);
        vm.set_memory_region(0, &region).unwrap();
    };
    let touch = |gfn: u64| {
        let mut vcpu = vm.create_vcpu().unwrap();
        vcpu.enter_unguarded(1);
        vcpu.quiesce();
        while vcpu.translate(Gpa(gfn << 12), Access::Read) == Err(Stop::Retry) {
            vcpu.quiesce();
        }
        vcpu.leave();
    };
    // The dirty bits of the leaves are the log, so taking the log walks over all leaves.
    set(0, PAGES, SlotFlags::default());
    (0..PAGES).for_each(touch);
    set(0, PAGES, SlotFlags::LOG_DIRTY_PAGES);

    let taken = Arc::new(AtomicU64::new(0));
    let change = Arc::new(Mutex::new((Change::Begun, Vec::new())));
    vm.platform().set_hook({
        let (taken, change) = (taken.clone(), change.clone());
        move |event| {
            if thread::current().name() != Some("changer") {
                return;
            }
            let (now, overtaken) = &mut *change.lock().unwrap();
            match (*now, event) {
                (Change::Begun, Event::Wait(_)) => *now = Change::Waits(taken.load(SeqCst)),
                // The change holds the lock, and walks over the tables.
                (Change::Waits(before), Event::Entries(_)) => {
                    overtaken.push(taken.load(SeqCst) - before);
                    *now = Change::Goes;
                }
                _ => {}
            }
        }
    });
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..HARVESTERS {
            scope.spawn(|| {
                let mut log = vec![0; PAGES as usize / 64];
                while !stop.load(Relaxed) {
                    vm.get_dirty_log(0, 0, &mut log).unwrap();
                    taken.fetch_add(1, SeqCst);
                }
            });
        }
        let changer = thread::Builder::new().name("changer".into());
        let changer = changer.spawn_scoped(scope, || {
            let begin = Instant::now();
            while change.lock().unwrap().1.len() < WAITS
                && begin.elapsed() < Duration::from_secs(30)
            {
                change.lock().unwrap().0 = Change::Goes;
                set(1, 1, SlotFlags::default());
                touch(PAGES);
                change.lock().unwrap().0 = Change::Begun;
                vm.remove_memory_region(0, 1).unwrap();
            }
        });
        changer.unwrap().join().unwrap();
        stop.store(true, SeqCst);
    });
    vm.platform().clear_hook();
    change.lock().unwrap().1.clone()
}

#[test]
fn a_slot_change_waits_for_no_harvest_that_came_after_it() {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(overtaken()));
    let overtaken = result
        .recv_timeout(Duration::from_secs(60))
        .expect("it ends, and in time");
    println!("logs taken while a change waited: {overtaken:?}");
    assert!(!overtaken.is_empty(), "no change had to wait");
    // Each of the other threads may have been ahead of the change in the queue once. In addition, it may not yet have
    // counted the log that it took before.
    let worst = overtaken.into_iter().max().unwrap();
    assert!(worst <= 2 * HARVESTERS, "{worst} harvests went before");
}
