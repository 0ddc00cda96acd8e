//! Compares random accesses, changes of the guest's tables and invalidations with a simple model of what a TLB may
//! hold: every translation that the CPU uses was in the tables at some moment since the last flush that covers it (SDM
//! volume 3, "Caching Translation Information").

use crate::common::*;
use slat_x86::state::control;
use slat_x86::{Exit, vector};
use std::collections::HashSet;

/// Linear addresses. Two of them share an entry in a direct-mapped TLB of up to 1024 pages, and some a large page.
const PAGES: [u64; 6] = [
    0x40_0000, 0x40_1000, 0x41_0000, 0x80_0000, 0x80_1000, 0xc0_0000,
];
/// The pages from this index on are global.
const GLOBAL_FROM: usize = 3;
const PCIDS: usize = 4;
/// The first of the guest-physical pages to which pages are mapped.
const TARGETS: u64 = 0x10_0000;
const COUNT: u64 = 8;
const TESTED: u64 = CODE + 0x1000;
const DESCRIPTOR: u64 = 0x3_4000;
/// The offset in a page of the word to which the guest writes. A page also contains its number, and a function.
const WORD: u64 = 8;
const FUNCTION: u64 = 0x100;

/// The contents of the guest's entry for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Mapping {
    target: u64,
    writable: bool,
}

struct Model {
    guest: Guest,
    random: Random,
    /// The current mappings, by PCID and page. Those of global pages are the same for all PCIDs.
    tables: [[Mapping; PAGES.len()]; PCIDS],
    /// The mappings that a TLB may hold.
    valid: [[HashSet<Mapping>; PAGES.len()]; PCIDS],
    pcid: usize,
    large: bool,
    written: u64,
    /// The number of accesses that used a mapping which the tables no longer have.
    stale: u64,
}

impl Model {
    fn new(seed: u64, large: bool) -> Self {
        let mut guest = Guest::new(b"\xf4");
        for n in 0..COUNT {
            let at = TARGETS + (n << 12);
            guest.memory().write64(at, n);
            // mov eax,n; ret
            let code = [0xb8, n as u8, 0, 0, 0, 0xc3];
            guest.memory().write(at + FUNCTION, &code);
        }
        let state = &mut guest.cpu.state;
        state.cr4 |= control::CR4_PCIDE | control::CR4_PGE;
        state.cr3 = 0x1000;
        guest.machine.page_bits = if large { 21 } else { 12 };
        for page in &PAGES[GLOBAL_FROM..] {
            guest.machine.globals.insert(page >> 12);
        }
        let first = Mapping {
            target: 0,
            writable: true,
        };
        Self {
            guest,
            random: Random(seed | 1),
            tables: [[first; PAGES.len()]; PCIDS],
            valid: std::array::from_fn(|_| std::array::from_fn(|_| HashSet::from([first]))),
            pcid: 0,
            large,
            written: 0,
            stale: 0,
        }
    }

    fn below(&mut self, n: usize) -> usize {
        self.random.below(n as u64) as usize
    }

    fn has_globals(&self) -> bool {
        self.guest.cpu.state.cr4 & control::CR4_PGE != 0
    }

    fn is_global(&self, page: usize) -> bool {
        page >= GLOBAL_FROM && self.has_globals()
    }

    /// Changes an entry of the tables.
    fn map(&mut self) {
        let page = self.below(PAGES.len());
        let pcid = self.below(PCIDS);
        let to = Mapping {
            target: self.random.below(COUNT),
            writable: self.random.below(4) != 0,
        };
        for other in 0..PCIDS {
            if other == pcid || page >= GLOBAL_FROM {
                self.tables[other][page] = to;
                self.valid[other][page].insert(to);
            }
        }
    }

    /// Records a flush of one page of a PCID.
    fn flush(&mut self, pcid: usize, page: usize) {
        self.valid[pcid][page] = HashSet::from([self.tables[pcid][page]]);
    }

    /// Records a flush of all pages of the PCIDs for which `which` returns true; with `globals` also of global
    /// pages, of all PCIDs.
    fn flush_all(&mut self, which: impl Fn(usize) -> bool, globals: bool) {
        for pcid in 0..PCIDS {
            for page in 0..PAGES.len() {
                let covered = match self.is_global(page) {
                    true => globals,
                    false => which(pcid),
                };
                if covered {
                    self.flush(pcid, page);
                }
            }
        }
    }

    /// Records a flush of one page of the guest; with `globals` also if the page is global.
    fn flush_page(&mut self, pcid: usize, page: usize, globals: bool) {
        for (other, lin) in PAGES.into_iter().enumerate() {
            let same = match self.large {
                true => lin >> 21 == PAGES[page] >> 21,
                false => other == page,
            };
            match (same, self.is_global(other)) {
                (false, _) => {}
                (true, false) => self.flush(pcid, other),
                (true, true) if globals => {
                    (0..PCIDS).for_each(|pcid| self.flush(pcid, other));
                }
                (true, true) => {}
            }
        }
    }

    /// Runs `code` with the tables of the current PCID. Returns `true` if the code has reached its end, and `false`
    /// if it has raised a page fault.
    fn run(&mut self, code: &[u8], registers: &[(usize, u64)]) -> bool {
        for (page, mapping) in PAGES.into_iter().zip(self.tables[self.pcid]) {
            let machine = &mut self.guest.machine;
            let target = (TARGETS >> 12) + mapping.target;
            machine.moved.insert(page >> 12, target);
            let rights = Rights {
                present: true,
                write: mapping.writable,
                execute: true,
                user: true,
            };
            machine.rights.insert(page >> 12, rights);
        }
        self.guest.memory().write(TESTED, &[code, b"\xf4"].concat());
        let state = &mut self.guest.cpu.state;
        state.rip = TESTED;
        state.gpr[RSP] = STACK;
        for &(register, value) in registers {
            state.gpr[register] = value;
        }
        assert_eq!(self.guest.run(), Exit::Hlt);
        let at = self.guest.cpu.state.rip;
        let faulted = at == HANDLERS + 16 * u64::from(vector::PF) + 1;
        assert!(faulted || at == TESTED + code.len() as u64 + 1, "{at:#x}");
        !faulted
    }

    fn used(&mut self, page: usize, target: u64, write: bool) {
        let valid = &self.valid[self.pcid][page];
        let may = |m: &Mapping| m.target == target && (m.writable || !write);
        assert!(
            valid.iter().any(may),
            "page {page} of {}: {target}, write: {write}, not in {valid:?}",
            self.pcid
        );
        self.stale += u64::from(!may(&self.tables[self.pcid][page]));
    }

    fn access(&mut self) {
        let page = self.below(PAGES.len());
        let lin = PAGES[page];
        match self.below(3) {
            0 => {
                // mov rbx,[rsi]
                assert!(self.run(b"\x48\x8b\x1e", &[(RSI, lin)]));
                let target = self.guest.cpu.state.gpr[RBX];
                self.used(page, target, false);
            }
            1 => {
                // mov [rsi],rbx
                self.written += 1;
                let registers = [(RSI, lin + WORD), (RBX, self.written)];
                if self.run(b"\x48\x89\x1e", &registers) {
                    let memory = self.guest.memory();
                    let has = |n: &u64| memory.read64(TARGETS + (n << 12) + WORD) == self.written;
                    let target = (0..COUNT).find(has).expect("it was written");
                    self.used(page, target, true);
                } else {
                    let mapping = self.tables[self.pcid][page];
                    assert!(!mapping.writable, "a fault that the tables do not say");
                    let others = if self.is_global(page) { PCIDS } else { 0 };
                    self.flush(self.pcid, page);
                    (0..others).for_each(|pcid| self.flush(pcid, page));
                }
            }
            _ => {
                // call rdi
                assert!(self.run(b"\xff\xd7", &[(RDI, lin + FUNCTION)]));
                let target = self.guest.cpu.state.gpr[RAX] & 0xff;
                self.used(page, target, false);
            }
        }
    }

    fn invalidate(&mut self) {
        match self.below(10) {
            // mov cr3,rax
            0..4 => {
                let (pcid, keeps) = (self.below(PCIDS), self.below(2) as u64);
                self.run(
                    b"\x0f\x22\xd8",
                    &[(RAX, 0x1000 | pcid as u64 | keeps << 63)],
                );
                self.pcid = pcid;
                if keeps == 0 {
                    self.flush_all(|other| other == pcid, false);
                }
            }
            // invlpg [rsi]
            4..6 => {
                let page = self.below(PAGES.len());
                self.run(b"\x0f\x01\x3e", &[(RSI, PAGES[page] + 5)]);
                self.flush_page(self.pcid, page, true);
            }
            // invpcid rax,[rsi]
            6..8 => {
                let (kind, pcid) = (self.below(4), self.below(PCIDS));
                let page = self.below(PAGES.len());
                self.guest.memory().write64(DESCRIPTOR, pcid as u64);
                self.guest.memory().write64(DESCRIPTOR + 8, PAGES[page]);
                let registers = [(RAX, kind as u64), (RSI, DESCRIPTOR)];
                self.run(b"\x66\x0f\x38\x82\x06", &registers);
                match kind {
                    0 => self.flush_page(pcid, page, false),
                    1 => self.flush_all(|other| other == pcid, false),
                    2 => self.flush_all(|_| true, true),
                    _ => self.flush_all(|_| true, false),
                }
            }
            // mov cr4,rax
            8 if self.below(4) == 0 => {
                let cr4 = self.guest.cpu.state.cr4 ^ control::CR4_PGE;
                self.run(b"\x0f\x22\xe0", &[(RAX, cr4)]);
                self.flush_all(|_| true, true);
            }
            9 if self.below(4) == 0 => {
                self.guest.cpu.flush_tlb();
                self.flush_all(|_| true, true);
            }
            _ => {}
        }
    }
}

#[test]
fn every_translation_that_is_used_was_valid_since_the_last_flush_that_covers_it() {
    let mut stale = 0;
    for run in 0..24 {
        let mut model = Model::new(0x9e37_79b9 * (run + 1), run % 2 == 1);
        for _ in 0..1500 {
            match model.below(6) {
                0 => model.map(),
                1 => model.invalidate(),
                _ => model.access(),
            }
        }
        stale += model.stale;
    }
    // A CPU that flushes at each step would also pass the checks above.
    assert!(stale > 500, "{stale}");
}
