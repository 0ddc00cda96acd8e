//! Repeated string instructions: handling many elements at once must have the same result as one after the other. With
//! a data watchpoint set, even one elsewhere, the CPU handles the elements one by one.

use crate::common::*;

/// The number of pages, from [`DATA`] on, that the instructions may reach. Most instructions begin in the middle.
const PAGES: u64 = 16;

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
    code: Vec<u8>,
    rax: u64,
    rcx: u64,
    rsi: u64,
    rdi: u64,
    seed: u64,
    /// Distinct values of a byte.
    values: u64,
    absent: Option<u64>,
    /// A page that is also mapped at another address.
    alias: Option<(u64, u64)>,
}

impl Case {
    fn random(random: &mut Random) -> Case {
        let operation = random.pick(&[0xa4, 0xaa, 0xac, 0xae, 0xa6]);
        let size = random.below(4);
        let mut code = vec![random.pick(&[0xf3, 0xf2])];
        match size {
            1 => code.insert(0, 0x66),
            3 => code.push(0x48),
            _ => {}
        }
        code.push(operation | u8::from(size != 0));
        if random.below(8) == 0 {
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
        let values = random.pick(&[1, 2, 2, 256]);
        let rax = match random.below(3) {
            0 => random.next(),
            1 => 0x0101_0101_0101_0101 * random.below(2),
            _ => random.below(3),
        };
        Case {
            code,
            rax,
            rcx: match random.below(4) {
                0 => random.below(4),
                1 => random.below(0x700),
                _ => random.below(100),
            },
            rsi,
            rdi,
            seed: random.next() | 1,
            values,
            absent: (random.below(4) == 0).then(|| DATA + 0x6000 + random.below(6) * 0x1000),
            alias: (random.below(4) == 0).then(|| (near_page(random), near_page(random))),
        }
    }

    fn run(&self, guest: &mut Guest, one_by_one: bool) -> Left {
        guest.memory().write(CODE, &self.code);
        let mut random = Random(self.seed);
        for page in 0..PAGES {
            let mut bytes = [0u8; 0x1000];
            // Mostly equal bytes, so that comparisons continue for a while.
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
        state.gpr[RAX] = self.rax;
        (state.gpr[RCX], state.gpr[RSI], state.gpr[RDI]) = (self.rcx, self.rsi, self.rdi);
        // Sets a watchpoint on writes to a byte elsewhere.
        state.dr[0] = IST_STACK - 1;
        state.dr7 = if one_by_one { 0x1_0401 } else { 0x400 };
        guest.halt();
        let memory = (0..PAGES).map(|page| guest.memory().read(DATA + page * 0x1000));
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
