//! A guest with tables of 4 KiB pages in the lower half, and code in the upper half.

use crate::machine::*;
use slat_a64::{Cpu, Leave, Pstate};

/// The tables of the lower half, whose first 2 MiB are in pages.
pub const LEVEL_1: u64 = 0x1000_0000;
pub const LEVEL_2: u64 = 0x1000_1000;
pub const LEVEL_3: u64 = 0x1000_2000;

/// Bits of descriptors: a page or table, and a block, each valid and with its access flag.
pub const PAGE: u64 = 3 | 1 << 10;
pub const BLOCK: u64 = 1 | 1 << 10;
pub const EL0: u64 = 1 << 6;
pub const READ_ONLY: u64 = 1 << 7;
pub const NOT_GLOBAL: u64 = 1 << 11;
pub const DBM: u64 = 1 << 51;
/// Indices of MAIR_EL1.
pub const DEVICE: u64 = 1 << 2;
pub const UNCACHED: u64 = 2 << 2;

pub const HA: u64 = 1 << 39;
pub const HD: u64 = 1 << 40;
pub const TBI0: u64 = 1 << 37;
pub const TCR_USED: u64 = 25 | OWN_T1 | 5 << 32 | 1 << 36;

pub struct Guest {
    pub cpu: Cpu,
    pub ram: Ram,
    pub code: u64,
}

impl Guest {
    pub fn new() -> Self {
        let mut ram = Ram::new(None, |_| 0);
        let mut cpu = cpu();
        let code = map_code(&mut ram, true);
        ram.set(LEVEL_1, LEVEL_2 | 3);
        ram.set(LEVEL_2, LEVEL_3 | 3);
        let settings = [
            (TCR, TCR_USED),
            (TTBR0, LEVEL_1 | 5 << 48),
            (TTBR1, TABLE),
            (MAIR, 0x44_00ff),
            (VBAR, code + 0x8000),
            (CPACR, 3 << 20),
            (SCTLR, M | SPAN | EL0_MAINTAINS),
        ];
        for (name, value) in settings {
            cpu.set_system(name, value);
        }
        Self { cpu, ram, code }
    }

    /// Maps a page without TLBI.
    pub fn map(&mut self, page: u64, descriptor: u64) {
        self.ram.set(LEVEL_3 + 8 * page, descriptor);
    }

    /// Executes instructions at EL1 with values of X0 and X1, one run for each. Returns how the last run has ended.
    pub fn execute(&mut self, words: &[u32], x: [u64; 2]) -> Leave<Hole> {
        self.execute_at(true, words, x)
    }

    pub fn execute_at(&mut self, el1: bool, words: &[u32], x: [u64; 2]) -> Leave<Hole> {
        set_code(&mut self.cpu, &mut self.ram, CODE, words);
        let pstate = Pstate {
            el1,
            own_stack: el1,
            daif: 15,
            ..Pstate::default()
        };
        self.cpu.state.set_pstate(pstate);
        self.cpu.state.pc = self.code;
        self.cpu.state.x[..2].copy_from_slice(&x);
        self.cpu.set_system(ESR, 0);
        self.cpu.set_system(FAR, 0);
        let mut leave = Leave::Limit;
        for _ in words {
            leave = self.cpu.run(&mut self.ram, 1);
        }
        leave
    }

    /// Returns ESR_EL1 and FAR_EL1.
    pub fn syndrome(&self) -> [u64; 2] {
        [ESR, FAR].map(|name| self.cpu.state.system(name).unwrap())
    }

    /// Executes an instruction. EL1 must take no exception.
    pub fn succeeds(&mut self, word: u32, x: [u64; 2]) -> u64 {
        assert_eq!(self.execute(&[word], x), Leave::Limit, "{word:08x}");
        assert_eq!(self.syndrome()[0], 0, "{word:08x}");
        assert_eq!(self.cpu.state.pc, self.code + 4);
        self.cpu.state.x[0]
    }

    /// Executes an instruction, of which EL1 takes an exception. Returns ESR_EL1 and FAR_EL1.
    pub fn fails(&mut self, word: u32, x: [u64; 2]) -> [u64; 2] {
        assert_eq!(self.execute(&[word], x), Leave::Limit, "{word:08x}");
        self.syndrome()
    }
}

/// Returns ESR_EL1 of a data abort from EL1.
pub fn data_abort(details: u64) -> u64 {
    0x25 << 26 | 1 << 25 | details
}

/// LDR X0, [X1] and the like.
pub const LDR: u32 = 0xf940_0020;
pub const STR: u32 = 0xf900_0020;
pub const LDR_Q: u32 = 0x3dc0_0020;
pub const LDP: u32 = 0xa940_0820;
pub const STP: u32 = 0xa900_0820;
pub const LD1_4S: u32 = 0x4c40_7820;
pub const ZVA: u32 = 0xd50b_7421;
pub const WNR: u64 = 1 << 6;
