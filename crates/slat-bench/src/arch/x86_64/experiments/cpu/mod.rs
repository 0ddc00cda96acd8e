//! Measures the speed of the software CPU.

mod tcg;

use std::sync::atomic::Ordering::Relaxed;

use kvm_bindings::kvm_regs;

use crate::arch::x86_64::machine::guest::{DATA, PAGE};
use crate::arch::x86_64::machine::program::UNSEARCHED;
use crate::arch::x86_64::machine::{
    Api, Failure, Machine, Memory, Mode, Pages, Program, RealKvm, Slat, Slot, Task, no_device,
};
use crate::arch::x86_64::qemu;
use crate::compared::{Line, Rows};
use crate::experiments::a64;
use crate::report::{Report, Sample, Unit};
use crate::rounds::{Bench, Size};
use crate::{Elsewhere, Experiment, Settable};

const NAME: &str = "cpu";
const COLD: &str = "cold";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "guest instructions in each second",
    explain: "\
How many million instructions the guest executes in a second of its thread's processor time.
alu: arithmetic of registers. ldst: loads and stores of one page. x87, float: doubles, by x87 and
SSE2. simd: vectors of words. bigint: sums of products (MULX, ADCX, ADOX). bits: counts, rotations
(BMI). div: DIV. call: calls of a function with a frame. fib: the Fibonacci numbers by recursion.
string: REP MOVSB, REP STOSQ, REPNE SCASB, of 3 to 1000. code32, code16: sums, loads, stores and
calls in flat protected mode and in real mode. string32, string16: REP STOSD, MOVSD (both ways) and
CMPSD there. miss: a write to each of 2048 pages, more than the software TLB's first level holds.
walk: additions to 32768 pages in a pseudo-random order: most walk the guest's tables, and slat's.
cold: writes 65536 functions, a page each, and calls each once. The same on tcg, QEMU's software
CPU, without its start, and on a real KVM: the limit. Asked for: 1.5 times tcg's, twice for miss.",
    settable: Settable::AllBut(&[]),
    elsewhere: Elsewhere::Guests(&a64::EXPERIMENT),
    run,
    compare,
    rows: Rows::Metrics,
};

/// The number of pages of the case `miss`, twice as many as the first level of the software TLB has entries.
const PAGES: u64 = 2048;
/// The number of pages of the case `walk`, four times as many as the second level of the software TLB has entries.
const WALKED: u64 = 32768;
/// The number of pages of the case `cold`, each with a function. The data slot of all cases has this size.
const FUNCTIONS: u64 = 65536;

/// The program of a case, and a check that the guest has really executed the program.
struct Work {
    case: &'static str,
    program: Program,
    /// The number of pages of data that the program uses.
    pages: u64,
    instructions: u64,
    is_right: Check,
}

/// Checks the registers at the end of the program, and the words of its data.
type Check = Box<dyn Fn(&kvm_regs, &dyn Fn(usize) -> u64) -> bool>;

/// The CPU that executes the programs. The amount of work that a program does depends on this CPU.
#[derive(Clone, Copy)]
enum Worker {
    /// slat and QEMU's software CPU, which execute the same amount of work.
    Software,
    /// A real KVM, whose CPU may be an interpreter.
    Kvm,
    /// QEMU with as few instructions as possible, to measure the time of QEMU's start.
    Start,
}

/// Returns the cases of this experiment. The amount of work suits `worker`.
fn works(size: Size, worker: Worker) -> [Work; 18] {
    // `part` divides the number of repetitions. `less` is subtracted from the argument of the case `fib`.
    let (part, less) = match worker {
        Worker::Software => (1, 0),
        Worker::Kvm => (1600, 12),
        Worker::Start => (3200, 14),
    };
    let times = |usual: u64| size.pick(3200, usual, 4 * usual) / part;
    let work = |case, (program, instructions), is_right: Check| Work {
        case,
        program,
        pages: PAGES,
        instructions,
        is_right,
    };
    let (alu, ldst, x87, call, miss, walk) = (
        times(160_000_000),
        times(32_000_000),
        times(4_000_000),
        times(16_000_000),
        times(3_200),
        times(4_800_000),
    );
    let [float, simd, bigint, bits, div] =
        [16_000_000, 16_000_000, 32_000_000, 32_000_000, 16_000_000].map(times);
    let [string, code32, code16] = [200_000, 16_000_000, 8_000_000].map(times);
    let string_in_mode = times(64_000);
    let in_mode = |case, times, mode: Mode, task: Task| {
        let result = task.result(mode, times);
        work(
            case,
            Program::in_mode(times, mode, task),
            Box::new(move |end, _| [end.rax, end.rsi, end.rdi] == result),
        )
    };
    let fib = size.pick(14, 30, 33) - less;
    let cold = match worker {
        Worker::Software => size.pick(64, FUNCTIONS, FUNCTIONS),
        Worker::Kvm | Worker::Start => 16,
    };
    [
        work(
            "alu",
            Program::arithmetic(alu),
            Box::new(move |end, _| end.rax == alu * (alu + 1) / 2),
        ),
        work(
            "ldst",
            Program::loads_and_stores(ldst, DATA),
            Box::new(move |_, word| word(2) == ldst),
        ),
        work(
            "x87",
            Program::doubles(x87, DATA),
            Box::new(move |_, word| f64::from_bits(word(0)) == x87 as f64),
        ),
        work(
            "float",
            Program::floats(float, DATA),
            Box::new(move |_, word| f64::from_bits(word(0)) == float as f64),
        ),
        work(
            "simd",
            Program::vectors(simd, SEED, DATA),
            Box::new(move |_, word| [word(0), word(1)] == mixed(simd, SEED)),
        ),
        work(
            "bigint",
            Program::products(bigint, FACTORS),
            Box::new(move |end, _| {
                let [a, b] = FACTORS.map(u128::from);
                let sum = (a * b).wrapping_mul(bigint.into());
                u128::from(end.r11) << 64 | u128::from(end.r10) == sum
            }),
        ),
        work(
            "bits",
            Program::bits(bits),
            Box::new(move |end, _| end.rsi == counted(bits)),
        ),
        work(
            "div",
            Program::quotients(div, 3),
            Box::new(move |end, _| {
                (1..=div)
                    .rev()
                    .fold(0, |sum: u64, n| sum.wrapping_add(sum.wrapping_add(n) / 3))
                    == end.rdi
            }),
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
            "string",
            Program::strings(string, DATA),
            Box::new(move |end, word| {
                // The loop counts down, so its last iteration has copied and filled memory with 1.
                let mut filled = ((4096 + 1000) / 8..).take(64);
                end.r11 == string * (string + 1)
                    && end.r10 == string * UNSEARCHED
                    && word(512) == 1
                    && filled.all(|index| word(index) == 1)
            }),
        ),
        in_mode("code32", code32, Mode::Protected32, Task::Mixed),
        in_mode("code16", code16, Mode::Real16, Task::Mixed),
        in_mode("string32", string_in_mode, Mode::Protected32, Task::Strings),
        in_mode("string16", string_in_mode, Mode::Real16, Task::Strings),
        work(
            "miss",
            Program::rounds(DATA, PAGES, miss),
            // The program counts down, so its last round has written 1 to each page.
            Box::new(|_, word| (0..PAGES as usize).all(|page| word(page * PAGE as usize / 8) == 1)),
        ),
        Work {
            pages: WALKED,
            ..work(
                "walk",
                Program::walk(DATA, WALKED, walk),
                Box::new(move |_, word| {
                    let words = (0..WALKED as usize).map(|page| word(page * PAGE as usize / 8));
                    let rounds = walk / WALKED;
                    words.clone().sum::<u64>() == walk
                        && words.into_iter().all(|word| word - rounds <= 1)
                }),
            )
        },
        Work {
            pages: FUNCTIONS,
            ..work(
                COLD,
                Program::cold(DATA, cold),
                Box::new(move |end, _| end.rsi == cold),
            )
        },
    ]
}

/// The initial value of one vector of the case `simd`. The second vector begins with the number of iterations.
const SEED: u64 = 0x0123_4567_89ab_cdef;
/// The two factors that the case `bigint` multiplies.
const FACTORS: [u64; 2] = [0xfedc_ba98_7654_3210, 0x0f1e_2d3c_4b5a_6978];

/// Returns the words that the guest must leave in memory in the case `simd`.
fn mixed(times: u64, seed: u64) -> [u64; 2] {
    let words = |value: u64| [value as u32, (value >> 32) as u32, 0, 0];
    let (mut a, mut b) = (words(times), words(seed));
    for _ in 0..times {
        for (a, b) in a.iter_mut().zip(&mut b) {
            *a = a.wrapping_add(*b);
            *b = (*b ^ *a).rotate_left(7);
        }
        a.rotate_left(1);
    }
    [0, 2].map(|k| u64::from(a[k + 1]) << 32 | u64::from(a[k]))
}

/// Returns the number of bits that the guest must count in the case `bits`.
fn counted(times: u64) -> u64 {
    let (mut value, mut sum) = (0u64, 0u64);
    for n in (1..=times).rev() {
        value = value.rotate_right(13);
        sum += u64::from((!value & n).count_ones());
        value = value.swap_bytes() ^ sum;
    }
    sum
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
    // The memory is mapped by huge pages, as in QEMU.
    let data = Memory::new((FUNCTIONS * PAGE) as usize, 2 << 20, Pages::Huge)?;
    let mut slat = prepare(&bench.guests.slat, &data)?;
    let mut kvm = match &bench.guests.kvm {
        Some(kvm) => Some(prepare(kvm, &data)?),
        None => None,
    };
    let mut variants = bench.guests.with_kvm(&[Slat::NAME]);
    match qemu::version() {
        Some(version) => {
            variants.insert(0, tcg::NAME);
            bench.note(format!("tcg is that of {version}."));
        }
        None => bench.note_missing("cpu: there is no QEMU here to compare with.".to_owned()),
    }
    let size = bench.size;
    let [works, for_kvm, start] =
        [Worker::Software, Worker::Kvm, Worker::Start].map(|worker| works(size, worker));
    for (k, work) in works.iter().enumerate() {
        let mut variants = variants.clone();
        if ["x87", "float", "simd", "bigint", "bits"].contains(&work.case) {
            // A KVM that is an interpreter may not implement the instructions of this case.
            variants.retain(|variant| *variant != RealKvm::NAME);
        }
        bench.in_turns(
            work.case,
            rounds,
            &variants,
            |bench, variant| match variant {
                tcg::NAME => measure_tcg(&start[k], work),
                RealKvm::NAME => match &mut kvm {
                    Some(kvm) => measure(kvm, &data, &for_kvm[k]),
                    None => Err("no real KVM".into()),
                },
                // A machine keeps the compiled code of functions that it has called. So in the case `cold`, each round
                // uses a new machine.
                _ if work.case == COLD => {
                    measure(&mut prepare(&bench.guests.slat, &data)?, &data, work)
                }
                _ => measure(&mut slat, &data, work),
            },
        )?;
    }
    Ok(())
}

/// Measures on QEMU's software CPU how much longer `more` takes than `less`. So the time of QEMU's start is not
/// included.
fn measure_tcg(less: &Work, more: &Work) -> Result<Vec<Sample>, Failure> {
    let run = |work: &Work| -> Result<f64, Failure> {
        let ran = tcg::run(&work.program, (work.pages * PAGE) as usize)?;
        let word = |index: usize| {
            let bytes = ran.data.get(8 * index..8 * index + 8);
            bytes.map_or(0, |bytes| {
                u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
            })
        };
        match (work.is_right)(&ran.registers, &word) {
            true => Ok(ran.cpu.as_secs_f64()),
            false => {
                Err(format!("QEMU's guest computed something else: {:?}", ran.registers).into())
            }
        }
    };
    let (start, all) = (run(less)?, run(more)?);
    let instructions = more.instructions.saturating_sub(less.instructions) as f64;
    // At the tiny size, nearly all of the time is QEMU's start, so the difference may be 0.
    let seconds = (all - start).max(1e-3);
    Ok(vec![Sample::new(
        "mips",
        Unit::Mips,
        instructions / seconds / 1e6,
    )])
}

/// Makes a machine whose pages are all mapped, so that the program takes no faults.
fn prepare<'m, A: Api>(api: &A, data: &'m Memory) -> Result<Machine<'m, A>, Failure> {
    let mut machine = Machine::new(api, 1, DATA + data.size() as u64)?;
    machine.set_slot(&Slot::whole(1, DATA, data))?;
    machine.touch_system()?;
    machine.run(&[Program::write(DATA, FUNCTIONS, 0)], &no_device)?;
    Ok(machine)
}

fn measure<A: Api>(
    machine: &mut Machine<'_, A>,
    data: &Memory,
    work: &Work,
) -> Result<Vec<Sample>, Failure> {
    for word in &data.words()[..(work.pages * PAGE) as usize / 8] {
        word.store(0, Relaxed);
    }
    let ran = machine.run(&[work.program], &no_device)?;
    let word = |index: usize| data.words()[index].load(Relaxed);
    if !(work.is_right)(&ran.registers[0], &word) {
        return Err(format!("the guest computed something else: {:?}", ran.registers[0]).into());
    }
    let mips = work.instructions as f64 / ran.cpu.as_secs_f64() / 1e6;
    Ok(vec![Sample::new("mips", Unit::Mips, mips)])
}

fn compare(report: &Report) -> Vec<Line> {
    let line = |case| {
        let least = if case == "miss" { 1.0 } else { 0.5 };
        match Line::compare(report, NAME, case, "mips", tcg::NAME, Slat::NAME) {
            Some(line) => Some(line.change_at_least(least)),
            None => Line::of(report, NAME, case, "mips", Slat::NAME),
        }
    };
    report.cases(NAME).into_iter().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_computes_what_it_should_at_a_tiny_size() {
        // `measure` itself checks the guests' results.
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        assert_eq!(
            report.cases(NAME),
            [
                "alu", "ldst", "x87", "float", "simd", "bigint", "bits", "div", "call", "fib",
                "string", "code32", "code16", "string32", "string16", "miss", "walk", "cold"
            ]
        );
        assert_eq!(compare(&report).len(), 18);
    }
}
