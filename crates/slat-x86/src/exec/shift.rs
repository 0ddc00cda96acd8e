//! The shifts and rotates of `sem::shift` on registers and memory, and SHLD SHRD.

use crate::Cpu;
use crate::int::{Int, by_size};
use crate::op::{Flow, Handler, MEM, NONE, Op};
use crate::sem::shift::Shl;
use crate::sem::{Flags, Now, Operation, by_mnemonic};
use iced_x86::{Instruction, Mnemonic};

fn bit(v: u64, n: u32) -> bool {
    v.checked_shr(n).unwrap_or(0) & 1 != 0
}

#[inline(always)]
fn shift<T: Int, S: Operation>(cpu: &mut Cpu, op: &Op, count: u32) -> Flow {
    let mut count = count & if T::BITS == 64 { 63 } else { 31 };
    if S::CARRY {
        count %= T::BITS + 1;
    }
    let carry = S::CARRY && cpu.cf();
    let apply = move |a| match count {
        0 => (a, Flags::Recorded),
        _ => S::apply(&mut Now::new(), a, T::of(count.into()), carry),
    };
    let flags = if op.r[0] == MEM {
        let lin = cpu.lin(op, T::BYTES as u32)?;
        let (a, _) = cpu.update::<T>(lin, false, move |a| apply(a).0)?;
        apply(a).1
    } else {
        let (result, flags) = apply(T::get(cpu, op.r[0]));
        T::set(cpu, op.r[0], result);
        flags
    };
    cpu.note(flags);
    cpu.stored()
}

fn by_immediate<T: Int, S: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    shift::<T, S>(cpu, op, op.imm as u32)
}
fn by_cl<T: Int, S: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    let count = cpu.state.gpr[1] as u32 & 0xff;
    shift::<T, S>(cpu, op, count)
}

fn lower_shift<S: Operation>(op: &Op) -> Handler {
    match op.r[1] {
        NONE => by_size!(op.size, by_immediate, S),
        _ => by_size!(op.size, by_cl, S),
    }
}

/// SHLD and SHRD. A count above the width of a word operand is undefined; here, as on much hardware, the operand itself follows
/// the bits shifted in.
fn double<T: Int, const LEFT: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let count = if op.r[2] == NONE {
        op.imm
    } else {
        cpu.state.gpr[1]
    } as u32;
    let count = count & if T::BITS == 64 { 63 } else { 31 };
    let fill = T::get(cpu, op.r[1]).zx();
    let f = move |a: T| {
        let v = a.zx();
        match (count == 0, LEFT) {
            (true, _) => a,
            (_, true) if T::BITS == 16 => T::of((v << 32 | fill << 16 | v) << count >> 32),
            (_, false) if T::BITS == 16 => T::of((v << 32 | fill << 16 | v) >> count),
            (_, true) => T::of(v << count | fill >> (T::BITS - count)),
            (_, false) => T::of(v >> count | fill << (T::BITS - count)),
        }
    };
    let (a, result) = if op.r[0] == MEM {
        let lin = cpu.lin(op, T::BYTES as u32)?;
        cpu.update::<T>(lin, false, f)?
    } else {
        let a = T::get(cpu, op.r[0]);
        T::set(cpu, op.r[0], f(a));
        (a, f(a))
    };
    if count != 0 {
        let n = if LEFT {
            T::BITS.wrapping_sub(count)
        } else {
            count - 1
        };
        cpu.put_flags(bit(a.zx(), n), a.top() != result.top(), false, result);
    }
    cpu.stored()
}
fn shld<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    double::<T, true>(cpu, op)
}
fn shrd<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    double::<T, false>(cpu, op)
}

pub(crate) fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    Some(match insn.mnemonic() {
        Mnemonic::Shld => by_size!(op.size, shld),
        Mnemonic::Shrd => by_size!(op.size, shrd),
        Mnemonic::Sal => lower_shift::<Shl>(op),
        mnemonic => return by_mnemonic!(mnemonic, shift lower_shift(op)),
    })
}
