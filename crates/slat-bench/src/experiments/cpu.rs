//! How fast the software CPU is.

use std::sync::atomic::Ordering::Relaxed;

use kvm_bindings::kvm_regs;

use crate::Experiment;
use crate::machine::guest::{DATA, PAGE};
use crate::machine::{
    Api, Failure, Machine, Memory, Pages, Program, RealKvm, Slat, Slot, no_device,
};
use crate::report::{Report, Sample, Unit};
use crate::rounds::{Bench, Size};
use crate::show::{Line, Rows};

const NAME: &str = "cpu";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "guest instructions in each second",
    explain: "\
How many million instructions the guest executes in a second of its thread's processor time.
alu: arithmetic between registers; six instructions in a loop.
ldst: loads and stores to one page, which the TLB finds; six instructions in a loop.
call: calls of a function with a frame; eight instructions in a loop, four of them on the stack.
fib: the Fibonacci numbers by recursion: calls, branches and the stack, as compilers write them.
miss: a write to each of 2048 pages, over and over. Each misses the software TLB (1024 pages): the
page is found through the guest's tables and slat's. One instruction in four is such a write.
The other experiments run on this CPU; it decides how much of the memory system's cost is seen.
Instructions are known from the loops, so that a real KVM can be measured the same way.
Nothing was published, nothing is asked for; the limit is the processor itself, the column kvm.",
    run,
    compare,
    rows: Rows::Metrics,
};

/// Pages of the data slot: twice as many as the software TLB holds.
const PAGES: u64 = 2048;

/// The program of a case, and a check that the guest executed it.
struct Work {
    case: &'static str,
    program: Program,
    instructions: u64,
    is_right: Check,
}

/// Checks the registers at the end, and data.
type Check = Box<dyn Fn(&kvm_regs, &Memory) -> bool>;

/// Returns the cases; for a real KVM that interprets, with a fraction of the work.
fn works(size: Size, for_kvm: bool) -> [Work; 5] {
    let share = if for_kvm { 200 } else { 1 };
    let times = |usual: u64| size.pick(100, usual, 4 * usual) / share;
    let work = |case, (program, instructions), is_right: Check| Work {
        case,
        program,
        instructions,
        is_right,
    };
    let (alu, ldst, call, miss) = (
        times(5_000_000),
        times(4_000_000),
        times(2_000_000),
        times(400),
    );
    let fib = size.pick(10, 26, 29) - if for_kvm { 8 } else { 0 };
    [
        work(
            "alu",
            Program::arithmetic(alu),
            Box::new(move |end, _| end.rax == alu * (alu + 1) / 2),
        ),
        work(
            "ldst",
            Program::loads_and_stores(ldst, DATA),
            Box::new(move |_, data| data.words()[2].load(Relaxed) == ldst),
        ),
        work(
            "call",
            Program::calls(call),
            Box::new(|end, _| end.rax == 1 && end.rcx == 0),
        ),
        work(
            "fib",
            Program::fibonacci(fib),
            Box::new(move |end, _| end.rax == fibonacci(fib)),
        ),
        work(
            "miss",
            Program::rounds(DATA, PAGES, miss),
            // The last round wrote 1.
            Box::new(|_, data| {
                data.words()
                    .iter()
                    .step_by(PAGE as usize / 8)
                    .all(|word| word.load(Relaxed) == 1)
            }),
        ),
    ]
}

fn fibonacci(n: u64) -> u64 {
    let (mut now, mut next) = (0, 1);
    for _ in 0..n {
        (now, next) = (next, now + next);
    }
    now
}

fn run(bench: &mut Bench) -> Result<(), Failure> {
    let rounds = bench.size.pick(1, 3, 9);
    let data = Memory::new((PAGES * PAGE) as usize, 2 << 20, Pages::Small)?;
    let mut slat = prepare(&bench.slat, &data)?;
    let mut kvm = match &bench.kvm {
        Some(kvm) => Some(prepare(kvm, &data)?),
        None => None,
    };
    let variants = bench.with_kvm(&[Slat::NAME]);
    let works = works(bench.size, false)
        .into_iter()
        .zip(works(bench.size, true));
    for (work, less) in works {
        bench.in_turns(work.case, rounds, &variants, |_, variant| {
            match kvm.as_mut().filter(|_| variant == RealKvm::NAME) {
                Some(kvm) => measure(kvm, &data, &less),
                None => measure(&mut slat, &data, &work),
            }
        })?;
    }
    Ok(())
}

/// Makes a machine on which nothing faults any more.
fn prepare<'m, A: Api>(api: &A, data: &'m Memory) -> Result<Machine<'m, A>, Failure> {
    let mut machine = Machine::new(api, 1, DATA + data.size() as u64)?;
    machine.set_slot(&Slot::whole(1, DATA, data))?;
    machine.touch_system()?;
    machine.run(&[Program::write(DATA, PAGES, 0)], &no_device)?;
    Ok(machine)
}

fn measure<A: Api>(
    machine: &mut Machine<'_, A>,
    data: &Memory,
    work: &Work,
) -> Result<Vec<Sample>, Failure> {
    for word in data.words() {
        word.store(0, Relaxed);
    }
    let ran = machine.run(&[work.program], &no_device)?;
    if !(work.is_right)(&ran.registers[0], data) {
        return Err(format!("the guest computed something else: {:?}", ran.registers[0]).into());
    }
    let mips = work.instructions as f64 / ran.cpu.as_secs_f64() / 1e6;
    Ok(vec![Sample::new("mips", Unit::Mips, mips)])
}

fn compare(report: &Report) -> Vec<Line> {
    let cases = report.cases(NAME).into_iter();
    cases
        .filter_map(|case| Line::of(report, NAME, case, "mips", Slat::NAME))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_computes_what_it_should_at_a_tiny_size() {
        // `measure` checks the results.
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        assert_eq!(report.cases(NAME), ["alu", "ldst", "call", "fib", "miss"]);
        assert_eq!(compare(&report).len(), 5);
    }
}
