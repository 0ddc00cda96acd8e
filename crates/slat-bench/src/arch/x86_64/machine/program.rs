//! The programs of a guest: loops of a few 64-bit instructions (`loops.rs`). A program's only input is its registers.
//! It ends with HLT.

use kvm_bindings::kvm_regs;

use super::layout::{DEVICE, PAGE, STACKS};
use super::loops::Loop;
use super::modes::{self, Mode, Task};

/// A vCPU's program, as the first values of the vCPU's registers.
#[derive(Clone, Copy, Debug)]
pub struct Program(kvm_regs);

impl Program {
    fn new(code: Loop, registers: kvm_regs) -> Self {
        Program(kvm_regs {
            rip: code.address(),
            rflags: 1 << 1,
            ..registers
        })
    }

    fn pages(code: Loop, first: u64, pages: u64) -> Self {
        Self::new(
            code,
            kvm_regs {
                rbx: first,
                rcx: pages,
                ..Default::default()
            },
        )
    }

    /// Reads the first byte of each page. rsi ends as the sum of these bytes.
    pub fn read(first: u64, pages: u64) -> Self {
        Self::pages(Loop::read, first, pages)
    }

    /// Writes `value` to the beginning of each page.
    pub fn write(first: u64, pages: u64, value: u32) -> Self {
        let Program(mut registers) = Self::pages(Loop::write, first, pages);
        registers.rax = value.into();
        Program(registers)
    }

    /// Writes `value` every `stride` bytes from `first` on, `times` times.
    pub fn write_every(first: u64, stride: u64, times: u64, value: u32) -> Self {
        let Program(registers) = Self::pages(Loop::write_every, first, times);
        Program(kvm_regs {
            rax: value.into(),
            rdx: stride,
            ..registers
        })
    }

    /// Writes `value` to `pages` pages from `first` on, then to as many pages from `second` on. Guest and host take
    /// turns ([`Turns`](super::guest::Turns) at `words`). rsi counts the passes.
    pub fn turns(first: u64, second: u64, pages: u64, value: u32, words: u64) -> Self {
        let registers = kvm_regs {
            rbx: first,
            r8: second,
            r9: pages,
            rax: value.into(),
            r10: words,
            ..Default::default()
        };
        Self::new(Loop::turns, registers)
    }

    /// Repeatedly writes `value` to `pages` pages from `first` on, until the word at `stop` is not zero. rsi counts the
    /// passes.
    pub fn hammer(first: u64, pages: u64, value: u32, stop: u64) -> Self {
        let registers = kvm_regs {
            rbx: first,
            r9: pages,
            rax: value.into(),
            r10: stop,
            ..Default::default()
        };
        Self::new(Loop::hammer, registers)
    }

    /// Calls a function at the beginning of each page. If that function is [`COUNTED_RETURN`], rsi counts the calls.
    pub fn call(first: u64, pages: u64) -> Self {
        Self::pages(Loop::call, first, pages)
    }

    /// Writes [`COUNTED_RETURN`] to each of `pages` pages and calls each. rsi counts the calls. Also returns the
    /// number of instructions.
    pub fn cold(first: u64, pages: u64) -> (Self, u64) {
        let Program(mut registers) = Self::pages(Loop::cold, first, pages);
        registers.rax = COUNTED_RETURN.into();
        (Self::new(Loop::cold, registers), 10 * pages + 3)
    }

    /// Reads the first byte of `times` random pages among the `1 << bits` pages at `first`. rsi ends as the sum of
    /// these bytes.
    pub fn scatter(first: u64, bits: u32, times: u64) -> Self {
        let Program(registers) = Self::pages(Loop::scatter, first, times);
        Program(kvm_regs {
            rax: Random::SEED,
            r8: Random::MULTIPLIER,
            r9: Random::INCREMENT,
            r10: 64 - u64::from(bits),
            ..registers
        })
    }

    /// Writes to [`DEVICE`] `times` times. The written values count down from `times` to 1.
    pub fn doorbell(times: u64) -> Self {
        Self::pages(Loop::doorbell, DEVICE, times)
    }

    /// Sends `times` requests to the device at [`DEVICE`], which responds in memory at `response`. rsi counts the
    /// right responses. rdi sums the values of the status register (at `DEVICE + 4`).
    pub fn requests(times: u64, response: u64) -> Self {
        let Program(registers) = Self::pages(Loop::request, DEVICE, times);
        Program(kvm_regs {
            rdx: response,
            ..registers
        })
    }

    /// Does arithmetic. rax ends as the sum of the numbers up to `times`. Also returns the number of instructions.
    pub fn arithmetic(times: u64) -> (Self, u64) {
        (Self::pages(Loop::alu, 0, times), 6 * times + 1)
    }

    /// Loads and stores at `data`. The word at `data + 16` ends as `times`. Also returns the number of instructions.
    pub fn loads_and_stores(times: u64, data: u64) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::ldst, 0, times);
        let rsi = data;
        (Program(kvm_regs { rsi, ..registers }), 6 * times + 1)
    }

    /// Adds 1 to the double at `data` by x87 instructions, from 0 up to `times`. Also returns the number of
    /// instructions.
    pub fn doubles(times: u64, data: u64) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::x87, 0, times);
        let rsi = data;
        (Program(kvm_regs { rsi, ..registers }), 6 * times + 4)
    }

    /// Adds doubles in a register. The double at `data` ends as `times`. Also returns the number of instructions.
    pub fn floats(times: u64, data: u64) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::float, 0, times);
        let rsi = data;
        (Program(kvm_regs { rsi, ..registers }), 6 * times + 5)
    }

    /// Mixes two vectors of four words, which begin as `times` and `seed`. In the end stores the first vector at
    /// `data`. Also returns the number of instructions.
    pub fn vectors(times: u64, seed: u64, data: u64) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::simd, seed, times);
        let rsi = data;
        (Program(kvm_regs { rsi, ..registers }), 10 * times + 4)
    }

    /// Multiplies the factors `[rbx, rdx]` `times` times, by MULX, and sums the 128-bit products in R11:R10. Also
    /// returns the number of instructions.
    pub fn products(times: u64, [rbx, rdx]: [u64; 2]) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::bigint, rbx, times);
        (Program(kvm_regs { rdx, ..registers }), 7 * times + 1)
    }

    /// Counts bits in RSI. Also returns the number of instructions.
    pub fn bits(times: u64) -> (Self, u64) {
        (Self::pages(Loop::count_bits, 0, times), 8 * times + 1)
    }

    /// Divides by `divisor`, and sums the quotients in RDI. Also returns the number of instructions.
    pub fn quotients(times: u64, divisor: u64) -> (Self, u64) {
        (Self::pages(Loop::div, divisor, times), 6 * times + 1)
    }

    /// Calls a small function repeatedly. rax ends as 1. Also returns the number of instructions.
    pub fn calls(times: u64) -> (Self, u64) {
        (Self::pages(Loop::frame, 0, times), 8 * times + 1)
    }

    /// Computes the `n`th Fibonacci number in rax, by recursion. Also returns the number of instructions.
    pub fn fibonacci(n: u64) -> (Self, u64) {
        // A call that makes no further calls takes 4 instructions. A call that makes two further calls takes 13
        // instructions plus those of the two calls.
        let (mut now, mut next) = (4, 4);
        for _ in 0..n {
            (now, next) = (next, 13 + now + next);
        }
        let registers = kvm_regs {
            rdi: n,
            ..Default::default()
        };
        (Self::new(Loop::fib, registers), now + 2)
    }

    /// Copies, fills and searches at `data`, by REP MOVSB, REP STOSQ and REPNE SCASB with large and small counts.
    /// Turns are numbered from `times` down to 1. Each turn copies its number and fills with it, so R11 ends as twice
    /// the sum of these numbers. R10 grows by [`UNSEARCHED`] in each turn. Also returns the number of instructions; a
    /// repeated instruction counts once.
    pub fn strings(times: u64, data: u64) -> (Self, u64) {
        let registers = kvm_regs {
            rbx: data,
            rdx: times,
            ..Default::default()
        };
        (Self::new(Loop::string, registers), 25 * times + 2)
    }

    /// Does `task` in protected or real mode, and ends with the task's [result](Task::result). Also returns the
    /// number of instructions, not counting those that change the mode.
    pub fn in_mode(times: u64, mode: Mode, task: Task) -> (Self, u64) {
        let registers = kvm_regs {
            rip: modes::entry(),
            rflags: 1 << 1,
            rbx: mode.address(),
            rdi: task.address(mode),
            rcx: times,
            ..Default::default()
        };
        (Program(registers), task.instructions() * times)
    }

    /// Writes to each of `pages` pages, `times` times. The first word of each page ends as 1. Also returns the number
    /// of instructions.
    pub fn rounds(first: u64, pages: u64, times: u64) -> (Self, u64) {
        let registers = kvm_regs {
            rsi: first,
            rdx: pages,
            rcx: times,
            ..Default::default()
        };
        let instructions = times * (4 + 4 * pages) + 1;
        (Self::new(Loop::rounds, registers), instructions)
    }

    /// Adds 1 to the first word of a page, `times` times, visiting the `pages` pages (a power of two) in a
    /// pseudo-random order. Any two pages' counts differ by one at most. Also returns the number of instructions.
    pub fn walk(first: u64, pages: u64, times: u64) -> (Self, u64) {
        let registers = kvm_regs {
            rsi: first,
            rdx: pages - 1,
            rcx: times,
            // With these constants, the sequence has a period of 2^64, and its lower bits have a period of `pages`.
            r8: 25_173,
            r9: 13_849,
            ..Default::default()
        };
        (Self::new(Loop::walk, registers), times * 8 + 1)
    }

    /// Makes `times` hypercalls.
    pub fn hypercalls(times: u64) -> Self {
        Self::pages(Loop::hypercall, 0, times)
    }

    /// Enables SVM. `save` is the address of the host save area, one page.
    pub fn begin_svm(save: u64) -> Self {
        Self::pages(Loop::begin_svm, save, 0)
    }

    /// Runs `guest` as the guest of a hypervisor, with the control block at `vmcb` ([`super::hypervisor`]). The
    /// registers of this program are also the guest's first registers, except RAX and RSP.
    pub(super) fn hypervisor(guest: &Program, vmcb: u64) -> Self {
        let Program(registers) = *guest;
        Self::new(
            Loop::hypervisor,
            kvm_regs {
                rax: vmcb,
                ..registers
            },
        )
    }

    /// Takes interrupts until the word at `stop` is not zero, and writes the time-stamp counter to the word at
    /// `clock` all the time. The interrupt handler writes the counter to the word at `stamp`, and increments the next
    /// word.
    pub fn interruptible(stamp: u64, clock: u64, stop: u64) -> Self {
        let registers = kvm_regs {
            r8: stamp,
            r9: clock,
            r10: stop,
            ..Default::default()
        };
        Self::new(Loop::interruptible, registers)
    }

    /// Returns the first registers of vCPU number `index`.
    pub fn registers(&self, index: usize) -> kvm_regs {
        kvm_regs {
            rsp: STACKS + (index as u64 + 1) * PAGE,
            ..self.0
        }
    }
}

/// The code `inc esi; ret`: a function that counts its calls. [`Program::write`] stores it and
/// [`Program::call`] calls it.
pub const COUNTED_RETURN: u32 = u32::from_le_bytes([0xff, 0xc6, 0xc3, 0xcc]);

/// The number of bytes that a turn of [`Program::strings`] leaves unsearched, because each search ends at its match.
pub const UNSEARCHED: u64 = 256 - 201 + 16 - 11;

/// The page numbers that [`Program::scatter`] reads: the upper bits of a linear congruential generator.
#[derive(Debug)]
pub struct Random {
    state: u64,
    bits: u32,
}

impl Random {
    const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
    // The multiplier of Knuth's MMIX.
    const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
    const INCREMENT: u64 = 1_442_695_040_888_963_407;

    /// Makes the sequence of page numbers below `1 << bits`.
    pub fn pages(bits: u32) -> Self {
        Random {
            state: Self::SEED,
            bits,
        }
    }
}

impl Iterator for Random {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.state = self
            .state
            .wrapping_mul(Self::MULTIPLIER)
            .wrapping_add(Self::INCREMENT);
        Some(self.state >> (64 - self.bits))
    }
}
