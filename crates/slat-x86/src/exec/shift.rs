//! Shifts and rotates: SHL SHR SAR ROL ROR RCL RCR, SHLD SHRD.

use crate::Cpu;
use crate::int::{Int, by_size};
use crate::op::{Flow, Handler, MEM, NONE, Op};
use iced_x86::{Instruction, Mnemonic};

/// Result, carry and overflow of a shift by a count that is not zero.
type Shifted<T> = (T, bool, bool);

trait Shift: 'static {
    /// Rotates leave SF, ZF, AF and PF alone.
    const ROTATE: bool;
    /// Whether it rotates through the carry flag: BITS + 1 steps restore the operand and the flags.
    const THROUGH_CARRY: bool = false;
    fn apply<T: Int>(a: T, count: u32, carry: bool) -> Shifted<T>;
}

fn bit(v: u64, n: u32) -> bool {
    v.checked_shr(n).unwrap_or(0) & 1 != 0
}

struct Shl;
impl Shift for Shl {
    const ROTATE: bool = false;
    #[inline(always)]
    fn apply<T: Int>(a: T, count: u32, _: bool) -> Shifted<T> {
        let v = a.zx();
        // The count may exceed a byte's or word's width.
        let result = T::of(v << count);
        let carry = count <= T::BITS && bit(v, T::BITS - count);
        (result, carry, carry != result.top())
    }
}
struct Shr;
impl Shift for Shr {
    const ROTATE: bool = false;
    #[inline(always)]
    fn apply<T: Int>(a: T, count: u32, _: bool) -> Shifted<T> {
        let result = T::of(a.zx() >> count);
        let overflow = (result.zx() ^ result.zx() << 1) >> (T::BITS - 1) & 1 != 0;
        (result, bit(a.zx(), count - 1), overflow)
    }
}
struct Sar;
impl Shift for Sar {
    const ROTATE: bool = false;
    #[inline(always)]
    fn apply<T: Int>(a: T, count: u32, _: bool) -> Shifted<T> {
        (
            T::of((a.sx() >> count) as u64),
            a.sx() >> (count - 1) & 1 != 0,
            false,
        )
    }
}
struct Rol;
impl Shift for Rol {
    const ROTATE: bool = true;
    #[inline(always)]
    fn apply<T: Int>(a: T, count: u32, _: bool) -> Shifted<T> {
        let n = count % T::BITS;
        let v = a.zx();
        let result = T::of(v << n | v.checked_shr(T::BITS - n).unwrap_or(0));
        let carry = bit(result.zx(), 0);
        (result, carry, carry != result.top())
    }
}
struct Ror;
impl Shift for Ror {
    const ROTATE: bool = true;
    #[inline(always)]
    fn apply<T: Int>(a: T, count: u32, _: bool) -> Shifted<T> {
        let n = count % T::BITS;
        let v = a.zx();
        let result = T::of(v >> n | v.checked_shl(T::BITS - n).unwrap_or(0));
        let next = bit(result.zx(), T::BITS - 2);
        (result, result.top(), result.top() != next)
    }
}
struct Rcl;
impl Shift for Rcl {
    const ROTATE: bool = true;
    const THROUGH_CARRY: bool = true;
    fn apply<T: Int>(a: T, count: u32, mut carry: bool) -> Shifted<T> {
        let mut v = a.zx();
        for _ in 0..count {
            let out = bit(v, T::BITS - 1);
            v = T::of(v << 1 | u64::from(carry)).zx();
            carry = out;
        }
        let result = T::of(v);
        (result, carry, carry != result.top())
    }
}
struct Rcr;
impl Shift for Rcr {
    const ROTATE: bool = true;
    const THROUGH_CARRY: bool = true;
    fn apply<T: Int>(a: T, count: u32, mut carry: bool) -> Shifted<T> {
        let mut v = a.zx();
        for _ in 0..count {
            let out = v & 1 != 0;
            v = v >> 1 | u64::from(carry) << (T::BITS - 1);
            carry = out;
        }
        let result = T::of(v);
        (result, carry, result.top() != bit(v, T::BITS - 2))
    }
}

#[inline(always)]
fn shift<T: Int, S: Shift>(cpu: &mut Cpu, op: &Op, count: u32) -> Flow {
    let mut count = count & if T::BITS == 64 { 63 } else { 31 };
    if S::THROUGH_CARRY {
        count %= T::BITS + 1;
    }
    let carry = S::ROTATE && cpu.cf();
    let f = move |a| {
        if count == 0 {
            (a, false, false)
        } else {
            S::apply::<T>(a, count, carry)
        }
    };
    let (result, carry, overflow) = if op.r[0] == MEM {
        let lin = cpu.lin(op, T::BYTES as u32)?;
        let (a, _) = cpu.update::<T>(lin, false, move |a| f(a).0)?;
        f(a)
    } else {
        let out = f(T::get(cpu, op.r[0]));
        T::set(cpu, op.r[0], out.0);
        out
    };
    if count == 0 {
        // The flags stay.
    } else if S::ROTATE {
        cpu.rotate_flags(carry, overflow);
    } else {
        cpu.put_flags(carry, overflow, false, result);
    }
    cpu.stored()
}

fn by_immediate<T: Int, S: Shift>(cpu: &mut Cpu, op: &Op) -> Flow {
    shift::<T, S>(cpu, op, op.imm as u32)
}
fn by_cl<T: Int, S: Shift>(cpu: &mut Cpu, op: &Op) -> Flow {
    let count = cpu.state.gpr[1] as u32 & 0xff;
    shift::<T, S>(cpu, op, count)
}

fn lower_shift<S: Shift>(op: &Op) -> Handler {
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
        Mnemonic::Shl | Mnemonic::Sal => lower_shift::<Shl>(op),
        Mnemonic::Shr => lower_shift::<Shr>(op),
        Mnemonic::Sar => lower_shift::<Sar>(op),
        Mnemonic::Rol => lower_shift::<Rol>(op),
        Mnemonic::Ror => lower_shift::<Ror>(op),
        Mnemonic::Rcl => lower_shift::<Rcl>(op),
        Mnemonic::Rcr => lower_shift::<Rcr>(op),
        Mnemonic::Shld => by_size!(op.size, shld),
        Mnemonic::Shrd => by_size!(op.size, shrd),
        _ => return None,
    })
}
