//! A guest that changes its tables, its address space, and what is in the TLB, at random. Each access does what the
//! tables say, or what they have said since the translation was last invalidated (D8.13, D8.14).
//!
//! The processor keeps no entries of tables, but only whole translations. So this model is stricter than the
//! architecture: a leaf that is reached through an old table is no excuse.

use crate::guest::*;
use crate::machine::*;
use crate::model::{self, Outcome, Query, Registers};
use crate::numbers::Random;
use crate::random::{rounds, seed};
use slat_a64::Leave;

/// The pages of virtual addresses that the guest accesses. All are in the first 2 MiB.
const PAGES: u64 = 8;
/// The distance of the tables of one address space from those of the other one.
const SPACES: u64 = 0x1_0000;
/// The pages of physical addresses: what a leaf leads to, and a block of 2 MiB.
const FRAMES: std::ops::Range<u64> = 0x10..0x20;
const BLOCK_AT: u64 = 0x20_0000;
/// Where a store writes.
const STORED: u64 = 8;

/// TCR_EL1: ASIDs have 16 bits; TTBR1_EL1 has the current one.
const AS: u64 = 1 << 36;
const A1: u64 = 1 << 22;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Access {
    Load,
    Store,
    Fetch,
}
const ACCESSES: [(Access, bool); 6] = [
    (Access::Load, true),
    (Access::Load, false),
    (Access::Store, true),
    (Access::Store, false),
    (Access::Fetch, true),
    (Access::Fetch, false),
];

/// What an access has done: the physical page that it has reached, or a fault status code.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Done {
    Reached(u64),
    Fault(u8),
}

/// A translation that the TLB may have.
#[derive(Clone, Debug, PartialEq)]
struct Kept {
    page: u64,
    /// `None`: it is global.
    asid: Option<u64>,
    is_block: bool,
    /// What each of [`ACCESSES`] does by it.
    does: [Done; 6],
}

struct Campaign {
    guest: Guest,
    random: Random,
    registers: Registers,
    kept: Vec<Kept>,
    stored: u64,
}

impl Campaign {
    fn new(mut random: Random) -> Self {
        let mut guest = Guest::new();
        for frame in FRAMES.chain((0..PAGES).map(|page| (BLOCK_AT >> 12) + page)) {
            // MOVZ X0, #frame, twice.
            let word = 0xd280_0000 | frame << 5;
            guest.ram.set(frame << 12, word << 32 | word);
        }
        for space in [0, SPACES] {
            guest.ram.set(LEVEL_1 + space, (LEVEL_2 + space) | 3);
            guest.ram.set(LEVEL_2 + space, (LEVEL_3 + space) | 3);
        }
        let tcr = TCR_USED & !AS | random.of(&[0, AS]) | random.of(&[0, A1]);
        guest.cpu.set_system(TCR, tcr);
        let registers = Registers {
            tcr,
            ttbr: [LEVEL_1, TABLE],
            mair: 0x44_00ff,
            wxn: false,
        };
        let mut campaign = Self {
            guest,
            random,
            registers,
            kept: vec![],
            stored: 0,
        };
        campaign.switch();
        campaign
    }

    fn asid(&self) -> u64 {
        let asid = self.registers.ttbr[usize::from(self.registers.tcr & A1 != 0)] >> 48;
        self.compared(asid)
    }

    /// Returns the bits of an ASID that count.
    fn compared(&self, asid: u64) -> u64 {
        match self.registers.tcr & AS {
            0 => asid & 0xff,
            _ => asid,
        }
    }

    /// Returns what an access does by the tables as they are, and the descriptor that was read last.
    fn now(&self, page: u64, (access, privileged): (Access, bool)) -> (Done, u64) {
        let query = Query {
            privileged,
            pan: false,
            right: match access {
                Access::Load => 'r',
                Access::Store => 'w',
                Access::Fetch => 'x',
            },
            updates: false,
        };
        let mut leaf = 0;
        let mut read = |at: u64| {
            leaf = self.guest.ram.word(at);
            Some(leaf)
        };
        let outcome = model::translate(
            &self.registers,
            page << 12,
            query,
            &mut read,
            &mut Vec::new(),
        );
        let done = match outcome {
            Outcome::Address { pa, .. } => Done::Reached(pa >> 12),
            Outcome::Fault(status) => Done::Fault(status),
            Outcome::Hole { .. } => unreachable!("memory without holes"),
        };
        (done, leaf)
    }

    /// Adds the translations of the current address space to those that the TLB may have.
    fn keep(&mut self) {
        for page in 0..PAGES {
            let (done, leaf) = self.now(page, ACCESSES[0]);
            // Neither invalid descriptors nor those without an access flag are kept. Permission faults are.
            if matches!(done, Done::Fault(status) if status >> 2 != 3) {
                continue;
            }
            let kept = Kept {
                page,
                asid: (leaf & NOT_GLOBAL != 0).then(|| self.asid()),
                is_block: leaf & 3 == 1,
                does: ACCESSES.map(|access| self.now(page, access).0),
            };
            if !self.kept.contains(&kept) {
                self.kept.push(kept);
            }
        }
    }

    fn descriptor(&mut self) -> u64 {
        let frame = FRAMES.start + self.random.below(FRAMES.end - FRAMES.start);
        let mut value = frame << 12 | PAGE;
        for (bit, one_in) in [
            (NOT_GLOBAL, 2),
            (EL0, 2),
            (READ_ONLY, 3),
            (1 << 53, 3),
            (1 << 54, 3),
        ] {
            value |= if self.random.one_in(one_in) { bit } else { 0 };
        }
        match self.random.below(8) {
            0 => 0,
            // Without an access flag.
            1 => value & !(1 << 10),
            _ => value,
        }
    }

    fn space(&mut self) -> u64 {
        self.random.of(&[0, SPACES])
    }

    /// Changes a descriptor, without TLBI.
    fn change(&mut self) {
        let (space, page, new) = (self.space(), self.random.below(PAGES), self.descriptor());
        if !self.random.one_in(8) {
            self.guest.ram.set(LEVEL_3 + space + 8 * page, new);
        } else {
            let block = BLOCK_AT | new & !(0xffff << 12) & !3 | 1;
            let other = self.space();
            let new = self
                .random
                .of(&[(LEVEL_3 + other) | 3, block, (LEVEL_3 + other) | 3, 0]);
            self.guest.ram.set(LEVEL_2 + space, new);
        }
    }

    /// Goes to an address space and an ASID.
    fn switch(&mut self) {
        let asids = [0u64, 1].map(|_| self.random.of(&[5, 6, 0x105]) << 48);
        self.registers.ttbr = [(LEVEL_1 + self.space()) | asids[0], TABLE | asids[1]];
        // MSR TTBR0_EL1, X0, and MSR TTBR1_EL1, X1.
        let ttbr = self.registers.ttbr;
        assert_eq!(
            self.guest.execute(&[0xd518_2000, 0xd518_2021], ttbr),
            Leave::Limit
        );
    }

    /// Executes TLBI, and forgets what it invalidates.
    fn invalidate(&mut self) {
        let page = self.random.below(PAGES);
        let asid = self.random.of(&[5u64, 6, 0x105]);
        let op2 = self.random.of(&[0u64, 1, 1, 2, 3, 5, 7]);
        let crm = self.random.of(&[3u64, 7]);
        let word = 0xd508_8001 | crm << 8 | op2 << 5;
        let leave = self.guest.execute(&[word as u32], [0, asid << 48 | page]);
        assert_eq!(leave == Leave::Limit, crm == 7, "{leave:?}");
        let asid = self.compared(asid);
        self.kept.retain(|kept| {
            let is_page = kept.page == page || kept.is_block;
            let is_asid = kept.asid.is_none_or(|kept| kept == asid);
            let is_dropped = match op2 {
                0 => true,
                2 => kept.asid == Some(asid),
                1 | 5 => is_page && is_asid,
                _ => is_page,
            };
            !is_dropped
        });
    }

    /// Makes an access. Returns whether it did what the tables no longer say.
    fn access(&mut self) -> bool {
        let page = self.random.below(PAGES);
        let index = self.random.below(6) as usize;
        let (access, privileged) = ACCESSES[index];
        let va = page << 12;
        self.stored += 1;
        let start = match access {
            Access::Load => {
                self.guest.execute_at(privileged, &[LDR], [0, va]);
                self.guest.code
            }
            Access::Store => {
                let [at, value] = [va + STORED, self.stored];
                self.guest.execute_at(privileged, &[STR], [value, at]);
                self.guest.code
            }
            Access::Fetch => {
                // The instructions that are executed are not at the code, but PSTATE is as for them.
                self.guest.execute_at(privileged, &[], [0, 0]);
                self.guest.cpu.state.pc = va;
                self.guest.cpu.run(&mut self.guest.ram, 1);
                va
            }
        };
        let pc = self.guest.cpu.state.pc;
        let done = if pc != start + 4 {
            assert_eq!(
                pc & !0x7ff,
                self.guest.code + 0x8000,
                "{access:?} of {va:#x}"
            );
            Done::Fault(self.guest.syndrome()[0] as u8 & 0x3f)
        } else {
            Done::Reached(match access {
                Access::Load => self.guest.cpu.state.x[0] >> 5 & 0xffff,
                Access::Fetch => self.guest.cpu.state.x[0],
                Access::Store => {
                    let blocks = (BLOCK_AT >> 12)..(BLOCK_AT >> 12) + PAGES;
                    let written =
                        |frame: &u64| self.guest.ram.word(frame << 12 | STORED) == self.stored;
                    FRAMES
                        .chain(blocks)
                        .find(written)
                        .expect("a page was written")
                }
            })
        };
        let now = self.now(page, ACCESSES[index]).0;
        let asid = self.asid();
        let may = |kept: &&Kept| kept.page == page && kept.asid.is_none_or(|kept| kept == asid);
        let mut kept = self.kept.iter().filter(may);
        assert!(
            done == now || kept.any(|kept| kept.does[index] == done),
            "{access:?} of {va:#x}, privileged: {privileged}, ASID {asid:#x}: {done:x?}; the tables say {now:x?}, \
             and have said {:x?}",
            self.kept.iter().filter(may).collect::<Vec<_>>()
        );
        done != now
    }
}

#[test]
fn accesses_are_as_the_tables_say_or_have_said_since_tlbi() {
    let mut random = Random(seed());
    let (mut stale, mut accesses) = (0, 0);
    for _ in 0..(rounds() / 5_000).max(1) {
        let mut campaign = Campaign::new(Random(random.next()));
        for _ in 0..1_000 {
            match campaign.random.below(16) {
                0..3 => campaign.change(),
                3 => campaign.switch(),
                4 => campaign.invalidate(),
                _ => {
                    accesses += 1;
                    stale += u64::from(campaign.access());
                    continue;
                }
            }
            campaign.keep();
        }
    }
    println!("{accesses} accesses, {stale} of them by translations that the tables no longer had");
    assert!(stale > accesses / 50, "{stale} of {accesses}");
}
