//! The VEX-encoded vector instructions: AVX, AVX2, FMA and F16C.
//!
//! The host executes the instructions, as in [`simd`](super): `table` has their stubs, and `host` calls them. Operand
//! `k` of an instruction is passed in vector register `k` of the stub, whether the operand is a register, memory or a
//! mask. So a handler depends only on the number of sources (`operate`). `moves` has the instructions without a stub.
//! `masked` has accesses to selected elements of memory.
//!
//! Each of these instructions clears the bits of its destination, up to bit 255, that are not part of its result.
//! Memory operands need no alignment, except for those of a few moves.

mod host;
mod masked;
mod moves;
mod operate;
#[cfg(feature = "jit")]
mod plain;
mod table;

#[cfg(feature = "jit")]
pub(super) use plain::plain;

use crate::Cpu;
use crate::op::{Break, Flow, MEM, Op, Row};
use host::Ymm;
use iced_x86::Instruction;

pub(super) const ROWS: [&[Row]; 5] = [
    moves::ROWS,
    masked::ROWS,
    operate::ROWS,
    operate::WITH_GPR,
    operate::STRINGS,
];

/// Stores in `op` the size of the memory operand.
pub(super) fn set_size(insn: &Instruction, op: &mut Op) {
    if op.r.contains(&MEM) {
        op.size = insn.memory_size().size().trailing_zeros() as u8;
    }
}

/// Whether an instruction has a 256-bit operand.
fn is_wide(insn: &Instruction) -> bool {
    let is_ymm = |k| insn.op_register(k).is_ymm();
    insn.memory_size().size() == 32 || (0..insn.op_count()).any(is_ymm)
}

impl Cpu {
    #[inline(always)]
    fn ymm(&self, r: u8) -> Ymm {
        let r = usize::from(r & 15);
        [self.state.xmm[r], self.state.ymm_high[r]]
    }

    #[inline(always)]
    fn set_ymm(&mut self, r: u8, v: Ymm) {
        let r = usize::from(r & 15);
        [self.state.xmm[r], self.state.ymm_high[r]] = v;
    }
}

/// Whether an access of 32 bytes stays in one page.
fn in_one_page(lin: u64) -> bool {
    lin & 0xfff <= 0xfe0
}

/// Reads 32 bytes of memory.
fn load32(cpu: &mut Cpu, lin: u64) -> Result<Ymm, Break> {
    if in_one_page(lin)
        && let Some(low) = cpu.try_load::<u128>(lin)
        && let Some(high) = cpu.try_load::<u128>(lin.wrapping_add(16))
    {
        return Ok([low, high]);
    }
    cpu.check_alignment(lin, 32)?;
    let mut bytes = [0; 32];
    cpu.load_bytes(lin, &mut bytes)?;
    let (halves, _) = bytes.as_chunks::<16>();
    Ok([
        u128::from_le_bytes(halves[0]),
        u128::from_le_bytes(halves[1]),
    ])
}

/// Writes 32 bytes to memory.
fn store32(cpu: &mut Cpu, lin: u64, v: Ymm) -> Flow {
    if in_one_page(lin)
        && cpu.try_store::<u128>(lin, v[0])
        && cpu.try_store::<u128>(lin.wrapping_add(16), v[1])
    {
        return Ok(());
    }
    cpu.check_alignment(lin, 32)?;
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(&v[0].to_le_bytes());
    bytes[16..].copy_from_slice(&v[1].to_le_bytes());
    cpu.store_bytes(lin, &bytes)
}

/// Reads the memory operand of size `op.size`, zero-extended.
#[inline(always)]
fn load(cpu: &mut Cpu, op: &Op) -> Result<Ymm, Break> {
    let low = match op.size {
        0 => cpu.load_mem::<u8>(op)?.into(),
        1 => cpu.load_mem::<u16>(op)?.into(),
        2 => cpu.load_mem::<u32>(op)?.into(),
        3 => cpu.load_mem::<u64>(op)?.into(),
        4 => cpu.load_mem::<u128>(op)?,
        _ => {
            let lin = cpu.lin(op, 32)?;
            return load32(cpu, lin);
        }
    };
    Ok([low, 0])
}

/// Writes the memory operand of size `op.size`.
#[inline(always)]
fn store(cpu: &mut Cpu, op: &Op, v: Ymm) -> Flow {
    match op.size {
        2 => cpu.store_mem::<u32>(op, v[0] as u32),
        3 => cpu.store_mem::<u64>(op, v[0] as u64),
        4 => cpu.store_mem::<u128>(op, v[0]),
        _ => {
            let lin = cpu.lin(op, 32)?;
            store32(cpu, lin, v)
        }
    }
}
