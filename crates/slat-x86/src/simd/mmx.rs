//! MMX: instructions with MMX registers, which are the significands of the x87 registers.

use super::host::{self, Entry, FLAGS, MASKS, NOT_FOR_HOST, Work};
use super::{moves, table};
use crate::Cpu;
use crate::int::Int;
use crate::op::{Break, Flow, Handler, MEM, NONE, Op, Row, rows};
use crate::state::{F80, control};
use iced_x86::{Instruction, Mnemonic as M, OpKind};

/// The rows of mnemonics that have no form with XMM registers.
pub(super) const ROWS: &[Row] = rows! { |insn, op|
    Emms | Movntq | Maskmovq | Pshufw | Cvtpi2ps | Cvtpi2pd | Cvtps2pi | Cvttps2pi | Cvtpd2pi | Cvttpd2pi | Movq2dq
    | Movdq2q => lower(insn, op)?,
};

/// Whether the instruction has an MMX register as an operand.
pub(super) fn is_mmx(insn: &Instruction) -> bool {
    insn.op0_register().is_mm() || insn.op1_register().is_mm()
}

pub(super) fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    let mnemonic = insn.mnemonic();
    op.aux = op.imm as u8;
    if op.r[1] == MEM {
        op.size = insn.memory_size().size().trailing_zeros() as u8;
    }
    let from_gpr = insn.op1_register().is_gpr();
    let handler: Handler = match mnemonic {
        M::Emms => emms,
        M::Movd if op.r[0] == MEM => store::<u32>,
        M::Movq | M::Movntq if op.r[0] == MEM => store::<u64>,
        M::Movd if op.r[1] == MEM => load::<u32>,
        M::Movq if op.r[1] == MEM => load::<u64>,
        M::Movd if from_gpr => set::<u32>,
        M::Movq if from_gpr => set::<u64>,
        M::Movd => get::<u32>,
        M::Movq if insn.op0_register().is_gpr() => get::<u64>,
        M::Pinsrw => insert,
        M::Pextrw => extract,
        M::Maskmovq => {
            moves::address_in_di(op);
            masked_store
        }
        _ if insn.op1_kind() == OpKind::Immediate8 => {
            op.imm = table::mmx_shift(mnemonic)? as usize as u64;
            op.r[1] = op.r[0];
            operate
        }
        _ => {
            op.imm = table::mmx(mnemonic)? as usize as u64;
            match mnemonic {
                M::Pmovmskb => signs,
                M::Cvtpi2ps | M::Cvtpi2pd | M::Movq2dq => to_xmm,
                M::Cvtps2pi | M::Cvttps2pi | M::Cvtpd2pi | M::Cvttpd2pi | M::Movdq2q => from_xmm,
                _ => operate,
            }
        }
    };
    Some(handler)
}

/// Raises a pending x87 exception, as MMX instructions do, like x87 instructions.
fn check(cpu: &mut Cpu) -> Flow {
    crate::x87::check_pending(cpu)
}

fn mm(cpu: &Cpu, r: u8) -> u64 {
    cpu.state.st[usize::from(r)].mantissa
}

fn set_mm(cpu: &mut Cpu, r: u8, value: u64) {
    cpu.state.st[usize::from(r)] = F80 {
        mantissa: value,
        exponent: 0xffff,
    };
}

/// Changes the x87 state (tags, top of stack) as every MMX instruction does, even one that then raises #XM.
fn enter(cpu: &mut Cpu) {
    const TOP: u16 = 7 << 11;
    cpu.state.fsw &= !TOP;
    cpu.state.ftw = 0xff;
}

fn emms(cpu: &mut Cpu, _op: &Op) -> Flow {
    check(cpu)?;
    enter(cpu);
    cpu.state.ftw = 0;
    Ok(())
}

fn load<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    check(cpu)?;
    let value = cpu.load_mem::<T>(op)?;
    enter(cpu);
    set_mm(cpu, op.r[0], value.zx());
    Ok(())
}

fn store<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    check(cpu)?;
    cpu.store_mem::<T>(op, T::of(mm(cpu, op.r[1])))?;
    enter(cpu);
    Ok(())
}

fn set<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    check(cpu)?;
    enter(cpu);
    let value = T::get(cpu, op.r[1]).zx();
    set_mm(cpu, op.r[0], value);
    Ok(())
}

fn get<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    check(cpu)?;
    enter(cpu);
    T::set(cpu, op.r[0], T::of(mm(cpu, op.r[1])));
    Ok(())
}

fn insert(cpu: &mut Cpu, op: &Op) -> Flow {
    check(cpu)?;
    let value = if op.r[1] == MEM {
        cpu.load_mem::<u16>(op)?
    } else {
        u64::get(cpu, op.r[1]) as u16
    };
    enter(cpu);
    let at = u32::from(op.aux & 3) * 16;
    let value = mm(cpu, op.r[0]) & !(0xffff << at) | u64::from(value) << at;
    set_mm(cpu, op.r[0], value);
    Ok(())
}

fn extract(cpu: &mut Cpu, op: &Op) -> Flow {
    check(cpu)?;
    enter(cpu);
    u64::set(
        cpu,
        op.r[0],
        mm(cpu, op.r[1]) >> (u32::from(op.aux & 3) * 16) & 0xffff,
    );
    Ok(())
}

fn masked_store(cpu: &mut Cpu, op: &Op) -> Flow {
    check(cpu)?;
    let data = mm(cpu, op.r[1]).to_le_bytes();
    let mask = mm(cpu, op.r[2]).to_le_bytes();
    let lin = cpu.lin(op, 8)?;
    moves::store_bytes_by_mask(cpu, lin, &data, &mask)?;
    enter(cpu);
    Ok(())
}

/// Reads the source operand from an MMX register, or from memory.
fn source(cpu: &mut Cpu, op: &Op) -> Result<u64, Break> {
    if op.r[1] == MEM {
        // Instructions that unpack low halves read 32 bits of memory, all others 64 bits.
        return match op.size {
            2 => cpu.load_mem::<u32>(op).map(u64::from),
            _ => cpu.load_mem::<u64>(op),
        };
    }
    debug_assert_ne!(op.r[1], NONE);
    Ok(mm(cpu, op.r[1]))
}

fn operate(cpu: &mut Cpu, op: &Op) -> Flow {
    check(cpu)?;
    let src = source(cpu, op)?;
    enter(cpu);
    let mut mms = [mm(cpu, op.r[0]), src];
    run(
        cpu,
        op,
        &mut mms,
        &mut Work {
            dst: 0,
            src: 0,
            gpr: 0,
            imm: op.aux,
        },
    )?;
    set_mm(cpu, op.r[0], mms[0]);
    Ok(())
}

fn signs(cpu: &mut Cpu, op: &Op) -> Flow {
    check(cpu)?;
    enter(cpu);
    let mut work = Work {
        dst: 0,
        src: 0,
        gpr: 0,
        imm: 0,
    };
    run(cpu, op, &mut [0, mm(cpu, op.r[1])], &mut work)?;
    u32::set(cpu, op.r[0], work.gpr as u32);
    Ok(())
}

fn to_xmm(cpu: &mut Cpu, op: &Op) -> Flow {
    // With a source in memory, the instruction uses no MMX register, so it does not check for a pending x87 exception.
    if op.r[1] != MEM {
        check(cpu)?;
    }
    let src = source(cpu, op)?;
    let mut work = Work {
        dst: cpu.state.xmm[usize::from(op.r[0])],
        src: 0,
        gpr: 0,
        imm: 0,
    };
    if op.r[1] != MEM {
        enter(cpu);
    }
    run(cpu, op, &mut [0, src], &mut work)?;
    cpu.state.xmm[usize::from(op.r[0])] = work.dst;
    Ok(())
}

fn from_xmm(cpu: &mut Cpu, op: &Op) -> Flow {
    check(cpu)?;
    let src = if op.r[1] != MEM {
        cpu.state.xmm[usize::from(op.r[1])]
    } else if op.size == 3 {
        cpu.load_mem::<u64>(op)?.into()
    } else {
        let lin = cpu.lin(op, 16)?;
        cpu.aligned_operand(lin)?;
        cpu.load::<u128>(lin)?
    };
    let mut mms = [0; 2];
    enter(cpu);
    run(
        cpu,
        op,
        &mut mms,
        &mut Work {
            dst: 0,
            src,
            gpr: 0,
            imm: 0,
        },
    )?;
    set_mm(cpu, op.r[0], mms[0]);
    Ok(())
}

/// Runs the stub with all exceptions masked, and then raises the exceptions that the guest has not masked. (Only
/// conversions have exceptions.)
fn run(cpu: &mut Cpu, op: &Op, mms: &mut [u64; 2], work: &mut Work) -> Flow {
    let guest = cpu.state.mxcsr;
    let mut mxcsr = (guest | MASKS) & !(FLAGS | NOT_FOR_HOST);
    host::mmx(Entry(op.imm), mms, work, &mut mxcsr);
    let mut raised = mxcsr & FLAGS;
    let unmasked = !(guest >> 7);
    const INVALID: u32 = 1;
    if raised & unmasked & INVALID != 0 {
        raised = INVALID;
    }
    cpu.state.mxcsr = guest | raised;
    if raised & unmasked & FLAGS == 0 {
        return Ok(());
    }
    let vector = if cpu.state.cr4 & control::CR4_OSXMMEXCPT != 0 {
        19
    } else {
        6
    };
    Err(cpu.raise(vector, None))
}
