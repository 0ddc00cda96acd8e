//! A subject is a VM or vCPU that a line of the table describes. This module also computes how a subject's counters
//! change between refreshes.

use std::collections::BTreeMap;
use std::time::Instant;

use super::Process;
use super::text::{Answer, Counters, Times, Vcpu, Vm};

/// The identity of a subject: the process id, the number of the VM, and the id of the vCPU. For a whole VM, the last is
/// `None`.
pub type Key = (i32, u64, Option<u32>);

/// The state of a VM or a vCPU at one refresh.
#[derive(Clone)]
pub struct Subject {
    /// The identity of the VM or vCPU.
    pub key: Key,
    /// The process's command.
    pub command: String,
    /// For a VM, the number of its vCPUs; for a vCPU, its state.
    pub vcpus: String,
    /// The counters of the memory system (page faults, leaves, flushes).
    pub memory: Counters,
    /// The counters of the software CPU.
    pub cpu: Counters,
    /// The counters of exits.
    pub exits: Counters,
    /// The times of exits by reason. Waits in halts are included.
    pub times: BTreeMap<String, Times>,
    at: Instant,
}

impl Subject {
    fn vm(process: &Process, vm: &Vm) -> Self {
        let (cpu, exits) = vm.sums();
        let mut times = BTreeMap::<_, Times>::new();
        for (reason, of_vcpu) in vm.vcpus.iter().flat_map(times_of) {
            times.entry(reason).or_default().add(&of_vcpu);
        }
        Subject {
            key: (process.pid, vm.number, None),
            command: process.command.clone(),
            vcpus: vm.vcpus.len().to_string(),
            memory: vm.memory.clone(),
            cpu,
            exits,
            times,
            at: process.at,
        }
    }

    fn vcpu(process: &Process, vm: &Vm, vcpu: &Vcpu) -> Self {
        Subject {
            key: (process.pid, vm.number, Some(vcpu.id)),
            command: process.command.clone(),
            vcpus: vcpu.state.clone(),
            memory: vcpu.memory.clone(),
            cpu: vcpu.cpu.clone(),
            exits: vcpu.exits.clone(),
            times: times_of(vcpu).collect(),
            at: process.at,
        }
    }

    /// Returns all counters, those of the memory system first.
    pub fn counters(&self) -> impl Iterator<Item = (&str, u64)> {
        let all = [&self.memory, &self.cpu, &self.exits];
        all.into_iter().flat_map(Counters::iter)
    }
}

/// Returns the times of a vCPU's exits by reason. Waits in halts have the reason `halt`.
fn times_of(vcpu: &Vcpu) -> impl Iterator<Item = (String, Times)> {
    let halts = Times {
        ns: vcpu.exits["halt_wait_ns"],
        counts: vcpu.halts.clone(),
    };
    let others = vcpu.times.iter();
    let others = others.map(|(reason, times)| (reason.clone(), times.clone()));
    others.chain([("halt".to_owned(), halts)])
}

/// Returns a subject for each VM of `processes`, or for each vCPU.
pub fn subjects(processes: &[Process], by_vcpu: bool) -> Vec<Subject> {
    let mut subjects = Vec::new();
    let answers = |process: &Process| process.answer.as_ref().ok().cloned();
    for process in processes {
        let Some(Answer { vms, .. }) = answers(process) else {
            continue;
        };
        for vm in &vms {
            match by_vcpu {
                false => subjects.push(Subject::vm(process, vm)),
                true => {
                    let vcpus = vm.vcpus.iter();
                    subjects.extend(vcpus.map(|vcpu| Subject::vcpu(process, vm, vcpu)));
                }
            }
        }
    }
    subjects
}

/// The subjects at the previous refresh.
#[derive(Default)]
pub struct Earlier(BTreeMap<Key, Subject>);

impl Earlier {
    /// Stores `subjects` as the previous refresh.
    pub fn remember(&mut self, subjects: &[Subject]) {
        let new = subjects
            .iter()
            .map(|subject| (subject.key, subject.clone()));
        self.0 = new.collect();
    }

    /// Returns the change per second of a counter since the previous refresh. `None`: the subject was not in the
    /// previous refresh.
    pub fn rate(&self, now: &Subject, of: impl Fn(&Subject) -> u64) -> Option<f64> {
        let before = self.0.get(&now.key)?;
        let seconds = now.at.duration_since(before.at).as_secs_f64();
        // The difference is signed, because the value may have become smaller (a gauge).
        let change = of(now).wrapping_sub(of(before)) as i64;
        (seconds > 0.0).then(|| change as f64 / seconds)
    }

    /// Returns the speed since the previous refresh: millions of instructions per second, and the percentage of
    /// instructions that ran in compiled code.
    fn speed(&self, now: &Subject) -> (Option<f64>, Option<f64>) {
        let all = self.rate(now, |it| it.cpu["instructions"]);
        let compiled = self.rate(now, |it| it.cpu["instructions_compiled"]);
        let share = all.filter(|all| *all > 0.0).zip(compiled);
        let share = share.map(|(all, compiled)| 100.0 * compiled / all);
        (all.map(|all| all / 1e6), share)
    }
}

/// The column headings of [`cells`].
pub const HEADS: [&str; 12] = [
    "PID", "COMMAND", "VM", "VCPUS", "MIPS", "COMPILED", "EXITS/s", "FAULTS/s", "DIRTY/s", "4K",
    "2M", "1G",
];

/// Returns the cells of a subject's line. A rate is `-` until the second refresh.
pub fn cells(now: &Subject, earlier: &Earlier) -> [String; HEADS.len()] {
    let (pid, vm, vcpu) = now.key;
    let rate = |kind: fn(&Subject) -> &Counters, name: &str| {
        shown(earlier.rate(now, |subject| kind(subject)[name]))
    };
    let (mips, compiled) = earlier.speed(now);
    let leaves = |name: &str| match vcpu {
        None => now.memory[name].to_string(),
        // The number of leaves is not shown for a vCPU, because other vCPUs may zap leaves that this vCPU has mapped.
        Some(_) => String::new(),
    };
    [
        pid.to_string(),
        now.command.chars().take(16).collect(),
        vm.to_string(),
        match vcpu {
            None => now.vcpus.clone(),
            Some(id) => format!("{id} {}", now.vcpus),
        },
        mips.map_or("-".to_owned(), |mips| format!("{mips:.1}")),
        compiled.map_or("-".to_owned(), |share| format!("{share:.0} %")),
        rate(|it| &it.exits, "exits"),
        rate(|it| &it.memory, "pf_taken"),
        rate(|it| &it.memory, "dirty_pages"),
        leaves("pages_4k"),
        leaves("pages_2m"),
        leaves("pages_1g"),
    ]
}

/// Formats a rate. `None` becomes `-`.
pub fn shown(rate: Option<f64>) -> String {
    rate.map_or("-".to_owned(), |rate| format!("{rate:.0}"))
}

/// Returns a text with the times of exits by reason: the mean, and a power of two that 99 % of the times do not exceed.
/// Omits reasons without a measured time.
pub fn times(subject: &Subject) -> String {
    let taken = subject.times.iter();
    let taken = taken.filter_map(|(reason, times)| described(times).map(|it| (reason, it)));
    let parts: Vec<_> = taken.map(|(reason, it)| format!("{reason} {it}")).collect();
    match parts.is_empty() {
        true => "exits: no time was taken yet".to_owned(),
        false => format!("exits, mean (p99): {}", parts.join(", ")),
    }
}

/// Returns the text `MEAN (P99)` for `times`. `None`: there are no times.
fn described(times: &Times) -> Option<String> {
    let count: u64 = times.counts.iter().sum();
    if count == 0 {
        return None;
    }
    let mut seen = 0;
    let p99 = times.counts.iter().position(|times| {
        seen += times;
        seen * 100 >= count * 99
    })?;
    let last = times.counts.len() - 1;
    let bound = match p99 < last {
        true => time((1u64 << p99) as f64),
        false => format!("more than {}", time((1u64 << (last - 1)) as f64)),
    };
    Some(format!(
        "{} ({bound})",
        time(times.ns as f64 / count as f64)
    ))
}

/// Formats nanoseconds.
fn time(ns: f64) -> String {
    match ns {
        ..1e3 => format!("{ns:.0} ns"),
        ..1e6 => format!("{:.1} us", ns / 1e3),
        ..1e9 => format!("{:.1} ms", ns / 1e6),
        _ => format!("{:.1} s", ns / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stat::text::question;
    use std::time::Duration;

    fn process(at: Instant, instructions: u64, compiled: u64, leaves: u64) -> Process {
        let text = format!(
            "slat 1\nnames memory pages_4k\nnames cpu instructions instructions_compiled\nnames exits halt_wait_ns\n\
            vm 0\nmemory {leaves}\nvcpu 0 runs\nmemory 0\ncpu {instructions} {compiled}\nexits 3000\nhalts 0 0 0 2 0\ntimes io 100 0 0 0 0 1 3 0\ntimes mmio 0 0 0\nend\n"
        );
        Process {
            pid: 7,
            command: "vmm".to_owned(),
            at,
            answer: question().parse(&text),
        }
    }

    #[test]
    fn rates_are_those_between_two_looks() {
        let begin = Instant::now();
        let mut earlier = Earlier::default();
        let first = subjects(&[process(begin, 1_000_000, 0, 9)], false);
        assert_eq!(cells(&first[0], &earlier)[4..6], ["-", "-"]);
        earlier.remember(&first);
        let later = begin + Duration::from_secs(2);
        let second = &subjects(&[process(later, 5_000_000, 3_000_000, 5)], false)[0];
        let cells = cells(second, &earlier);
        assert_eq!(cells[..6], ["7", "vmm", "0", "1", "2.0", "75 %"]);
        assert_eq!(cells[9], "5");
        let leaves = earlier.rate(second, |it| it.memory["pages_4k"]);
        assert_eq!(leaves, Some(-2.0));
    }

    #[test]
    fn exits_have_a_mean_and_a_bound() {
        let processes = [process(Instant::now(), 0, 0, 0)];
        let vcpu = &subjects(&processes, true)[0];
        assert_eq!(vcpu.key, (7, 0, Some(0)));
        assert_eq!(
            times(vcpu),
            "exits, mean (p99): halt 1.5 us (8 ns), io 25 ns (32 ns)"
        );
        let vm = &subjects(&processes, false)[0];
        assert_eq!(times(vm), times(vcpu));
    }
}
