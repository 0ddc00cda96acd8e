//! Moves between XMM registers, general registers and memory.

use crate::Cpu;
use crate::int::Int;
use crate::op::{Flow, Handler, MEM, NONE, Op, Row, form, rows};
use iced_x86::{Code, Instruction};

/// Chooses one of a move's handlers: between registers, load, or store.
pub(super) fn one_of(op: &Op, registers: Handler, load: Handler, store: Handler) -> Handler {
    match (op.r[0] == MEM, op.r.contains(&MEM)) {
        (true, _) => store,
        (_, true) => load,
        _ => registers,
    }
}

pub(super) const ROWS: &[Row] = rows! { |insn, op|
    Movaps | Movapd | Movdqa | Movntdqa | Movntdq | Movntps | Movntpd => {
        one_of(op, whole, load16::<true>, store16::<true>)
    },
    Movups | Movupd | Movdqu | Lddqu => one_of(op, whole, load16::<false>, store16::<false>),
    Movss => one_of(op, merge::<u32>, load_zero::<u32>, store_low::<u32>),
    Movsd => one_of(op, merge::<u64>, load_zero::<u64>, store_low::<u64>),
    Movd => gpr_or_memory::<u32>(insn, op),
    Movq => match insn.code() {
        Code::Movq_xmm_xmmm64 | Code::Movq_xmmm64_xmm => {
            one_of(op, low::<u64>, load_zero::<u64>, store_low::<u64>)
        }
        _ => gpr_or_memory::<u64>(insn, op),
    },
    Movlps | Movlpd => one_of(op, merge::<u64>, load_low, store_low::<u64>),
    Movhps | Movhpd => if op.r[0] == MEM { store_high } else { load_high },
    Maskmovdqu => {
        address_in_di(op);
        masked_store
    },
};

/// Chooses the handler of MOVD or MOVQ between an XMM register and a general register or memory.
fn gpr_or_memory<T: Int>(insn: &Instruction, op: &Op) -> Handler {
    match insn.op0_register().is_xmm() {
        true => one_of(op, from_gpr::<T>, load_zero::<T>, store_low::<T>),
        false => one_of(op, to_gpr::<T>, load_zero::<T>, store_low::<T>),
    }
}

pub(super) fn whole(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.state.xmm[usize::from(op.r[0])] = cpu.state.xmm[usize::from(op.r[1])];
    Ok(())
}

pub(super) fn load16<const ALIGNED: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let lin = cpu.lin(op, 16)?;
    if ALIGNED {
        cpu.aligned16(lin)?;
    }
    cpu.state.xmm[usize::from(op.r[0])] = cpu.load::<u128>(lin)?;
    Ok(())
}

pub(super) fn store16<const ALIGNED: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let lin = cpu.lin(op, 16)?;
    if ALIGNED {
        cpu.aligned16(lin)?;
    }
    cpu.store::<u128>(lin, cpu.state.xmm[usize::from(op.r[1])])
}

/// Copies the low element. The rest of the destination keeps its value.
fn merge<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let ones = u128::from(u64::MAX >> (64 - T::BITS));
    let src = cpu.state.xmm[usize::from(op.r[1])];
    let dst = &mut cpu.state.xmm[usize::from(op.r[0])];
    *dst = *dst & !ones | src & ones;
    Ok(())
}

/// Copies the low element, and clears all other elements of the destination.
pub(super) fn low<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.state.xmm[usize::from(op.r[0])] = T::of(cpu.state.xmm[usize::from(op.r[1])] as u64)
        .zx()
        .into();
    Ok(())
}

pub(super) fn load_zero<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.state.xmm[usize::from(op.r[0])] = cpu.load_mem::<T>(op)?.zx().into();
    Ok(())
}

pub(super) fn store_low<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let value = T::of(cpu.state.xmm[usize::from(op.r[1])] as u64);
    cpu.store_mem::<T>(op, value)
}

pub(super) fn from_gpr<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.state.xmm[usize::from(op.r[0])] = T::get(cpu, op.r[1]).zx().into();
    Ok(())
}

pub(super) fn to_gpr<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let value = T::of(cpu.state.xmm[usize::from(op.r[1])] as u64);
    T::set(cpu, op.r[0], value);
    Ok(())
}

const LOW: u128 = u64::MAX as u128;

fn load_low(cpu: &mut Cpu, op: &Op) -> Flow {
    let value = cpu.load_mem::<u64>(op)?;
    let dst = &mut cpu.state.xmm[usize::from(op.r[0])];
    *dst = *dst & !LOW | u128::from(value);
    Ok(())
}

fn load_high(cpu: &mut Cpu, op: &Op) -> Flow {
    let value = cpu.load_mem::<u64>(op)?;
    let dst = &mut cpu.state.xmm[usize::from(op.r[0])];
    *dst = *dst & LOW | u128::from(value) << 64;
    Ok(())
}

pub(super) fn store_high(cpu: &mut Cpu, op: &Op) -> Flow {
    let value = (cpu.state.xmm[usize::from(op.r[1])] >> 64) as u64;
    cpu.store_mem::<u64>(op, value)
}

/// Fills in the implicit memory operand of masked stores: the address in RDI, in DS or the segment that a prefix
/// selects.
pub(super) fn address_in_di(op: &mut Op) {
    const DI: u8 = 7;
    op.base = DI;
    op.index = NONE;
    op.disp = 0;
    op.form = form::FULL;
}

/// Executes MASKMOVDQU: stores each byte whose mask byte has its sign bit set.
pub(super) fn masked_store(cpu: &mut Cpu, op: &Op) -> Flow {
    let data = cpu.state.xmm[usize::from(op.r[1])].to_le_bytes();
    let mask = cpu.state.xmm[usize::from(op.r[2])].to_le_bytes();
    let lin = cpu.lin(op, 16)?;
    store_bytes_by_mask(cpu, lin, &data, &mask)
}

/// Stores the bytes that `mask` selects, after checking that all of them are writable. Does not write the other bytes,
/// because another CPU may write them at the same time.
pub(super) fn store_bytes_by_mask(cpu: &mut Cpu, lin: u64, data: &[u8], mask: &[u8]) -> Flow {
    let selected = || {
        (0..data.len())
            .filter(|n| mask[*n] & 0x80 != 0)
            .map(|n| (lin.wrapping_add(n as u64), data[n]))
    };
    for (at, _) in selected() {
        cpu.probe_write(at, 1)?;
    }
    for (at, byte) in selected() {
        cpu.store::<u8>(at, byte)?;
    }
    Ok(())
}
