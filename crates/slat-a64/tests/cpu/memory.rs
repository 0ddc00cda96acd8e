//! Memory that processors on several threads share. All addresses lead to one page, which repeats.

use slat_a64::{Access, Machine, Memory, State};
use std::sync::atomic::{AtomicU64, Ordering};

pub const WORDS: usize = 512;

pub struct Shared {
    pub code: Vec<u32>,
    pub words: [AtomicU64; WORDS],
}

/// The address of the code. Data has lower addresses.
pub const CODE: u64 = 1 << 32;

impl Shared {
    pub fn new(code: &[u32]) -> Self {
        Self {
            code: code.to_vec(),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
    fn word(&self, address: u64) -> &AtomicU64 {
        &self.words[(address / 8) as usize % WORDS]
    }
}

/// The memory as one processor sees it.
pub struct View<'a> {
    pub shared: &'a Shared,
    /// The number of the access that fails.
    pub failing: Option<u32>,
    pub accesses: u32,
    pub stores: Vec<(u64, u32)>,
}

impl<'a> View<'a> {
    pub fn new(shared: &'a Shared) -> Self {
        Self {
            shared,
            failing: None,
            accesses: 0,
            stores: vec![],
        }
    }
    /// Counts an access that may fail.
    fn may_fail(&mut self) -> Result<(), Failed> {
        self.accesses += 1;
        match self.failing == Some(self.accesses) {
            true => Err(Failed),
            false => Ok(()),
        }
    }
    /// Counts a store, unless the instruction has checked this store before.
    fn may_fail_to_store(&mut self, address: u64, bytes: u32) -> Result<(), Failed> {
        let end = address.wrapping_add(bytes.into());
        let is_prepared = |&(start, length): &(u64, u32)| {
            address >= start && end <= start.wrapping_add(length.into())
        };
        if self.stores.iter().any(is_prepared) {
            return Ok(());
        }
        self.may_fail()
    }
    fn byte(&self, address: u64) -> u8 {
        (self.shared.word(address).load(Ordering::Relaxed) >> (address % 8 * 8)) as u8
    }
    fn set_byte(&self, address: u64, value: u8) {
        let shift = address % 8 * 8;
        let word = self.shared.word(address);
        let replaced = |old| Some(old & !(0xff << shift) | u64::from(value) << shift);
        word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, replaced)
            .unwrap();
    }
    fn get(&self, address: u64, bytes: u64) -> u128 {
        let all = (0..bytes).map(|n| u128::from(self.byte(address.wrapping_add(n))) << (8 * n));
        all.fold(0, |value, byte| value | byte)
    }
    fn put(&self, address: u64, bytes: u64, value: u128) {
        for n in 0..bytes {
            self.set_byte(address.wrapping_add(n), (value >> (8 * n)) as u8);
        }
    }
}

/// An access that the test has made fail.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Failed;

impl Memory for View<'_> {
    type Fault = Failed;

    fn fetch(&mut self, _: &State, address: u64) -> Result<u32, Failed> {
        let at = address.wrapping_sub(CODE) / 4;
        self.shared.code.get(at as usize).copied().ok_or(Failed)
    }
    fn load(&mut self, _: &State, address: u64, size: u8, _: Access) -> Result<u64, Failed> {
        self.may_fail()?;
        Ok(match (size, address % 8) {
            (3, 0) => self.shared.word(address).load(Ordering::SeqCst),
            _ => self.get(address, 1 << size) as u64,
        })
    }
    fn store(
        &mut self,
        _: &State,
        address: u64,
        size: u8,
        value: u64,
        _: Access,
    ) -> Result<(), Failed> {
        self.may_fail_to_store(address, 1 << size)?;
        match (size, address % 8) {
            (3, 0) => self.shared.word(address).store(value, Ordering::SeqCst),
            _ => self.put(address, 1 << size, value.into()),
        }
        Ok(())
    }
    fn load_wide(&mut self, _: &State, address: u64, _: Access) -> Result<u128, Failed> {
        self.may_fail()?;
        Ok(self.get(address, 16))
    }
    fn store_wide(
        &mut self,
        _: &State,
        address: u64,
        value: u128,
        _: Access,
    ) -> Result<(), Failed> {
        self.may_fail_to_store(address, 16)?;
        self.put(address, 16, value);
        Ok(())
    }
    fn prepare_stores(
        &mut self,
        _: &State,
        address: u64,
        bytes: u32,
        _: Access,
    ) -> Result<(), Failed> {
        self.may_fail()?;
        self.stores.push((address, bytes));
        Ok(())
    }
    /// Processors on several threads use only words of 8 bytes here.
    fn compare_exchange(
        &mut self,
        _: &State,
        address: u64,
        size: u8,
        [expected, new]: [u128; 2],
        _: Access,
    ) -> Result<u128, Failed> {
        self.may_fail()?;
        if size == 3 {
            let word = self.shared.word(address);
            let (expected, new) = (expected as u64, new as u64);
            let found = word.compare_exchange(expected, new, Ordering::SeqCst, Ordering::SeqCst);
            return Ok(found.unwrap_or_else(|found| found).into());
        }
        let found = self.get(address, 1 << size);
        if found == expected {
            self.put(address, 1 << size, new);
        }
        Ok(found)
    }
}

impl Machine for View<'_> {}
