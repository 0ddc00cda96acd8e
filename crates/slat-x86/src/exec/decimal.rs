//! Instructions that do not exist in 64-bit mode: decimal adjustment (AAA AAS AAM AAD DAA DAS), SALC and BOUND. They
//! follow SDM volume 2. Flags that the manual calls undefined are cleared.

use crate::Cpu;
use crate::int::Int;
use crate::op::{Flow, Op, Row, rows};
use crate::state::flags::AF;
use crate::vector;

/// The number of register AH among the byte registers.
const AH: u8 = 16;

fn al_ah(cpu: &Cpu) -> (u8, u8) {
    (u8::get(cpu, 0), u8::get(cpu, AH))
}
fn set_al_ah(cpu: &mut Cpu, al: u8, ah: u8) {
    u8::set(cpu, 0, al);
    u8::set(cpu, AH, ah);
}

/// Executes AAS if `SUBTRACT`, else AAA.
fn ascii_adjust<const SUBTRACT: bool>(cpu: &mut Cpu, _: &Op) -> Flow {
    let adjust = u8::get(cpu, 0) & 15 > 9 || cpu.flags() & AF != 0;
    if adjust {
        let ax = u16::get(cpu, 0);
        let ax = match SUBTRACT {
            false => ax.wrapping_add(0x106),
            true => ax.wrapping_sub(0x106),
        };
        u16::set(cpu, 0, ax);
    }
    let al = u8::get(cpu, 0) & 15;
    u8::set(cpu, 0, al);
    cpu.put_flags(adjust, false, adjust, al);
    Ok(())
}

/// Executes DAS if `SUBTRACT`, else DAA.
fn decimal_adjust<const SUBTRACT: bool>(cpu: &mut Cpu, _: &Op) -> Flow {
    let old = u8::get(cpu, 0);
    let old_carry = cpu.cf();
    let low = old & 15 > 9 || cpu.flags() & AF != 0;
    let high = old > 0x99 || old_carry;
    let by = if low { 6 } else { 0 } + if high { 0x60 } else { 0 };
    let al = match SUBTRACT {
        false => old.wrapping_add(by),
        true => old.wrapping_sub(by),
    };
    u8::set(cpu, 0, al);
    // The first step of DAS may borrow although the second step is not taken. The first step of DAA cannot carry then.
    let borrowed = SUBTRACT && low && old < 6;
    cpu.put_flags(high || borrowed, false, low, al);
    Ok(())
}

fn aam(cpu: &mut Cpu, op: &Op) -> Flow {
    let base = op.imm as u8;
    let al = u8::get(cpu, 0);
    let (Some(ah), Some(rest)) = (al.checked_div(base), al.checked_rem(base)) else {
        return Err(cpu.raise(vector::DE, None));
    };
    set_al_ah(cpu, rest, ah);
    cpu.put_flags(false, false, false, rest);
    Ok(())
}
fn aad(cpu: &mut Cpu, op: &Op) -> Flow {
    let (al, ah) = al_ah(cpu);
    let al = al.wrapping_add(ah.wrapping_mul(op.imm as u8));
    set_al_ah(cpu, al, 0);
    cpu.put_flags(false, false, false, al);
    Ok(())
}

fn salc(cpu: &mut Cpu, _: &Op) -> Flow {
    let al = if cpu.cf() { 0xff } else { 0 };
    u8::set(cpu, 0, al);
    Ok(())
}

fn bound<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let lin = cpu.lin(op, 2 * T::BYTES as u32)?;
    let lower = cpu.load::<T>(lin)?.sx();
    let upper = cpu.load::<T>(lin.wrapping_add(T::BYTES))?.sx();
    let index = T::get(cpu, op.r[0]).sx();
    if index < lower || index > upper {
        return Err(cpu.raise(vector::BR, None));
    }
    Ok(())
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Aaa => ascii_adjust::<false>,
    Aas => ascii_adjust::<true>,
    Daa => decimal_adjust::<false>,
    Das => decimal_adjust::<true>,
    Aam => {
        op.imm = insn.immediate8().into();
        aam
    },
    Aad => {
        op.imm = insn.immediate8().into();
        aad
    },
    Salc => salc,
    Bound => match op.size {
        1 => bound::<u16>,
        _ => bound::<u32>,
    },
};
