//! The shifts and rotates of `sem::shift` on registers and memory.

use crate::Cpu;
use crate::int::{Int, by_size};
use crate::op::{Flow, Handler, MEM, NONE, Op};
use crate::sem::shift::Shl;
use crate::sem::{self, Flags, FlagsOf, Now, Operation, by_mnemonic};
use iced_x86::{Instruction, Mnemonic};

#[inline(always)]
fn shift<T: Int, S: Operation>(cpu: &mut Cpu, op: &Op, count: u32) -> Flow {
    let mut count = count & if T::BITS == 64 { 63 } else { 31 };
    if S::READS.is_some() {
        count %= T::BITS + 1;
    }
    let carry = cpu.input_of::<S>();
    let apply = move |a| match count {
        0 => (a, Flags::Recorded),
        _ => S::apply(&mut Now::new(), a, T::of(count.into()), carry),
    };
    change(cpu, op, apply)
}

/// Changes the first operand.
#[inline(always)]
fn change<T: Int>(
    cpu: &mut Cpu,
    op: &Op,
    apply: impl Fn(T) -> (T, FlagsOf<Now<T>>) + Copy,
) -> Flow {
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

#[inline(always)]
fn double<T: Int>(
    cpu: &mut Cpu,
    op: &Op,
    shift: impl Fn(&mut Now<T>, T, T, T) -> (T, FlagsOf<Now<T>>) + Copy,
) -> Flow {
    let count = if op.r[2] == NONE {
        op.imm
    } else {
        cpu.state.gpr[1]
    };
    let count = count & if T::BITS == 64 { 63 } else { 31 };
    let fill = T::get(cpu, op.r[1]);
    let apply = move |a| match count {
        0 => (a, Flags::Recorded),
        _ => shift(&mut Now::new(), a, fill, T::of(count)),
    };
    change(cpu, op, apply)
}
fn shld<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    double::<T>(cpu, op, sem::shift::shld)
}
fn shrd<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    double::<T>(cpu, op, sem::shift::shrd)
}

pub(crate) fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    Some(match insn.mnemonic() {
        Mnemonic::Shld => by_size!(op.size, shld),
        Mnemonic::Shrd => by_size!(op.size, shrd),
        Mnemonic::Sal => lower_shift::<Shl>(op),
        mnemonic => return by_mnemonic!(mnemonic, shift lower_shift(op)),
    })
}
