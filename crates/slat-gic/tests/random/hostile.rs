//! Random bytes as a saved state, and then a guest that uses the result: nothing panics.

use super::its_guest::{self, MEMORY, MEMORY_SIZE};
use super::saving::system_register;
use super::{INTERRUPTS, VCPUS};
use crate::common::{self, Random, TestMemory};
use slat_gic::gic::{Gic, Model};
use slat_gic::icc::Icc;
use slat_gic::its::Its;
use slat_gic::registers::Frame;

/// Frames that either model, or none, has.
fn frame(random: &mut Random) -> Frame {
    match random.below(4) {
        0 => Frame::CpuInterface,
        1 => Frame::Redistributor(random.below(VCPUS as u64) as usize),
        _ => Frame::Distributor,
    }
}

/// Returns an offset: mostly of registers, sometimes anything.
fn offset(random: &mut Random) -> u64 {
    match random.below(8) {
        0 => random.next(),
        1 => random.below(0x2_0000),
        2 => 0x1_0000 + random.below(0x1000) / 4 * 4,
        3 => 0x6000 + random.below(0x400) / 4 * 4,
        4 => random.below(0x100) / 4 * 4,
        _ => random.below(0x1000) / 4 * 4,
    }
}

/// Does something that a client or a guest can do.
fn operate(random: &mut Random, gic: &mut Gic, its: &mut Its, memory: &TestMemory) {
    let vcpu = random.below(VCPUS as u64) as usize;
    let (frame, at) = (frame(random), offset(random));
    let mut data = random.next().to_le_bytes();
    let width = [1, 2, 3, 4, 8][random.below(5) as usize];
    let value = random.next();
    match random.below(10) {
        0..2 => drop(gic.client_write(vcpu, frame, at, value as u32, memory)),
        2 => drop(gic.client_read(vcpu, frame, at)),
        3 => gic.read(vcpu, frame, at, &mut data[..width]),
        4 => gic.write(vcpu, frame, at, &data[..width], memory),
        5 => {
            // Encodings of system registers, most of which exist.
            let crm = random.below(16) as u16;
            let name = match random.below(4) {
                0 => value as u16,
                _ => system_register((12, crm, random.below(8) as u16)),
            };
            let _ = gic.client_write_icc(vcpu, name, random.next());
            let _ = gic.client_read_icc(vcpu, name);
            if let Some(register) = Icc::from_encoding(name) {
                let _ = gic.read_icc(vcpu, register);
                let _ = gic.write_icc(vcpu, register, random.next());
            }
        }
        6 => {
            let lines = value as u32 & 0x3e0;
            gic.client_write_lines(vcpu, lines, random.next() as u32)
                .unwrap();
            gic.client_read_lines(vcpu, lines).unwrap();
            let _ = gic.set_spi(value as u32 % 200, random.once_in(2));
            let _ = gic.set_ppi(vcpu, value as u32 % 40, random.once_in(2));
        }
        7 => {
            let at = random.below(0x140) / 8 * 8;
            its.read(at, &mut data[..width]);
            its.write(
                at,
                &random.next().to_le_bytes()[..width.max(4)],
                gic,
                memory,
            );
            let _ = its.client_write(at, random.next(), gic, memory);
            let _ = its.client_read(at);
        }
        8 => drop(its.signal(gic, value as u32 % 16, (value >> 32) as u32 % 16)),
        _ => {
            for register in [Icc::Iar(slat_gic::interrupt::Group::One), Icc::Rpr] {
                if let Ok(intid) = gic.read_icc(vcpu, register) {
                    let end = Icc::Eoir(slat_gic::interrupt::Group::One);
                    gic.write_icc(vcpu, end, intid).unwrap();
                }
            }
        }
    }
    gic.take_changed(|vcpu| assert!(vcpu < VCPUS));
    gic.take_ended(|intid| assert!((32..INTERRUPTS).contains(&intid)));
}

#[test]
fn random_states_do_not_panic() {
    let mut random = Random(7);
    for model in [Model::V2, Model::V3] {
        let memory = TestMemory::new(MEMORY, MEMORY_SIZE);
        for _ in 0..60 {
            let mut gic = Gic::new(model, INTERRUPTS, &common::vcpus(VCPUS as u32)).unwrap();
            let mut its = Its::new();
            gic.attach_its();
            for _ in 0..2_000 {
                operate(&mut random, &mut gic, &mut its, &memory);
            }
        }
    }
}

/// Fills a range with words, of which many are plausible entries.
fn fill(random: &mut Random, memory: &TestMemory, start: u64, words: u64) {
    for index in 0..words {
        let word = match random.below(6) {
            0 => 0,
            1 => random.next(),
            // A device with a table inside the memory, and the next entry near.
            2 => {
                1 << 63
                    | random.below(3) << 49
                    | (MEMORY + random.below(0x1f) * 0x1_0000) >> 8 << 5
                    | random.below(18)
            }
            // A collection of a vCPU.
            3 => 1 << 63 | random.below(5) << 16 | random.below(8),
            // A page of a table of two levels.
            4 => 1 << 63 | (MEMORY + random.below(0x20) * 0x1_0000),
            // An event.
            _ => random.below(4) << 48 | (8190 + random.below(64)) << 16 | random.below(8),
        };
        memory.set_u64(start + 8 * index, word);
    }
}

#[test]
fn random_tables_do_not_panic() {
    let mut random = Random(8);
    let (mut restored, mut refused) = (0, 0);
    for _ in 0..400 {
        let memory = TestMemory::new(MEMORY, MEMORY_SIZE);
        let mut gic = Gic::new(Model::V3, INTERRUPTS, &common::vcpus(VCPUS as u32)).unwrap();
        gic.attach_its();
        for vcpu in 0..VCPUS {
            its_guest::enable_lpis(&mut gic, vcpu, &memory);
        }
        let mut its = Its::new();
        its_guest::set_tables(&mut its, &mut gic, &memory);
        if random.once_in(3) {
            let table = 1 << 63 | 1 << 62 | (MEMORY + 0x1_0000);
            its.client_write(0x100, table, &mut gic, &memory).unwrap();
        }
        for page in 0..MEMORY_SIZE as u64 / 0x1_0000 {
            let words = 1 + random.below(16);
            fill(&mut random, &memory, MEMORY + page * 0x1_0000, words);
        }
        // Otherwise collections are rarely consistent.
        if !random.once_in(4) {
            for (collection, vcpu) in [(0, 0), (1, 2), (2, 0xffff_ffff), (3, 1)] {
                let entry = 1 << 63 | vcpu << 16 | collection;
                memory.set_u64(MEMORY + 0x2_0000 + 8 * collection, entry);
            }
            memory.set_u64(MEMORY + 0x2_0020, 0);
        }
        match its.restore_tables(&mut gic, &memory) {
            Ok(()) => restored += 1,
            Err(_) => refused += 1,
        }
        its_guest::enable(&mut its, &mut gic, &memory);
        for _ in 0..500 {
            operate(&mut random, &mut gic, &mut its, &memory);
        }
        let _ = its.save_tables(&gic, &memory);
        let _ = gic.save_pending_tables(&memory);
        let _ = its.restore_tables(&mut gic, &memory);
        its.reset(&mut gic);
    }
    println!("{restored} tables were restored, {refused} refused");
    assert!(restored > 10 && refused > 10, "{restored} {refused}");
}
