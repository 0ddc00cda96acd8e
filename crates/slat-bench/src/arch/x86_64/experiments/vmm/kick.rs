//! Measures guest writes that signal an eventfd, as when a driver tells its device that there is work.

use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use kvm_ioctls::VcpuExit;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::arch::x86_64::machine::guest::{DATA, DEVICE};
use crate::arch::x86_64::machine::{
    Api, Device, Failure, Machine, Program, RealKvm, VmApi, no_device, thread_time,
};
use crate::report::{Sample, Unit};
use crate::rounds::{Bench, fastest};

pub const NS_PER_KICK: &str = "ns_per_kick";
/// The variant in which the program gets the exit, and signals the eventfd itself.
pub const EXIT: &str = "exit";
/// The variant in which KVM signals the eventfd.
pub const IOEVENTFD: &str = "ioeventfd";
/// The variant without a guest: a thread signals the eventfd repeatedly.
pub const WRITE: &str = "write";

/// The name of each case, and whether a device thread waits for the eventfd.
pub const CASES: [(&str, bool); 2] = [("kick/unread", false), ("kick/read", true)];

/// The number of runs. The result is the shortest time.
const RUNS: usize = 5;

pub fn run(bench: &mut Bench) -> Result<(), Failure> {
    let (rounds, times) = (
        bench.size.pick(1, 9, 31),
        bench.size.pick(10, 5_000, 20_000),
    );
    let event = EventFd::new(EFD_NONBLOCK)?;
    let mut by_exit = Machine::new(&bench.guests.slat, 1, DATA)?;
    let mut by_ioeventfd = registered(&bench.guests.slat, &event)?;
    let mut kvm = match &bench.guests.kvm {
        Some(kvm) => Some(registered(kvm, &event)?),
        None => None,
    };
    let variants = bench.guests.with_kvm(&[EXIT, IOEVENTFD, WRITE]);
    for (case, is_read) in CASES {
        bench.in_turns(case, rounds, &variants, |_, variant| {
            let signalled = |_, exit: VcpuExit<'_>| match exit {
                VcpuExit::MmioWrite(DEVICE, [_, _, _, _]) => Ok(event.write(1)?),
                exit => no_device(0, exit),
            };
            match (variant, &mut kvm) {
                (RealKvm::NAME, Some(kvm)) => kick(&event, is_read, times / 20 + 1, |times| {
                    ring(kvm, times, &no_device)
                }),
                (EXIT, _) => kick(&event, is_read, times, |times| {
                    ring(&mut by_exit, times, &signalled)
                }),
                (WRITE, _) => kick(&event, is_read, times, |times| write(&event, times)),
                _ => kick(&event, is_read, times, |times| {
                    ring(&mut by_ioeventfd, times, &no_device)
                }),
            }
        })?;
    }
    Ok(())
}

fn registered<'m, A: Api>(api: &A, event: &EventFd) -> Result<Machine<'m, A>, Failure> {
    let machine = Machine::new(api, 1, DATA)?;
    machine.vm().set_ioeventfd(event, DEVICE)?;
    Ok(machine)
}

/// Returns the processor time of a guest that writes to the device `times` times.
fn ring<A: Api>(
    machine: &mut Machine<'_, A>,
    times: u64,
    device: &Device<'_>,
) -> Result<Duration, Failure> {
    Ok(machine.run(&[Program::doorbell(times)], device)?.cpu)
}

fn write(event: &EventFd, times: u64) -> Result<Duration, Failure> {
    let began = thread_time();
    for _ in 0..times {
        event.write(1)?;
    }
    Ok(thread_time() - began)
}

/// Calls `signal`, which must signal `event` `times` times. Returns the time of one signal. Checks that the eventfd has
/// counted every signal.
fn kick(
    event: &EventFd,
    is_read: bool,
    times: u64,
    mut signal: impl FnMut(u64) -> Result<Duration, Failure>,
) -> Result<Vec<Sample>, Failure> {
    let stop = EventFd::new(0)?;
    let (time, heard) = thread::scope(|scope| {
        let reader = is_read.then(|| scope.spawn(|| read_until(event, &stop)));
        // The first signal is not measured, because it also translates the addresses.
        let time = signal(1).and_then(|_| fastest(RUNS, || signal(times)));
        stop.write(1)?;
        let heard = match reader {
            Some(reader) => reader.join().expect("a reader does not panic")?,
            None => 0,
        };
        Ok::<_, Failure>((time?, heard + drain(event)?))
    })?;
    let all = RUNS as u64 * times + 1;
    if heard != all {
        return Err(format!("{heard} of {all} kicks were heard").into());
    }
    let nanoseconds = time.as_secs_f64() * 1e9 / times as f64;
    Ok(vec![Sample::new(
        NS_PER_KICK,
        Unit::Nanoseconds,
        nanoseconds,
    )])
}

/// Waits for `event` and reads it, as a device's thread does, until `stop` is signalled. Returns the number of signals.
fn read_until(event: &EventFd, stop: &EventFd) -> Result<u64, Failure> {
    let wait = |fd: &EventFd| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut heard = 0;
    let mut both = [wait(event), wait(stop)];
    while both[1].revents == 0 {
        // SAFETY: the array has the given length.
        if unsafe { libc::poll(both.as_mut_ptr(), 2, -1) } < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        heard += drain(event)?;
    }
    Ok(heard)
}

/// Returns the number of signals of `event` since the last read.
fn drain(event: &EventFd) -> Result<u64, Failure> {
    match event.read() {
        Ok(count) => Ok(count),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(0),
        Err(error) => Err(error.into()),
    }
}
