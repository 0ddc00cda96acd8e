//! The instructions of the programs in long mode. The comments name the registers that a program reads;
//! [`Program`](super::Program) sets them.

use super::layout::PROGRAM;

/// Defines the programs' instructions: bytes for the guest, which this process never executes.
macro_rules! programs {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal [$($line:literal),* $(,)?])*) => {
        std::arch::global_asm!(
            ".pushsection .rodata.slat_bench_guest, \"a\", @progbits",
            ".balign 16",
            // The labels are global, because the Rust code that uses them may be compiled into another object file.
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

        /// A program, given by its loop.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(non_camel_case_types)]
        pub(super) enum Loop {
            $($(#[$doc])* $name,)*
        }

        impl Loop {
            pub(super) fn address(self) -> u64 {
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
    /// Adds the first byte of each page to rsi. rbx is the address of the first page, rcx the number of pages.
    read = "slat_bench_read" [
        "2:",
        "movzx eax, byte ptr [rbx]",
        "add rsi, rax",
        "add rbx, 4096",
        "dec rcx",
        "jnz 2b",
    ]
    /// Writes rax to the beginning of each page. rbx is the address of the first page, rcx the number of pages.
    write = "slat_bench_write" [
        "2:",
        "mov [rbx], eax",
        "add rbx, 4096",
        "dec rcx",
        "jnz 2b",
    ]
    /// Writes eax every rdx bytes from rbx on, rcx times.
    write_every = "slat_bench_write_every" [
        "2:",
        "mov [rbx], eax",
        "add rbx, rdx",
        "dec rcx",
        "jnz 2b",
    ]
    /// Writes eax to r9 pages from rbx on, increments rsi, and waits for its next turn. Then does the same with r9
    /// pages from r8 on. Repeats both until the host stops the program. r10 is the address of two words, stop and turn
    /// ([`Turns`](super::guest::Turns)).
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
    /// Writes eax to r9 pages from rbx on, repeatedly, until the word at r10 is not zero. rsi counts the rounds.
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
    /// Calls a function at the beginning of each page. rbx is the address of the first page, rcx the number of pages.
    call = "slat_bench_call" [
        "2:",
        "call rbx",
        "add rbx, 4096",
        "dec rcx",
        "jnz 2b",
    ]
    /// Writes eax, the code of a function, to the beginning of each page, and calls each function. rbx is the address
    /// of the first page, rcx the number of pages.
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
    /// Adds the first byte of random pages ([`Random`]) to rsi. rbx is the address of the first page, and rcx the
    /// number of reads. rax is the state of the random sequence, r8 its multiplier, r9 its increment. r10 is 64 minus
    /// the number of bits of a page number.
    ///
    /// [`Random`]: super::program::Random
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
    /// Writes to the device register at rbx, rcx times.
    doorbell = "slat_bench_doorbell" [
        "2:",
        "mov [rbx], ecx",
        "dec rcx",
        "jnz 2b",
    ]
    /// Sends requests to a device and reads its responses. For each request, writes the number in ecx to the doorbell
    /// at rbx. The response is the number's complement, in memory at rdx. rsi counts the right responses. rdi sums the
    /// values of the device's status register at rbx + 4.
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
    /// Does arithmetic in registers. The loop has six instructions and is executed rcx times.
    alu = "slat_bench_alu" [
        "2:",
        "add rax, rcx",
        "xor rdx, rax",
        "lea rbx, [rbx + rdx * 2]",
        "shr rdx, 3",
        "sub rcx, 1",
        "jnz 2b",
    ]
    /// Loads and stores at rsi. The loop has six instructions and is executed rcx times.
    ldst = "slat_bench_ldst" [
        "2:",
        "mov rax, [rsi]",
        "mov [rsi + 8], rax",
        "add qword ptr [rsi + 16], 1",
        "mov rdx, [rsi + rbx * 8]",
        "dec rcx",
        "jnz 2b",
    ]
    /// Adds doubles at rsi by x87 instructions. The loop has six instructions and is executed rcx times.
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
    /// Adds doubles in a register, and stores the result at rsi. The loop has six instructions and is executed rcx
    /// times.
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
    /// Mixes two vectors of four words, whose initial words are rcx and rbx. Stores the result at rsi. The loop has ten
    /// instructions and is executed rcx times.
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
    /// Multiplies rdx by rbx, and adds the product with two chains of carries. The loop has seven instructions and is
    /// executed rcx times.
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
    /// Counts the bits in rdx. The loop has eight instructions and is executed rcx times.
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
    /// Divides by rbx and adds the quotients to rdi. The loop has six instructions and is executed rcx times.
    div = "slat_bench_div" [
        "2:",
        "lea rax, [rdi + rcx]",
        "xor edx, edx",
        "div rbx",
        "add rdi, rax",
        "dec rcx",
        "jnz 2b",
    ]
    /// Calls a function with a stack frame. The loop has eight instructions and is executed rcx times.
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
    /// Computes the Fibonacci number of rdi in rax, by recursion. [`Program::fibonacci`] computes the number of
    /// instructions.
    ///
    /// [`Program::fibonacci`]: super::Program::fibonacci
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
    /// Copies, fills and searches by repeated string instructions. The loop has 25 instructions and is executed rdx
    /// times. rbx is the address of two pages of data. r10 counts the bytes that were not searched, and r11 sums the
    /// values that were copied and filled.
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
    /// Enables the local APIC, and takes interrupts ([`super::interrupts`] has prepared the guest). Repeatedly writes
    /// the time-stamp counter to the word at r9, until the word at r10 is not zero. The handler `handle` uses r8.
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
        "out 0xf4, al", // END: with interrupt controllers, KVM itself waits in HLT
    ]
    /// The interrupt handler: writes the time-stamp counter to the word at r8, and increments the next word.
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
    /// Writes to each page, rcx times. rsi is the address of the first page, rdx the number of pages.
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
    /// Executes VMMCALL rcx times. rax is the number of the hypercall.
    hypercall = "slat_bench_hypercall" [
        "2:",
        "vmmcall",
        "dec rcx",
        "jnz 2b",
    ]
    /// Enables SVM. rbx is the address of the host save area.
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
    /// Runs the guest of the control block at rax until that guest halts. Continues the guest after each VMMCALL.
    hypervisor = "slat_bench_hypervisor" [
        "2:",
        "vmrun rax",
        "cmp dword ptr [rax + 0x70], 0x81", // exit code: VMMCALL
        "jne 3f",
        "add qword ptr [rax + 0x578], 3", // RIP
        "jmp 2b",
        "3:",
    ]
    /// Adds 1 to the first word of pages, in a pseudo-random order that visits all pages before it visits one again.
    /// rsi is the address of the first page, rdx the number of pages (a power of two) minus 1, rcx the number of
    /// additions. rax is the page number. r8 and r9 are the multiplier and the increment of the pseudo-random sequence.
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
    // SAFETY: both labels are in the same section. The second follows the first, with only initialised constants
    // between them.
    unsafe { std::slice::from_raw_parts(begin, end.offset_from(begin) as usize) }
}

/// Returns the address of the interrupt handler.
pub(super) fn interrupt_handler() -> u64 {
    Loop::handle.address()
}
