//! Checks that a disassembler reads back the instructions that [`Assembler`] has encoded.

use super::*;
use iced_x86::{Decoder, DecoderOptions, FastFormatter};

const NAMES: [[&str; 16]; 4] = [
    [
        "al", "cl", "dl", "bl", "spl", "bpl", "sil", "dil", "r8b", "r9b", "r10b", "r11b", "r12b",
        "r13b", "r14b", "r15b",
    ],
    [
        "ax", "cx", "dx", "bx", "sp", "bp", "si", "di", "r8w", "r9w", "r10w", "r11w", "r12w",
        "r13w", "r14w", "r15w",
    ],
    [
        "eax", "ecx", "edx", "ebx", "esp", "ebp", "esi", "edi", "r8d", "r9d", "r10d", "r11d",
        "r12d", "r13d", "r14d", "r15d",
    ],
    [
        "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12",
        "r13", "r14", "r15",
    ],
];

fn name(size: u8, register: Reg) -> &'static str {
    NAMES[usize::from(size)][usize::from(register.0)]
}

/// Disassembles `code` to text.
fn read(code: &[u8]) -> String {
    let mut text = String::new();
    let mut decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    while decoder.can_decode() {
        let insn = decoder.decode();
        assert!(!insn.is_invalid(), "{code:x?}");
        if !text.is_empty() {
            text.push_str("; ");
        }
        FastFormatter::new().format(&insn, &mut text);
    }
    text
}

fn made(make: impl FnOnce(&mut Assembler)) -> String {
    let mut asm = Assembler::default();
    make(&mut asm);
    asm.link();
    read(&asm.code)
}

fn memory(size: u8, base: Reg, disp: i32) -> String {
    let width = ["byte", "word", "dword", "qword"][usize::from(size)];
    let base = name(3, base);
    match disp {
        0 => format!("{width} ptr [{base}]"),
        1.. => format!("{width} ptr [{base}+{disp:X}h]"),
        _ => format!("{width} ptr [{base}-{:X}h]", -disp),
    }
}

/// Removes the widths of memory operands from a text, because some formatters do not write them.
fn plain(text: &str) -> String {
    let widths = ["dword ptr ", "qword ptr ", "byte ptr ", "word ptr "];
    widths
        .iter()
        .fold(text.to_lowercase(), |text, width| text.replace(width, ""))
}

#[track_caller]
fn same(made: &str, expected: &str) {
    assert_eq!(plain(made), plain(expected));
}

#[test]
fn another_decoder_reads_what_is_written_for_every_register() {
    for (a, b) in (0..16).flat_map(|a| (0..16).map(move |b| (Reg(a), Reg(b)))) {
        for size in 0..4 {
            let (x, y) = (name(size, a), name(size, b));
            for (alu, word) in [
                (Alu::Add, "add"),
                (Alu::Or, "or"),
                (Alu::And, "and"),
                (Alu::Sub, "sub"),
                (Alu::Xor, "xor"),
                (Alu::Cmp, "cmp"),
            ] {
                let made = made(|asm| asm.alu(alu, size, a, b));
                same(&made, &format!("{word} {x},{y}"));
            }
            same(
                &made(|asm| asm.alu_with(Alu::Cmp, size, a, Place::Memory(b, 0x30))),
                &format!("cmp {x},[{}+30h]", name(3, b)),
            );
            let wide = name(2, a);
            let extended = match size {
                0 | 1 => format!("movzx {wide},{y}"),
                _ => format!("mov {x},{y}"),
            };
            same(
                &made(|asm| asm.zero_extend(size, a, Place::Register(b))),
                &extended,
            );
            let extended = match size {
                0 | 1 => format!("movsx {},{y}", name(3, a)),
                2 => format!("movsxd {},{y}", name(3, a)),
                _ => format!("mov {x},{y}"),
            };
            same(&made(|asm| asm.sign_extend(size, a, b)), &extended);
            for disp in [0, 1, -8, 127, -128, 128, 0x12345] {
                let place = memory(size, b, disp);
                let loaded = match size {
                    0 | 1 => format!("movzx {wide},{place}"),
                    _ => format!("mov {x},{place}"),
                };
                let at = Place::Memory(b, disp);
                same(&made(|asm| asm.zero_extend(size, a, at)), &loaded);
                same(
                    &made(|asm| asm.store(size, at, a)),
                    &format!("mov {place},{x}"),
                );
                for index in (0..16).map(Reg).filter(|index| index.0 != 4) {
                    let sum = format!("[{}+{}", name(3, b), name(3, index));
                    let place = place.replace(&format!("[{}", name(3, b)), &sum);
                    same(
                        &made(|asm| asm.store(size, Place::Sum(b, index, disp), a)),
                        &format!("mov {place},{x}"),
                    );
                }
            }
            let place = memory(size, a, 0);
            let exchanged = format!("lock cmpxchg {place},{y}");
            same(&made(|asm| asm.compare_exchange(size, a, b)), &exchanged);
            if size >= 1 {
                same(&made(|asm| asm.imul(size, a, b)), &format!("imul {x},{y}"));
                for (count, word) in [
                    (Count::Ones, "popcnt"),
                    (Count::TrailingZeros, "tzcnt"),
                    (Count::LeadingZeros, "lzcnt"),
                ] {
                    same(
                        &made(|asm| asm.count(count, size, a, b)),
                        &format!("{word} {x},{y}"),
                    );
                }
            }
            if size >= 2 {
                same(
                    &made(|asm| asm.mov_if(5, size, a, b)),
                    &format!("cmovne {x},{y}"),
                );
            }
        }
        let (x, y) = (name(3, a), name(3, b));
        same(&made(|asm| asm.mov(a, b)), &format!("mov {x},{y}"));
        same(&made(|asm| asm.exchange(a, b)), &format!("xchg {y},{x}"));
        same(
            &made(|asm| asm.address(a, Place::Memory(b, 0x40))),
            &format!("lea {x},[{y}+40h]"),
        );
        if b != Reg(4) {
            same(
                &made(|asm| asm.address(a, Place::Sum(Reg(1), b, 0))),
                &format!("lea {x},[rcx+{y}]"),
            );
            same(
                &made(|asm| asm.address(Reg(1), Place::Sum(a, b, 0))),
                &format!("lea rcx,[{x}+{y}]"),
            );
        }
    }
}

#[test]
fn another_decoder_reads_what_is_written_for_one_register() {
    for a in (0..16).map(Reg) {
        for size in 0..4 {
            let x = name(size, a);
            same(&made(|asm| asm.test(size, a)), &format!("test {x},{x}"));
            for (unary, word) in [
                (Unary::Not, "not"),
                (Unary::Neg, "neg"),
                (Unary::Mul, "mul"),
                (Unary::Imul, "imul"),
                (Unary::Div, "div"),
            ] {
                same(
                    &made(|asm| asm.unary(unary, size, a)),
                    &format!("{word} {x}"),
                );
            }
            for (shift, word) in [
                (Shift::Rol, "rol"),
                (Shift::Ror, "ror"),
                (Shift::Shl, "shl"),
                (Shift::Shr, "shr"),
                (Shift::Sar, "sar"),
            ] {
                same(
                    &made(|asm| asm.shift(shift, size, a, 3)),
                    &format!("{word} {x},3h"),
                );
                same(
                    &made(|asm| asm.shift_by_cl(shift, size, a)),
                    &format!("{word} {x},cl"),
                );
            }
            for value in [1, 0x7f, 0x1234, 0x123_4567] {
                let value = match size {
                    0 => value & 0x7f,
                    1 => value & 0x7fff,
                    _ => value,
                };
                let sum = format!("add {x},{}", hex(value));
                same(
                    &made(|asm| asm.alu_immediate(Alu::Add, size, a, value)),
                    &sum,
                );
                let place = memory(size, a, 0x30);
                same(
                    &made(|asm| asm.add_to_memory(size, a, 0x30, value)),
                    &format!("add {place},{}", hex(value)),
                );
                let stored = format!("mov {place},{}", hex(value));
                same(
                    &made(|asm| asm.store_immediate(size, Place::Memory(a, 0x30), value)),
                    &stored,
                );
            }
            if size >= 2 {
                same(&made(|asm| asm.swap_bytes(size, a)), &format!("bswap {x}"));
            }
        }
        let (x, dword) = (name(3, a), name(2, a));
        same(&made(|asm| asm.constant(a, 0)), &format!("mov {dword},0h"));
        same(
            &made(|asm| asm.constant(a, 0x8000_0000)),
            &format!("mov {dword},80000000h"),
        );
        same(
            &made(|asm| asm.constant(a, -1)),
            &format!("mov {x},0ffffffffffffffffh"),
        );
        let large = 0x1234_5678_9abc_def0;
        same(
            &made(|asm| asm.constant(a, large)),
            &format!("mov {x},123456789abcdef0h"),
        );
        same(&made(|asm| asm.set(2, a)), &format!("setb {}", name(0, a)));
        same(&made(|asm| asm.call(a)), &format!("call {x}"));
        same(&made(|asm| asm.push(a)), &format!("push {x}"));
        same(
            &made(|asm| asm.push_memory(Place::Memory(a, -8))),
            &format!("push [{x}-8h]"),
        );
        same(
            &made(|asm| asm.pop_memory(Place::Memory(a, -8))),
            &format!("pop [{x}-8h]"),
        );
    }
}

/// Formats a number as the disassembler does.
fn hex(value: i32) -> String {
    format!("{value:x}h")
}

#[test]
fn jumps_lead_to_their_labels() {
    let text = made(|asm| {
        let (back, on) = (asm.label(), asm.label());
        asm.place(back);
        asm.jump_if(5, on);
        asm.jump(back);
        asm.place(on);
        asm.leave();
    });
    same(&text, "jne 0bh; jmp 0h; mov rsp,rbp; pop rbp; ret");
}
