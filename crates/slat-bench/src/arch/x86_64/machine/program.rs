//! The programs of a guest: loops of a few 64-bit instructions (`loops.rs`). A program's only input is its registers.
//! It ends with HLT.

use kvm_bindings::kvm_regs;

use super::layout::{DEVICE, PAGE, STACKS};
use super::loops::Loop;
use super::modes::{self, Mode, Task};

/// A vCPU's program, given by the initial values of the vCPU's registers.
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

    /// Returns a program that reads the first byte of each page. At the end, rsi is the sum of these bytes.
    pub fn read(first: u64, pages: u64) -> Self {
        Self::pages(Loop::read, first, pages)
    }

    /// Returns a program that writes `value` to the beginning of each page.
    pub fn write(first: u64, pages: u64, value: u32) -> Self {
        let Program(mut registers) = Self::pages(Loop::write, first, pages);
        registers.rax = value.into();
        Program(registers)
    }

    /// Returns a program that writes `value` every `stride` bytes from `first` on, `times` times.
    pub fn write_every(first: u64, stride: u64, times: u64, value: u32) -> Self {
        let Program(registers) = Self::pages(Loop::write_every, first, times);
        Program(kvm_regs {
            rax: value.into(),
            rdx: stride,
            ..registers
        })
    }

    /// Returns a program that writes `value` to `pages` pages from `first` on, then to as many pages from `second` on,
    /// and so on. Between two of these passes it waits for its turn ([`Turns`](super::guest::Turns) at `words`). rsi
    /// counts the passes.
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

    /// Returns a program that repeatedly writes `value` to `pages` pages from `first` on, until the word at `stop` is
    /// not zero. rsi counts the passes.
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

    /// Returns a program that calls a function at the beginning of each page. If that function is [`COUNTED_RETURN`],
    /// rsi counts the calls.
    pub fn call(first: u64, pages: u64) -> Self {
        Self::pages(Loop::call, first, pages)
    }

    /// Returns a program that writes [`COUNTED_RETURN`] to each of `pages` pages, and calls it. rsi counts the calls.
    /// Also returns the number of instructions.
    pub fn cold(first: u64, pages: u64) -> (Self, u64) {
        let Program(mut registers) = Self::pages(Loop::cold, first, pages);
        registers.rax = COUNTED_RETURN.into();
        (Self::new(Loop::cold, registers), 10 * pages + 3)
    }

    /// Returns a program that reads the first byte of `times` random pages among the `1 << bits` pages at `first`. At
    /// the end, rsi is the sum of these bytes.
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

    /// Returns a program that writes to [`DEVICE`] `times` times. The values count down from `times` to 1.
    pub fn doorbell(times: u64) -> Self {
        Self::pages(Loop::doorbell, DEVICE, times)
    }

    /// Returns a program that sends `times` requests to the device at [`DEVICE`], which responds in memory at
    /// `response`. rsi counts the right responses. rdi sums the values of the status register (at `DEVICE + 4`).
    pub fn requests(times: u64, response: u64) -> Self {
        let Program(registers) = Self::pages(Loop::request, DEVICE, times);
        Program(kvm_regs {
            rdx: response,
            ..registers
        })
    }

    /// Returns a program that does arithmetic. At the end, rax is the sum of the numbers up to `times`. Also returns
    /// the number of instructions.
    pub fn arithmetic(times: u64) -> (Self, u64) {
        (Self::pages(Loop::alu, 0, times), 6 * times + 1)
    }

    /// Returns a program that loads and stores at `data`. At the end, the word at `data + 16` is `times`. Also returns
    /// the number of instructions.
    pub fn loads_and_stores(times: u64, data: u64) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::ldst, 0, times);
        let rsi = data;
        (Program(kvm_regs { rsi, ..registers }), 6 * times + 1)
    }

    /// Returns a program that adds 1 to the double at `data` by x87 instructions, `times` times, beginning with 0. Also
    /// returns the number of instructions.
    pub fn doubles(times: u64, data: u64) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::x87, 0, times);
        let rsi = data;
        (Program(kvm_regs { rsi, ..registers }), 6 * times + 4)
    }

    /// Returns a program that adds doubles in a register. At the end, the double at `data` is `times`. Also returns the
    /// number of instructions.
    pub fn floats(times: u64, data: u64) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::float, 0, times);
        let rsi = data;
        (Program(kvm_regs { rsi, ..registers }), 6 * times + 5)
    }

    /// Returns a program that mixes two vectors of four words, whose initial words are `times` and `seed`, and then
    /// stores the first vector at `data`. Also returns the number of instructions.
    pub fn vectors(times: u64, seed: u64, data: u64) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::simd, seed, times);
        let rsi = data;
        (Program(kvm_regs { rsi, ..registers }), 10 * times + 4)
    }

    /// Returns a program that multiplies the factors `[rbx, rdx]` `times` times, by MULX, and sums the 128-bit products
    /// in R11:R10. Also returns the number of instructions.
    pub fn products(times: u64, [rbx, rdx]: [u64; 2]) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::bigint, rbx, times);
        (Program(kvm_regs { rdx, ..registers }), 7 * times + 1)
    }

    /// Returns a program that counts bits in RSI. Also returns the number of instructions.
    pub fn bits(times: u64) -> (Self, u64) {
        (Self::pages(Loop::count_bits, 0, times), 8 * times + 1)
    }

    /// Returns a program that divides by `divisor`, and sums the quotients in RDI. Also returns the number of
    /// instructions.
    pub fn quotients(times: u64, divisor: u64) -> (Self, u64) {
        (Self::pages(Loop::div, divisor, times), 6 * times + 1)
    }

    /// Returns a program that calls a small function repeatedly. At the end, rax is 1. Also returns the number of
    /// instructions.
    pub fn calls(times: u64) -> (Self, u64) {
        (Self::pages(Loop::frame, 0, times), 8 * times + 1)
    }

    /// Returns a program that computes the `n`th Fibonacci number in rax, by recursion. Also returns the number of
    /// instructions.
    pub fn fibonacci(n: u64) -> (Self, u64) {
        // A call of the function that makes no further calls executes 4 instructions. A call that makes two further
        // calls executes 13 instructions plus those of the two calls.
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

    /// Returns a program that copies, fills and searches at `data`, by REP MOVSB, REP STOSQ and REPNE SCASB with large
    /// and small counts. Iterations are numbered from `times` down to 1. Each iteration copies its number and fills
    /// with it, so at the end R11 is twice the sum of these numbers. R10 grows by [`UNSEARCHED`] in each iteration.
    /// Also returns the number of instructions; a repeated instruction counts once.
    pub fn strings(times: u64, data: u64) -> (Self, u64) {
        let registers = kvm_regs {
            rbx: data,
            rdx: times,
            ..Default::default()
        };
        (Self::new(Loop::string, registers), 25 * times + 2)
    }

    /// Returns a program that does `task` in protected or real mode. At the end, the registers have the task's
    /// [result](Task::result). Also returns the number of instructions, without those that change the mode.
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

    /// Returns a program that writes to each of `pages` pages, `times` times. At the end, the first word of each page
    /// is 1. Also returns the number of instructions.
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

    /// Returns a program that adds 1 to the first word of a page, `times` times, visiting the `pages` pages (a power of
    /// two) in a pseudo-random order. The counts of any two pages differ by at most one. Also returns the number of
    /// instructions.
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

    /// Returns a program that makes `times` hypercalls.
    pub fn hypercalls(times: u64) -> Self {
        Self::pages(Loop::hypercall, 0, times)
    }

    /// Returns a program that enables SVM. `save` is the address of the host save area, which is one page.
    pub fn begin_svm(save: u64) -> Self {
        Self::pages(Loop::begin_svm, save, 0)
    }

    /// Returns a hypervisor's program, which runs `guest` as its guest, with the control block at `vmcb`
    /// ([`super::hypervisor`]). The initial registers of this program are also the guest's initial registers, except
    /// RAX and RSP.
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

    /// Returns a program that takes interrupts until the word at `stop` is not zero, and writes the time-stamp counter
    /// to the word at `clock` all the time. The interrupt handler writes the counter to the word at `stamp`, and
    /// increments the next word.
    pub fn interruptible(stamp: u64, clock: u64, stop: u64) -> Self {
        let registers = kvm_regs {
            r8: stamp,
            r9: clock,
            r10: stop,
            ..Default::default()
        };
        Self::new(Loop::interruptible, registers)
    }

    /// Returns the initial registers of vCPU number `index`.
    pub fn registers(&self, index: usize) -> kvm_regs {
        kvm_regs {
            rsp: STACKS + (index as u64 + 1) * PAGE,
            ..self.0
        }
    }
}

/// The code `inc esi; ret`: a function that counts its calls. [`Program::write`] can store this code, and
/// [`Program::call`] can call it.
pub const COUNTED_RETURN: u32 = u32::from_le_bytes([0xff, 0xc6, 0xc3, 0xcc]);

/// The number of bytes that one iteration of [`Program::strings`] does not search, because each search ends at its
/// match.
pub const UNSEARCHED: u64 = 256 - 201 + 16 - 11;

/// The page numbers that [`Program::scatter`] reads. They are the upper bits of a linear congruential generator.
#[derive(Debug)]
pub struct Random {
    state: u64,
    bits: u32,
}

impl Random {
    const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
    // The multiplier of Knuth's generator MMIX.
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
