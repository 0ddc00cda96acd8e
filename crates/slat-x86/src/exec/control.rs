//! Near branches: JMP, Jcc, CALL, RET, JRCXZ and LOOP.

use super::far;
use crate::Cpu;
use crate::flags::by_condition;
use crate::op::{Break, Flow, Handler, Op, Row, rows};
use iced_x86::{Code, ConditionCode, Instruction};

/// Returns the number of a condition: the low four bits of the opcodes that use it.
pub(crate) fn condition_number(cc: ConditionCode) -> u8 {
    match cc {
        ConditionCode::o | ConditionCode::None => 0,
        ConditionCode::no => 1,
        ConditionCode::b => 2,
        ConditionCode::ae => 3,
        ConditionCode::e => 4,
        ConditionCode::ne => 5,
        ConditionCode::be => 6,
        ConditionCode::a => 7,
        ConditionCode::s => 8,
        ConditionCode::ns => 9,
        ConditionCode::p => 10,
        ConditionCode::np => 11,
        ConditionCode::l => 12,
        ConditionCode::ge => 13,
        ConditionCode::le => 14,
        ConditionCode::g => 15,
    }
}

impl Cpu {
    /// Raises #GP(0) if the target of a near branch is not canonical.
    #[inline(always)]
    fn check_target(&mut self, target: u64) -> Result<(), Break> {
        if target >> 47 == 0 || !self.is_64() || self.canonical(target) {
            Ok(())
        } else {
            Err(self.gp())
        }
    }

    #[inline(always)]
    pub(crate) fn jump(&mut self, target: u64) -> Flow {
        self.state.rip = target;
        Err(Break::Jump)
    }
}

fn jmp(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.jump(op.imm)
}
fn jcc<const CC: u8>(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.condition::<CC>() {
        cpu.jump(op.imm)
    } else {
        Ok(())
    }
}
fn jmp_indirect(cpu: &mut Cpu, op: &Op) -> Flow {
    let target = sized_operand(cpu, op)?;
    cpu.check_target(target)?;
    cpu.jump(target)
}

fn sized_operand(cpu: &mut Cpu, op: &Op) -> Result<u64, Break> {
    Ok(match op.size {
        1 => u64::from(cpu.operand::<u16>(op, 0)?),
        2 => u64::from(cpu.operand::<u32>(op, 0)?),
        _ => cpu.operand::<u64>(op, 0)?,
    })
}

fn call64(cpu: &mut Cpu, op: &Op) -> Flow {
    let next = cpu.next_rip(op);
    cpu.push(next)?;
    cpu.jump(op.imm)
}
fn call(cpu: &mut Cpu, op: &Op) -> Flow {
    let next = cpu.next_rip(op);
    cpu.push_sized(op.size, next)?;
    cpu.jump(op.imm)
}
fn call_indirect(cpu: &mut Cpu, op: &Op) -> Flow {
    let target = sized_operand(cpu, op)?;
    cpu.check_target(target)?;
    let next = cpu.next_rip(op);
    cpu.push_sized(op.size, next)?;
    cpu.jump(target)
}
fn ret64(cpu: &mut Cpu, op: &Op) -> Flow {
    let target = cpu.peek::<u64>(0)?;
    cpu.check_target(target)?;
    cpu.state.gpr[4] = cpu.state.gpr[4].wrapping_add(8).wrapping_add(op.imm);
    cpu.jump(target)
}
fn ret(cpu: &mut Cpu, op: &Op) -> Flow {
    let target = cpu.peek_sized(op.size, 0)?;
    cpu.check_target(target)?;
    let rsp = cpu.rsp_plus((1 << op.size) + op.imm);
    cpu.set_rsp(rsp);
    cpu.jump(target)
}

/// Returns the mask of the count register's width, which is the address size.
fn count_mask(op: &Op) -> u64 {
    match op.address_size {
        2 => 0xffff,
        4 => 0xffff_ffff,
        _ => u64::MAX,
    }
}
fn jrcxz(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.state.gpr[1] & count_mask(op) == 0 {
        cpu.jump(op.imm)
    } else {
        Ok(())
    }
}
/// Executes LOOPNE (`aux` is 0), LOOPE (1) or LOOP (2).
fn looping(cpu: &mut Cpu, op: &Op) -> Flow {
    let mask = count_mask(op);
    let rcx = &mut cpu.state.gpr[1];
    let left = rcx.wrapping_sub(1) & mask;
    *rcx = match op.address_size {
        2 => *rcx & !mask | left,
        _ => left,
    };
    let goes_on = left != 0
        && match op.aux {
            0 => !cpu.zf(),
            1 => cpu.zf(),
            _ => true,
        };
    if goes_on { cpu.jump(op.imm) } else { Ok(()) }
}

/// Returns the logarithm of the bytes by which the instruction changes the stack pointer.
fn stack_size(insn: &Instruction) -> u8 {
    insn.stack_pointer_increment()
        .unsigned_abs()
        .trailing_zeros() as u8
}

fn lower_call(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    let code = insn.code();
    if code.is_call_near() {
        op.size = stack_size(insn);
        op.seg = 2;
        return Some(if op.size == 3 { call64 } else { call });
    }
    if code.is_call_near_indirect() {
        op.size = stack_size(insn);
        return Some(call_indirect);
    }
    far::lower_branch(insn, op)
}

fn lower_jmp(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    let code = insn.code();
    if code.is_jmp_short_or_near() {
        return Some(jmp);
    }
    if code.is_jmp_near_indirect() {
        return Some(jmp_indirect);
    }
    far::lower_branch(insn, op)
}

/// Stores in `op` the size of the register (CX, ECX or RCX) in which the instruction counts.
fn by_count(op: &mut Op, bytes: u8, handler: Handler) -> Handler {
    op.address_size = bytes;
    handler
}

/// Chooses the handler of LOOP and its variants. `kind` is the `aux` of [`looping`].
fn lower_loop(insn: &Instruction, op: &mut Op, kind: u8) -> Handler {
    op.aux = kind;
    op.address_size = match insn.code() {
        Code::Loopne_rel8_16_CX
        | Code::Loopne_rel8_32_CX
        | Code::Loope_rel8_16_CX
        | Code::Loope_rel8_32_CX
        | Code::Loop_rel8_16_CX
        | Code::Loop_rel8_32_CX => 2,
        Code::Loopne_rel8_64_RCX
        | Code::Loopne_rel8_16_RCX
        | Code::Loope_rel8_64_RCX
        | Code::Loope_rel8_16_RCX
        | Code::Loop_rel8_64_RCX
        | Code::Loop_rel8_16_RCX => 8,
        _ => 4,
    };
    looping
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Jo | Jno | Jb | Jae | Je | Jne | Jbe | Ja | Js | Jns | Jp | Jnp | Jl | Jge | Jle | Jg => {
        by_condition!(condition_number(insn.condition_code()), jcc)
    },
    Jmp => lower_jmp(insn, op)?,
    Call => lower_call(insn, op)?,
    Ret => {
        op.seg = 2;
        op.size = match insn.code() {
            Code::Retnw | Code::Retnw_imm16 => 1,
            Code::Retnd | Code::Retnd_imm16 => 2,
            _ => 3,
        };
        op.imm &= 0xffff;
        if op.size == 3 { ret64 } else { ret }
    },
    Jcxz => by_count(op, 2, jrcxz),
    Jecxz => by_count(op, 4, jrcxz),
    Jrcxz => by_count(op, 8, jrcxz),
    Loopne => lower_loop(insn, op, 0),
    Loope => lower_loop(insn, op, 1),
    Loop => lower_loop(insn, op, 2),
};
