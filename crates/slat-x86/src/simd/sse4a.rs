//! SSE4a of AMD's CPUs: EXTRQ, INSERTQ, MOVNTSS and MOVNTSD. They are computed in Rust, so that guests have them on
//! every host.

use super::moves::store_low;
use crate::Cpu;
use crate::int::Int;
use crate::op::{Flow, Op, Row, rows};
use iced_x86::{Code, Instruction};

/// A field of a quadword: its length in bits (0 means 64), and the index of its first bit.
struct Field {
    len: u32,
    index: u32,
}

impl Field {
    /// Decodes a field from the low six bits of each of two bytes, its length and its index. The bytes are immediates,
    /// or the low bytes of a register.
    fn of(bytes: u64) -> Self {
        Field {
            len: bytes as u32 & 63,
            index: (bytes >> 8) as u32 & 63,
        }
    }

    /// Returns a mask of as many ones as the field has bits, from bit 0 on.
    fn mask(&self) -> u64 {
        match self.len {
            0 => u64::MAX,
            len => (1 << len) - 1,
        }
    }
}

/// Extracts a field of the quadword in register `r`, and stores it in `r` from bit 0 on. The manual leaves the upper
/// half of the register undefined; CPUs clear it.
fn extract(cpu: &mut Cpu, r: u8, field: &Field) {
    let dst = &mut cpu.state.xmm[usize::from(r)];
    *dst = (*dst as u64 >> field.index & field.mask()).into();
}

/// Replaces a field of the quadword in register `r` by the low bits of `from`.
fn insert(cpu: &mut Cpu, r: u8, from: u64, field: &Field) {
    let dst = &mut cpu.state.xmm[usize::from(r)];
    let bits = field.mask() << field.index;
    *dst = (*dst as u64 & !bits | from << field.index & bits).into();
}

fn is_there(cpu: &mut Cpu) -> Flow {
    match cpu.features.sse4a {
        true => Ok(()),
        false => Err(cpu.ud()),
    }
}

fn low_of(cpu: &Cpu, r: u8) -> u64 {
    cpu.state.xmm[usize::from(r)] as u64
}

fn extrq_imm(cpu: &mut Cpu, op: &Op) -> Flow {
    is_there(cpu)?;
    extract(cpu, op.r[0], &Field::of(op.imm));
    Ok(())
}
fn extrq(cpu: &mut Cpu, op: &Op) -> Flow {
    is_there(cpu)?;
    let field = Field::of(low_of(cpu, op.r[1]));
    extract(cpu, op.r[0], &field);
    Ok(())
}
fn insertq_imm(cpu: &mut Cpu, op: &Op) -> Flow {
    is_there(cpu)?;
    let from = low_of(cpu, op.r[1]);
    insert(cpu, op.r[0], from, &Field::of(op.imm));
    Ok(())
}
fn insertq(cpu: &mut Cpu, op: &Op) -> Flow {
    is_there(cpu)?;
    let field = Field::of((cpu.state.xmm[usize::from(op.r[1])] >> 64) as u64);
    let from = low_of(cpu, op.r[1]);
    insert(cpu, op.r[0], from, &field);
    Ok(())
}
fn movnt<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    is_there(cpu)?;
    store_low::<T>(cpu, op)
}

/// Stores in `op` the field that the instruction's two immediates describe.
fn field(insn: &Instruction, op: &mut Op) {
    op.imm = u64::from(insn.immediate8()) | u64::from(insn.immediate8_2nd()) << 8;
}

pub(super) const ROWS: &[Row] = rows! { |insn, op|
    Extrq => match insn.code() {
        Code::Extrq_xmm_xmm => extrq,
        _ => {
            field(insn, op);
            extrq_imm
        }
    },
    Insertq => match insn.code() {
        Code::Insertq_xmm_xmm => insertq,
        _ => {
            field(insn, op);
            insertq_imm
        }
    },
    Movntss => movnt::<u32>,
    Movntsd => movnt::<u64>,
};
