//! Parses a process's reply to `slat stat`. `publish/stat.rs` of `slat_kvm` defines the reply's form.

use std::collections::BTreeMap;
use std::ops::Index;
use std::rc::Rc;

use slat_kvm::publish::STAT;

use crate::processes::Question;

/// Counters with their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    names: Rc<[String]>,
    values: Vec<u64>,
}

impl Counters {
    /// Returns names and values, in the order of the process's reply.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        let values = self.values.iter().copied();
        self.names.iter().map(String::as_str).zip(values)
    }

    /// Adds the counters of `other`, which has the same names. If `self` is empty, becomes a copy of `other`.
    pub fn add(&mut self, other: &Counters) {
        if self.values.is_empty() {
            *self = other.clone();
            return;
        }
        for (sum, value) in self.values.iter_mut().zip(&other.values) {
            *sum = sum.wrapping_add(*value);
        }
    }
}

/// Returns the value of the counter of this name, or 0 if the process does not have it.
impl Index<&str> for Counters {
    type Output = u64;

    fn index(&self, name: &str) -> &u64 {
        let place = self.names.iter().position(|known| known == name);
        place.and_then(|place| self.values.get(place)).unwrap_or(&0)
    }
}

/// A vCPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vcpu {
    /// The vCPU's id.
    pub id: u32,
    /// The vCPU's state: `runs`, `halted`, or `out` if the vCPU is not in KVM_RUN.
    pub state: String,
    /// The counters of the memory system.
    pub memory: Counters,
    /// The counters of the software CPU.
    pub cpu: Counters,
    /// The counters of exits.
    pub exits: Counters,
    /// A histogram of waits in halts. Element n is the number of waits whose nanoseconds have n as their highest set
    /// bit.
    pub halts: Vec<u64>,
    /// The measured times of the vCPU's exits, by reason.
    pub times: BTreeMap<String, Times>,
}

/// Measured times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// The sum of the times, in nanoseconds.
    pub ns: u64,
    /// A histogram. Element n is the number of times whose nanoseconds have n as their highest set bit.
    pub counts: Vec<u64>,
}

impl Times {
    /// Adds the times of `other`.
    pub fn add(&mut self, other: &Times) {
        self.ns += other.ns;
        let len = self.counts.len().max(other.counts.len());
        self.counts.resize(len, 0);
        for (sum, value) in self.counts.iter_mut().zip(&other.counts) {
            *sum += value;
        }
    }
}

/// A live VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vm {
    /// The number of VMs that the process had created before this VM.
    pub number: u64,
    /// The counters of the memory system.
    pub memory: Counters,
    /// The VM's vCPUs.
    pub vcpus: Vec<Vcpu>,
}

impl Vm {
    /// Returns the sums over all vCPUs of the software CPU's counters and of the counters of exits.
    pub fn sums(&self) -> (Counters, Counters) {
        let mut sums = <(Counters, Counters)>::default();
        for vcpu in &self.vcpus {
            sums.0.add(&vcpu.cpu);
            sums.1.add(&vcpu.exits);
        }
        sums
    }
}

/// The reply of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The reason why the process does not compile guest code. `None`: it does compile guest code.
    pub interprets: Option<String>,
    /// The number of VMs that have ended.
    pub ended: u64,
    /// The sums of the memory system's counters of VMs that have ended.
    pub ended_memory: Counters,
    /// The sums of the software CPU's counters of vCPUs that have ended.
    pub ended_cpu: Counters,
    /// The live VMs.
    pub vms: Vec<Vm>,
}

impl Answer {
    /// Returns the sums over all VMs, including ended VMs: the memory system's counters and the software CPU's
    /// counters. `slat run --stats` prints the same sums.
    pub fn totals(&self) -> (Counters, Counters) {
        let mut sums = (self.ended_memory.clone(), self.ended_cpu.clone());
        for vm in &self.vms {
            sums.0.add(&vm.memory);
            for vcpu in &vm.vcpus {
                sums.1.add(&vcpu.cpu);
            }
        }
        sums
    }
}

/// The names of the counters of each kind.
#[derive(Default)]
struct Names(BTreeMap<String, Rc<[String]>>);

impl Names {
    fn of(&self, kind: &str, values: Vec<u64>) -> Option<Counters> {
        let names = self.0.get(kind)?.clone();
        (names.len() == values.len()).then_some(Counters { names, values })
    }
}

/// Returns the question for all counters.
pub fn question() -> Question<Answer> {
    Question {
        words: STAT.to_owned(),
        read,
    }
}

/// Parses the lines of a reply. `None`: a line does not have the expected form.
fn read(lines: &[&str]) -> Option<Answer> {
    let mut names = Names::default();
    let mut answer = Answer::default();
    for line in lines {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let words = || rest.split_ascii_whitespace();
        let numbers = || {
            words()
                .map(|word| word.parse().ok())
                .collect::<Option<Vec<u64>>>()
        };
        match word {
            "names" => {
                let kind = words().next()?.to_owned();
                names
                    .0
                    .insert(kind, words().skip(1).map(str::to_owned).collect());
            }
            "interprets" => answer.interprets = Some(rest.to_owned()),
            "ended" => answer.ended = rest.parse().ok()?,
            "vm" => answer.vms.push(Vm {
                number: rest.parse().ok()?,
                ..Vm::default()
            }),
            "vcpu" => {
                let (id, state) = rest.split_once(' ')?;
                answer.vms.last_mut()?.vcpus.push(Vcpu {
                    id: id.parse().ok()?,
                    state: state.to_owned(),
                    ..Vcpu::default()
                });
            }
            "times" => {
                let (name, rest) = rest.split_once(' ')?;
                let numbers = rest.split_ascii_whitespace().map(|word| word.parse().ok());
                let numbers = numbers.collect::<Option<Vec<u64>>>()?;
                let (&ns, counts) = numbers.split_first()?;
                let counts = counts.to_vec();
                let vcpu = answer.vms.last_mut()?.vcpus.last_mut()?;
                vcpu.times.insert(name.to_owned(), Times { ns, counts });
            }
            "halts" => answer.vms.last_mut()?.vcpus.last_mut()?.halts = numbers()?,
            "memory" | "cpu" | "exits" => {
                *place(&mut answer, word)? = names.of(word, numbers()?)?
            }
            // Unknown lines are ignored, because a later version of slat may send new ones.
            _ => {}
        }
    }
    Some(answer)
}

/// Returns the counters that a line of this `kind` sets. The line is about the last vCPU that was listed. If no vCPU
/// was listed, it is about the last VM; if no VM was listed, about the VMs and vCPUs that have ended.
fn place<'a>(answer: &'a mut Answer, kind: &str) -> Option<&'a mut Counters> {
    let Some(vm) = answer.vms.last_mut() else {
        return match kind {
            "memory" => Some(&mut answer.ended_memory),
            "cpu" => Some(&mut answer.ended_cpu),
            _ => None,
        };
    };
    match (vm.vcpus.last_mut(), kind) {
        (None, "memory") => Some(&mut vm.memory),
        (Some(vcpu), "memory") => Some(&mut vcpu.memory),
        (Some(vcpu), "cpu") => Some(&mut vcpu.cpu),
        (Some(vcpu), "exits") => Some(&mut vcpu.exits),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Answer, String> {
        question().parse(text)
    }

    const TEXT: &str = "slat 1\nnames memory a b\nnames cpu instructions\nnames exits exits\nended 1\nmemory 1 2\ncpu 5\n\
        vm 4\nmemory 10 20\nvcpu 0 runs\nmemory 10 0\ncpu 100\nexits 3\nhalts 0 1\ntimes io 7 0 1\nvcpu 2 out\nmemory 0 20\ncpu 200\nexits 4\n\
        halts 0 0\nlater 7\nend\n";

    #[test]
    fn an_answer_is_read_and_summed() {
        let answer = parse(TEXT).unwrap();
        assert_eq!((answer.ended, answer.vms.len()), (1, 1));
        let vm = &answer.vms[0];
        assert_eq!((vm.number, vm.vcpus.len()), (4, 2));
        assert_eq!((vm.vcpus[0].state.as_str(), vm.vcpus[1].id), ("runs", 2));
        assert_eq!(vm.vcpus[0].halts, [0, 1]);
        let (ns, counts) = (7, vec![0, 1]);
        assert_eq!(vm.vcpus[0].times["io"], Times { ns, counts });
        let (memory, cpu) = answer.totals();
        assert_eq!((memory["a"], memory["b"], memory["c"]), (11, 22, 0));
        assert_eq!(cpu["instructions"], 305);
        assert_eq!(vm.sums().1["exits"], 7);
    }

    #[test]
    fn half_an_answer_is_none() {
        for cut in 7..TEXT.len() - 1 {
            let error = parse(&TEXT[..cut]).unwrap_err();
            assert!(error.contains("part of an answer"), "{cut}: {error}");
        }
        assert!(parse("slat 2\nend\n").unwrap_err().contains("version"));
        assert!(parse("").is_err());
        assert!(parse(&TEXT.replace("memory 10 20", "memory 10")).is_err());
    }
}
