//! Instructions between XMM and general registers, other than plain moves.

use super::host::{self, Entry, Work};
use super::operate::{run_float, source};
use super::table;
use crate::Cpu;
use crate::int::Int;
use crate::op::{Flow, Handler, MEM, Op};
use iced_x86::{Instruction, Mnemonic as M};

pub(super) fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    let mnemonic = insn.mnemonic();
    let memory = op.r[0] == MEM || op.r[1] == MEM;
    let op0_size = insn.op0_register().size();
    macro_rules! by_memory {
        ($handler:ident, $ty:ty, $from:literal) => {
            if memory {
                $handler::<$ty, $from>
            } else {
                $handler::<$ty, 0>
            }
        };
    }
    let handler: Handler = match mnemonic {
        M::Cvtsi2ss | M::Cvtsi2sd => {
            let size = if memory {
                insn.memory_size().size()
            } else {
                insn.op1_register().size()
            };
            op.imm = table::from_gpr(mnemonic, size)? as usize as u64;
            if size == 8 {
                from_gpr::<u64>
            } else {
                from_gpr::<u32>
            }
        }
        M::Cvtss2si | M::Cvttss2si => {
            op.imm = table::to_gpr(mnemonic, op0_size)? as usize as u64;
            if op0_size == 8 {
                by_memory!(to_gpr, u64, 4)
            } else {
                by_memory!(to_gpr, u32, 4)
            }
        }
        M::Cvtsd2si | M::Cvttsd2si => {
            op.imm = table::to_gpr(mnemonic, op0_size)? as usize as u64;
            if op0_size == 8 {
                by_memory!(to_gpr, u64, 8)
            } else {
                by_memory!(to_gpr, u32, 8)
            }
        }
        M::Movmskps | M::Movmskpd | M::Pmovmskb => {
            op.imm = table::signs(mnemonic, 4)? as usize as u64;
            signs
        }
        M::Pinsrb => insert::<u8>,
        M::Pinsrw => insert::<u16>,
        M::Pinsrd => insert::<u32>,
        M::Pinsrq => insert::<u64>,
        M::Pextrb => extract::<u8>,
        M::Pextrw => extract::<u16>,
        M::Pextrd | M::Extractps => extract::<u32>,
        M::Pextrq => extract::<u64>,
        _ => return None,
    };
    Some(handler)
}

fn from_gpr<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let value = if op.r[1] == MEM {
        cpu.load_mem::<T>(op)?
    } else {
        T::get(cpu, op.r[1])
    };
    let dst = cpu.state.xmm[usize::from(op.r[0])];
    let mut work = Work {
        dst,
        src: 0,
        gpr: value.zx(),
        imm: 0,
    };
    run_float(cpu, op, &mut work)?;
    cpu.state.xmm[usize::from(op.r[0])] = work.dst;
    Ok(())
}

fn to_gpr<T: Int, const FROM: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    let src = source::<FROM>(cpu, op)?;
    let mut work = Work {
        dst: 0,
        src,
        gpr: 0,
        imm: 0,
    };
    run_float(cpu, op, &mut work)?;
    T::set(cpu, op.r[0], T::of(work.gpr));
    Ok(())
}

fn signs(cpu: &mut Cpu, op: &Op) -> Flow {
    let mut work = Work {
        dst: 0,
        src: cpu.state.xmm[usize::from(op.r[1])],
        gpr: 0,
        imm: 0,
    };
    host::int_gpr(Entry(op.imm), &mut work);
    u32::set(cpu, op.r[0], work.gpr as u32);
    Ok(())
}

/// Returns the position, in bits, of the element of type `T` that the immediate selects.
fn element<T: Int>(op: &Op) -> u32 {
    (op.imm as u32 & (128 / T::BITS - 1)) * T::BITS
}

fn insert<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let value = if op.r[1] == MEM {
        cpu.load_mem::<T>(op)?.zx()
    } else {
        u64::get(cpu, op.r[1])
    };
    let dst = &mut cpu.state.xmm[usize::from(op.r[0])];
    *dst = inserted::<T>(op, *dst, value);
    Ok(())
}

/// Returns `vector` with the element that the immediate selects replaced by `value`.
pub(super) fn inserted<T: Int>(op: &Op, vector: u128, value: u64) -> u128 {
    let at = element::<T>(op);
    let ones = u128::from(u64::MAX >> (64 - T::BITS));
    vector & !(ones << at) | (u128::from(value) & ones) << at
}

pub(super) fn extract<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let value = T::of((cpu.state.xmm[usize::from(op.r[1])] >> element::<T>(op)) as u64);
    if op.r[0] == MEM {
        return cpu.store_mem::<T>(op, value);
    }
    u64::set(cpu, op.r[0], value.zx());
    Ok(())
}
