//! Tests one page of code at several linear addresses: mapped twice, or copied. The compiled code for all these
//! addresses is the same. At each address it has the same results as the interpreter.
#![cfg(feature = "jit")]

use crate::common::*;
use slat_x86::*;

/// The means by which the code is executed: the interpreter, or compiled code of a tier.
const BY: [Option<Tier>; 3] = [None, Some(Tier::Baseline), Some(Tier::Full)];

/// The addresses of the copies of the code. There are other pages around each page of code. The places below are
/// relative to the page of code.
const COPIES: [u64; 6] = [
    0,
    0x30_0000,
    0x7fff_1234_5000,
    0xffff_ffff_8123_4000,
    0xffff_8880_0010_0000,
    0xffff_ffff_ffff_b000,
];
/// The places of the other pages: code before the page, the code's data, more code, and a page that is absent at first.
const BEFORE: i64 = -0x1000;
const DATA: i64 = 0x1000;
const OTHER: i64 = 0x2000;
const LATE: i64 = 0x3000;
const PAGES: [i64; 5] = [BEFORE, 0, DATA, OTHER, LATE];

/// Returns the guest-physical address of a place in a copy. The second and the third copy have the same page of code.
fn physical(copy: usize, place: i64) -> u64 {
    let copy = match place {
        0..0x1000 if copy == 2 => 1,
        _ => copy,
    };
    0x20_0000 + copy as u64 * 0x1_0000 + (place - BEFORE) as u64
}

/// Code for a page, and its place in the page.
struct Code {
    place: i64,
    bytes: Vec<u8>,
}

impl Code {
    fn at(place: i64) -> Self {
        let bytes = vec![];
        Self { place, bytes }
    }

    fn plain(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend(bytes);
        self
    }

    /// Adds an instruction with an operand at `place`, or a branch to it.
    fn to(mut self, before: &[u8], place: i64, after: &[u8]) -> Self {
        self.bytes.extend(before);
        let next = self.place + (self.bytes.len() + 4 + after.len()) as i64;
        self.bytes.extend(((place - next) as i32).to_le_bytes());
        self.bytes.extend(after);
        self
    }
}

/// A guest with the copies, and the results seen so far.
struct Copies {
    guest: Guest,
    seen: Vec<(State, [u8; 0x1000], [u8; 0x80])>,
}

impl Copies {
    fn new(tier: Option<Tier>, codes: &[Code]) -> Self {
        let mut guest = Guest::interpreted(Memory::new(MMIO as usize), b"\xf4");
        if let Some(tier) = tier {
            compiled::by(&mut guest.cpu, tier);
        }
        for (copy, base) in COPIES.into_iter().enumerate() {
            for place in PAGES {
                let lin = base.wrapping_add_signed(place);
                // Maps the address itself, and the address truncated to 32 bits.
                for lin in [lin, lin & 0xffff_ffff] {
                    let page = physical(copy, place) >> 12;
                    guest.machine.moved.insert(lin >> 12, page);
                }
            }
            for code in codes {
                guest
                    .memory()
                    .write(physical(copy, code.place), &code.bytes);
            }
            let mut random = Random(0x1234_5678_9abc + copy as u64);
            for word in 0..0x200 {
                let at = physical(copy, DATA + 8 * word);
                guest.memory().write64(at, random.next());
            }
        }
        let mut seen = Self {
            guest,
            seen: vec![],
        };
        seen.guest.cpu.state.fs.base = 0x100;
        seen.guest.cpu.state.fcw = 0x37f;
        seen
    }

    fn write64(&self, copy: usize, place: i64, value: u64) {
        self.guest.memory().write64(physical(copy, place), value);
    }

    /// Executes a copy, beginning at a place, by a call from [`CODE`].
    fn call(&mut self, copy: usize, place: i64) {
        let state = &mut self.guest.cpu.state;
        state.gpr[RSP] = STACK;
        state.rip = COPIES[copy].wrapping_add_signed(place);
        state.rflags = 2;
        for word in 1..16 {
            self.guest.memory().write64(STACK - 8 * word, 0);
        }
        self.guest.memory().write64(STACK, CODE);
        self.go_on(copy);
    }

    fn go_on(&mut self, copy: usize) {
        self.guest.halt();
        let memory = self.guest.memory();
        let data = memory.read(physical(copy, DATA));
        let stack = memory.read(STACK - 0x78);
        let state = self.guest.cpu.state.clone();
        self.seen.push((state, data, stack));
    }

    /// Returns the result of the code.
    fn rax(&self) -> u64 {
        self.guest.cpu.state.gpr[RAX]
    }

    /// Checks the frame of the exception that the code has raised, which has an error code.
    fn assert_raised(&self, vector: u64, error_code: u64, rip: u64) {
        let state = &self.guest.cpu.state;
        assert_eq!(state.rip, HANDLERS + 16 * vector + 1);
        assert_eq!(
            (self.guest.stack(0), self.guest.stack(1)),
            (error_code, rip)
        );
    }
}

/// Runs a test by the interpreter and by both tiers, and checks that the results agree. `shared` is how often the
/// baseline tier must use the code of another copy.
fn same(codes: &[Code], shared: u64, run: impl Fn(&mut Copies)) {
    let [interpreted, others @ ..] = BY.map(|tier| {
        let mut copies = Copies::new(tier, codes);
        run(&mut copies);
        copies
    });
    for (other, tier) in others.iter().zip([Tier::Baseline, Tier::Full]) {
        assert_eq!(interpreted.seen.len(), other.seen.len());
        for (n, (a, b)) in interpreted.seen.iter().zip(&other.seen).enumerate() {
            let (first, second) = (&a.0, &b.0);
            assert_eq!(first, second, "{tier:?}, {n}");
            assert_eq!(a.2, b.2, "the stack, {tier:?}, {n}");
            let place = a.1.iter().zip(&b.1).position(|(a, b)| a != b);
            assert_eq!(place, None, "data, {tier:?}, {n}");
        }
        let counters = other.guest.cpu.counters();
        assert!(counters.instructions_compiled > 0);
        let is_enough = tier != Tier::Baseline || counters.regions_shared >= shared;
        assert!(is_enough, "{counters:?}");
    }
}

const OTHERS: u64 = COPIES.len() as u64 - 1;

#[test]
fn operands_near_the_code_are_those_of_the_copy() {
    let d = |offset: i64| DATA + offset;
    let operands: &[(&[u8], i64, &[u8])] = &[
        (b"\x8a\x05", d(0), b""),                    // mov al
        (b"\x66\x8b\x1d", d(2), b""),                // mov bx
        (b"\x8b\x0d", d(4), b""),                    // mov ecx
        (b"\x48\x8b\x15", d(8), b""),                // mov rdx
        (b"\x0f\x10\x05", d(0x10), b""),             // movups xmm0
        (b"\x88\x05", d(0x40), b""),                 // mov ,al
        (b"\x66\x89\x1d", d(0x42), b""),             // mov ,bx
        (b"\x89\x0d", d(0x44), b""),                 // mov ,ecx
        (b"\x48\x89\x15", d(0x48), b""),             // mov ,rdx
        (b"\x0f\x11\x05", d(0x50), b""),             // movups ,xmm0
        (b"\x48\x83\x05", d(0x60), b"\x05"),         // add ,5
        (b"\xc7\x05", d(0x68), b"\x11\x22\x33\x44"), // mov ,0x44332211
        (b"\xf0\x48\x0f\xc1\x15", d(0x70), b""),     // lock xadd ,rdx
        (b"\x48\x8d\x35", BEFORE + 0x10, b""),       // lea rsi
        (b"\x67\x8d\x3d", d(0x20), b""),             // lea edi,[eip]
        (b"\x67\x48\x8d\x2d", BEFORE + 0x20, b""),   // lea rbp,[eip]
        (b"\x67\x48\x8b\x1d", d(0x18), b""),         // mov rbx,[eip]
        (b"\x67\x48\x89\x1d", d(0x78), b""),         // mov [eip],rbx
        (b"\x0f\xc6\x0d", d(0x10), b"\x1b"),         // shufps xmm1,,1b
        (b"\x66\x0f\x3a\x63\x05", d(0x20), b"\x08"), // pcmpistri xmm0,,8
        (b"\x44\x0f\x38\xf0\x05", d(4), b""),        // movbe r8d
        (b"\xdf\x2d", d(0x80), b""),                 // fild qword
        (b"\xdd\x1d", d(0x88), b""),                 // fstp qword
        (b"\x48\x0f\xc7\x0d", d(0x90), b""),         // cmpxchg16b
        (b"\x48\xf7\x35", d(0xa0), b""),             // div qword
        (b"\x64\x4c\x8b\x0d", d(8) - 0x100, b""),    // mov r9,fs:
        (b"\x64\x0f\x12\x15", d(0x10) - 0x100, b""), // movlps xmm2,fs:
        (b"\x0f\xba\x2d", d(0xb4), b"\x09"),         // bts ,9
        (b"\x48\x0f\x44\x05", d(0x18), b""),         // cmove rax
        (b"\x4c\x6b\x15", d(8), b"\x07"),            // imul r10,,7
        (b"\x48\x0f\xa4\x05", d(0xb8), b"\x05"),     // shld ,rax,5
        (b"\x0f\xae\x05", d(0x200), b""),            // fxsave
        (b"\x0f\xae\x1d", d(0xc0), b""),             // stmxcsr
        (b"\x0f\x01\x05", d(0xc8), b""),             // sgdt
        (b"\x4c\x8b\x1d", 0x200, b""),               // mov r11, a word of the page itself
        (b"\x4c\x8b\x25", BEFORE + 0x300, b""),      // mov r12, before it
        (b"\x4c\x03\x25", 0xffc, b""),               // add r12, in two pages
        (b"\x4c\x89\x25", d(0xffc), b""),            // mov ,r12, too
        (b"\x48\x0f\xae\x0d", d(0x200), b""),        // fxrstor64
    ];
    // Calls each block alone, and then all blocks one after the other.
    let mut all = Code::at(0xa00);
    let mut codes = Vec::new();
    for (n, (before, place, after)) in operands.iter().enumerate() {
        all = all.plain(b"\x31\xd2").to(before, *place, after);
        let one = Code::at(0x10 + 0x20 * n as i64).plain(b"\x31\xd2");
        codes.push(one.to(before, *place, after).plain(b"\xc3"));
    }
    codes.push(all.plain(b"\xc3"));
    // push; pop; ret
    let stack = Code::at(0x980).to(b"\xff\x35", d(8), b"");
    codes.push(stack.to(b"\x8f\x05", d(0xb0), b"").plain(b"\xc3"));
    let places: Vec<i64> = codes.iter().map(|code| code.place).collect();
    same(&codes, OTHERS * places.len() as u64, |copies| {
        for copy in 0..COPIES.len() {
            copies.write64(copy, DATA + 0xa0, 0xffff_ffff_0000_0000 | copy as u64);
        }
        for _ in 0..4 {
            for place in &places {
                for (copy, base) in COPIES.into_iter().enumerate() {
                    let state = &mut copies.guest.cpu.state;
                    state.gpr[..3].copy_from_slice(&[0x1234 + base, 0x55, 0]);
                    copies.call(copy, *place);
                    assert_eq!(copies.guest.cpu.state.rip, CODE + 1, "{place:x}");
                }
            }
        }
    });
}

#[test]
fn branches_lead_from_a_copy_to_its_own_places_and_back() {
    let codes = [
        // inc r8; ret, at the beginnings of pages
        Code::at(0).plain(b"\x49\xff\xc0\xc3"),
        Code::at(BEFORE).plain(b"\x49\xff\xc1\xc3"),
        // This function adds the return address to R10.
        Code::at(0x180).plain(b"\x4c\x03\x14\x24\xc3"),
        Code::at(OTHER).plain(b"\x4c\x03\x1c\x24\xc3"),
        // jmp 0x140
        Code::at(OTHER + 0x10).to(b"\xe9", 0x140, b""),
        // call 0; call BEFORE; jmp [DATA + 8]
        Code::at(0x140)
            .to(b"\xe8", 0, b"")
            .to(b"\xe8", BEFORE, b"")
            .to(b"\xff\x25", DATA + 8, b""),
        // loop to itself; jrcxz; ret
        Code::at(0x160).plain(b"\xb9\x05\0\0\0\xe2\xfe\xe3\0\xc3"),
        // call 0x180; call OTHER; call [DATA]; call 0x180; mov ecx,5; dec ecx; jnz; jz OTHER + 0x10
        Code::at(0x100)
            .to(b"\xe8", 0x180, b"")
            .to(b"\xe8", OTHER, b"")
            .to(b"\xff\x15", DATA, b"")
            .to(b"\xe8", 0x180, b"")
            .plain(b"\xb9\x05\0\0\0\xff\xc9\x75\xfc")
            .to(b"\x0f\x84", OTHER + 0x10, b""),
        // jmp to the beginning of the page, and to the previous page
        Code::at(0x1a0).to(b"\xe9", 0, b""),
        Code::at(0x1b0).to(b"\xe9", BEFORE, b""),
    ];
    // Runs the later blocks first, because a region has only the blocks that are known when it is compiled.
    let places = [
        0, BEFORE, 0x180, OTHER, 0x160, 0x140, 0x11a, 0x115, 0x110, 0x10a, 0x105, 0x100, 0x1a0,
        0x1b0,
    ];
    same(&codes, OTHERS * 4, |copies| {
        for (copy, base) in COPIES.into_iter().enumerate() {
            copies.write64(copy, DATA, base.wrapping_add(0x180));
            copies.write64(copy, DATA + 8, base.wrapping_add(0x160));
        }
        for _ in 0..10 {
            for place in places {
                for (copy, base) in COPIES.into_iter().enumerate() {
                    let gpr = &mut copies.guest.cpu.state.gpr;
                    gpr[8..12].fill(0);
                    gpr[RCX] = 5;
                    copies.call(copy, place);
                    let state = &copies.guest.cpu.state;
                    assert_eq!(state.rip, CODE + 1);
                    if place == 0x100 {
                        let back = |places: &[u64]| {
                            let of = places.iter().map(|place| base.wrapping_add(*place));
                            of.fold(0, u64::wrapping_add)
                        };
                        let expected = [1, 1, back(&[0x105, 0x110, 0x115]), back(&[0x10a])];
                        assert_eq!(state.gpr[8..12], expected);
                    }
                }
            }
        }
    });
}

#[test]
fn faults_are_those_of_the_copy() {
    let codes = [
        // mov ecx,1; div dword
        Code::at(0x40)
            .plain(b"\xb9\x01\0\0\0")
            .to(b"\xf7\x35", DATA, b""),
        // inc eax; mov rax, late; inc eax; ret
        Code::at(0x80)
            .plain(b"\xff\xc0")
            .to(b"\x48\x8b\x05", LATE, b"")
            .plain(b"\xff\xc0\xc3"),
        // mov late,rax
        Code::at(0xc0)
            .plain(b"\xff\xc0")
            .to(b"\x48\x89\x05", LATE + 8, b"")
            .plain(b"\xc3"),
        // fld late; movaps xmm0,[odd]
        Code::at(0x100)
            .plain(b"\xff\xc0")
            .to(b"\xdd\x05", LATE + 8, b"")
            .to(b"\xdd\x1d", DATA + 8, b"")
            .to(b"\x0f\x28\x05", DATA + 1, b""),
        // lea rsi,DATA; lea rdi,LATE - 8; mov ecx,32; rep movsb; ret
        Code::at(0x140)
            .to(b"\x48\x8d\x35", DATA, b"")
            .to(b"\x48\x8d\x3d", LATE - 8, b"")
            .plain(b"\xb9\x20\0\0\0\xf3\xa4\xc3"),
        // call LATE
        Code::at(0x180).to(b"\xe8", LATE, b""),
    ];
    same(&codes, OTHERS * 5, |copies| {
        for round in 0..3 {
            for (copy, base) in COPIES.into_iter().enumerate() {
                copies.write64(copy, DATA, 0);
                copies.write64(copy, LATE, 0xc3);
                copies.write64(copy, LATE + 8, 0);
                let late = base.wrapping_add_signed(LATE);
                for page in [late, late & 0xffff_ffff] {
                    copies.guest.machine.absent(page);
                }
                copies.guest.cpu.flush_tlb();
                copies.call(copy, 0x40);
                assert_eq!(copies.guest.stack(0), base + 0x45, "#DE, {round}");
                for (place, after, error_code) in [
                    (0x80, 2, 0),
                    (0xc0, 2, 2),
                    (0x100, 2, 0),
                    (0x140, 0x13, 2),
                    (0x180, 0, 0x10),
                ] {
                    copies.call(copy, place);
                    let rip = match place {
                        0x180 => late,
                        _ => base.wrapping_add_signed(place + after),
                    };
                    copies.assert_raised(14, error_code, rip);
                }
                let rcx = copies.guest.cpu.state.gpr[RCX];
                assert_eq!(rcx, 24, "the copy has stopped at the end of the page");
                // When the page is mapped, the code continues.
                for page in [late, late & 0xffff_ffff] {
                    copies.guest.machine.rights.remove(&(page >> 12));
                }
                for place in [0x80, 0xc0, 0x140] {
                    copies.call(copy, place);
                    assert_eq!(copies.guest.cpu.state.rip, CODE + 1);
                }
                copies.call(copy, 0x100);
                copies.assert_raised(13, 0, base + 0x10e);
            }
        }
    });
}

#[test]
fn single_steps_lead_through_the_copy() {
    const TF: u64 = 1 << 8;
    let code = Code::at(0x40)
        .to(b"\x48\x8b\x05", DATA, b"")
        .to(b"\xdd\x05", DATA, b"")
        .to(b"\xe8", 0x80, b"")
        .plain(b"\xc3");
    let codes = [code, Code::at(0x80).plain(b"\x50\x58\xc3")];
    let places = [0x47, 0x4d, 0x80, 0x81, 0x82, 0x52];
    same(&codes, 2 * OTHERS, |copies| {
        for _ in 0..3 {
            for (copy, base) in COPIES.into_iter().enumerate() {
                copies.call(copy, 0x80);
                copies.call(copy, 0x40);
                let state = &mut copies.guest.cpu.state;
                (state.rip, state.gpr[RSP]) = (base + 0x40, STACK);
                for place in places {
                    copies.guest.cpu.state.rflags |= TF;
                    copies.go_on(copy);
                    let rip = copies.guest.stack(0);
                    assert_eq!(rip, base + place);
                    let rsp = copies.guest.stack(3);
                    let state = &mut copies.guest.cpu.state;
                    (state.rip, state.gpr[RSP]) = (rip, rsp);
                }
            }
        }
    });
}

/// mov eax,N; jmp 0x80, which is: add eax,M; ret
fn adds(n: u8, m: u8) -> [Code; 2] {
    let first = Code::at(0x40).plain(&[0xb8, n, 0, 0, 0]);
    let second = Code::at(0x80).plain(&[0x05, m, 0, 0, 0, 0xc3]);
    [first.to(b"\xe9", 0x80, b""), second]
}

/// Calls the code of [`adds`], first its second block.
fn sum(copies: &mut Copies, copy: usize) -> u64 {
    copies.call(copy, 0x80);
    copies.call(copy, 0x40);
    copies.rax()
}

#[test]
fn copies_that_begin_alike_go_on_as_each_is() {
    same(&adds(1, 2), OTHERS - 1, |copies| {
        // In these two copies the second number differs.
        for copy in [3, 5] {
            let memory = copies.guest.memory();
            memory.write(physical(copy, 0x81), &[100 + copy as u8]);
        }
        for _ in 0..5 {
            for copy in 0..COPIES.len() {
                let m = if matches!(copy, 3 | 5) {
                    100 + copy as u64
                } else {
                    2
                };
                assert_eq!(sum(copies, copy), 1 + m, "{copy}");
            }
        }
    });
}

#[test]
fn a_store_to_the_code_of_a_copy_changes_that_one() {
    let [first, second] = adds(3, 4);
    // mov [0x41],al; ret
    let store = Code::at(0x100).to(b"\x88\x05", 0x41, b"").plain(b"\xc3");
    same(&[first, second, store], 2 * OTHERS, |copies| {
        let mut expected = [3; COPIES.len()];
        for round in 0..4 {
            for copy in 0..COPIES.len() {
                for (copy, n) in expected.iter().enumerate() {
                    assert_eq!(sum(copies, copy), 4 + n);
                }
                let n = 10 * (copy as u64 + 1) + round;
                copies.guest.cpu.state.gpr[RAX] = n;
                copies.call(copy, 0x100);
                expected[copy] = n;
                if let 1 | 2 = copy {
                    // The second and third copy use the same page of memory.
                    (expected[1], expected[2]) = (n, n);
                }
            }
        }
    });
}

#[test]
fn another_page_in_the_place_of_a_copy_is_seen() {
    same(&adds(5, 6), OTHERS - 1, |copies| {
        copies.guest.memory().write(physical(5, 0x41), &[50]);
        for round in 0..6 {
            for (copy, base) in COPIES.into_iter().enumerate() {
                let shown = if copy == 0 { 5 * (round % 2) } else { copy };
                let page = physical(shown, 0) >> 12;
                copies.guest.machine.moved.insert(base >> 12, page);
                copies.guest.cpu.flush_tlb();
                let n = if shown == 5 { 50 } else { 5 };
                assert_eq!(sum(copies, copy), 6 + n, "{copy}, {round}");
            }
        }
    });
}
