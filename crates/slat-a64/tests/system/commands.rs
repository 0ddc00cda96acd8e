//! Commands to the payload: see payload.s.

use crate::image::{COMMANDS, STUB, TABLE, TABLES, UPPER, Words};
use crate::setting;

/// The most commands of an image. There is space for the commands that a full script still adds.
const MOST: u64 = (TABLES - COMMANDS) / 128 - 20;

/// TCR_EL1 of the own half: 39 bits, 4 KiB.
const OWN_T0: u64 = 25;
const OWN_T1: u64 = 25 << 16 | 2 << 30;
/// SCTLR_EL1: RES1, SPAN, M.
pub const SCTLR: u64 = 0x30d0_0801;
/// Everything is masked.
pub const MASKED: u64 = 0xf << 6;
pub const EL0: u64 = MASKED;
pub const EL1: u64 = MASKED | 5;

/// A command for EL0 or EL1.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub words: [u32; 4],
    pub spsr: u64,
    /// The address at which the run begins. 0: that of the stub, where the payload stores `words`.
    pub start: u64,
    pub cpacr: u64,
    pub mdscr: u64,
    pub sp_el0: u64,
    pub x: [u64; 4],
}

const NOP: u32 = 0xd503_201f;

impl Run {
    pub fn new(spsr: u64, words: &[u32]) -> Self {
        let mut all = [NOP; 4];
        all[..words.len()].copy_from_slice(words);
        Run {
            words: all,
            spsr,
            start: 0,
            cpacr: 3 << 20,
            mdscr: 0,
            sp_el0: 0,
            x: [0; 4],
        }
    }
}

/// The commands, and for each word of output its meaning.
#[derive(Default)]
pub struct Script {
    pub commands: Vec<Words>,
    /// For each record of output, the number of its words and the command.
    pub records: Vec<(usize, String)>,
    is_upper: bool,
    /// TCR_EL1, TTBR of the other half, and SCTLR_EL1.
    configuration: [u64; 3],
}

impl Script {
    pub fn is_full(&self) -> bool {
        self.commands.len() as u64 >= setting("SLAT_SYSTEM_COMMANDS", 2000).min(MOST)
    }
    fn push(&mut self, words: &[u64]) {
        let mut all = [0; 16];
        all[..words.len()].copy_from_slice(words);
        self.commands.push(all);
    }
    /// Returns the virtual address of the stub.
    pub fn stub(&self) -> u64 {
        STUB + if self.is_upper { UPPER } else { 0 }
    }
    /// Makes the payload continue in the other half of the address space, if it is in the half that the next commands
    /// change.
    pub fn work_on(&mut self, upper: bool) {
        if upper == self.is_upper {
            self.push(&[5]);
            self.is_upper = !upper;
        }
    }
    /// Configures the half of the address space that the payload is not in. `tcr` has the fields of that half, and the
    /// common ones.
    pub fn configure(&mut self, tcr: u64, ttbr: u64, mair: u64, sctlr: u64) {
        self.configuration = [tcr, ttbr, sctlr];
        let (ttbrs, own) = match self.is_upper {
            true => ([ttbr, TABLE], OWN_T1),
            false => ([TABLE, ttbr], OWN_T0),
        };
        self.push(&[
            1,
            ttbrs[0],
            ttbrs[1],
            tcr | own,
            mair & (!0 >> 16) | 0xff << 56,
            sctlr,
        ]);
    }
    /// Appends the command that executes `run`.
    pub fn run(&mut self, run: Run) {
        let pair = |n: usize| u64::from(run.words[n + 1]) << 32 | u64::from(run.words[n]);
        let [a, b, c, d] = run.x;
        let words = [
            2,
            pair(0),
            pair(2),
            run.spsr,
            run.start,
            run.cpacr,
            run.mdscr,
            run.sp_el0,
            a,
            b,
            c,
            d,
        ];
        self.push(&words);
        let what = format!("{run:x?} {:x?}", self.configuration);
        self.records.push((8, what));
    }
    pub fn read(&mut self, at: u64) {
        self.push(&[3, at]);
        self.records.push((1, format!("word at {at:#x}")));
    }
}
