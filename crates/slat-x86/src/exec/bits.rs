//! Bit tests on registers and memory; bit scans, CRC32.

use crate::Cpu;
use crate::int::{Int, by_size};
use crate::op::{Break, Flow, Handler, MEM, NONE, Op, Row, bytes_of, family_rows, rows};
use crate::sem::{Now, Operation};

/// Returns the address of the word that contains bit number `bit`. A bit number in a register may select a bit outside
/// of the operand.
fn bit_address<T: Int>(cpu: &mut Cpu, op: &Op, bit: i64) -> Result<u64, Break> {
    if op.r[1] == NONE {
        return cpu.lin(op, T::BYTES as u32);
    }
    let words = bit >> T::BITS.trailing_zeros();
    let offset = cpu
        .offset(op)
        .wrapping_add((words as u64).wrapping_mul(T::BYTES));
    let offset = match op.address_size {
        2 => offset & 0xffff,
        4 => offset & 0xffff_ffff,
        _ => offset,
    };
    cpu.segmented(op.seg, offset, T::BYTES as u32)
}

fn bit<T: Int, B: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    let index = if op.r[1] == NONE {
        op.imm as i64
    } else {
        T::get(cpu, op.r[1]).sx()
    };
    let apply = move |a| B::apply(&mut Now::new(), a, T::of(index as u64), false);
    let old = if op.r[0] == MEM {
        let lin = bit_address::<T>(cpu, op, index)?;
        if B::WRITES {
            cpu.update::<T>(lin, op.lock, move |a| apply(a).0)?.0
        } else {
            cpu.load::<T>(lin)?
        }
    } else {
        let a = T::get(cpu, op.r[0]);
        if B::WRITES {
            T::set(cpu, op.r[0], apply(a).0);
        }
        a
    };
    cpu.note(apply(old).1);
    cpu.stored()
}
fn bit_test<B: Operation>(op: &Op) -> Handler {
    by_size!(op.size, bit, B)
}

/// Executes BSF or BSR. As on processors, the destination keeps its value if the source is zero.
fn scan<T: Int, B: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    let source = cpu.operand::<T>(op, 1)?;
    let (result, flags) = B::apply(&mut Now::new(), source, source, false);
    if source.zx() != 0 {
        T::set(cpu, op.r[0], result);
    }
    cpu.note(flags);
    Ok(())
}
fn bit_scan<B: Operation>(op: &Op) -> Handler {
    by_size!(op.size, scan, B)
}

/// Adds a source of type `T` to a CRC-32C in a 32-bit register.
fn crc32<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let mut data = cpu.operand::<T>(op, 1)?.zx();
    let mut crc = cpu.state.gpr[usize::from(op.r[0] & 15)] as u32;
    for _ in 0..T::BYTES {
        crc ^= data as u8 as u32;
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 != 0 { 0x82f6_3b78 } else { 0 };
        }
        data >>= 8;
    }
    u32::set(cpu, op.r[0], crc);
    Ok(())
}

pub(crate) const TESTS: &[Row] = family_rows!(bit_test bit_test);
pub(crate) const SCANS: &[Row] = family_rows!(scan bit_scan);
pub(crate) const CRC: &[Row] = rows! { |insn, op|
    Crc32 => by_size!(bytes_of(insn, 1).trailing_zeros(), crc32),
};
