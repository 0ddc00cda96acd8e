//! The built-in KVM program: a VM with four memslots and two vCPUs. Each vCPU has a thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kvm_bindings::kvm_userspace_memory_region;
use slat_kvm::{Kvm, VcpuExit, VcpuFd, VmFd};

use crate::Failure;
use crate::arch::x86_64::guest::{self, VCPUS};
use crate::arch::x86_64::progress::Progress;
use crate::memory::{Memory, Pages};

/// The number of the guest's phases whose times are in the report.
pub const PHASES: usize = 4;

/// The maximum time of any wait. A longer wait is reported as an error. No wait in this program takes even a tenth of
/// this time.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the program has observed.
pub struct Report {
    /// The time of each of the first phases, summed over all vCPUs.
    pub phases: [Duration; PHASES],
    /// The number of accesses to the device's register that exited to the program.
    pub device_exits: u64,
    /// The number of writes to addresses of the spare slot (which the host deletes and creates again) that exited to
    /// the program while the slot was deleted.
    pub exits_while_away: u64,
    /// The time of deleting the slot while both vCPUs write to it.
    pub taking_away: Duration,
    /// The time of creating the slot again.
    pub giving_back: Duration,
}

const HUGE_PAGE: usize = 2 << 20;

const SYSTEM_SLOT: u32 = 0;
const DATA_SLOT: u32 = 1;
const CODE_SLOT: u32 = 2;
const SPARE_SLOT: u32 = 3;

/// Runs the program on `kvm`. At the end, calls `at_end` while the VM still exists.
pub fn run<T>(kvm: &Kvm, at_end: impl FnOnce() -> T) -> Result<(Report, T), Failure> {
    let progress = Progress::default();
    progress.during(|| run_silently(kvm, &progress, at_end))
}

fn run_silently<T>(
    kvm: &Kvm,
    progress: &Progress,
    at_end: impl FnOnce() -> T,
) -> Result<(Report, T), Failure> {
    // The memory is made before the VM, because it must outlive the VM.
    let memory = |size, pages| Memory::new(size, HUGE_PAGE, pages);
    let mut system = memory(guest::SYSTEM_SIZE, Pages::Small)?;
    let data = memory(guest::DATA_SIZE, Pages::Huge)?;
    let code = memory(guest::CODE_SIZE, Pages::Small)?;
    let spare = memory(guest::SPARE_SIZE, Pages::Small)?;
    guest::load(system.bytes());

    let vm = kvm.create_vm()?;
    set_slot(&vm, SYSTEM_SLOT, guest::SYSTEM, &system, system.size())?;
    set_slot(&vm, DATA_SLOT, guest::DATA, &data, data.size())?;
    set_slot(&vm, CODE_SLOT, guest::CODE, &code, code.size())?;
    set_slot(&vm, SPARE_SLOT, guest::SPARE, &spare, spare.size())?;

    let shared = Shared {
        start: Barrier::new(VCPUS),
        phase_times: Mutex::default(),
        device_exits: AtomicU64::new(0),
        away: Default::default(),
        failed: AtomicBool::new(false),
        progress,
    };
    let (taking_away, giving_back) = thread::scope(|scope| -> Result<_, Failure> {
        // All vCPUs are created before the first thread starts, because that thread waits for the others.
        let vcpus = (0..VCPUS as u64)
            .map(|id| vm.create_vcpu(id))
            .collect::<Result<Vec<_>, _>>()?;
        let mut threads = Vec::new();
        for (index, mut vcpu) in vcpus.into_iter().enumerate() {
            let shared = &shared;
            threads.push(scope.spawn(move || {
                let ended = run_vcpu(&mut vcpu, index, shared);
                if ended.is_err() {
                    shared.failed.store(true, Ordering::SeqCst);
                }
                ended
            }));
        }
        let times = move_slot(&vm, &spare, &shared);
        // The guests are stopped even if a phase has failed.
        guest::stop(system.words());
        // A vCPU's own error is reported first. An error of the main thread may be only a consequence of the vCPU's
        // error.
        for thread in threads {
            thread.join().expect("a vCPU's thread does not panic")?;
        }
        times
    })?;

    let phases = *shared.phase_times.lock().expect("no thread panicked");
    let report = Report {
        phases,
        device_exits: shared.device_exits.into_inner(),
        exits_while_away: shared.away.iter().map(|n| n.load(Ordering::SeqCst)).sum(),
        taking_away,
        giving_back,
    };
    Ok((report, at_end()))
}

/// Creates a slot. If `size` is 0, deletes it.
fn set_slot(vm: &VmFd, slot: u32, gpa: u64, memory: &Memory, size: usize) -> Result<(), Failure> {
    let region = kvm_userspace_memory_region {
        slot,
        flags: 0,
        guest_phys_addr: gpa,
        memory_size: size as u64,
        userspace_addr: memory.address(),
    };
    // SAFETY: `memory` is mapped as long as the VM exists. While a guest runs, this process accesses it only as
    // atomics.
    unsafe { vm.set_user_memory_region(region) }.map_err(|e| format!("memslot {slot}: {e}"))?;
    Ok(())
}

/// The state that the vCPUs' threads and the main thread have in common.
struct Shared<'p> {
    /// The barrier at which all vCPUs start together, so that they run each phase at the same time.
    start: Barrier,
    phase_times: Mutex<[Duration; PHASES]>,
    device_exits: AtomicU64,
    /// For each vCPU, the number of its writes to addresses of the spare slot (which the host deletes and creates
    /// again) while the slot was deleted.
    away: [AtomicU64; VCPUS],
    failed: AtomicBool,
    progress: &'p Progress,
}

fn run_vcpu(vcpu: &mut VcpuFd, index: usize, shared: &Shared<'_>) -> Result<(), Failure> {
    let prepared = vcpu
        .get_sregs()
        .and_then(|sregs| vcpu.set_sregs(&guest::special_registers(sregs)))
        .and_then(|()| vcpu.set_regs(&guest::registers(index)));
    // The thread waits here even after an error, because the other threads wait here, too.
    shared.start.wait();
    prepared?;

    let mut began = Instant::now();
    loop {
        match vcpu.run()? {
            VcpuExit::MmioWrite(guest::DEVICE, _) => {
                shared.device_exits.fetch_add(1, Ordering::Relaxed);
            }
            VcpuExit::MmioRead(guest::DEVICE, data) => {
                data.copy_from_slice(&guest::DEVICE_VALUE.to_le_bytes());
                shared.device_exits.fetch_add(1, Ordering::Relaxed);
            }
            VcpuExit::MmioWrite(address, _) if address >= guest::SPARE => {
                shared.away[index].fetch_add(1, Ordering::SeqCst);
            }
            VcpuExit::IoOut(guest::PORT, &[guest::WRONG]) => {
                return Err(format!("vCPU {index} read a value that it had not written").into());
            }
            VcpuExit::IoOut(guest::PORT, &[phase]) => {
                let took = began.elapsed();
                shared.progress.ended_phase(index);
                let mut times = shared.phase_times.lock().expect("no thread panicked");
                if let Some(longest) = times.get_mut(usize::from(phase) - 1) {
                    *longest = took.max(*longest);
                }
                began = Instant::now();
            }
            VcpuExit::Hlt => return Ok(()),
            other => return Err(format!("vCPU {index}: unexpected exit {other:?}").into()),
        }
    }
}

/// Deletes the spare slot while the vCPUs run, and creates it again. Returns the times of both.
fn move_slot(
    vm: &VmFd,
    spare: &Memory,
    shared: &Shared<'_>,
) -> Result<(Duration, Duration), Failure> {
    let counters = || {
        let words = spare.words();
        std::array::from_fn::<_, VCPUS, _>(|i| {
            words[i * words.len() / VCPUS].load(Ordering::SeqCst)
        })
    };
    wait(shared, "the vCPUs to reach the spare slot", || {
        counters().iter().all(|&n| n > 0)
    })?;

    let began = Instant::now();
    set_slot(vm, SPARE_SLOT, guest::SPARE, spare, 0)?;
    let taking_away = began.elapsed();
    // After the deletion, no vCPU may write to the slot's memory, so these counters must not change.
    let at_deletion = counters();
    wait(shared, "writes to the deleted slot to exit", || {
        shared.away.iter().all(|n| n.load(Ordering::SeqCst) > 0)
    })?;
    if counters() != at_deletion {
        return Err("a vCPU wrote to a slot that was deleted".into());
    }

    let began = Instant::now();
    set_slot(vm, SPARE_SLOT, guest::SPARE, spare, spare.size())?;
    let giving_back = began.elapsed();
    wait(shared, "the vCPUs to write to the slot again", || {
        counters()
            .iter()
            .zip(at_deletion)
            .all(|(&now, then)| now > then)
    })?;
    Ok((taking_away, giving_back))
}

fn wait(
    shared: &Shared<'_>,
    what: &str,
    mut happened: impl FnMut() -> bool,
) -> Result<(), Failure> {
    let began = Instant::now();
    while !happened() {
        if shared.failed.load(Ordering::SeqCst) {
            return Err("a vCPU failed".into());
        }
        if began.elapsed() > PATIENCE {
            return Err(format!("waited {} s for {what}", PATIENCE.as_secs()).into());
        }
        thread::yield_now();
    }
    Ok(())
}
