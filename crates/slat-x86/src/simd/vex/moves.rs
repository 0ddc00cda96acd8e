//! VEX-encoded moves, insertions and extractions of one element, VZEROUPPER and VZEROALL.

use super::host::Ymm;
use super::{is_wide, load32, store32};
use crate::Cpu;
use crate::exec::fpu_state::{load_mxcsr, store_mxcsr};
use crate::int::Int;
use crate::op::{Flow, Handler, MEM, Op, Row, rows};
use crate::simd::gpr::{extract, inserted};
use crate::simd::moves::{
    address_in_di, from_gpr, load_zero, load16, low, masked_store, one_of, store_high, store_low,
    store16, to_gpr, whole,
};
use iced_x86::{Code, Instruction};

/// Makes a handler of a VEX-encoded instruction from the handler without VEX: also clears the upper half of the
/// destination.
macro_rules! clearing {
    ($legacy:expr) => {
        |cpu: &mut Cpu, op: &Op| {
            $legacy(cpu, op)?;
            cpu.state.ymm_high[usize::from(op.r[0] & 15)] = 0;
            Ok(())
        }
    };
}

pub(super) const ROWS: &[Row] = rows! { |insn, op|
    Vmovaps | Vmovapd | Vmovdqa | Vmovntdqa | Vmovntdq | Vmovntps | Vmovntpd => match is_wide(insn) {
        true => one_of(op, whole_ymm, load_ymm::<true>, store_ymm::<true>),
        false => one_of(op, clearing!(whole), clearing!(load16::<true>), store16::<true>),
    },
    Vmovups | Vmovupd | Vmovdqu | Vlddqu => match is_wide(insn) {
        true => one_of(op, whole_ymm, load_ymm::<false>, store_ymm::<false>),
        false => one_of(op, clearing!(whole), clearing!(load16::<false>), store16::<false>),
    },
    Vmovss => one_of(op, merge::<u32>, clearing!(load_zero::<u32>), store_low::<u32>),
    Vmovsd => one_of(op, merge::<u64>, clearing!(load_zero::<u64>), store_low::<u64>),
    Vmovd => gpr_or_memory::<u32>(insn, op),
    Vmovq => match insn.code() {
        Code::VEX_Vmovq_xmm_xmmm64 | Code::VEX_Vmovq_xmmm64_xmm => {
            one_of(op, clearing!(low::<u64>), clearing!(load_zero::<u64>), store_low::<u64>)
        }
        _ => gpr_or_memory::<u64>(insn, op),
    },
    Vmovlps | Vmovlpd => if op.r[0] == MEM { store_low::<u64> } else { load_half::<0> },
    Vmovhps | Vmovhpd => if op.r[0] == MEM { store_high } else { load_half::<64> },
    Vpinsrb => insert::<u8>,
    Vpinsrw => insert::<u16>,
    Vpinsrd => insert::<u32>,
    Vpinsrq => insert::<u64>,
    Vpextrb => extract::<u8>,
    Vpextrw => extract::<u16>,
    Vpextrd | Vextractps => extract::<u32>,
    Vpextrq => extract::<u64>,
    Vmaskmovdqu => {
        address_in_di(op);
        masked_store
    },
    Vldmxcsr => load_mxcsr,
    Vstmxcsr => store_mxcsr,
    Vzeroupper => clear_upper,
    Vzeroall => clear_all,
};

/// Chooses the handler of VMOVD or VMOVQ between an XMM register and a general register or memory.
fn gpr_or_memory<T: Int>(insn: &Instruction, op: &Op) -> Handler {
    match insn.op0_register().is_xmm() {
        true => one_of(
            op,
            clearing!(from_gpr::<T>),
            clearing!(load_zero::<T>),
            store_low::<T>,
        ),
        false => one_of(op, to_gpr::<T>, clearing!(load_zero::<T>), store_low::<T>),
    }
}

fn whole_ymm(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.set_ymm(op.r[0], cpu.ymm(op.r[1]));
    Ok(())
}

/// Returns the linear address of a 32-byte memory operand. If `ALIGNED`, raises #GP unless it is a multiple of 32.
fn address32<const ALIGNED: bool>(cpu: &mut Cpu, op: &Op) -> Result<u64, crate::op::Break> {
    let lin = cpu.lin(op, 32)?;
    match ALIGNED && lin & 31 != 0 {
        true => Err(cpu.gp()),
        false => Ok(lin),
    }
}

fn load_ymm<const ALIGNED: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let lin = address32::<ALIGNED>(cpu, op)?;
    let v: Ymm = load32(cpu, lin)?;
    cpu.set_ymm(op.r[0], v);
    Ok(())
}

fn store_ymm<const ALIGNED: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let lin = address32::<ALIGNED>(cpu, op)?;
    store32(cpu, lin, cpu.ymm(op.r[1]))
}

/// Makes the result from the second operand, with its low element replaced by the low element of the last operand.
fn merge<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let ones = u128::from(u64::MAX >> (64 - T::BITS));
    let ([a, _], [b, _]) = (cpu.ymm(op.r[1]), cpu.ymm(op.r[2]));
    cpu.set_ymm(op.r[0], [a & !ones | b & ones, 0]);
    Ok(())
}

/// Makes the result from the second operand, with the quadword at bit `AT` replaced by one from memory.
fn load_half<const AT: u32>(cpu: &mut Cpu, op: &Op) -> Flow {
    let half = u128::from(cpu.load_mem::<u64>(op)?) << AT;
    let [other, _] = cpu.ymm(op.r[1]);
    let kept = other & !(u128::from(u64::MAX) << AT);
    cpu.set_ymm(op.r[0], [kept | half, 0]);
    Ok(())
}

fn insert<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let value = match op.r[2] {
        MEM => cpu.load_mem::<T>(op)?.zx(),
        r => u64::get(cpu, r),
    };
    let [vector, _] = cpu.ymm(op.r[1]);
    cpu.set_ymm(op.r[0], [inserted::<T>(op, vector, value), 0]);
    Ok(())
}

/// Returns the number of vector registers that the current mode has.
fn registers(cpu: &Cpu) -> usize {
    if cpu.is_64() { 16 } else { 8 }
}

/// Executes VZEROUPPER.
fn clear_upper(cpu: &mut Cpu, _: &Op) -> Flow {
    let n = registers(cpu);
    cpu.state.ymm_high[..n].fill(0);
    Ok(())
}

/// Executes VZEROALL.
fn clear_all(cpu: &mut Cpu, op: &Op) -> Flow {
    let n = registers(cpu);
    cpu.state.xmm[..n].fill(0);
    clear_upper(cpu, op)
}
