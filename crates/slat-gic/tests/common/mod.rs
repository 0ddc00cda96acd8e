//! Random numbers, memory, and accesses that several tests use.
#![allow(dead_code)]

use slat_gic::gic::{Gic, Model, VcpuName};
use slat_gic::memory::{Fault, Memory};
use slat_gic::registers::Frame;
use std::cell::RefCell;

/// SplitMix64. Each run gets the same numbers.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ value >> 31
    }

    /// Returns a number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Returns true once in `times` times.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// Returns a word with few bits set.
    pub fn few_bits(&mut self) -> u32 {
        let bits = 1 + self.below(3);
        (0..bits).fold(0, |word, _| word | 1 << self.below(32))
    }
}

/// Guest memory from one address on.
pub struct TestMemory {
    pub base: u64,
    pub bytes: RefCell<Vec<u8>>,
}

impl TestMemory {
    pub fn new(base: u64, size: usize) -> Self {
        TestMemory {
            base,
            bytes: RefCell::new(vec![0; size]),
        }
    }

    fn range(&self, gpa: u64, length: usize) -> Result<std::ops::Range<usize>, Fault> {
        let start = gpa.checked_sub(self.base).ok_or(Fault)? as usize;
        let end = start.checked_add(length).ok_or(Fault)?;
        match end <= self.bytes.borrow().len() {
            true => Ok(start..end),
            false => Err(Fault),
        }
    }

    pub fn u64(&self, gpa: u64) -> u64 {
        let mut bytes = [0; 8];
        self.read(gpa, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    pub fn set_u64(&self, gpa: u64, value: u64) {
        self.write(gpa, &value.to_le_bytes()).unwrap();
    }

    pub fn set_u8(&self, gpa: u64, value: u8) {
        self.write(gpa, &[value]).unwrap();
    }
}

impl Memory for TestMemory {
    fn read(&self, gpa: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        let range = self.range(gpa, bytes.len())?;
        bytes.copy_from_slice(&self.bytes.borrow()[range]);
        Ok(())
    }

    fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), Fault> {
        let range = self.range(gpa, bytes.len())?;
        self.bytes.borrow_mut()[range].copy_from_slice(bytes);
        Ok(())
    }

    fn has(&self, gpa: u64) -> bool {
        self.range(gpa, 1).is_ok()
    }
}

/// Returns the names of `count` vCPUs, as KVM gives them.
pub fn vcpus(count: u32) -> Vec<VcpuName> {
    let name = |id: u32| VcpuName {
        id,
        affinity: id & 0xf | id >> 4 << 8,
    };
    (0..count).map(name).collect()
}

/// Returns the private frame of a vCPU for registers with bits of its SGIs and PPIs, and the offset that they have
/// there.
pub fn private_frame(model: Model, vcpu: usize) -> (Frame, u64) {
    match model {
        Model::V2 => (Frame::Distributor, 0),
        Model::V3 => (Frame::Redistributor(vcpu), 0x1_0000),
    }
}

/// Returns the frame and the offset of the register at `offset` of the distributor that has the bits of `intid`,
/// with `bits` bits for each interrupt.
pub fn place(model: Model, vcpu: usize, offset: u64, bits: u32, intid: u32) -> (Frame, u64) {
    let (frame, base) = match intid {
        0..32 => private_frame(model, vcpu),
        _ => (Frame::Distributor, 0),
    };
    (frame, base + offset + u64::from(intid * bits / 32 * 4))
}

pub fn read32(gic: &mut Gic, vcpu: usize, (frame, offset): (Frame, u64)) -> u32 {
    let mut data = [0; 4];
    gic.read(vcpu, frame, offset, &mut data);
    u32::from_le_bytes(data)
}

pub fn write32(
    gic: &mut Gic,
    vcpu: usize,
    (frame, offset): (Frame, u64),
    value: u32,
    memory: &impl Memory,
) {
    gic.write(vcpu, frame, offset, &value.to_le_bytes(), memory);
}
