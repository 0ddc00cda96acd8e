//! Measures exits: the time of a `KVM_RUN` that returns at once, for each way in which a program can call slat.

mod loaded;

use std::arch::asm;
use std::fmt::Write as _;
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Instant;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use slat_kvm::abi::KVM_RUN;

use crate::arch::x86_64::machine::{Api, Failure, RealKvm};
use crate::compared::{Line, Rows};
use crate::report::{Report, Sample, Unit, median};
use crate::rounds::{Bench, Size};
use crate::{Elsewhere, Experiment, Settable};

const NAME: &str = "exit";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "Exits, by the C library, by dispatch, and from a rewritten call site",
    explain: "\
A guest writes to a device register for ever; the program enters it again and does nothing else.
library: this program, started once more under `slat run`, calls the C library's ioctl, which slat
replaces. dispatch: it makes the system call by an instruction of its own, which the kernel sends to
slat by a signal (Syscall User Dispatch): as static programs do, and Go's. rewritten: a statically
linked program, in which slat has put a jump in that instruction's place.
kvm: a real /dev/kvm, where it opens, by the C library.
exit/ns_per_exit: one KVM_RUN with its exit. call/ns_per_call: getppid, which no one serves but the
kernel: what a system call itself costs, without dispatch and with it.
Asked for: an exit by dispatch in at most twice a call by dispatch; from a rewritten site in 1 µs.
Medians of rounds, taken in turns. docs/dispatch.md says what happens in such a call.",
    settable: Settable::None,
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Metrics,
};

/// The environment variable that tells this program how many calls to measure, if it was started under `slat run`.
pub(crate) const CLIENT: &str = "SLAT_BENCH_EXIT";

/// The ways of calling slat that this program can measure in its own process.
const WAYS: &[&str] = &["library", "dispatch"];
const REWRITTEN: &str = "rewritten";
const PAGE: usize = 4096;

/// A guest that writes to a device forever.
struct Guest {
    vcpu: VcpuFd,
    // These fields are dropped after the vCPU, which needs them.
    _vm: VmFd,
    _memory: Box<[Aligned]>,
}

#[repr(C, align(4096))]
#[derive(Clone)]
struct Aligned([u8; PAGE]);

impl Guest {
    fn new() -> Result<Self, Failure> {
        const CODE: usize = 0x1000;
        /// The guest address of the device, above the guest's memory.
        const DEVICE: u16 = 0x2000;
        let vm = Kvm::new()?.create_vm()?;
        let mut memory = vec![Aligned([0; PAGE]); 4].into_boxed_slice();
        // The guest's code: mov ax, 0x2000; mov ds, ax; mov [0], al; jmp to the third instruction (the write).
        let code = [0xb8, 0x00, 0x20, 0x8e, 0xd8, 0xa2, 0x00, 0x00, 0xeb, 0xfb];
        memory[CODE / PAGE].0[..code.len()].copy_from_slice(&code);
        let region = kvm_userspace_memory_region {
            memory_size: (memory.len() * PAGE) as u64,
            userspace_addr: memory.as_ptr() as u64,
            ..Default::default()
        };
        // SAFETY: the memory lives as long as the VM, and no other code accesses it.
        unsafe { vm.set_user_memory_region(region)? };
        let mut vcpu = vm.create_vcpu(0)?;
        let mut sregs = vcpu.get_sregs()?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs)?;
        let mut regs = vcpu.get_regs()?;
        (regs.rip, regs.rflags) = (CODE as u64, 2);
        vcpu.set_regs(&regs)?;
        match vcpu.run()? {
            kvm_ioctls::VcpuExit::MmioWrite(address, _) if address == u64::from(DEVICE) << 4 => {}
            other => return Err(format!("the guest ended with {other:?}").into()),
        }
        Ok(Guest {
            vcpu,
            _vm: vm,
            _memory: memory,
        })
    }

    /// Enters the guest `times` times, calling slat in the way `way`. Returns the nanoseconds of one entry and exit.
    fn exits(&self, way: &str, times: u32) -> Result<f64, Failure> {
        let vcpu = self.vcpu.as_raw_fd() as usize;
        let begin = Instant::now();
        for _ in 0..times {
            let answer = match way {
                // SAFETY: the descriptor is that of a vCPU, and the request has no argument.
                "dispatch" => unsafe { call(libc::SYS_ioctl, [vcpu, KVM_RUN as usize, 0]) },
                // SAFETY: the descriptor is that of a vCPU, and the request has no argument.
                _ => unsafe { libc::ioctl(vcpu as i32, KVM_RUN as libc::Ioctl, 0) as isize },
            };
            if answer != 0 {
                return Err(format!("KVM_RUN by {way} answers {answer}").into());
            }
        }
        Ok(begin.elapsed().as_nanos() as f64 / f64::from(times))
    }
}

/// Makes a system call by an instruction of this program, not of the C library.
///
/// # Safety
/// The caller fulfils the conditions of the system call.
unsafe fn call(number: i64, [a, b, c]: [usize; 3]) -> isize {
    let answer;
    // SAFETY: the caller fulfils the conditions of the system call. The kernel overwrites only RCX and R11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

/// Makes `times` getppid calls in the way `way`. Returns the nanoseconds of one call.
fn calls(way: &str, times: u32) -> f64 {
    let begin = Instant::now();
    for _ in 0..times {
        // SAFETY: the call has no arguments.
        black_box(unsafe {
            match way {
                "dispatch" => call(libc::SYS_getppid, [0; 3]),
                _ => libc::getppid() as isize,
            }
        });
    }
    begin.elapsed().as_nanos() as f64 / f64::from(times)
}

/// Measures all ways of calling slat, in a process that an experiment has started for this purpose. Returns one line
/// for each measurement: case, way, nanoseconds.
///
/// # Errors
/// KVM's errors. It is also an error if the value of [`CLIENT`] is not a number of calls.
pub(crate) fn client() -> Result<String, Failure> {
    const ROUNDS: usize = 5;
    let times: u32 = std::env::var(CLIENT)?.parse()?;
    let guest = Guest::new()?;
    let mut measured = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        for (index, way) in WAYS.iter().enumerate() {
            measured[2 * index].push(guest.exits(way, times)?);
            measured[2 * index + 1].push(calls(way, times));
        }
    }
    let mut lines = String::new();
    for (index, way) in WAYS.iter().enumerate() {
        for (case, values) in ["exit", "call"].iter().zip(&measured[2 * index..]) {
            writeln!(lines, "{case} {way} {}", median(values))?;
        }
    }
    Ok(lines)
}

/// Returns the metric of a case.
fn metric(case: &str) -> &'static str {
    match case {
        "exit" => "ns_per_exit",
        _ => "ns_per_call",
    }
}

fn run(bench: &mut Bench) -> Result<(), Failure> {
    let (rounds, times) = (
        bench.size.pick(1, 5, 11),
        bench.size.pick(10, 20_000, 100_000),
    );
    let kvm = match bench.size {
        Size::Tiny => None,
        _ if bench.guests.kvm.is_some() => Some(Guest::new()?),
        _ => None,
    };
    let Some(slat) = bench.others.slat.clone() else {
        bench.note_missing("exit: not measured without the slat command".to_owned());
        return Ok(());
    };
    for _ in 0..rounds {
        let mut command = Command::new(&slat);
        command.args(["run", "--"]).arg(&slat).args(["bench", NAME]);
        let output = command.env(CLIENT, times.to_string()).output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into());
        }
        for line in String::from_utf8(output.stdout)?.lines() {
            let mut words = line.split(' ');
            let mut next = || words.next().ok_or("a line without three words");
            let (case, way, value) = (next()?, next()?, next()?.parse()?);
            let way = WAYS
                .iter()
                .find(|known| **known == way)
                .ok_or("an unknown way")?;
            bench.in_turns(case, 1, &[way], |_, _| {
                Ok(vec![Sample::new(metric(case), Unit::Nanoseconds, value)])
            })?;
        }
        bench.in_turns("exit", 1, &[REWRITTEN], |_, _| {
            let value = loaded::exits(&slat, times)?;
            Ok(vec![Sample::new("ns_per_exit", Unit::Nanoseconds, value)])
        })?;
    }
    if let Some(kvm) = kvm {
        bench.in_turns("exit", 1, &[RealKvm::NAME], |_, _| {
            let value = kvm.exits("library", times / 20 + 1)?;
            Ok(vec![Sample::new("ns_per_exit", Unit::Nanoseconds, value)])
        })?;
    }
    Ok(())
}

fn compare(report: &Report) -> Vec<Line> {
    let line = |case| Line::compare(report, NAME, case, metric(case), "library", "dispatch");
    let bare = report.value(NAME, "call", "dispatch", metric("call"));
    let exits = line("exit").map(|line| line.with_limit("call", bare).at_most_of_limit(2.0));
    let rewritten = Line::compare(report, NAME, "exit", metric("exit"), "library", REWRITTEN);
    let rewritten = rewritten.map(|line| line.at_most(1000.0));
    exits
        .into_iter()
        .chain(rewritten)
        .chain(line("call"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_command_nothing_is_measured_and_a_note_says_so() {
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        assert!(report.cases(NAME).is_empty() && report.notes().len() == 1);
    }
}
