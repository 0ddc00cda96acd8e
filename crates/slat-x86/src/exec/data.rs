//! Moves: MOV and its extending forms, LEA, CMOVcc, SETcc, MOVBE, XLAT, and the conversions of RAX.

use super::{bmi, descriptor, registers};
use crate::Cpu;
use crate::exec::{Form, by_size_and_form};
use crate::flags::by_condition;
use crate::int::{Int, by_size};
use crate::op::{Flow, Handler, MEM, NONE, Op, Row, bytes_of, form, rows};
use crate::sem::moves::{Cmov, Extend, Movbe, Setcc, Spread};
use crate::sem::{Now, Operation};
use iced_x86::{Instruction, OpKind};

fn mov_rr<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = T::get(cpu, op.r[1]);
    T::set(cpu, op.r[0], v);
    Ok(())
}
fn mov_ri<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    T::set(cpu, op.r[0], T::of(op.imm));
    Ok(())
}
fn mov_rm<T: Int, F: Form>(cpu: &mut Cpu, op: &Op) -> Flow {
    if F::FLAT {
        let lin = F::flat(cpu, op);
        let Some(v) = cpu.try_load::<T>(lin) else {
            return mov_rm_slow::<T>(cpu, op);
        };
        T::set(cpu, op.r[0], v);
        return Ok(());
    }
    mov_rm_slow::<T>(cpu, op)
}
#[inline(never)]
fn mov_rm_slow<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.load_mem::<T>(op)?;
    T::set(cpu, op.r[0], v);
    Ok(())
}
fn mov_mr<T: Int, F: Form>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = T::get(cpu, op.r[1]);
    if F::FLAT {
        let lin = F::flat(cpu, op);
        if cpu.try_store::<T>(lin, v) {
            return cpu.stored();
        }
    }
    mov_mr_slow::<T>(cpu, op)
}
#[inline(never)]
fn mov_mr_slow<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = T::get(cpu, op.r[1]);
    cpu.store_mem::<T>(op, v)?;
    cpu.stored()
}
fn mov_mi<T: Int, F: Form>(cpu: &mut Cpu, op: &Op) -> Flow {
    let lin = F::lin(cpu, op, T::BYTES as u32)?;
    cpu.store::<T>(lin, T::of(op.imm))?;
    cpu.stored()
}

fn mov(op: &Op) -> Handler {
    match (op.r[0], op.r[1]) {
        (MEM, NONE) => by_size_and_form!(op, mov_mi),
        (MEM, _) => by_size_and_form!(op, mov_mr),
        (_, MEM) => by_size_and_form!(op, mov_rm),
        (_, NONE) => by_size!(op.size, mov_ri),
        _ => by_size!(op.size, mov_rr),
    }
}

/// Executes MOVZX or MOVSX. `op.size` is the size of the source.
fn extend_r<S: Int, D: Int, const SIGNED: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = S::get(cpu, op.r[1]);
    D::set(
        cpu,
        op.r[0],
        D::of(if SIGNED { v.sx() as u64 } else { v.zx() }),
    );
    Ok(())
}
fn extend_m<S: Int, D: Int, F: Form, const SIGNED: bool>(cpu: &mut Cpu, op: &Op) -> Flow {
    let lin = F::lin(cpu, op, S::BYTES as u32)?;
    let v = cpu.load::<S>(lin)?;
    D::set(
        cpu,
        op.r[0],
        D::of(if SIGNED { v.sx() as u64 } else { v.zx() }),
    );
    Ok(())
}
fn extend_from<S: Int, const SIGNED: bool>(op: &Op, destination: u8) -> Handler {
    use crate::exec::{Base, Full, Index};
    match (op.r[1] == MEM, destination, op.form) {
        (false, 1, _) => extend_r::<S, u16, SIGNED>,
        (false, 2, _) => extend_r::<S, u32, SIGNED>,
        (false, ..) => extend_r::<S, u64, SIGNED>,
        (true, 1, _) => extend_m::<S, u16, Full, SIGNED>,
        (true, 2, form::BASE) => extend_m::<S, u32, Base, SIGNED>,
        (true, 2, form::INDEX) => extend_m::<S, u32, Index, SIGNED>,
        (true, 2, _) => extend_m::<S, u32, Full, SIGNED>,
        (true, _, form::BASE) => extend_m::<S, u64, Base, SIGNED>,
        (true, _, form::INDEX) => extend_m::<S, u64, Index, SIGNED>,
        (true, ..) => extend_m::<S, u64, Full, SIGNED>,
    }
}
fn extend<const SIGNED: bool>(insn: &Instruction, op: &mut Op) -> Handler {
    let destination = op.size;
    match bytes_of(insn, 1) {
        1 => extend_from::<u8, SIGNED>(op, destination),
        2 => extend_from::<u16, SIGNED>(op, destination),
        _ => extend_from::<u32, SIGNED>(op, destination),
    }
}

fn lea_base<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.ea::<{ form::BASE }>(op);
    T::set(cpu, op.r[0], T::of(v));
    Ok(())
}
fn lea_index<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.ea::<{ form::INDEX }>(op);
    T::set(cpu, op.r[0], T::of(v));
    Ok(())
}
fn lea_full<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.offset(op);
    T::set(cpu, op.r[0], T::of(v));
    Ok(())
}
fn lea(op: &Op) -> Handler {
    match op.form {
        form::BASE => by_size!(op.size, lea_base),
        form::INDEX => by_size!(op.size, lea_index),
        _ => by_size!(op.size, lea_full),
    }
}

fn cmov<T: Int, const CC: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    // A 32-bit destination is always zero-extended to 64 bits, even if the condition is false.
    let source = cpu.operand::<T>(op, 1)?;
    let (old, holds) = (T::get(cpu, op.r[0]), cpu.condition::<CC>());
    let (v, _) = Cmov::apply(&mut Now::new(), old, source, holds);
    T::set(cpu, op.r[0], v);
    Ok(())
}
fn setcc<const CC: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    let (v, _) = Setcc::apply(&mut Now::new(), 0u8, 0, cpu.condition::<CC>());
    cpu.set_operand(op, 0, v)?;
    cpu.stored()
}

fn movbe<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.operand::<T>(op, 1)?;
    let (v, _) = Movbe::apply(&mut Now::new(), v, v, false);
    cpu.set_operand(op, 0, v)?;
    cpu.stored()
}

fn xlat(cpu: &mut Cpu, op: &Op) -> Flow {
    let offset = cpu.state.gpr[3].wrapping_add(cpu.state.gpr[0] & 0xff);
    let offset = match op.address_size {
        2 => offset & 0xffff,
        4 => offset & 0xffff_ffff,
        _ => offset,
    };
    let lin = cpu.segmented(op.seg, offset, 1)?;
    let v = cpu.load::<u8>(lin)?;
    u8::set(cpu, 0, v);
    Ok(())
}

/// Chooses the handler that converts RAX. `size` is the size of the result.
fn convert<A: Operation>(op: &mut Op, size: u8, to: u8) -> Handler {
    op.size = size;
    (op.r[0], op.r[1]) = (to, 0);
    bmi::sources::<A>(op)
}

fn nop(_: &mut Cpu, _: &Op) -> Flow {
    Ok(())
}

/// Returns the number of a condition (the low bits of the opcode) from iced's enumeration.
fn condition(insn: &Instruction) -> u8 {
    super::control::condition_number(insn.condition_code())
}

fn cmov_handler(op: &Op, cc: u8) -> Handler {
    match op.size {
        1 => by_condition!(cc, cmov, u16),
        2 => by_condition!(cc, cmov, u32),
        _ => by_condition!(cc, cmov, u64),
    }
}

/// Lowers MOV, also to and from segment, control and debug registers.
fn lower_mov(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    let is_general = |k| insn.op_kind(k) != OpKind::Register || insn.op_register(k).is_gpr();
    match is_general(0) && is_general(1) {
        true => Some(mov(op)),
        false => descriptor::lower_mov(insn, op).or_else(|| registers::lower_mov(insn, op)),
    }
}

fn lower_movsx(insn: &Instruction, op: &mut Op) -> Handler {
    match op.size == 1 && op.r[1] != MEM && insn.op1_register().size() == 2 {
        true => mov_rr::<u16>,
        false => extend::<true>(insn, op),
    }
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Mov => lower_mov(insn, op)?,
    Movnti => mov(op),
    Movzx => extend::<false>(insn, op),
    Movsx | Movsxd => lower_movsx(insn, op),
    Lea => lea(op),
    Movbe => by_size!(op.size, movbe),
    Xlatb => xlat,
    Cbw => convert::<Extend>(op, 1, 0),
    Cwde => convert::<Extend>(op, 2, 0),
    Cdqe => convert::<Extend>(op, 3, 0),
    Cwd => convert::<Spread>(op, 1, 2),
    Cdq => convert::<Spread>(op, 2, 2),
    Cqo => convert::<Spread>(op, 3, 2),
    Nop | Endbr64 | Endbr32 | Prefetchnta | Prefetcht0 | Prefetcht1 | Prefetcht2 | Prefetch | Prefetchw | Prefetchwt1
    | Prefetchit0 | Prefetchit1 | Reservednop | Cldemote | Rdsspd | Rdsspq => nop,
    Cmovo | Cmovno | Cmovb | Cmovae | Cmove | Cmovne | Cmovbe | Cmova | Cmovs | Cmovns | Cmovp | Cmovnp | Cmovl | Cmovge
    | Cmovle | Cmovg => cmov_handler(op, condition(insn)),
    Seto | Setno | Setb | Setae | Sete | Setne | Setbe | Seta | Sets | Setns | Setp | Setnp | Setl | Setge | Setle
    | Setg => by_condition!(condition(insn), setcc),
};
