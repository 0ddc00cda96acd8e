//! Handlers of the arithmetic and logical operations of `sem::alu`, on registers and memory, and of BSWAP.

use crate::Cpu;
use crate::exec::{Form, by_size_and_form};
use crate::flags::by_condition;
use crate::int::{Int, by_size};
use crate::op::{Flow, Handler, MEM, NONE, Op, Row, family_rows};
use crate::sem::alu::{Cmp, Dec, Sub, Test};
use crate::sem::{Now, Operation};
use iced_x86::Mnemonic;

/// Executes operation `A` on a register, which is the destination, and the value `b`.
#[inline(always)]
fn to_register<T: Int, A: Operation>(cpu: &mut Cpu, op: &Op, b: T) -> Flow {
    let a = T::get(cpu, op.r[0]);
    let input = cpu.input_of::<A>();
    let (result, flags) = A::apply(&mut Now::new(), a, b, input);
    cpu.note(flags);
    if A::WRITES {
        T::set(cpu, op.r[0], result);
    }
    Ok(())
}

/// Executes operation `A` on memory, which is the destination, and the value `b`.
#[inline(always)]
fn to_memory<T: Int, F: Form, A: Operation>(cpu: &mut Cpu, op: &Op, b: T) -> Flow {
    if F::FLAT && !A::WRITES {
        let lin = F::flat(cpu, op);
        if let Some(a) = cpu.try_load::<T>(lin) {
            cpu.note(A::apply(&mut Now::new(), a, b, false).1);
            return Ok(());
        }
    }
    to_memory_full::<T, F, A>(cpu, op, b)
}
#[inline(never)]
fn to_memory_full<T: Int, F: Form, A: Operation>(cpu: &mut Cpu, op: &Op, b: T) -> Flow {
    let lin = F::lin(cpu, op, T::BYTES as u32)?;
    let input = cpu.input_of::<A>();
    let apply = move |a| A::apply(&mut Now::new(), a, b, input);
    if A::WRITES {
        let (a, _) = cpu.update::<T>(lin, op.lock, move |a| apply(a).0)?;
        cpu.note(apply(a).1);
        cpu.stored()
    } else {
        let a = cpu.load::<T>(lin)?;
        cpu.note(apply(a).1);
        Ok(())
    }
}

fn rr<T: Int, A: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    let b = T::get(cpu, op.r[1]);
    to_register::<T, A>(cpu, op, b)
}
fn ri<T: Int, A: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    to_register::<T, A>(cpu, op, T::of(op.imm))
}
fn rm<T: Int, F: Form, A: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    if F::FLAT {
        let lin = F::flat(cpu, op);
        if let Some(b) = cpu.try_load::<T>(lin) {
            return to_register::<T, A>(cpu, op, b);
        }
    }
    rm_slow::<T, A>(cpu, op)
}
#[inline(never)]
fn rm_slow<T: Int, A: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    let b = cpu.load_mem::<T>(op)?;
    to_register::<T, A>(cpu, op, b)
}
fn mr<T: Int, F: Form, A: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    let b = T::get(cpu, op.r[1]);
    to_memory::<T, F, A>(cpu, op, b)
}
fn mi<T: Int, F: Form, A: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    to_memory::<T, F, A>(cpu, op, T::of(op.imm))
}

pub(super) fn binary<A: Operation>(op: &Op) -> Handler {
    match (op.r[0], op.r[1]) {
        (MEM, NONE) => by_size_and_form!(op, mi, A),
        (MEM, _) => by_size_and_form!(op, mr, A),
        (_, MEM) => by_size_and_form!(op, rm, A),
        (_, NONE) => by_size!(op.size, ri, A),
        _ => by_size!(op.size, rr, A),
    }
}

fn unary_r<T: Int, A: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    let a = T::get(cpu, op.r[0]);
    to_register::<T, A>(cpu, op, a)
}
fn unary_m<T: Int, F: Form, A: Operation>(cpu: &mut Cpu, op: &Op) -> Flow {
    let lin = F::lin(cpu, op, T::BYTES as u32)?;
    let apply = |a| A::apply(&mut Now::new(), a, a, false);
    let (a, _) = cpu.update::<T>(lin, op.lock, move |a| apply(a).0)?;
    cpu.note(apply(a).1);
    cpu.stored()
}
fn unary<A: Operation>(op: &Op) -> Handler {
    match op.r[0] {
        MEM => by_size_and_form!(op, unary_m, A),
        _ => by_size!(op.size, unary_r, A),
    }
}

/// Executes operation `A` on registers, and the Jcc that is fused with the operation. `op.disp` is the target of the
/// Jcc.
fn rr_jcc<T: Int, A: Operation, const CC: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    rr::<T, A>(cpu, op)?;
    branch::<CC>(cpu, op)
}
fn ri_jcc<T: Int, A: Operation, const CC: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    ri::<T, A>(cpu, op)?;
    branch::<CC>(cpu, op)
}
fn dec_jcc<T: Int, const CC: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    unary_r::<T, Dec>(cpu, op)?;
    branch::<CC>(cpu, op)
}
#[inline(always)]
fn branch<const CC: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.condition::<CC>() {
        cpu.jump(op.disp)
    } else {
        Ok(())
    }
}

fn fused_binary<A: Operation>(op: &Op, cc: u8) -> Handler {
    match (op.r[1], op.size) {
        (NONE, 0) => by_condition!(cc, ri_jcc, u8, A),
        (NONE, 2) => by_condition!(cc, ri_jcc, u32, A),
        (NONE, _) => by_condition!(cc, ri_jcc, u64, A),
        (_, 0) => by_condition!(cc, rr_jcc, u8, A),
        (_, 2) => by_condition!(cc, rr_jcc, u32, A),
        _ => by_condition!(cc, rr_jcc, u64, A),
    }
}

/// Fuses `op` with the Jcc after it, so that `op` executes both. Returns `false` if `op` cannot be fused.
pub(crate) fn fuse(op: &mut Op, cc: u8, target: u64, len: u8) -> bool {
    if op.r[0] == MEM || op.r[1] == MEM || op.size == 1 {
        return false;
    }
    op.handler = match op.mnemonic {
        Mnemonic::Cmp => fused_binary::<Cmp>(op, cc),
        Mnemonic::Test => fused_binary::<Test>(op, cc),
        Mnemonic::Sub => fused_binary::<Sub>(op, cc),
        Mnemonic::Dec if op.size == 2 => by_condition!(cc, dec_jcc, u32),
        Mnemonic::Dec if op.size == 3 => by_condition!(cc, dec_jcc, u64),
        _ => return false,
    };
    op.disp = target;
    op.len += len;
    op.count = 2;
    true
}

pub(crate) const BINARY: &[Row] = family_rows!(binary binary);
pub(crate) const UNARY: &[Row] = family_rows!(unary unary);
