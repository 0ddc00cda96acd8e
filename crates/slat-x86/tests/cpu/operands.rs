//! Makes each memory operand of compiled code fail in turn. Afterwards the compiled CPU must have the same registers,
//! flags and memory as the interpreter.
#![cfg(feature = "jit")]

use crate::common::*;
use slat_x86::Exit;
use slat_x86::state::{control, xcr0};

/// The number of pages with operands. After each comes a page into which operands may cross.
const PAGES: u64 = 4;
const BASES: [usize; PAGES as usize] = [RBX, RSI, RDI, RBP];
const CASES: u64 = if cfg!(debug_assertions) { 30 } else { 400 };

/// Instructions with a memory operand: their prefix, their opcode, the middle bits of ModRM (8 stands for any
/// register), and the number of bytes of the immediate.
const FORMS: [(&[u8], &[u8], u8, usize); 54] = [
    (&[], &[0x8a], 8, 0),
    (&[], &[0x8b], 8, 0),
    (&[0x66], &[0x8b], 8, 0),
    (&[], &[0x88], 8, 0),
    (&[], &[0x89], 8, 0),
    (&[0x66], &[0x89], 8, 0),
    (&[], &[0xc6], 0, 1),
    (&[], &[0x01], 8, 0),
    (&[], &[0x03], 8, 0),
    (&[], &[0x11], 8, 0),
    (&[], &[0x1b], 8, 0),
    (&[], &[0x28], 8, 0),
    (&[], &[0x39], 8, 0),
    (&[], &[0x85], 8, 0),
    (&[], &[0x80], 4, 1),
    (&[], &[0xff], 0, 0),
    (&[], &[0xfe], 1, 0),
    (&[], &[0xf7], 2, 0),
    (&[], &[0xf7], 3, 0),
    (&[], &[0xf7], 4, 0),
    (&[], &[0xc1], 5, 1),
    (&[], &[0xc0], 0, 1),
    (&[], &[0xd3], 4, 0),
    (&[], &[0xd3], 1, 0),
    (&[], &[0x0f, 0xb6], 8, 0),
    (&[], &[0x0f, 0xbe], 8, 0),
    (&[], &[0x63], 8, 0),
    (&[], &[0x0f, 0xaf], 8, 0),
    (&[], &[0x0f, 0x44], 8, 0),
    (&[], &[0x0f, 0x9c], 0, 0),
    (&[0xf0], &[0x0f, 0xc1], 8, 0),
    (&[], &[0x87], 8, 0),
    (&[], &[0xff], 6, 0),
    (&[], &[0x8f], 0, 0),
    // movdqu, movdqa, movups, movd, movq; pxor, pcmpeqb, paddw, pminub; pshufb.
    (&[0xf3], &[0x0f, 0x6f], 8, 0),
    (&[0xf3], &[0x0f, 0x7f], 8, 0),
    (&[0x66], &[0x0f, 0x6f], 8, 0),
    (&[0x66], &[0x0f, 0x7f], 8, 0),
    (&[], &[0x0f, 0x11], 8, 0),
    (&[0x66], &[0x0f, 0x6e], 8, 0),
    (&[0x66], &[0x0f, 0x7e], 8, 0),
    (&[0x66], &[0x0f, 0xd6], 8, 0),
    (&[0x66], &[0x0f, 0xef], 8, 0),
    (&[0x66], &[0x0f, 0x74], 8, 0),
    (&[0x66], &[0x0f, 0xfd], 8, 0),
    (&[0x66], &[0x0f, 0xda], 8, 0),
    (&[0x66], &[0x0f, 0x38, 0x00], 8, 0),
    // vmovdqu, with ymm registers too; vpcmpeqb, vpandn, vpbroadcastb.
    (&[0xc5, 0xfe], &[0x6f], 8, 0),
    (&[0xc5, 0xfe], &[0x7f], 8, 0),
    (&[0xc5, 0xfc], &[0x11], 8, 0),
    (&[0xc5, 0xfd], &[0x7f], 8, 0),
    (&[0xc5, 0xfa], &[0x6f], 8, 0),
    (&[0xc5, 0xf5], &[0x74], 8, 0),
    (&[0xc4, 0xe2, 0x7d], &[0x78], 8, 0),
];

/// Instructions without a memory operand. They set flags, use flags, end a block, or change a base.
const BETWEEN: [&[u8]; 16] = [
    b"\x01\xc8",     // add eax, ecx
    b"\x48\x39\xd1", // cmp rcx, rdx
    b"\xff\xc2",     // inc edx
    b"\xd1\xc0",     // rol eax, 1
    b"\x74\x00",     // je to the next
    b"\x7c\x00",     // jl to the next
    b"\x0f\x92\xc1", // setc cl
    b"\x48\x8d\x04\x48",
    b"\x66\x0f\xef\xc1",     // pxor xmm0, xmm1
    b"\x66\x0f\x38\x00\xca", // pshufb xmm1, xmm2
    b"\x66\x0f\xd7\xc1",     // pmovmskb eax, xmm1
    b"\xc5\xfd\xd7\xc8",     // vpmovmskb ecx, ymm0
    b"\xc5\xf5\xdf\xc2",     // vpandn ymm0, ymm1, ymm2
    b"\xc5\xf8\x77",         // vzeroupper
    b"\x48\x83\xc3\x03",     // add rbx, 3
    b"\x48\x83\xee\x05",     // sub rsi, 5
];

/// Returns a loop of some instructions with memory operands. R15 counts its turns.
fn program(random: &mut Random) -> Vec<u8> {
    let mut code = Vec::new();
    let mut base = 0;
    for n in 0..2 + random.below(8) {
        let (prefix, opcode, middle, immediate) = random.pick(&FORMS);
        // The operand is often near the last operand, because compiled code remembers the page of the last access.
        if n == 0 || random.below(2) == 0 {
            base = random.pick(&BASES) as u8;
        }
        let register = match middle {
            8 => random.below(3) as u8,
            middle => middle,
        };
        code.extend_from_slice(prefix);
        if random.below(2) == 0 && (prefix.is_empty() || prefix == [0xf0]) {
            code.push(0x48);
        }
        code.extend_from_slice(opcode);
        let displacement = random.below(32) as u8 as i8 - 16;
        code.extend([0x40 | register << 3 | base, displacement as u8]);
        code.extend((0..immediate).map(|_| 1 + random.below(6) as u8));
        if random.below(4) != 0 {
            code.extend_from_slice(random.pick(&BETWEEN));
        }
    }
    // dec r15; jne to the beginning; hlt
    code.extend(b"\x49\xff\xcf\x0f\x85");
    let back = -(code.len() as i32 + 4);
    code.extend(back.to_le_bytes());
    code.push(0xf4);
    code
}

/// The ways in which the operands in a page fail.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Absent,
    ReadOnly,
    /// The host's memory is no longer accessible.
    Gone,
}

/// The results of a run.
#[derive(Debug, PartialEq)]
struct Seen {
    exit: Exit,
    gpr: [u64; 16],
    ymm: [[u128; 16]; 2],
    rip: u64,
    rflags: u64,
    cr2: u64,
    instructions: u64,
    memory: Vec<[u8; 0x1000]>,
}

fn start(guest: &mut Guest, at: u64) {
    let memory = guest.machine.memory.clone();
    for word in 0..2 * PAGES * 512 {
        memory.write64(DATA + 8 * word, word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
    let state = &mut guest.cpu.state;
    state.gpr = [0; 16];
    (state.gpr[RAX], state.gpr[RCX], state.gpr[RDX]) = (0x1234_5678_9abc, 7, u64::MAX);
    for (page, base) in BASES.into_iter().enumerate() {
        state.gpr[base] = DATA + 0x2000 * page as u64 + at;
    }
    state.gpr[RSP] = STACK;
    state.gpr[15] = 3;
    state.cr4 |= control::CR4_OSXSAVE;
    state.xcr0 = xcr0::X87 | xcr0::SSE | xcr0::AVX;
    for r in 0..16 {
        let bits = (1 + r as u128).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        (state.xmm[r], state.ymm_high[r]) = (bits, !bits);
    }
    (state.rip, state.rflags, state.cr2) = (CODE, 2, 0);
}

fn run(code: &[u8], failing: Option<(u64, Failure)>, at: u64, is_compiled: bool) -> Seen {
    let mut guest = Guest::interpreted(Memory::new(MMIO as usize), code);
    if is_compiled {
        compiled::always(&mut guest.cpu);
    }
    // Consecutive pages must not be consecutive in the host's memory, either: an access beyond the end of a page would
    // find another page's data there.
    for page in 0..2 * PAGES {
        let (linear, elsewhere) = ((DATA >> 12) + page, (DATA >> 12) + (3 * page) % (2 * PAGES));
        guest.machine.moved.insert(linear, elsewhere);
    }
    let page = failing.map_or(0, |(page, _)| DATA + 0x1000 * page);
    match failing {
        Some((_, Failure::Absent)) => guest.machine.absent(page),
        Some((_, Failure::ReadOnly)) => guest.machine.read_only(page),
        Some((_, Failure::Gone)) => {
            // The page is in the TLB when it becomes inaccessible.
            start(&mut guest, at);
            guest.run();
            start(&mut guest, at);
            guest.machine.bad_address = true;
            guest.memory().protect(page, libc::PROT_NONE);
        }
        None => {}
    }
    if !matches!(failing, Some((_, Failure::Gone))) {
        start(&mut guest, at);
    }
    let before = guest.cpu.counters().instructions;
    let exit = guest.run();
    guest
        .memory()
        .protect(page, libc::PROT_READ | libc::PROT_WRITE);
    let state = &guest.cpu.state;
    let pages = (0..2 * PAGES).map(|page| DATA + 0x1000 * page);
    Seen {
        exit,
        gpr: state.gpr,
        ymm: [state.xmm, state.ymm_high],
        rip: state.rip,
        rflags: state.rflags,
        cr2: state.cr2,
        instructions: guest.cpu.counters().instructions - before,
        memory: pages
            .chain([STACK - 0x1000])
            .map(|page| guest.memory().read(page))
            .collect(),
    }
}

#[test]
fn every_operand_that_fails_leaves_compiled_code_where_it_leaves_the_interpreter() {
    let mut random = Random(0x0051_a7be_5eed);
    let mut failures = 0;
    for case in 0..CASES {
        let code = program(&mut random);
        // The operands are within the pages, or cross their ends.
        let at = random.pick(&[0x100, 0xfe8, 0xff8, 0xffd]);
        let pages = (0..2 * PAGES).flat_map(|page| {
            [Failure::Absent, Failure::ReadOnly, Failure::Gone].map(|failure| Some((page, failure)))
        });
        let whole = run(&code, None, at, false);
        for failing in std::iter::once(None).chain(pages) {
            let interpreted = run(&code, failing, at, false);
            let compiled = run(&code, failing, at, true);
            assert!(
                interpreted == compiled,
                "case {case}, {failing:?}, operands at {at:#x}: {code:x?}\n{:x?}\n{:x?}",
                Seen {
                    memory: vec![],
                    ..interpreted
                },
                Seen {
                    memory: vec![],
                    ..compiled
                },
            );
            failures += u64::from(compiled.rip != whole.rip || compiled.exit != whole.exit);
        }
    }
    assert!(failures > CASES, "{failures} operands have failed");
}

#[test]
fn an_access_below_one_across_a_page_end_is_in_memory() {
    for at in [0xff8, 0xffd] {
        // mov rax, [rbx]; mov rcx, [rbx-8]; mov rdx, [rbx+2]; dec r15; jne; hlt
        let code = b"\x48\x8b\x03\x48\x8b\x4b\xf8\x48\x8b\x53\x02\x49\xff\xcf\x75\xf0\xf4";
        assert_eq!(run(code, None, at, true), run(code, None, at, false));
    }
}

/// Returns an instruction that loads a register, RAX or RCX, or stores it. `operand` is the encoding of its operand.
fn access(is_store: bool, size: usize, register: u8, operand: &[u8]) -> Vec<u8> {
    let prefix: &[u8] = match size {
        1 => &[0x66],
        3 => &[0x48],
        _ => &[],
    };
    let opcode = 0x88 | u8::from(!is_store) << 1 | u8::from(size != 0);
    let mut insn = [prefix, &[opcode], operand].concat();
    insn[prefix.len() + 1] |= register << 3;
    insn
}

/// The kinds of two accesses: for each of the two, whether it is a store.
const KINDS: [(bool, bool); 3] = [(false, false), (true, false), (true, true)];

/// Returns all pairs of size indices.
fn sizes() -> impl Iterator<Item = (usize, usize)> {
    (0..4).flat_map(|size| (0..4).map(move |other| (size, other)))
}

#[test]
fn two_accesses_that_are_near_one_another_may_be_in_two_pages() {
    for (first, second) in KINDS {
        for (size, other) in sizes() {
            for distance in -9..=9i8 {
                let turn = [
                    &access(first, size, 0, &[0x43, 0])[..],
                    &access(second, other, 1, &[0x43, distance as u8]),
                    // add r8, rax; rol r8, 7; add r8, rcx; lea rcx, [r8+r8*2]; inc rbx; dec r15
                    b"\x49\x01\xc0\x49\xc1\xc0\x07\x49\x01\xc8\x4b\x8d\x0c\x40\x48\xff\xc3\x49\xff\xcf",
                ]
                .concat();
                // mov r15d, 32; the turn; jne to it; hlt
                let back = -(turn.len() as i8 + 2) as u8;
                let code = [b"\x41\xbf\x20\0\0\0", &turn[..], &[0x75, back, 0xf4]].concat();
                assert_eq!(
                    run(&code, None, 0xff0, true),
                    run(&code, None, 0xff0, false),
                    "sizes {size} and {other}, stores {first} and {second}, distance {distance}"
                );
            }
        }
    }
}

#[test]
fn two_accesses_at_fixed_addresses_may_be_in_two_pages() {
    // [address]
    let at = |address: u64| [&[0x04, 0x25], &(address as u32).to_le_bytes()[..]].concat();
    for (first, second) in KINDS {
        for (size, other) in sizes() {
            for (offset, distance) in [
                (0xff1, 8),
                (0xff1, 15),
                (0xff8, 1),
                (0xff8, 8),
                (0xffd, -8),
                (0xffd, 3),
                (0xfff, -4),
            ] {
                let address = DATA + offset;
                let near = address.wrapping_add_signed(distance);
                let turn = [
                    &access(first, size, 0, &at(address))[..],
                    &access(second, other, 1, &at(near)),
                    // inc rax; lea rcx, [rcx+rax]; dec r15
                    b"\x48\xff\xc0\x48\x8d\x0c\x01\x49\xff\xcf",
                ]
                .concat();
                // jne to the turn; hlt
                let back = -(turn.len() as i8 + 2) as u8;
                let code = [&turn[..], &[0x75, back, 0xf4]].concat();
                assert_eq!(
                    run(&code, None, 0, true),
                    run(&code, None, 0, false),
                    "sizes {size} and {other}, stores {first} and {second}, {address:#x} and {near:#x}"
                );
            }
        }
    }
}

#[test]
fn a_sum_beyond_4_gib_is_not_near_its_lower_half() {
    // mov eax, esi; mov rdx, [rax+5]; lea ecx, [rsi+5]; mov rdi, [rcx]; dec r15; jne; hlt
    let code = b"\x89\xf0\x48\x8b\x50\x05\x8d\x4e\x05\x48\x8b\x39\x49\xff\xcf\x75\xef\xf4";
    for is_compiled in [false, true] {
        let mut guest = Guest::interpreted(Memory::new(MMIO as usize), code);
        if is_compiled {
            compiled::always(&mut guest.cpu);
        }
        guest.machine.moved.insert(1 << 20, DATA >> 12);
        guest.machine.moved.insert(0, (DATA >> 12) + 1);
        start(&mut guest, 0);
        guest.cpu.state.gpr[RSI] = 0xffff_fffe;
        assert_eq!(guest.run(), Exit::Hlt);
        let memory = guest.machine.memory.clone();
        let [beyond, half] = [DATA + 3, DATA + 0x1003].map(|at| memory.read64(at));
        assert_eq!([RDX, RDI].map(|r| guest.cpu.state.gpr[r]), [beyond, half]);
    }
}
