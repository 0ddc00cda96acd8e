//! What a guest does: loops of a few 64-bit instructions. A program's only input is its registers, and it ends with HLT.

use kvm_bindings::kvm_regs;

use super::guest::{DEVICE, PAGE, PROGRAM, STACKS};
use super::modes::{self, Mode};

/// The programs' instructions: bytes among this process's constants, never executed by it.
macro_rules! programs {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal [$($line:literal),* $(,)?])*) => {
        std::arch::global_asm!(
            ".pushsection .rodata.slat_bench_guest, \"a\", @progbits",
            ".balign 16",
            // Global, because Rust code may be compiled into another object file than this code.
            ".globl slat_bench_guest, slat_bench_guest_end",
            "slat_bench_guest:",
            $(concat!(".globl ", $symbol), concat!($symbol, ":"), $($line,)* "hlt",)*
            "slat_bench_guest_end:",
            ".popsection",
        );

        unsafe extern "C" {
            static slat_bench_guest: u8;
            static slat_bench_guest_end: u8;
            $(#[link_name = $symbol] static $name: u8;)*
        }

        /// A loop that a vCPU can run.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(non_camel_case_types)]
        enum Loop {
            $($(#[$doc])* $name,)*
        }

        impl Loop {
            fn address(self) -> u64 {
                let label = match self {
                    $(Loop::$name => &raw const $name,)*
                };
                // SAFETY: both labels are in the same section.
                PROGRAM + unsafe { label.offset_from(&raw const slat_bench_guest) } as u64
            }
        }
    };
}

programs! {
    /// rsi += the first byte of each page; rbx first page, rcx pages.
    read = "slat_bench_read" [
        "2:",
        "movzx eax, byte ptr [rbx]",
        "add rsi, rax",
        "add rbx, 4096",
        "dec rcx",
        "jnz 2b",
    ]
    /// Writes rax to the beginning of each page; rbx first page, rcx pages.
    write = "slat_bench_write" [
        "2:",
        "mov [rbx], eax",
        "add rbx, 4096",
        "dec rcx",
        "jnz 2b",
    ]
    /// Writes every rdx bytes; rcx times.
    write_every = "slat_bench_write_every" [
        "2:",
        "mov [rbx], eax",
        "add rbx, rdx",
        "dec rcx",
        "jnz 2b",
    ]
    /// Writes eax to r9 pages from rbx on, counts that in rsi, waits for its turn and continues with r9 pages from r8 on; and
    /// again, until it is told to stop. The words at r10: stop, turn ([`Turns`](super::guest::Turns)).
    turns = "slat_bench_turns" [
        "2:",
        "mov rdi, rbx",
        "mov rcx, r9",
        "3:",
        "mov [rdi], eax",
        "add rdi, 4096",
        "dec rcx",
        "jnz 3b",
        "inc rsi",
        "xchg rbx, r8",
        "4:",
        "cmp qword ptr [r10], 0",
        "jne 5f",
        "cmp qword ptr [r10 + 8], 0",
        "je 4b",
        "mov qword ptr [r10 + 8], 0",
        "jmp 2b",
        "5:",
    ]
    /// Writes eax to r9 pages from rbx on, counts that in rsi, and again, until the word at r10 says stop.
    hammer = "slat_bench_hammer" [
        "2:",
        "mov rdi, rbx",
        "mov rcx, r9",
        "3:",
        "mov [rdi], eax",
        "add rdi, 4096",
        "dec rcx",
        "jnz 3b",
        "inc rsi",
        "cmp qword ptr [r10], 0",
        "je 2b",
    ]
    /// Calls the beginning of each page; rbx first page, rcx pages.
    call = "slat_bench_call" [
        "2:",
        "call rbx",
        "add rbx, 4096",
        "dec rcx",
        "jnz 2b",
    ]
    /// Writes eax, a function, to the beginning of each page, and calls each; rbx first page, rcx pages.
    cold = "slat_bench_cold" [
        "mov rdi, rbx",
        "mov rdx, rcx",
        "2:",
        "mov [rdi], eax",
        "add rdi, 4096",
        "dec rdx",
        "jnz 2b",
        "3:",
        "call rbx",
        "add rbx, 4096",
        "dec rcx",
        "jnz 3b",
    ]
    /// rsi += the first byte of random pages ([`Random`]); rbx first page, rcx times, rax state, r8 and r9 multiplier and
    /// increment, r10 64 minus the bits of a page number.
    scatter = "slat_bench_scatter" [
        "2:",
        "imul rax, r8",
        "add rax, r9",
        "mov rdx, rax",
        "xchg rcx, r10",
        "shr rdx, cl",
        "xchg rcx, r10",
        "shl rdx, 12",
        "movzx edx, byte ptr [rbx + rdx]",
        "add rsi, rdx",
        "dec rcx",
        "jnz 2b",
    ]
    /// Writes to a device register; rbx register, rcx times.
    doorbell = "slat_bench_doorbell" [
        "2:",
        "mov [rbx], ecx",
        "dec rcx",
        "jnz 2b",
    ]
    /// Sends a request to a device and reads the response: rings the doorbell at rbx with the number in ecx, finds the response
    /// (the number's complement) in memory at rdx, counts the right ones in rsi, and adds the device's status at rbx + 4 to
    /// rdi.
    request = "slat_bench_request" [
        "2:",
        "mov [rbx], ecx",
        "mov eax, [rdx]",
        "not eax",
        "cmp eax, ecx",
        "sete al",
        "movzx eax, al",
        "add rsi, rax",
        "mov eax, [rbx + 4]",
        "add rdi, rax",
        "dec rcx",
        "jnz 2b",
    ]
    /// Arithmetic in registers, six instructions; rcx times.
    alu = "slat_bench_alu" [
        "2:",
        "add rax, rcx",
        "xor rdx, rax",
        "lea rbx, [rbx + rdx * 2]",
        "shr rdx, 3",
        "sub rcx, 1",
        "jnz 2b",
    ]
    /// Loads and stores, six instructions; rcx times, rsi data.
    ldst = "slat_bench_ldst" [
        "2:",
        "mov rax, [rsi]",
        "mov [rsi + 8], rax",
        "add qword ptr [rsi + 16], 1",
        "mov rdx, [rsi + rbx * 8]",
        "dec rcx",
        "jnz 2b",
    ]
    /// Adds doubles, six instructions; rcx times, rsi data.
    x87 = "slat_bench_x87" [
        "fninit",
        "fld1",
        "fstp qword ptr [rsi + 8]",
        "2:",
        "fld qword ptr [rsi]",
        "fmul qword ptr [rsi + 8]",
        "fadd qword ptr [rsi + 8]",
        "fstp qword ptr [rsi]",
        "dec rcx",
        "jnz 2b",
    ]
    /// Arithmetic with doubles in a register, six instructions; rcx times, rsi data for the result.
    float = "slat_bench_float" [
        "mov eax, 1",
        "cvtsi2sd xmm1, eax",
        "xorps xmm0, xmm0",
        "2:",
        "mulsd xmm0, xmm1",
        "addsd xmm0, xmm1",
        "cvttsd2si rax, xmm0",
        "ucomisd xmm0, xmm1",
        "dec rcx",
        "jnz 2b",
        "movsd [rsi], xmm0",
    ]
    /// Mixes vectors of four words, which begin as rcx and rbx, ten instructions; rcx times, rsi data for the result.
    simd = "slat_bench_simd" [
        "movq xmm0, rcx",
        "movq xmm1, rbx",
        "2:",
        "paddd xmm0, xmm1",
        "pxor xmm1, xmm0",
        "movdqa xmm2, xmm1",
        "pslld xmm1, 7",
        "psrld xmm2, 25",
        "por xmm1, xmm2",
        "pshufd xmm0, xmm0, 0x39",
        "punpckldq xmm2, xmm0",
        "dec rcx",
        "jnz 2b",
        "movdqu [rsi], xmm0",
    ]
    /// Multiplies rdx by rbx and adds the product with two carries, seven instructions; rcx times.
    bigint = "slat_bench_bigint" [
        "2:",
        "xor eax, eax",
        "mulx r9, r8, rbx",
        "adcx r10, r8",
        "adox r11, r9",
        "adcx r11, rax",
        "dec rcx",
        "jnz 2b",
    ]
    /// Instructions on bits, eight of them; rcx times, rdx the bits.
    count_bits = "slat_bench_bits" [
        "2:",
        "rorx rdx, rdx, 13",
        "andn rax, rdx, rcx",
        "popcnt rbx, rax",
        "add rsi, rbx",
        "bswap rdx",
        "xor rdx, rsi",
        "dec rcx",
        "jnz 2b",
    ]
    /// Divisions, six instructions; rcx times, rbx the divisor, rdi the sum of the quotients.
    div = "slat_bench_div" [
        "2:",
        "lea rax, [rdi + rcx]",
        "xor edx, edx",
        "div rbx",
        "add rdi, rax",
        "dec rcx",
        "jnz 2b",
    ]
    /// A call of a function with a frame, eight instructions; rcx times.
    frame = "slat_bench_frame" [
        "2:",
        "call 3f",
        "dec rcx",
        "jnz 2b",
        "hlt",
        "3:",
        "push rbp",
        "mov rbp, rsp",
        "mov eax, 1",
        "pop rbp",
        "ret",
    ]
    /// The Fibonacci number of rdi, by recursion, to rax; [`Program::fibonacci`] counts instructions.
    fib = "slat_bench_fib" [
        "call 3f",
        "hlt",
        "3:",
        "cmp rdi, 2",
        "jae 4f",
        "mov rax, rdi",
        "ret",
        "4:",
        "push rbx",
        "push rdi",
        "lea rdi, [rdi - 1]",
        "call 3b",
        "mov rbx, rax",
        "pop rdi",
        "lea rdi, [rdi - 2]",
        "call 3b",
        "add rax, rbx",
        "pop rbx",
        "ret",
    ]
    /// Copies, fills and searches, by repeated instructions, 25 instructions; rdx times, rbx data of two pages. r10 counts what was not
    /// searched, r11 adds what was copied and filled.
    string = "slat_bench_string" [
        "mov byte ptr [rbx + 2048 + 200], 1",
        "2:",
        "mov [rbx], rdx",
        "mov rax, rdx",
        "mov rsi, rbx",
        "lea rdi, [rbx + 4096]",
        "mov ecx, 1000",
        "rep movsb",
        "mov ecx, 64",
        "rep stosq",
        "mov ecx, 7",
        "rep movsb",
        "mov ecx, 3",
        "rep stosq",
        "add r11, [rbx + 4096]",
        "add r11, [rdi - 8]",
        "mov al, 1",
        "lea rdi, [rbx + 2048]",
        "mov ecx, 256",
        "repne scasb",
        "add r10, rcx",
        "sub rdi, 11",
        "mov ecx, 16",
        "repne scasb",
        "add r10, rcx",
        "dec rdx",
        "jnz 2b",
    ]
    /// Takes interrupts, as [`super::interrupts`] has prepared: enables the local APIC and writes the time-stamp
    /// counter to the word at r9, again and again, until the word at r10 is not zero. r8: as for `handle`.
    interruptible = "slat_bench_interruptible" [
        "mov ecx, 0x80f", // spurious-interrupt vector register: enabled
        "mov eax, 0x1ff",
        "xor edx, edx",
        "wrmsr",
        "sti",
        "2:",
        "rdtsc",
        "shl rdx, 32",
        "or rax, rdx",
        "mov [r9], rax",
        "cmp qword ptr [r10], 0",
        "je 2b",
        "cli",
        "out 0xf4, al", // END: with interrupt controllers KVM itself waits in HLT
    ]
    /// The interrupt handler: writes the time-stamp counter to the word at r8 and counts in the next one.
    handle = "slat_bench_handle" [
        "push rax",
        "push rcx",
        "push rdx",
        "rdtsc",
        "shl rdx, 32",
        "or rax, rdx",
        "mov [r8], rax",
        "inc qword ptr [r8 + 8]",
        "mov ecx, 0x80b", // end of interrupt
        "xor eax, eax",
        "xor edx, edx",
        "wrmsr",
        "pop rdx",
        "pop rcx",
        "pop rax",
        "iretq",
    ]
    /// Writes to each page, again and again; rsi first page, rdx pages, rcx times.
    rounds = "slat_bench_rounds" [
        "2:",
        "mov rdi, rsi",
        "mov rbx, rdx",
        "3:",
        "mov [rdi], rcx",
        "add rdi, 4096",
        "dec rbx",
        "jnz 3b",
        "dec rcx",
        "jnz 2b",
    ]
    /// VMMCALL; rcx times. rax: what for.
    hypercall = "slat_bench_hypercall" [
        "2:",
        "vmmcall",
        "dec rcx",
        "jnz 2b",
    ]
    /// Allows SVM; rbx host save area.
    begin_svm = "slat_bench_begin_svm" [
        "mov ecx, 0xc0000080", // EFER: SVME
        "rdmsr",
        "or eax, 0x1000",
        "wrmsr",
        "mov ecx, 0xc0010117", // VM_HSAVE_PA
        "mov eax, ebx",
        "xor edx, edx",
        "wrmsr",
    ]
    /// Runs the guest of the control block at rax until it halts; its VMMCALL does nothing.
    hypervisor = "slat_bench_hypervisor" [
        "2:",
        "vmrun rax",
        "cmp dword ptr [rax + 0x70], 0x81", // exit code: VMMCALL
        "jne 3f",
        "add qword ptr [rax + 0x578], 3", // RIP
        "jmp 2b",
        "3:",
    ]
    /// Adds 1 to the first word of pages in a pseudo-random order, which has each of them once before it begins again; rsi first
    /// page, rdx pages minus 1 (a power of two), rcx times, rax page number, r8 and r9 multiplier and increment.
    walk = "slat_bench_walk" [
        "2:",
        "imul rax, r8",
        "add rax, r9",
        "and rax, rdx",
        "mov rdi, rax",
        "shl rdi, 12",
        "inc qword ptr [rsi + rdi]",
        "dec rcx",
        "jnz 2b",
    ]
}

pub(super) fn code() -> &'static [u8] {
    let begin = &raw const slat_bench_guest;
    let end = &raw const slat_bench_guest_end;
    // SAFETY: both labels are in the same section, the second after the first, with nothing but initialised constants between
    // them.
    unsafe { std::slice::from_raw_parts(begin, end.offset_from(begin) as usize) }
}

/// Returns the address of the interrupt handler.
pub(super) fn interrupt_handler() -> u64 {
    Loop::handle.address()
}

/// A vCPU's program: its first registers.
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

    /// Reads the first byte of each page; rsi ends as their sum.
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

    /// Writes `value` to `pages` pages from `first` on, then from `second`, in turns with the host
    /// ([`Turns`](super::guest::Turns) at `words`). rsi counts.
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

    /// Writes `value` to `pages` pages from `first` on, again and again, until the word at `stop` is not
    /// zero. rsi counts.
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

    /// Calls the beginning of each page. If [`COUNTED_RETURN`] is stored there, rsi counts the calls.
    pub fn call(first: u64, pages: u64) -> Self {
        Self::pages(Loop::call, first, pages)
    }

    /// Writes [`COUNTED_RETURN`] to each of `pages` pages and calls each. Returns also the number of instructions. rsi counts the calls.
    pub fn cold(first: u64, pages: u64) -> (Self, u64) {
        let Program(mut registers) = Self::pages(Loop::cold, first, pages);
        registers.rax = COUNTED_RETURN.into();
        (Self::new(Loop::cold, registers), 10 * pages + 3)
    }

    /// Reads the first byte of `times` random pages of the `1 << bits` at `first`; rsi ends as the sum.
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

    /// Writes to [`DEVICE`] `times` times: the numbers from `times` down to 1.
    pub fn doorbell(times: u64) -> Self {
        Self::pages(Loop::doorbell, DEVICE, times)
    }

    /// Sends `times` requests to the device at [`DEVICE`], which responds in memory at `response`. rsi counts the right
    /// responses, rdi sums the values of the status register (at `DEVICE + 4`).
    pub fn requests(times: u64, response: u64) -> Self {
        let Program(registers) = Self::pages(Loop::request, DEVICE, times);
        Program(kvm_regs {
            rdx: response,
            ..registers
        })
    }

    /// Does arithmetic. Returns also the number of instructions. rax ends as the sum of the numbers up to `times`.
    pub fn arithmetic(times: u64) -> (Self, u64) {
        (Self::pages(Loop::alu, 0, times), 6 * times + 1)
    }

    /// Loads and stores at `data`. Returns also the number of instructions. The word at `data + 16` counts them.
    pub fn loads_and_stores(times: u64, data: u64) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::ldst, 0, times);
        let rsi = data;
        (Program(kvm_regs { rsi, ..registers }), 6 * times + 1)
    }

    /// Adds doubles at `data`, which begins as 0, by x87 instructions. Returns also the number of instructions. The double at `data`
    /// counts them.
    pub fn doubles(times: u64, data: u64) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::x87, 0, times);
        let rsi = data;
        (Program(kvm_regs { rsi, ..registers }), 6 * times + 4)
    }

    /// Adds doubles in a register. Returns also the number of instructions. The double at `data` ends as `times`.
    pub fn floats(times: u64, data: u64) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::float, 0, times);
        let rsi = data;
        (Program(kvm_regs { rsi, ..registers }), 6 * times + 5)
    }

    /// Mixes two vectors of four words, which begin as `times` and `seed`. Returns also the number of instructions. The first one ends at
    /// `data`.
    pub fn vectors(times: u64, seed: u64, data: u64) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::simd, seed, times);
        let rsi = data;
        (Program(kvm_regs { rsi, ..registers }), 10 * times + 4)
    }

    /// Multiplies two factors. Returns also the number of instructions. R10 and R11 end as the sum of the products.
    pub fn products(times: u64, [rbx, rdx]: [u64; 2]) -> (Self, u64) {
        let Program(registers) = Self::pages(Loop::bigint, rbx, times);
        (Program(kvm_regs { rdx, ..registers }), 7 * times + 1)
    }

    /// Counts bits, to RSI. Returns also the number of instructions.
    pub fn bits(times: u64) -> (Self, u64) {
        (Self::pages(Loop::count_bits, 0, times), 8 * times + 1)
    }

    /// Divides by `divisor`, and adds the quotients, to RDI. Returns also the number of instructions.
    pub fn quotients(times: u64, divisor: u64) -> (Self, u64) {
        (Self::pages(Loop::div, divisor, times), 6 * times + 1)
    }

    /// Calls a small function. Returns also the number of instructions. rax ends as 1.
    pub fn calls(times: u64) -> (Self, u64) {
        (Self::pages(Loop::frame, 0, times), 8 * times + 1)
    }

    /// Computes the `n`th Fibonacci number by recursion, to rax. Returns also the number of instructions.
    pub fn fibonacci(n: u64) -> (Self, u64) {
        // A call without further calls is 4 instructions, one with two is 13 and those of the two.
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

    /// Copies, fills and searches at `data`, by REP MOVSB, REP STOSQ and REPNE SCASB, long and short ones. Returns also the number of
    /// instructions; a repeated one counts once. What is copied and filled begins with the number of the turn: from `times` down to 1. R11
    /// is the sum of these, twice; R10 counts [`UNSEARCHED`] in each turn.
    pub fn strings(times: u64, data: u64) -> (Self, u64) {
        let registers = kvm_regs {
            rbx: data,
            rdx: times,
            ..Default::default()
        };
        (Self::new(Loop::string, registers), 25 * times + 2)
    }

    /// Does arithmetic, loads, stores and calls in another mode. Returns also the number of instructions, without those that go to the mode
    /// and back. Ends with the mode's [result](Mode::result).
    pub fn mixed(times: u64, mode: Mode) -> (Self, u64) {
        let registers = kvm_regs {
            rip: modes::entry(),
            rflags: 1 << 1,
            rbx: mode.address(),
            rcx: times,
            ..Default::default()
        };
        (Program(registers), Mode::INSTRUCTIONS * times)
    }

    /// Writes to each of `pages` pages, `times` times. Returns also the number of instructions. The first word of each page
    /// ends as 1.
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

    /// Adds 1 to the first word of one of `pages` pages, a power of two, `times` times in a pseudo-random order. Each page is as often
    /// as any other, give or take one. Also returns the number of instructions.
    pub fn walk(first: u64, pages: u64, times: u64) -> (Self, u64) {
        let registers = kvm_regs {
            rsi: first,
            rdx: pages - 1,
            rcx: times,
            // A period of 2^64, and of `pages` in the lower bits.
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

    /// Allows SVM. The host save area, which is a page, is at `save`.
    pub fn begin_svm(save: u64) -> Self {
        Self::pages(Loop::begin_svm, save, 0)
    }

    /// Runs `guest` as a guest of its own, by the control block at `vmcb` ([`super::hypervisor`]). Its registers are the guest's, but for
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

    /// Takes interrupts until the word at `stop` is not zero. Writes the time-stamp counter to the word at `clock` meanwhile;
    /// the handler writes it to the word at `stamp` and counts in the next word.
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

/// `inc esi; ret`: a function that counts its calls, to be [written](Program::write) and
/// [called](Program::call).
pub const COUNTED_RETURN: u32 = u32::from_le_bytes([0xff, 0xc6, 0xc3, 0xcc]);

/// The bytes that a turn of [`Program::strings`] does not search, because it has found what it looks for.
pub const UNSEARCHED: u64 = 256 - 201 + 16 - 11;

/// The page numbers that [`Program::scatter`] reads: the upper bits of a linear congruential sequence.
#[derive(Debug)]
pub struct Random {
    state: u64,
    bits: u32,
}

impl Random {
    const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
    // Knuth's MMIX.
    const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
    const INCREMENT: u64 = 1_442_695_040_888_963_407;

    /// Makes the sequence of `1 << bits` pages.
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
