//! A machine whose whole memory has contents that a seed determines, until they are overwritten. Some pages are holes.

use crate::compiled::compile;
use crate::numbers::mixed;
use slat_a64::{Cpu, Hypervisor, Invalidation, Order, Page, Right, State, SystemName};
use std::collections::BTreeMap;

pub const SCTLR: SystemName = SystemName::new(3, 0, 1, 0, 0);
pub const CPACR: SystemName = SystemName::new(3, 0, 1, 0, 2);
pub const TTBR0: SystemName = SystemName::new(3, 0, 2, 0, 0);
pub const TTBR1: SystemName = SystemName::new(3, 0, 2, 0, 1);
pub const TCR: SystemName = SystemName::new(3, 0, 2, 0, 2);
pub const ESR: SystemName = SystemName::new(3, 0, 5, 2, 0);
pub const FAR: SystemName = SystemName::new(3, 0, 6, 0, 0);
pub const PAR: SystemName = SystemName::new(3, 0, 7, 4, 0);
pub const MAIR: SystemName = SystemName::new(3, 0, 10, 2, 0);
pub const VBAR: SystemName = SystemName::new(3, 0, 12, 0, 0);

/// SCTLR_EL1.
pub const M: u64 = 1 << 0;
pub const A: u64 = 1 << 1;
pub const WXN: u64 = 1 << 19;
pub const SPAN: u64 = 1 << 23;
/// UCI, UCT, DZE: EL0 may do cache maintenance.
pub const EL0_MAINTAINS: u64 = 1 << 26 | 1 << 15 | 1 << 14;

#[derive(Clone)]
pub struct Ram {
    pub written: BTreeMap<u64, u64>,
    /// Without a seed, memory is zero and without holes.
    pub seed: Option<u64>,
    /// The word at an address that was not written.
    pub contents: fn(u64) -> u64,
    /// Pages that are not there, in addition to those of the seed.
    pub holes: Vec<u64>,
    /// Right and address of each page that was asked for.
    pub asked: Vec<(Right, u64)>,
    pub attention: bool,
    /// The next access to the first of these pages fails. From then on, the memory of the second page is that of the
    /// third.
    pub changes: Option<[u64; 3]>,
    moved: Option<[u64; 2]>,
}

/// The accesses that a machine refuses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hole;

impl Ram {
    pub fn new(seed: Option<u64>, contents: fn(u64) -> u64) -> Self {
        Self {
            written: BTreeMap::new(),
            seed,
            contents,
            holes: vec![],
            asked: vec![],
            attention: false,
            changes: None,
            moved: None,
        }
    }
    /// Makes the change that waits for an access to this page. The access then fails.
    fn accessed(&mut self, at: u64) -> Result<(), Hole> {
        match self.changes {
            Some([page, from, to]) if page == at & !0xfff => {
                (self.changes, self.moved) = (None, Some([from, to]));
                Err(Hole)
            }
            _ => Ok(()),
        }
    }
    pub fn is_hole(&self, ipa: u64) -> bool {
        let of_seed = |seed| mixed(seed ^ ipa >> 12).is_multiple_of(64);
        // The memory for the tests themselves is below 2 GiB.
        self.holes.contains(&(ipa >> 12)) || (ipa >> 31 != 0 && self.seed.is_some_and(of_seed))
    }
    pub fn word(&self, at: u64) -> u64 {
        let at = at & !7;
        let fresh = || {
            self.seed
                .map_or(0, |seed| (self.contents)(mixed(seed.wrapping_add(at))))
        };
        self.written.get(&at).copied().unwrap_or_else(fresh)
    }
    pub fn set(&mut self, at: u64, value: u64) {
        self.written.insert(at & !7, value);
    }
    pub fn byte(&self, at: u64) -> u8 {
        (self.word(at) >> (at % 8 * 8)) as u8
    }
    fn get(&self, at: u64, bytes: u64) -> u128 {
        (0..bytes).fold(0, |value, n| {
            value | u128::from(self.byte(at + n)) << (8 * n)
        })
    }
    fn put(&mut self, at: u64, bytes: u64, value: u128) {
        for n in 0..bytes {
            let shift = (at + n) % 8 * 8;
            let byte = (value >> (8 * n)) as u64 & 0xff;
            let old = self.word(at + n);
            self.set(at + n, old & !(0xff << shift) | byte << shift);
        }
    }
    /// Puts instructions at an address.
    pub fn put_code(&mut self, at: u64, words: &[u32]) {
        for (n, word) in words.iter().enumerate() {
            self.put(at + 4 * n as u64, 4, (*word).into());
        }
    }
}

impl Hypervisor for Ram {
    type Fault = Hole;

    fn page(&mut self, ipa: u64, right: Right) -> Result<Page, Hole> {
        self.asked.push((right, ipa));
        match self.is_hole(ipa) {
            true => Err(Hole),
            false => Ok(Page {
                base: match self.moved {
                    Some([from, to]) if from == ipa & !0xfff => to,
                    _ => ipa & !0xfff,
                },
                write: true,
                execute: true,
            }),
        }
    }
    fn load(&mut self, at: u64, size: u8, _: Order) -> Result<u64, Hole> {
        assert!(at % 4096 + (1 << size) <= 4096);
        self.accessed(at)?;
        Ok(self.get(at, 1 << size) as u64)
    }
    fn store(&mut self, at: u64, size: u8, value: u64, _: Order) -> Result<(), Hole> {
        assert!(at % 4096 + (1 << size) <= 4096);
        self.accessed(at)?;
        self.put(at, 1 << size, value.into());
        Ok(())
    }
    fn load_wide(&mut self, at: u64) -> Result<u128, Hole> {
        self.accessed(at)?;
        Ok(self.get(at, 16))
    }
    fn store_wide(&mut self, at: u64, value: u128) -> Result<(), Hole> {
        self.accessed(at)?;
        self.put(at, 16, value);
        Ok(())
    }
    fn compare_exchange(
        &mut self,
        at: u64,
        size: u8,
        [expected, new]: [u128; 2],
        _: Order,
    ) -> Result<u128, Hole> {
        self.accessed(at)?;
        let found = self.get(at, 1 << size);
        if found == expected {
            self.put(at, 1 << size, new);
        }
        Ok(found)
    }
    fn attention(&self) -> bool {
        self.attention
    }
}

/// The physical addresses of the tests' own tables, and of their code, which is in a block of 1 GiB.
pub const TABLE: u64 = 0x2000_0000;
pub const CODE: u64 = 0x4000_0000;
/// The TCR of a half whose level 1 table is at [`TABLE`]: 39 bits, 4 KiB.
pub const OWN_T0: u64 = 25;
pub const OWN_T1: u64 = 25 << 16 | 2 << 30;
/// A block that everybody may read and execute, at its physical address.
pub const READABLE: u64 = CODE | 1 | 1 << 10 | 3 << 6;

/// Maps [`CODE`] in the lower or the upper half, and returns its virtual address.
pub fn map_code(ram: &mut Ram, in_upper: bool) -> u64 {
    ram.set(TABLE + 8, READABLE);
    CODE | if in_upper { !0 << 39 } else { 0 }
}

/// Makes a processor at EL1 after reset.
pub fn cpu() -> Cpu {
    let mut cpu = Cpu::new(State::reset());
    compile(&mut cpu);
    cpu
}

/// Replaces the instruction at a physical address.
pub fn set_code(cpu: &mut Cpu, ram: &mut Ram, at: u64, words: &[u32]) {
    ram.put_code(at, words);
    cpu.invalidate(Invalidation::CodeLine(at));
}
