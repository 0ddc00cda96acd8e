//! Tests repeated string instructions: handling many elements at once must have the same result as one after the other.
//! With a data watchpoint set, even one elsewhere, the CPU handles the elements one by one.

use crate::common::*;

/// The number of pages, from [`DATA`] on, that the instructions reach. Most instructions begin in the middle.
const PAGES: u64 = 16;
/// The pages that instructions reach if their offsets wrap around: also [`PAGES`], and others before and after them.
const ALL: std::ops::Range<u64> = 0x1_4000..0x3_c000;

/// The code that contains the instruction, and its segments.
#[derive(Clone, Copy, Debug)]
enum Mode {
    /// 64-bit code.
    Long,
    /// 64-bit code, with 32-bit addresses.
    Long32,
    /// 32-bit code in segments of 4 GiB.
    Flat,
    /// Code with this number of bits, and addresses with this number of bits, in segments whose base and limit are near
    /// the memory that the instruction reaches.
    Segments { code: u8, addresses: u8 },
}

impl Mode {
    fn random(random: &mut Random) -> Mode {
        match random.below(6) {
            0 => Mode::Long,
            1 => Mode::Long32,
            2 => Mode::Flat,
            _ => Mode::Segments {
                code: random.pick(&[16, 32]),
                addresses: random.pick(&[16, 32]),
            },
        }
    }

    fn is_long(self) -> bool {
        matches!(self, Mode::Long | Mode::Long32)
    }

    /// Returns the width of the code outside 64-bit mode in which the instruction needs no prefix.
    fn width(self) -> u8 {
        match self {
            Mode::Segments { code, .. } => code,
            _ => 32,
        }
    }
}

/// A segment for the memory around `near`: its base, and the limit and the rights that the descriptor has.
#[derive(Clone, Copy, Debug)]
struct Around {
    base: u64,
    limit: u32,
    expands_down: bool,
}

impl Around {
    fn random(random: &mut Random, near: u64, bits: u8) -> Around {
        let expands_down = random.below(4) == 0;
        // Returns the lowest and the highest offsets, and some offsets in the middle of those that the address size
        // allows.
        let offset = match (bits, random.below(4)) {
            (16, 0) | (32, 0) => random.below(0x3000),
            (16, 1) => 0xffff - random.below(0x3000),
            (_, 1) => 0xffff_ffff - random.below(0x3000),
            _ => random.below(0x1_0000),
        };
        let base = near.wrapping_sub(offset) & 0xffff_ffff;
        let limit = match random.below(3) {
            // The segment's limit is in the memory that the instruction reaches.
            0 => offset
                .wrapping_add(random.below(0x2000))
                .wrapping_sub(0x1000) as u32,
            _ if expands_down => 0,
            _ => u32::MAX,
        };
        Around {
            base,
            limit,
            expands_down,
        }
    }

    fn offset(self, address: u64) -> u64 {
        address.wrapping_sub(self.base) & 0xffff_ffff
    }

    fn segment(self) -> slat_x86::Segment {
        slat_x86::Segment {
            selector: 16,
            base: self.base,
            limit: self.limit,
            rights: if self.expands_down { 0xc097 } else { 0xc093 },
        }
    }
}

/// The state after an instruction.
struct Left {
    memory: Vec<[u8; 0x1000]>,
    gpr: [u64; 16],
    rflags: u64,
    rip: u64,
    cr2: u64,
}

/// A case: the instruction with its prefix, registers and memory.
#[derive(Debug)]
struct Case {
    mode: Mode,
    /// The segments in DS and ES, outside 64-bit mode.
    segments: [Around; 2],
    code: Vec<u8>,
    rax: u64,
    rcx: u64,
    rsi: u64,
    rdi: u64,
    seed: u64,
    /// The number of distinct values of a byte of memory.
    values: u64,
    absent: Option<u64>,
    /// A page that is also mapped at another address.
    alias: Option<(u64, u64)>,
}

impl Case {
    fn random(random: &mut Random) -> Case {
        let mode = Mode::random(random);
        let operation = random.pick(&[0xa4, 0xaa, 0xac, 0xae, 0xa6]);
        let size = random.below(if mode.is_long() { 4 } else { 3 });
        let mut code = vec![random.pick(&[0xf3, 0xf2])];
        // In 64-bit code and in 32-bit code, 0x66 chooses words; in 16-bit code it chooses doublewords.
        if size == if mode.width() == 16 { 2 } else { 1 } {
            code.insert(0, 0x66);
        }
        let has_short_addresses = match mode {
            Mode::Long | Mode::Flat => false,
            Mode::Long32 => true,
            Mode::Segments { code, addresses } => code != addresses,
        };
        if has_short_addresses {
            code.insert(0, 0x67);
        }
        if size == 3 {
            code.push(0x48);
        }
        code.push(operation | u8::from(size != 0));
        if random.below(3) == 0 {
            // std
            code.insert(0, 0xfd);
        }
        code.push(0xf4);
        let page = DATA + 0x8000 + random.below(2) * 0x1000;
        let near_page = |random: &mut Random| DATA + 0x6000 + random.below(6) * 0x1000;
        let near = |random: &mut Random| match random.below(3) {
            0 => page,
            1 => page - random.below(40),
            _ => page + random.below(0x1000),
        };
        let rdi = near(random);
        let rsi = match random.below(4) {
            0 => near(random),
            1 => rdi.wrapping_add(random.below(40)).wrapping_sub(20),
            2 => rdi.wrapping_sub(random.below(0x1000)),
            _ => rdi ^ 0x1000,
        };
        let bits = match mode {
            Mode::Segments { addresses, .. } => addresses,
            _ => 32,
        };
        let segments = match mode {
            Mode::Segments { .. } => [
                Around::random(random, rsi, bits),
                Around::random(random, rdi, bits),
            ],
            _ => {
                [Around {
                    base: 0,
                    limit: u32::MAX,
                    expands_down: false,
                }; 2]
            }
        };
        // The upper bits of registers have no effect on short addresses.
        let garbage = match mode {
            Mode::Long => 0,
            _ if bits == 32 => random.next() << 32,
            _ => random.next() << 16,
        };
        let (rsi, rdi) = match mode {
            Mode::Segments { .. } => (segments[0].offset(rsi), segments[1].offset(rdi)),
            _ => (rsi, rdi),
        };
        let values = random.pick(&[1, 2, 2, 256]);
        let rax = match random.below(3) {
            0 => random.next(),
            1 => 0x0101_0101_0101_0101 * random.below(2),
            _ => random.below(3),
        };
        Case {
            mode,
            segments,
            code,
            rax,
            rcx: garbage
                | match random.below(4) {
                    0 => random.below(4),
                    1 => random.below(0x700),
                    _ => random.below(100),
                },
            rsi: rsi | garbage,
            rdi: rdi | garbage,
            seed: random.next() | 1,
            values,
            absent: (random.below(4) == 0).then(|| DATA + 0x6000 + random.below(6) * 0x1000),
            alias: (random.below(4) == 0).then(|| (near_page(random), near_page(random))),
        }
    }

    fn run(&self, guest: &mut Guest, one_by_one: bool) -> Left {
        guest.memory().write(CODE, &self.code);
        for page in ALL.step_by(0x1000) {
            guest.memory().write(page, &[0; 0x1000]);
        }
        let mut random = Random(self.seed);
        for page in 0..PAGES {
            let mut bytes = [0u8; 0x1000];
            // Most bytes are equal, so that comparisons continue for some time.
            for byte in &mut bytes {
                if random.below(64) == 0 {
                    *byte = random.below(self.values) as u8;
                }
            }
            guest.memory().write(DATA + page * 0x1000, &bytes);
        }
        guest.machine.rights.clear();
        guest.machine.moved.clear();
        if let Some(page) = self.absent {
            guest.machine.absent(page);
        }
        if let Some((page, other)) = self.alias {
            guest.machine.moved.insert(page >> 12, other >> 12);
        }
        guest.cpu.flush_tlb();
        let state = &mut guest.cpu.state;
        long_mode(state);
        (state.rflags, state.cr2) = (2, 0);
        if !self.mode.is_long() {
            state.cs.rights = if self.mode.width() == 16 {
                0x809b
            } else {
                0xc09b
            };
            (state.ds, state.es) = (self.segments[0].segment(), self.segments[1].segment());
        }
        state.gpr[RAX] = self.rax;
        (state.gpr[RCX], state.gpr[RSI], state.gpr[RDI]) = (self.rcx, self.rsi, self.rdi);
        // Sets a watchpoint on writes to a byte elsewhere.
        state.dr[0] = IST_STACK - 1;
        state.dr7 = if one_by_one { 0x1_0401 } else { 0x400 };
        guest.halt();
        let memory = ALL.step_by(0x1000).map(|page| guest.memory().read(page));
        let state = &guest.cpu.state;
        Left {
            memory: memory.collect(),
            gpr: state.gpr,
            rflags: state.rflags,
            rip: state.rip,
            cr2: state.cr2,
        }
    }
}

#[test]
fn many_elements_at_once_leave_what_one_after_the_other_leaves() {
    let mut guest = Guest::new(b"\xf4");
    let mut random = Random(0x5eed_1234_5678_9abd);
    let rounds = std::env::var("SLAT_TEST_ROUNDS").map_or(3000, |rounds| rounds.parse().unwrap());
    let mut faults = 0;
    for round in 0..rounds {
        let case = Case::random(&mut random);
        let expected = case.run(&mut guest, true);
        let actual = case.run(&mut guest, false);
        faults += u64::from(expected.rip > HANDLERS);
        for (page, (expected, actual)) in expected.memory.iter().zip(&actual.memory).enumerate() {
            let differs = expected.iter().zip(actual).position(|(a, b)| a != b);
            assert_eq!(differs, None, "round {round}, page {page}: {case:x?}");
        }
        let registers = |left: &Left| (left.gpr, left.rflags, left.rip, left.cr2);
        assert_eq!(
            registers(&expected),
            registers(&actual),
            "round {round}: {case:x?}"
        );
    }
    assert!(faults > rounds / 40, "{faults} faults");
}
