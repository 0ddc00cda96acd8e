//! Loops in 32-bit protected mode and in 16-bit real mode, both without paging. Like all programs, a program with such
//! a loop begins in long mode. It then enters the loop's mode, and returns to long mode before it ends.

use super::layout::{MODES, SCRATCH, STACKS, STRINGS};

// These bytes are data for the guest, which this process never executes. Their addresses are right for a guest, which
// has this code at MODES.
std::arch::global_asm!(
    // The loops with 32-bit registers (the macro's argument `e` is e) and with 16-bit registers (`e` is empty). Each
    // loop is executed ecx times. This loop does arithmetic, loads and stores, and calls a function.
    ".macro slat_bench_mixed e",
    r"xor \e\()ax, \e\()ax",
    r"xor \e\()bx, \e\()bx",
    r"mov \e\()si, {scratch}",
    "2:",
    r"add \e\()ax, \e\()cx",
    r"mov [\e\()si], \e\()ax",
    r"add [\e\()si + 4], \e\()cx",
    "call 3f",
    "dec ecx",
    "jnz 2b",
    "jmp 4f",
    "3:",
    r"push \e\()bp",
    r"mov \e\()bp, \e\()sp",
    r"add \e\()bx, [\e\()si]",
    r"xor \e\()bx, \e\()cx",
    r"pop \e\()bp",
    "ret",
    "4:",
    r"mov [\e\()si + 8], \e\()bx",
    ".endm",
    // Fills one KiB, copies it to the next KiB, copies it again from its end to its beginning, and compares the two.
    ".macro slat_bench_strings e",
    "mov edx, ecx",
    r"xor \e\()bx, \e\()bx",
    "2:",
    "mov eax, edx",
    r"mov \e\()di, {strings}",
    r"mov \e\()cx, 256",
    "rep stosd",
    r"mov \e\()si, {strings}",
    r"mov \e\()cx, 256",
    "rep movsd",
    "std",
    r"mov \e\()si, {strings} + 1020",
    r"mov \e\()di, {strings} + 2044",
    r"mov \e\()cx, 256",
    "rep movsd",
    "cld",
    r"mov \e\()si, {strings}",
    r"mov \e\()di, {strings} + 1024",
    r"mov \e\()cx, 256",
    "repe cmpsd",
    r"add \e\()bx, [\e\()di - 4]",
    "dec edx",
    "jnz 2b",
    r"mov [{scratch}], \e\()ax",
    r"mov [{scratch} + 4], \e\()si",
    r"mov [{scratch} + 8], \e\()bx",
    ".endm",
    // The operand of a far jump.
    ".macro slat_bench_far size, label, selector",
    r".\size {modes} + (\label - slat_bench_modes)",
    r".short \selector",
    ".endm",
    ".macro slat_bench_flat",
    "mov eax, 0x20",
    "mov ds, eax",
    "mov es, eax",
    "mov ss, eax",
    ".endm",
    ".pushsection .rodata.slat_bench_modes, \"a\", @progbits",
    ".balign 16",
    ".globl slat_bench_modes, slat_bench_modes_end, slat_bench_code32, slat_bench_code16",
    ".globl slat_bench_mixed32, slat_bench_mixed16, slat_bench_strings32, slat_bench_strings16",
    "slat_bench_modes:",
    "lgdt [rip + 5f]",
    "mov qword ptr [{scratch}], 0",
    "mov qword ptr [{scratch} + 8], 0",
    "lea rax, [rip + 1f]",
    "push 0x18",
    "push rax",
    "retfq",
    ".code32",
    "1:",
    "mov eax, cr0",
    "and eax, 0x7fffffff", // clears PG, and thereby returns to legacy mode; EFER.LME stays set
    "mov cr0, eax",
    "slat_bench_flat",
    "jmp ebx",
    "slat_bench_code32:",
    "jmp edi",
    "slat_bench_strings32:",
    "slat_bench_strings e",
    "jmp slat_bench_leave",
    "slat_bench_mixed32:",
    "slat_bench_mixed e",
    "slat_bench_leave:",
    "mov eax, cr0",
    "or eax, 0x80000000",
    "mov cr0, eax",
    ".byte 0xea",
    "slat_bench_far long, 1f, 8",
    ".code64",
    "1:",
    "mov eax, [{scratch}]",
    "mov esi, [{scratch} + 4]",
    "mov edi, [{scratch} + 8]",
    "hlt",
    ".code32",
    "slat_bench_code16:",
    ".byte 0xea",
    "slat_bench_far long, 1f, 0x28",
    ".code16",
    "1:",
    // The following instructions load segments with the limits of real mode.
    "mov ax, 0x30",
    "mov ds, ax",
    "mov es, ax",
    "mov ss, ax",
    "mov eax, cr0",
    "and al, 0xfe", // clears PE
    "mov cr0, eax",
    ".byte 0xea",
    "slat_bench_far short, 1f, 0",
    "1:",
    "xor ax, ax",
    "mov ds, ax",
    "mov es, ax",
    "mov ax, {stacks} >> 4",
    "mov ss, ax",
    "jmp di",
    "slat_bench_strings16:",
    "slat_bench_strings",
    "jmp 1f",
    "slat_bench_mixed16:",
    "slat_bench_mixed",
    "1:",
    "mov eax, cr0",
    "or al, 1",
    "mov cr0, eax",
    ".byte 0x66, 0xea",
    "slat_bench_far long, 1f, 0x18",
    ".code32",
    "1:",
    "slat_bench_flat",
    "jmp slat_bench_leave",
    ".code64",
    ".balign 8",
    // The segments: first 64-bit code at selector 8 and data at 0x10, as in long mode; then 32-bit code and data; then
    // 16-bit code and data.
    "6:",
    ".quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff",
    ".quad 0x00cf9b000000ffff, 0x00cf93000000ffff, 0x00009b000000ffff, 0x000093000000ffff",
    "5:",
    ".short 55",
    ".quad {modes} + (6b - slat_bench_modes)",
    "slat_bench_modes_end:",
    ".popsection",
    modes = const MODES,
    scratch = const SCRATCH,
    strings = const STRINGS,
    stacks = const STACKS,
);

unsafe extern "C" {
    static slat_bench_modes: u8;
    static slat_bench_modes_end: u8;
    static slat_bench_code32: u8;
    static slat_bench_code16: u8;
    static slat_bench_mixed32: u8;
    static slat_bench_mixed16: u8;
    static slat_bench_strings32: u8;
    static slat_bench_strings16: u8;
}

/// The processor mode in which a program's loop runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Protected mode with flat 32-bit segments.
    Protected32,
    /// Real mode.
    Real16,
}

/// The work of a loop in protected or real mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Arithmetic, loads, stores and calls.
    Mixed,
    /// Repeated string instructions, upwards and downwards.
    Strings,
}

impl Mode {
    fn mask(self) -> u64 {
        match self {
            Mode::Protected32 => 0xffff_ffff,
            Mode::Real16 => 0xffff,
        }
    }

    /// Returns the address to which the code at [`entry`] jumps after it has entered protected mode.
    pub(super) fn address(self) -> u64 {
        address(match self {
            Mode::Protected32 => &raw const slat_bench_code32,
            Mode::Real16 => &raw const slat_bench_code16,
        })
    }
}

impl Task {
    /// Returns the number of instructions in one iteration of the loop. A repeated instruction counts once.
    pub(super) fn instructions(self) -> u64 {
        match self {
            Task::Mixed => 12,
            Task::Strings => 20,
        }
    }

    /// Returns the values of RAX, RSI and RDI after `times` iterations of the loop in `mode`.
    pub fn result(self, mode: Mode, times: u64) -> [u64; 3] {
        let mask = mode.mask();
        match self {
            Task::Mixed => {
                let turn = |[a, count, b]: [u64; 3], n: u64| {
                    let a = a.wrapping_add(n) & mask;
                    [
                        a,
                        count.wrapping_add(n) & mask,
                        (b.wrapping_add(a) ^ n) & mask,
                    ]
                };
                (1..=times).rev().fold([0; 3], turn)
            }
            // The last iteration of the loop has filled memory with 1, and has compared one KiB.
            Task::Strings => [1, STRINGS + 1024, (times * (times + 1) / 2) & mask],
        }
    }

    /// Returns the address of the loop in `mode`.
    pub(super) fn address(self, mode: Mode) -> u64 {
        address(match (self, mode) {
            (Task::Mixed, Mode::Protected32) => &raw const slat_bench_mixed32,
            (Task::Mixed, Mode::Real16) => &raw const slat_bench_mixed16,
            (Task::Strings, Mode::Protected32) => &raw const slat_bench_strings32,
            (Task::Strings, Mode::Real16) => &raw const slat_bench_strings16,
        })
    }
}

/// Returns the address at which a program in protected or real mode begins. RBX must be the mode's
/// [address](Mode::address), RDI the loop's address, and RCX the number of iterations, which must not be 0.
pub(super) fn entry() -> u64 {
    address(&raw const slat_bench_modes)
}

fn address(label: *const u8) -> u64 {
    // SAFETY: both labels are in the same section.
    MODES + unsafe { label.offset_from(&raw const slat_bench_modes) } as u64
}

pub(super) fn code() -> &'static [u8] {
    let begin = &raw const slat_bench_modes;
    let end = &raw const slat_bench_modes_end;
    // SAFETY: both labels are in the same section. The second follows the first, with only initialised constants
    // between them.
    unsafe { std::slice::from_raw_parts(begin, end.offset_from(begin) as usize) }
}
