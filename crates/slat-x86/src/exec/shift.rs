//! The shifts and rotates of `sem::shift` on registers and memory.

use crate::Cpu;
use crate::int::{Int, by_size};
use crate::op::{Flow, Handler, MEM, NONE, Op, Row, family_rows, rows};
use crate::sem::shift::Shl;
use crate::sem::{self, Flags, FlagsOf, Now, Operation};

#[inline(always)]
fn shift<T: Int, S: Operation>(cpu: &mut Cpu, op: &Op, count: u64) -> Flow {
    let count = sem::shift::count::<S>(count, T::BITS);
    let carry = cpu.input_of::<S>();
    change(cpu, op, count, move |a: T, n| {
        S::apply(&mut Now::new(), a, n, carry)
    })
}

/// Replaces the first operand by its shifted value. If the count is 0, changes nothing.
#[inline(always)]
fn change<T: Int>(
    cpu: &mut Cpu,
    op: &Op,
    count: u64,
    shift: impl Fn(T, T) -> (T, FlagsOf<Now<T>>) + Copy,
) -> Flow {
    let apply = move |a| match count {
        0 => (a, Flags::InCpu),
        _ => shift(a, T::of(count)),
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
    shift::<T, S>(cpu, op, op.imm)
}
fn by_cl<T: Int, S: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    let count = cpu.state.gpr[1];
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
    let count = count & sem::shift::last_count(T::BITS);
    let fill = T::get(cpu, op.r[1]);
    change(cpu, op, count, move |a: T, n| {
        shift(&mut Now::new(), a, fill, n)
    })
}
fn shld<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    double::<T>(cpu, op, sem::shift::shld)
}
fn shrd<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    double::<T>(cpu, op, sem::shift::shrd)
}

pub(crate) const DOUBLE: &[Row] = rows! { |insn, op|
    Shld => by_size!(op.size, shld),
    Shrd => by_size!(op.size, shrd),
    // SAL is another encoding of SHL, with the same effect.
    Sal => lower_shift::<Shl>(op),
};
pub(crate) const ROWS: &[Row] = family_rows!(shift lower_shift);
