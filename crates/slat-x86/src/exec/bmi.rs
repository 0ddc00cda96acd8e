//! BMI1, BMI2 and ADX.

use crate::Cpu;
use crate::int::Int;
use crate::op::{Flow, Handler, Op};
use crate::state::flags::{CF, OF};
use iced_x86::{Instruction, Mnemonic};

/// Sets SF and ZF by a result, and CF; clears OF. AF and PF, which the manual leaves undefined, are those of a logical operation.
fn logic<T: Int>(cpu: &mut Cpu, result: T, carry: bool) {
    cpu.put_flags(carry, false, false, result);
}

fn andn<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let b = cpu.operand::<T>(op, 2)?.zx();
    let result = T::of(!T::get(cpu, op.r[1]).zx() & b);
    T::set(cpu, op.r[0], result);
    logic(cpu, result, false);
    Ok(())
}
fn blsr<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.operand::<T>(op, 1)?.zx();
    let result = T::of(v & v.wrapping_sub(1));
    T::set(cpu, op.r[0], result);
    logic(cpu, result, v == 0);
    Ok(())
}
fn blsmsk<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.operand::<T>(op, 1)?.zx();
    let result = T::of(v ^ v.wrapping_sub(1));
    T::set(cpu, op.r[0], result);
    logic(cpu, result, v == 0);
    Ok(())
}
fn blsi<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.operand::<T>(op, 1)?.zx();
    let result = T::of(v & v.wrapping_neg());
    T::set(cpu, op.r[0], result);
    logic(cpu, result, v != 0);
    Ok(())
}
fn bextr<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.operand::<T>(op, 1)?.zx();
    let control = T::get(cpu, op.r[2]).zx();
    let (start, len) = (control as u32 & 0xff, control as u32 >> 8 & 0xff);
    let v = v.checked_shr(start).unwrap_or(0);
    let result = T::of(if len >= 64 { v } else { v & ((1 << len) - 1) });
    T::set(cpu, op.r[0], result);
    logic(cpu, result, false);
    Ok(())
}
fn bzhi<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.operand::<T>(op, 1)?.zx();
    let n = T::get(cpu, op.r[2]).zx() as u32 & 0xff;
    let result = T::of(if n >= T::BITS { v } else { v & ((1 << n) - 1) });
    T::set(cpu, op.r[0], result);
    logic(cpu, result, n >= T::BITS);
    Ok(())
}
fn pdep<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let mut mask = cpu.operand::<T>(op, 2)?.zx();
    let source = T::get(cpu, op.r[1]).zx();
    let (mut result, mut at) = (0, 0);
    while mask != 0 {
        let lowest = mask & mask.wrapping_neg();
        if source >> at & 1 != 0 {
            result |= lowest;
        }
        mask &= mask - 1;
        at += 1;
    }
    T::set(cpu, op.r[0], T::of(result));
    Ok(())
}
fn pext<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let mut mask = cpu.operand::<T>(op, 2)?.zx();
    let source = T::get(cpu, op.r[1]).zx();
    let (mut result, mut at) = (0, 0);
    while mask != 0 {
        let lowest = mask & mask.wrapping_neg();
        if source & lowest != 0 {
            result |= 1 << at;
        }
        mask &= mask - 1;
        at += 1;
    }
    T::set(cpu, op.r[0], T::of(result));
    Ok(())
}
fn mulx<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let a = cpu.operand::<T>(op, 2)?.zx();
    let product = u128::from(a) * u128::from(T::get(cpu, 2).zx());
    // The low half first: if both destinations are one register it keeps the high half.
    T::set(cpu, op.r[1], T::of(product as u64));
    T::set(cpu, op.r[0], T::of((product >> T::BITS) as u64));
    Ok(())
}
fn rorx<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.operand::<T>(op, 1)?.zx();
    let n = op.imm as u32 & (T::BITS - 1);
    let result = v >> n | v.checked_shl(T::BITS - n).unwrap_or(0);
    T::set(cpu, op.r[0], T::of(result));
    Ok(())
}
fn shlx<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.operand::<T>(op, 1)?.zx();
    let n = T::get(cpu, op.r[2]).zx() as u32 & (T::BITS - 1);
    T::set(cpu, op.r[0], T::of(v << n));
    Ok(())
}
fn shrx<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.operand::<T>(op, 1)?.zx();
    let n = T::get(cpu, op.r[2]).zx() as u32 & (T::BITS - 1);
    T::set(cpu, op.r[0], T::of(v >> n));
    Ok(())
}
fn sarx<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.operand::<T>(op, 1)?.sx();
    let n = T::get(cpu, op.r[2]).zx() as u32 & (T::BITS - 1);
    T::set(cpu, op.r[0], T::of((v >> n) as u64));
    Ok(())
}

/// ADCX and ADOX: an addition with one flag as carry in and out.
fn add_with<T: Int, const FLAG: u64>(cpu: &mut Cpu, op: &Op) -> Flow {
    let b = cpu.operand::<T>(op, 1)?.zx();
    let a = T::get(cpu, op.r[0]).zx();
    let carry = cpu.flags() & FLAG != 0;
    let sum = u128::from(a) + u128::from(b) + u128::from(carry);
    T::set(cpu, op.r[0], T::of(sum as u64));
    cpu.set_flags(FLAG, if sum >> T::BITS != 0 { FLAG } else { 0 });
    Ok(())
}
fn adcx<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    add_with::<T, CF>(cpu, op)
}
fn adox<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    add_with::<T, OF>(cpu, op)
}

/// Chooses a handler of an instruction that exists for doublewords and quadwords only.
macro_rules! wide {
    ($op:expr, $f:ident) => {
        if $op.size == 2 { $f::<u32> } else { $f::<u64> }
    };
}

pub(crate) fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    Some(match insn.mnemonic() {
        Mnemonic::Andn => wide!(op, andn),
        Mnemonic::Blsr => wide!(op, blsr),
        Mnemonic::Blsmsk => wide!(op, blsmsk),
        Mnemonic::Blsi => wide!(op, blsi),
        Mnemonic::Bextr => wide!(op, bextr),
        Mnemonic::Bzhi => wide!(op, bzhi),
        Mnemonic::Pdep => wide!(op, pdep),
        Mnemonic::Pext => wide!(op, pext),
        Mnemonic::Mulx => wide!(op, mulx),
        Mnemonic::Rorx => wide!(op, rorx),
        Mnemonic::Shlx => wide!(op, shlx),
        Mnemonic::Shrx => wide!(op, shrx),
        Mnemonic::Sarx => wide!(op, sarx),
        Mnemonic::Adcx => wide!(op, adcx),
        Mnemonic::Adox => wide!(op, adox),
        _ => return None,
    })
}
