//! Measures eventfd signals that interrupt a vCPU, as when a device tells its driver that work is done.

use std::arch::x86_64::_rdtsc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::arch::x86_64::machine::guest::{DATA, PAGE, wait_until};
use crate::arch::x86_64::machine::{
    Api, Failure, Machine, Memory, Pages, Program, RealKvm, Slat, Slot, VcpuApi, VmApi, message,
    no_device,
};
use crate::report::{Sample, Unit, median};
use crate::rounds::Bench;

pub const CASE: &str = "irqfd/running";
pub const NS_MEDIAN: &str = "ns_median";
pub const NS_P99: &str = "ns_p99";
/// The variant without a guest: one thread waits for the eventfd, and another thread computes, as a vCPU would. This
/// variant measures how long the kernel takes to wake a thread.
pub const THREAD: &str = "thread";

/// The number of an interrupt (GSI) above those of the I/O APIC's pins.
const GSI: u32 = 24;
/// The time between two signals. It is long enough for all threads to fall asleep.
const PAUSE: Duration = Duration::from_micros(100);
/// A time limit that is longer than any interrupt takes, even on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The time for which the guest's clock is compared with the host's.
const COMPARISON: Duration = Duration::from_millis(20);

pub fn run(bench: &mut Bench) -> Result<(), Failure> {
    let (rounds, times) = (bench.size.pick(1, 7, 21), bench.size.pick(10, 500, 2_000));
    // Each of the two KVMs has its own eventfd, because a KVM that reads a signal clears the eventfd.
    let (event, kvm_event) = (EventFd::new(EFD_NONBLOCK)?, EventFd::new(EFD_NONBLOCK)?);
    let data = Memory::new(PAGE as usize, PAGE as usize, Pages::Small)?;
    let mut slat = prepare(&bench.guests.slat, &event, &data)?;
    let mut kvm = match &bench.guests.kvm {
        Some(kvm) => Some(prepare(kvm, &kvm_event, &data)?),
        None => None,
    };
    let variants = bench.guests.with_kvm(&[Slat::NAME, THREAD]);
    bench.in_turns(CASE, rounds, &variants, |_, variant| {
        match (variant, &mut kvm) {
            (RealKvm::NAME, Some(kvm)) => interrupt(kvm, &kvm_event, &data, times / 10 + 1),
            (THREAD, _) => wake(slat.vcpu(0).tsc_khz()?, times),
            _ => interrupt(&mut slat, &event, &data, times),
        }
    })
}

fn prepare<'m, A: Api>(
    api: &A,
    event: &EventFd,
    data: &'m Memory,
) -> Result<Machine<'m, A>, Failure> {
    let end = DATA + data.size() as u64;
    let machine = Machine::prepared(api, 1, end, |vm| {
        vm.create_irqchip()?;
        vm.route_irqfd(event, message(GSI))
    })?;
    machine.set_slot(&Slot::whole(1, DATA, data))?;
    machine.take_interrupts(0)?;
    Ok(machine)
}

/// The words that the guest writes, each in its own cache line.
struct Words<'m> {
    stop: &'m AtomicU64,
    clock: &'m AtomicU64,
    stamp: &'m AtomicU64,
    count: &'m AtomicU64,
}

impl<'m> Words<'m> {
    const CLOCK: usize = 8;
    const STAMP: usize = 16;

    fn new(words: &'m [AtomicU64]) -> Self {
        let words = Words {
            stop: &words[0],
            clock: &words[Self::CLOCK],
            stamp: &words[Self::STAMP],
            count: &words[Self::STAMP + 1],
        };
        for word in [words.stop, words.clock, words.count] {
            word.store(0, SeqCst);
        }
        words
    }

    fn program() -> Program {
        let at = |index: usize| DATA + index as u64 * 8;
        Program::interruptible(at(Self::STAMP), at(Self::CLOCK), at(0))
    }
}

/// Measures the times from a signal to the write by the guest's interrupt handler.
fn interrupt<A: Api>(
    machine: &mut Machine<'_, A>,
    event: &EventFd,
    data: &Memory,
    times: u64,
) -> Result<Vec<Sample>, Failure> {
    let words = Words::new(data.words());
    let khz = machine.vcpu(0).tsc_khz()?;
    let (_, ticks) = machine.run_beside(&[Words::program()], &no_device, |_| {
        let ticks = compare_clocks(&words)
            .and_then(|ahead| signal(event, words.count, words.stamp, ahead, times));
        words.stop.store(1, SeqCst);
        ticks
    })?;
    if words.count.load(SeqCst) != times {
        let count = words.count.load(SeqCst);
        return Err(format!("{count} interrupts for {times} signals").into());
    }
    Ok(samples(ticks, khz))
}

/// Measures the times from a signal until the waiting thread continues.
fn wake(khz: u32, times: u64) -> Result<Vec<Sample>, Failure> {
    let event = EventFd::new(0)?;
    let (count, stamp) = (AtomicU64::new(0), AtomicU64::new(0));
    let ended = AtomicBool::new(false);
    let ticks = thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Relaxed) {
                std::hint::spin_loop();
            }
        });
        let waiter = scope.spawn(|| {
            // The last signal ends this loop, because `count` is set to `times` before that signal.
            while count.load(SeqCst) <= times {
                event.read()?;
                stamp.store(host_clock(), SeqCst);
                count.fetch_add(1, SeqCst);
            }
            Ok(())
        });
        let ticks = signal(&event, &count, &stamp, 0, times);
        count.store(times, SeqCst);
        event
            .write(1)
            .expect("the counter of a waiting thread is not full");
        let waited: Result<(), Failure> = waiter.join().expect("a waiting thread does not panic");
        ended.store(true, Relaxed);
        waited.and(ticks)
    })?;
    Ok(samples(ticks, khz))
}

fn samples(mut ticks: Vec<f64>, khz: u32) -> Vec<Sample> {
    ticks.sort_by(f64::total_cmp);
    let nanoseconds = |metric, ticks| {
        let value = ticks * 1e6 / f64::from(khz);
        Sample::new(metric, Unit::Nanoseconds, value)
    };
    vec![
        nanoseconds(NS_MEDIAN, median(&ticks)),
        nanoseconds(NS_P99, ticks[ticks.len() * 99 / 100]),
    ]
}

/// Signals `event` `times` times. Returns for each signal the number of time-stamp counter ticks from the signal to the
/// receiver's stamp. The receiver writes its time to `stamp` and then increments `count`. Its clock is `ahead` ticks
/// ahead of the host's. This thread sleeps while it waits, so that a processor is free for the threads that deliver the
/// signal.
fn signal(
    event: &EventFd,
    count: &AtomicU64,
    stamp: &AtomicU64,
    ahead: u64,
    times: u64,
) -> Result<Vec<f64>, Failure> {
    (1..=times)
        .map(|time| {
            thread::sleep(PAUSE);
            let until = Instant::now() + PATIENCE;
            let began = host_clock();
            event.write(1)?;
            while count.load(SeqCst) != time {
                thread::sleep(PAUSE);
                if Instant::now() > until {
                    return Err(format!("signal {time} did not arrive").into());
                }
            }
            let arrived = stamp.load(SeqCst).wrapping_sub(ahead);
            Ok(arrived.wrapping_sub(began) as i64 as f64)
        })
        .collect()
}

/// Returns by how many ticks the guest's time-stamp counter is ahead of the host's. The guest writes its counter to
/// memory all the time. This function reads that word many times, compares it with the host's counter, and uses the
/// most recent word. That word is some dozen nanoseconds old at most. The result is too small by this age, so measured
/// latencies are too long by this age.
fn compare_clocks(words: &Words<'_>) -> Result<u64, Failure> {
    wait_until(|| words.clock.load(SeqCst) != 0)?;
    let first = words.clock.load(SeqCst).wrapping_sub(host_clock());
    let mut ahead = first;
    let began = Instant::now();
    while began.elapsed() < COMPARISON {
        let now = words.clock.load(SeqCst).wrapping_sub(host_clock());
        if now.wrapping_sub(ahead) as i64 > 0 {
            ahead = now;
        }
    }
    Ok(ahead)
}

fn host_clock() -> u64 {
    // SAFETY: every x86-64 processor has the instruction RDTSC.
    unsafe { _rdtsc() }
}
