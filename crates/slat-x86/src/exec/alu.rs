//! Two-operand arithmetic and logic (ADD OR ADC SBB AND SUB XOR CMP TEST), and INC DEC NEG NOT.

use crate::Cpu;
use crate::exec::{Form, by_size_and_form};
use crate::flags::{self, by_condition};
use crate::int::{Int, by_size};
use crate::op::{Flow, Handler, MEM, NONE, Op};
use iced_x86::{Instruction, Mnemonic};

/// One of the two-operand operations.
trait Binary: 'static {
    /// Whether the result is stored (not for CMP and TEST).
    const WRITES: bool = true;
    /// Whether the carry flag is an input.
    const CARRY: bool = false;
    fn apply<T: Int>(a: T, b: T, carry: bool) -> T;
    fn note<T: Int>(cpu: &mut Cpu, a: T, b: T, carry: bool, result: T);
}

macro_rules! binary {
    ($name:ident, |$a:ident, $b:ident| $result:expr, |$cpu:ident, $r:ident| $note:expr $(, $writes:literal)?) => {
        struct $name;
        impl Binary for $name {
            $(const WRITES: bool = $writes;)?
            #[inline(always)]
            fn apply<T: Int>($a: T, $b: T, _: bool) -> T {
                let ($a, $b) = ($a.zx(), $b.zx());
                T::of($result)
            }
            #[inline(always)]
            fn note<T: Int>($cpu: &mut Cpu, $a: T, $b: T, _: bool, $r: T) {
                let _ = ($a, $b, $r);
                $note
            }
        }
    };
}
binary!(Add, |a, b| a.wrapping_add(b), |cpu, r| cpu.note_add(a, r));
binary!(Sub, |a, b| a.wrapping_sub(b), |cpu, r| cpu.note_sub(a, b));
binary!(
    Cmp,
    |a, b| a.wrapping_sub(b),
    |cpu, r| cpu.note_sub(a, b),
    false
);
binary!(And, |a, b| a & b, |cpu, r| cpu.note_logic(r));
binary!(Or, |a, b| a | b, |cpu, r| cpu.note_logic(r));
binary!(Xor, |a, b| a ^ b, |cpu, r| cpu.note_logic(r));
binary!(Test, |a, b| a & b, |cpu, r| cpu.note_logic(r), false);

struct Adc;
impl Binary for Adc {
    const CARRY: bool = true;
    #[inline(always)]
    fn apply<T: Int>(a: T, b: T, carry: bool) -> T {
        T::of(a.zx().wrapping_add(b.zx()).wrapping_add(carry.into()))
    }
    #[inline(always)]
    fn note<T: Int>(cpu: &mut Cpu, a: T, b: T, carry: bool, result: T) {
        let (x, y, r) = (a.zx(), b.zx(), result.zx());
        let out = if carry { r <= x } else { r < x };
        let overflow = T::of((x ^ r) & (y ^ r)).top();
        cpu.put_flags(out, overflow, (x ^ y ^ r) & 16 != 0, result);
    }
}

struct Sbb;
impl Binary for Sbb {
    const CARRY: bool = true;
    #[inline(always)]
    fn apply<T: Int>(a: T, b: T, carry: bool) -> T {
        T::of(a.zx().wrapping_sub(b.zx()).wrapping_sub(carry.into()))
    }
    #[inline(always)]
    fn note<T: Int>(cpu: &mut Cpu, a: T, b: T, carry: bool, result: T) {
        let (x, y, r) = (a.zx(), b.zx(), result.zx());
        let out = if carry { x <= y } else { x < y };
        let overflow = T::of((x ^ y) & (x ^ r)).top();
        cpu.put_flags(out, overflow, (x ^ y ^ r) & 16 != 0, result);
    }
}

/// Operates on a register destination and the value `b`.
#[inline(always)]
fn to_register<T: Int, A: Binary>(cpu: &mut Cpu, op: &Op, b: T) -> Flow {
    let a = T::get(cpu, op.r[0]);
    let carry = A::CARRY && cpu.cf();
    let result = A::apply(a, b, carry);
    A::note(cpu, a, b, carry, result);
    if A::WRITES {
        T::set(cpu, op.r[0], result);
    }
    Ok(())
}

/// Operates on a memory destination and the value `b`.
#[inline(always)]
fn to_memory<T: Int, F: Form, A: Binary>(cpu: &mut Cpu, op: &Op, b: T) -> Flow {
    if F::FLAT && !A::WRITES {
        let lin = F::flat(cpu, op);
        if let Some(a) = cpu.try_load::<T>(lin) {
            A::note(cpu, a, b, false, A::apply(a, b, false));
            return Ok(());
        }
    }
    to_memory_full::<T, F, A>(cpu, op, b)
}
#[inline(never)]
fn to_memory_full<T: Int, F: Form, A: Binary>(cpu: &mut Cpu, op: &Op, b: T) -> Flow {
    let lin = F::lin(cpu, op, T::BYTES as u32)?;
    let carry = A::CARRY && cpu.cf();
    if A::WRITES {
        let (a, result) = cpu.update::<T>(lin, op.lock, move |a| A::apply(a, b, carry))?;
        A::note(cpu, a, b, carry, result);
        cpu.stored()
    } else {
        let a = cpu.load::<T>(lin)?;
        A::note(cpu, a, b, carry, A::apply(a, b, carry));
        Ok(())
    }
}

fn rr<T: Int, A: Binary>(cpu: &mut Cpu, op: &Op) -> Flow {
    let b = T::get(cpu, op.r[1]);
    to_register::<T, A>(cpu, op, b)
}
fn ri<T: Int, A: Binary>(cpu: &mut Cpu, op: &Op) -> Flow {
    to_register::<T, A>(cpu, op, T::of(op.imm))
}
fn rm<T: Int, F: Form, A: Binary>(cpu: &mut Cpu, op: &Op) -> Flow {
    if F::FLAT {
        let lin = F::flat(cpu, op);
        if let Some(b) = cpu.try_load::<T>(lin) {
            return to_register::<T, A>(cpu, op, b);
        }
    }
    rm_slow::<T, A>(cpu, op)
}
#[inline(never)]
fn rm_slow<T: Int, A: Binary>(cpu: &mut Cpu, op: &Op) -> Flow {
    let b = cpu.load_mem::<T>(op)?;
    to_register::<T, A>(cpu, op, b)
}
fn mr<T: Int, F: Form, A: Binary>(cpu: &mut Cpu, op: &Op) -> Flow {
    let b = T::get(cpu, op.r[1]);
    to_memory::<T, F, A>(cpu, op, b)
}
fn mi<T: Int, F: Form, A: Binary>(cpu: &mut Cpu, op: &Op) -> Flow {
    to_memory::<T, F, A>(cpu, op, T::of(op.imm))
}

fn binary<A: Binary>(op: &Op) -> Handler {
    match (op.r[0], op.r[1]) {
        (MEM, NONE) => by_size_and_form!(op, mi, A),
        (MEM, _) => by_size_and_form!(op, mr, A),
        (_, MEM) => by_size_and_form!(op, rm, A),
        (_, NONE) => by_size!(op.size, ri, A),
        _ => by_size!(op.size, rr, A),
    }
}

/// One of the one-operand operations.
trait Unary: 'static {
    fn apply<T: Int>(a: T) -> T;
    fn note<T: Int>(cpu: &mut Cpu, a: T, result: T);
}

struct Inc;
impl Unary for Inc {
    #[inline(always)]
    fn apply<T: Int>(a: T) -> T {
        T::of(a.zx().wrapping_add(1))
    }
    #[inline(always)]
    fn note<T: Int>(cpu: &mut Cpu, _: T, result: T) {
        cpu.note_result(flags::INC, result);
    }
}
struct Dec;
impl Unary for Dec {
    #[inline(always)]
    fn apply<T: Int>(a: T) -> T {
        T::of(a.zx().wrapping_sub(1))
    }
    #[inline(always)]
    fn note<T: Int>(cpu: &mut Cpu, _: T, result: T) {
        cpu.note_result(flags::DEC, result);
    }
}
struct Neg;
impl Unary for Neg {
    #[inline(always)]
    fn apply<T: Int>(a: T) -> T {
        T::of(a.zx().wrapping_neg())
    }
    #[inline(always)]
    fn note<T: Int>(cpu: &mut Cpu, a: T, _: T) {
        cpu.note_sub(T::of(0), a);
    }
}
struct Not;
impl Unary for Not {
    #[inline(always)]
    fn apply<T: Int>(a: T) -> T {
        T::of(!a.zx())
    }
    #[inline(always)]
    fn note<T: Int>(_: &mut Cpu, _: T, _: T) {}
}

fn unary_r<T: Int, U: Unary>(cpu: &mut Cpu, op: &Op) -> Flow {
    let a = T::get(cpu, op.r[0]);
    let result = U::apply(a);
    U::note(cpu, a, result);
    T::set(cpu, op.r[0], result);
    Ok(())
}
fn unary_m<T: Int, F: Form, U: Unary>(cpu: &mut Cpu, op: &Op) -> Flow {
    let lin = F::lin(cpu, op, T::BYTES as u32)?;
    let (a, result) = cpu.update::<T>(lin, op.lock, U::apply)?;
    U::note(cpu, a, result);
    cpu.stored()
}
fn unary<U: Unary>(op: &Op) -> Handler {
    match op.r[0] {
        MEM => by_size_and_form!(op, unary_m, U),
        _ => by_size!(op.size, unary_r, U),
    }
}

/// The flags of an operation that a fused Jcc can use: [`Op::fusible`].
mod fusible {
    pub const CMP: u8 = 1;
    pub const TEST: u8 = 2;
    pub const SUB: u8 = 3;
    pub const DEC: u8 = 4;
}

/// Executes a register operation and the Jcc after it. The target is in `disp`.
fn rr_jcc<T: Int, A: Binary, const CC: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    rr::<T, A>(cpu, op)?;
    branch::<CC>(cpu, op)
}
fn ri_jcc<T: Int, A: Binary, const CC: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
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

fn fused_binary<A: Binary>(op: &Op, cc: u8) -> Handler {
    match (op.r[1], op.size) {
        (NONE, 0) => by_condition!(cc, ri_jcc, u8, A),
        (NONE, 2) => by_condition!(cc, ri_jcc, u32, A),
        (NONE, _) => by_condition!(cc, ri_jcc, u64, A),
        (_, 0) => by_condition!(cc, rr_jcc, u8, A),
        (_, 2) => by_condition!(cc, rr_jcc, u32, A),
        _ => by_condition!(cc, rr_jcc, u64, A),
    }
}

/// Makes `op` execute the next instruction, a Jcc, too. Returns false if `op` is of a kind that
/// cannot.
pub(crate) fn fuse(op: &mut Op, cc: u8, target: u64, len: u8) -> bool {
    op.handler = match op.fusible {
        fusible::CMP => fused_binary::<Cmp>(op, cc),
        fusible::TEST => fused_binary::<Test>(op, cc),
        fusible::SUB => fused_binary::<Sub>(op, cc),
        fusible::DEC if op.size == 2 => by_condition!(cc, dec_jcc, u32),
        fusible::DEC => by_condition!(cc, dec_jcc, u64),
        _ => return false,
    };
    op.fusible = 0;
    op.disp = target;
    op.len += len;
    op.count = 2;
    true
}

pub(crate) fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    let in_registers = op.r[0] != MEM && op.r[1] != MEM;
    op.fusible = match insn.mnemonic() {
        _ if !in_registers || op.size == 1 => 0,
        Mnemonic::Cmp => fusible::CMP,
        Mnemonic::Test => fusible::TEST,
        Mnemonic::Sub => fusible::SUB,
        Mnemonic::Dec if op.size >= 2 => fusible::DEC,
        _ => 0,
    };
    Some(match insn.mnemonic() {
        Mnemonic::Add => binary::<Add>(op),
        Mnemonic::Or => binary::<Or>(op),
        Mnemonic::Adc => binary::<Adc>(op),
        Mnemonic::Sbb => binary::<Sbb>(op),
        Mnemonic::And => binary::<And>(op),
        Mnemonic::Sub => binary::<Sub>(op),
        Mnemonic::Xor => binary::<Xor>(op),
        Mnemonic::Cmp => binary::<Cmp>(op),
        Mnemonic::Test => binary::<Test>(op),
        Mnemonic::Inc => unary::<Inc>(op),
        Mnemonic::Dec => unary::<Dec>(op),
        Mnemonic::Neg => unary::<Neg>(op),
        Mnemonic::Not => unary::<Not>(op),
        _ => return None,
    })
}
