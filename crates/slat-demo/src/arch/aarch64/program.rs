//! The demonstration program, whose threads use the memory of a VM in phases.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use slat::Access;
use slat_kvm::Kvm;

use crate::Failure;
use crate::account::Account;
use crate::arch::aarch64::access::Accessor;
use crate::arch::aarch64::vm::{Slot, THREADS, Vm};
use crate::memory::{Memory, Pages};

const HUGE_PAGE: usize = 2 << 20;
/// The address of the memory that the threads write and read. It is large enough for huge pages.
const DATA: u64 = 1 << 30;
const DATA_SIZE: usize = 64 << 20;
/// The address of the memslot that is deleted and created again while the threads use it.
const SPARE: u64 = 3 << 30;
const SPARE_SIZE: usize = 2 << 20;
/// The address of a device's register. No memslot contains this address.
const DEVICE: u64 = 0xd000_0000;
/// The number of times that each thread accesses the device register.
const DEVICE_ACCESSES: u64 = 2000;
/// While pages are logged, one of this many pages is written.
const LOGGED: u64 = 8;

/// The maximum time of any wait. A longer wait is reported as an error. No wait in this program takes even a tenth of
/// this time.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs the program on `kvm`, whose VMs have tables of the format called `format`. At the end, calls `at_end` while the
/// VM still exists.
///
/// # Errors
/// A wrong value in memory, a wrong page in the log, and KVM's errors.
pub fn run<T>(
    kvm: &Kvm,
    format: &str,
    at_end: impl FnOnce() -> T,
) -> Result<(Account, T), Failure> {
    let title = format!(
        "The memory of a VM on slat: {THREADS} threads, 2 memslots, {format} tables. No /dev/kvm.\n\
         No guest ran: the demonstration has no guest for arm64 yet. The threads accessed guest memory through the engine."
    );
    let mut account = Account::new(title, "What the threads did");
    // The memory is made before the VM, because it must outlive the VM.
    let data = Memory::new(DATA_SIZE, HUGE_PAGE, Pages::Huge)?;
    let spare = Memory::new(SPARE_SIZE, HUGE_PAGE, Pages::Small)?;
    let vm = Vm::new(kvm)?;
    let data = Slot {
        id: 0,
        gpa: DATA,
        memory: &data,
    };
    let spare = Slot {
        id: 1,
        gpa: SPARE,
        memory: &spare,
    };
    vm.create(data)?;
    vm.create(spare)?;
    use_memory(&vm, data, &mut account)?;
    log(&vm, data, &mut account)?;
    let (time, outside) = vm.on_threads(|_, accessor| {
        let access = |_| accessor.access(DEVICE, Access::Write, |_| ());
        let outside = (0..DEVICE_ACCESSES).map(access);
        outside.collect::<Result<Vec<_>, _>>()
    })?;
    if outside.iter().flatten().any(Option::is_some) {
        return Err("an address without a memslot is memory".into());
    }
    let accesses = THREADS as u64 * DEVICE_ACCESSES;
    account.step(format!("found a device register {accesses} times"), time);
    lose(&vm, spare, &mut account)?;
    Ok((account, at_end()))
}

/// Returns the size of the host's pages. KVM's dirty log has one bit for each such page.
fn page() -> u64 {
    // SAFETY: the call only returns a number.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).expect("each host has a page size")
}

/// Returns the addresses of those of a memslot's pages that `thread` uses.
fn share(slot: Slot<'_>, thread: u64) -> impl Iterator<Item = u64> + use<> {
    let size = slot.memory.size() as u64 / THREADS as u64;
    let first = slot.gpa + thread * size;
    (first..first + size).step_by(page() as usize)
}

/// Returns the word of a memslot's memory at the host's address `host`.
fn word(slot: Slot<'_>, host: u64) -> &AtomicU64 {
    &slot.memory.words()[(host - slot.memory.address()) as usize / size_of::<u64>()]
}

/// Writes each page's address to the page, and reads the addresses back.
fn use_memory<'m>(vm: &Vm<'m>, data: Slot<'m>, account: &mut Account) -> Result<(), Failure> {
    let (time, _) = vm.on_threads(|thread, accessor| {
        share(data, thread).try_for_each(|gpa| {
            let store = |host| word(data, host).store(gpa, Ordering::Relaxed);
            let stored = accessor.access(gpa, Access::Write, store)?;
            stored.ok_or_else(|| no_memory(gpa))
        })
    })?;
    let pages = DATA_SIZE as u64 / page();
    let what = format!("wrote {pages} pages ({} MiB)", DATA_SIZE >> 20);
    account.step(what, time);
    let (time, _) = vm.on_threads(|thread, accessor| {
        share(data, thread).try_for_each(|gpa| {
            let load = |host| word(data, host).load(Ordering::Relaxed);
            match accessor.access(gpa, Access::Read, load)? {
                Some(value) if value == gpa => Ok(()),
                Some(value) => Err(format!("{gpa:#x} has the value {value:#x}").into()),
                None => Err(no_memory(gpa)),
            }
        })
    })?;
    account.step("read them back", time);
    Ok(())
}

fn no_memory(gpa: u64) -> Failure {
    format!("no memslot contains {gpa:#x}").into()
}

/// Turns on dirty logging, and lets the threads write to some pages.
fn log<'m>(vm: &Vm<'m>, data: Slot<'m>, account: &mut Account) -> Result<(), Failure> {
    let before = vm.engine().stats();
    let time = vm.begin_log(data)?;
    let splits = vm.engine().stats().since(&before).splits;
    let what = format!("began to log writes, which split {splits} huge leaves");
    account.step(what, time);
    let (time, _) = vm.on_threads(|thread, accessor| {
        share(data, thread)
            .step_by(LOGGED as usize)
            .try_for_each(|gpa| {
                let store = |host| word(data, host).store(0, Ordering::Relaxed);
                let stored = accessor.access(gpa, Access::Write, store)?;
                stored.ok_or_else(|| no_memory(gpa))
            })
    })?;
    account.step("wrote every eighth page again", time);
    let began = Instant::now();
    let logged = vm.log(data)?;
    let time = began.elapsed();
    let written = (0..DATA_SIZE as u64 / page()).step_by(LOGGED as usize);
    if !written.eq(logged.iter().copied()) {
        return Err(format!("the log has {} pages, or others than written", logged.len()).into());
    }
    account.step(format!("got the log: {} pages", logged.len()), time);
    Ok(())
}

/// Deletes a memslot while the threads write to it, and creates it again.
fn lose<'m>(vm: &Vm<'m>, spare: Slot<'m>, account: &mut Account) -> Result<(), Failure> {
    let away: [AtomicU64; THREADS] = Default::default();
    let stop = AtomicBool::new(false);
    let write = |thread: u64, accessor: &mut Accessor| {
        let first = share(spare, thread).next().expect("a share has pages");
        while !stop.load(Ordering::Relaxed) {
            let add = |host| word(spare, host).fetch_add(1, Ordering::Relaxed);
            if accessor.access(first, Access::Write, add)?.is_none() {
                away[thread as usize].fetch_add(1, Ordering::SeqCst);
            }
        }
        Ok(())
    };
    let counters = || {
        let words = spare.memory.words();
        let word = |thread: usize| words[thread * words.len() / THREADS].load(Ordering::SeqCst);
        std::array::from_fn::<_, THREADS, _>(word)
    };
    let (taking_away, giving_back) = thread::scope(|scope| {
        let threads = scope.spawn(|| vm.on_threads(write));
        let change = || {
            wait(|| counters().iter().all(|count| *count > 0))?;
            let taking_away = vm.delete(spare)?;
            // After the deletion, no thread may write to the slot's memory, so these counters must not change.
            let at_deletion = counters();
            wait(|| away.iter().all(|count| count.load(Ordering::SeqCst) > 0))?;
            if counters() != at_deletion {
                return Err("a thread wrote to a memslot that was deleted".into());
            }
            let giving_back = vm.create(spare)?;
            wait(|| {
                counters()
                    .iter()
                    .zip(at_deletion)
                    .all(|(now, then)| *now > then)
            })?;
            Ok::<_, Failure>((taking_away, giving_back))
        };
        let changed = change();
        stop.store(true, Ordering::Relaxed);
        // A thread's own error is reported first. An error of the memslot change may be only a consequence of the
        // thread's error.
        threads.join().expect("no access panics")?;
        changed
    })?;
    let size = SPARE_SIZE >> 20;
    let what = format!("lost a memslot ({size} MiB) while writing to it");
    account.step(what, taking_away);
    let writes: u64 = away.iter().map(|count| count.load(Ordering::SeqCst)).sum();
    let what = format!("got it back, after {writes} writes to nowhere");
    account.step(what, giving_back);
    Ok(())
}

/// Waits until `happened` returns `true`, as a result of a thread's access.
fn wait(happened: impl Fn() -> bool) -> Result<(), Failure> {
    let began = Instant::now();
    while !happened() {
        if began.elapsed() > PATIENCE {
            return Err("the threads do not access the memory".into());
        }
        thread::yield_now();
    }
    Ok(())
}
