//! Compiled code of 32 bits has the same results as the interpreter. The tests are random instructions in a segment of
//! 4 GiB, with a base and sometimes a limit in FS and GS, and with accesses up to the last byte below 4 GiB.
#![cfg(feature = "jit")]

mod common;
use common::*;
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};

/// Whether an instruction always has the same effect, ends soon, does not end the sequence, and stays
/// in the flat segments.
fn is_usable(insn: &Instruction) -> bool {
    use Mnemonic::*;
    let goes_on = insn.flow_control() == FlowControl::Next
        || insn.is_jcc_short() && insn.op0_kind() == OpKind::NearBranch32;
    let registers = (0..insn.op_count()).map(|k| insn.op_register(k));
    let mut registers = registers.filter(|r| *r != Register::None);
    goes_on
        && !insn.is_invalid()
        && registers.all(|r| r.is_gpr() || r.is_xmm() || r.is_ymm() || r.is_mm() || r.is_st())
        && !insn.is_privileged()
        && !insn.has_rep_prefix()
        && !insn.has_repne_prefix()
        && !matches!(
            insn.mnemonic(),
            Rdtsc
                | Rdtscp
                | Rdrand
                | Rdseed
                | Cpuid
                | Rdpmc
                | Xgetbv
                | Rdpid
                | Popf
                | Popfd
                | Sti
                | Cli
        )
}

/// Returns instructions, followed by HLT.
fn sequence(random: &mut Random) -> Vec<u8> {
    let mut code = Vec::new();
    while code.len() < 40 {
        let mut bytes = [0; 16];
        for part in bytes.chunks_mut(8) {
            part.copy_from_slice(&random.next().to_le_bytes());
        }
        match random.next() % 6 {
            0 => bytes[0] = 0x0f,
            1 => (bytes[0], bytes[1]) = (random.pick(&[0x66, 0xf2, 0xf3]), 0x0f),
            2 => bytes[0] = random.pick(&[0x64, 0x65, 0xf0, 0x66, 0x67]),
            3 => bytes[0] = 0x50 | bytes[0] & 15,
            _ => {}
        }
        let ip = CODE + code.len() as u64;
        let mut decoder = Decoder::with_ip(32, &bytes, ip, DecoderOptions::NONE);
        let insn = decoder.decode();
        if is_usable(&insn) {
            if insn.is_jcc_short() {
                // The branch continues at the same address in both cases.
                bytes[insn.len() - 1] = 0;
            }
            code.extend_from_slice(&bytes[..insn.len()]);
        }
    }
    code.resize(64, 0xf4);
    code
}

fn prepare(guest: &mut Guest, random: &mut Random, registers: &[u64; 8]) {
    let state = &mut guest.cpu.state;
    state.cs.rights = 0xc09b;
    state.gpr[..8].copy_from_slice(registers);
    for (k, segment) in [&mut state.fs, &mut state.gs].into_iter().enumerate() {
        segment.base = DATA + 0x100 * k as u64;
        segment.limit = random.pick(&[u32::MAX, u32::MAX, 0x2000]);
    }
    for xmm in &mut state.xmm[..8] {
        *xmm = u128::from(random.next()) << 64 | u128::from(random.next());
    }
}

#[test]
fn compiled_code_of_32_bits_does_what_the_interpreter_does() {
    const PARTS: u64 = 2;
    let rounds = std::env::var("SLAT_TEST_ROUNDS").map_or(6, |rounds| rounds.parse().unwrap());
    let seed: u64 = std::env::var("SLAT_ORACLE_SEED").map_or(1, |seed| seed.parse().unwrap());
    std::thread::scope(|scope| {
        for part in 0..PARTS {
            scope.spawn(move || compare(PARTS * seed + part, rounds * 500 / PARTS));
        }
    });
}

/// Runs `sequences` sequences, compiled and interpreted.
fn compare(seed: u64, sequences: u64) {
    let mut random = Random(0x2545_f491_4f6c_dd1d ^ seed);
    let mut compiled = 0;
    for round in 0..sequences {
        let code = sequence(&mut random);
        let mut registers = [0; 8];
        for r in &mut registers {
            *r = match random.next() % 6 {
                0 => random.next() & 0xffff_ffff,
                1 => random.next() % 64,
                2 => 0xffff_fff0 + random.next() % 16,
                _ => DATA + random.next() % 0x1800,
            };
        }
        registers[RSP] = STACK;
        let seed = random.next();
        let mut ends = [false, true].map(|compiles| {
            let mut guest = Guest::interpreted(Memory::new(MMIO as usize), &code);
            if compiles {
                common::compiled::always(&mut guest.cpu);
            }
            prepare(&mut guest, &mut Random(seed), &registers);
            for word in 0..0x400 {
                let mut value = Random(seed ^ word);
                guest.memory().write64(DATA + 8 * word, value.next());
            }
            let exit = guest.run();
            let memory = guest.memory().read::<0x2000>(DATA);
            compiled += guest.cpu.counters().instructions_compiled;
            (exit, guest.cpu.state.clone(), memory)
        });
        let [interpreted, compiled] = &mut ends;
        // The memory that the exception's frame overwrote is compared, too.
        assert!(
            interpreted.0 == compiled.0
                && interpreted.1 == compiled.1
                && interpreted.2 == compiled.2,
            "round {round}: {code:02x?}\n{registers:x?}\n{:?}\n{:?}",
            (interpreted.0.clone(), &interpreted.1),
            (compiled.0.clone(), &compiled.1)
        );
    }
    assert!(
        compiled > sequences,
        "{compiled} instructions were compiled"
    );
}
