//! PUSH, POP, PUSHF, POPF, PUSHA, POPA, ENTER and LEAVE.

use crate::Cpu;
use crate::frame::Frame;
use crate::int::{Int, by_size};
use crate::nested::code;
use crate::op::{Break, Flow, Handler, MEM, NONE, Op, Row, rows};
use crate::state::flags;
use iced_x86::{Code, Instruction, OpKind};

fn push_r64(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.state.gpr[usize::from(op.r[0] & 15)];
    cpu.push(v)?;
    cpu.stored()
}
fn pop_r64(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.peek::<u64>(0)?;
    cpu.state.gpr[4] = cpu.state.gpr[4].wrapping_add(8);
    cpu.state.gpr[usize::from(op.r[0] & 15)] = v;
    Ok(())
}

fn push<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = match op.r[0] {
        NONE => T::of(op.imm),
        _ => cpu.operand::<T>(op, 0)?,
    };
    cpu.push(v)?;
    cpu.stored()
}
fn pop<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.peek::<T>(0)?;
    let old = cpu.state.gpr[4];
    let new = cpu.rsp_plus(T::BYTES);
    cpu.set_rsp(new);
    // A destination in memory whose address is based on RSP uses RSP after the POP.
    if let Err(why) = cpu.set_operand(op, 0, v) {
        cpu.state.gpr[4] = old;
        return Err(why);
    }
    cpu.stored()
}

fn push_segment(cpu: &mut Cpu, op: &Op) -> Flow {
    let selector = cpu.segment(op.r[0]).selector;
    cpu.push_sized(op.size, selector.into())?;
    cpu.stored()
}
fn pop_segment(cpu: &mut Cpu, op: &Op) -> Flow {
    let selector = cpu.peek_sized(op.size, 0)? as u16;
    cpu.load_segment(op.r[0], selector)?;
    let new = cpu.rsp_plus(1 << op.size);
    cpu.set_rsp(new);
    if op.r[0] == 2 {
        cpu.state.events.mov_ss_shadow = true;
    }
    cpu.refresh();
    Err(Break::End)
}

fn pushf(cpu: &mut Cpu, op: &Op) -> Flow {
    let flag = cpu.pushed_interrupt_flag(op.size)?;
    cpu.intercept(op, code::PUSHF)?;
    let v = cpu.flags_to_push(flag);
    cpu.push_sized(op.size, v)?;
    cpu.stored()
}
/// Returns a mask of the flags that POPF of operand size `size` loads. Call outside virtual-8086 mode.
fn popped_flags(cpu: &Cpu, size: u8) -> u64 {
    let mut mask = flags::ARITHMETIC | flags::TF | flags::DF | flags::NT | flags::AC | flags::ID;
    let iopl = (cpu.state.rflags & flags::IOPL) >> 12;
    if cpu.cpl == 0 {
        mask |= flags::IOPL;
    }
    if u64::from(cpu.cpl) <= iopl {
        mask |= flags::IF;
    }
    if size == 1 { mask & 0xffff } else { mask }
}
fn popf(cpu: &mut Cpu, op: &Op) -> Flow {
    let flag = cpu.pushed_interrupt_flag(op.size)?;
    cpu.intercept(op, code::POPF)?;
    let image = cpu.peek_sized(op.size, 0)?;
    let (mask, v) = match cpu.virtual_8086() {
        true => cpu.flags_to_load(flag, op.size, image)?,
        false => (popped_flags(cpu, op.size), image),
    };
    let new = cpu.rsp_plus(1 << op.size);
    cpu.set_rsp(new);
    let old = cpu.flags();
    cpu.set_flags(mask | flags::RF, v & mask);
    // If only arithmetic flags have changed, which is the usual case, no derived state changes.
    if (old ^ cpu.state.rflags) & !flags::ARITHMETIC != 0 {
        cpu.update_table();
        cpu.slow = true;
        return Err(Break::End);
    }
    Ok(())
}

fn pusha(cpu: &mut Cpu, op: &Op) -> Flow {
    let bytes = 1u64 << op.size;
    let rsp = cpu.rsp_plus((8 * bytes).wrapping_neg());
    let lin = cpu.stack_address(rsp, 8 * bytes as u32)?;
    let mut frame = [0; 32];
    for (i, reg) in (0..8).rev().enumerate() {
        let at = i * bytes as usize;
        let v = cpu.state.gpr[reg].to_le_bytes();
        frame[at..at + bytes as usize].copy_from_slice(&v[..bytes as usize]);
    }
    cpu.check_alignment(lin, bytes as usize)?;
    cpu.store_bytes(lin, &frame[..8 * bytes as usize])?;
    cpu.set_rsp(rsp);
    cpu.stored()
}
fn popa(cpu: &mut Cpu, op: &Op) -> Flow {
    let bytes = 1u64 << op.size;
    let mut values = [0; 8];
    for (i, value) in values.iter_mut().enumerate() {
        *value = cpu.peek_sized(op.size, i as u64 * bytes)?;
    }
    for (i, reg) in (0..8u8).rev().enumerate() {
        match (reg, op.size) {
            (4, _) => {}
            (_, 1) => u16::set(cpu, reg, values[i] as u16),
            _ => u32::set(cpu, reg, values[i] as u32),
        }
    }
    let new = cpu.rsp_plus(8 * bytes);
    cpu.set_rsp(new);
    Ok(())
}

fn leave(cpu: &mut Cpu, op: &Op) -> Flow {
    let mask = cpu.stack_mask();
    let rbp = cpu.state.gpr[5] & mask;
    let lin = cpu.stack_address(rbp, 1 << op.size)?;
    let v = match op.size {
        1 => cpu.load::<u16>(lin)?.zx(),
        2 => cpu.load::<u32>(lin)?.zx(),
        _ => cpu.load::<u64>(lin)?,
    };
    cpu.set_rsp(rbp.wrapping_add(1 << op.size));
    match op.size {
        1 => u16::set(cpu, 5, v as u16),
        2 => u32::set(cpu, 5, v as u32),
        _ => cpu.state.gpr[5] = v,
    }
    Ok(())
}

fn enter(cpu: &mut Cpu, op: &Op) -> Flow {
    /// The greatest number of words that ENTER pushes: RBP, up to 30 pointers to outer frames, and the pointer to this
    /// frame.
    const WORDS: usize = 32;
    let bytes = 1u64 << op.size;
    let allocate = op.imm & 0xffff;
    let level = u64::from(op.aux & 31);
    let rbp = cpu.state.gpr[5];
    let mut frame = Frame::<{ 8 * WORDS }>::new();
    frame.push(rbp, bytes as usize);
    let pointer = cpu.rsp_plus(bytes.wrapping_neg());
    for i in 1..level {
        let at = rbp.wrapping_sub(i * bytes) & cpu.stack_mask();
        let lin = cpu.stack_address(at, bytes as u32)?;
        let outer = match op.size {
            1 => cpu.load::<u16>(lin)?.zx(),
            2 => cpu.load::<u32>(lin)?.zx(),
            _ => cpu.load::<u64>(lin)?,
        };
        frame.push(outer, bytes as usize);
    }
    if level > 0 {
        frame.push(pointer, bytes as usize);
    }
    let image = frame.bytes();
    let rsp = cpu.rsp_plus((image.len() as u64).wrapping_neg());
    let lin = cpu.stack_address(rsp, image.len() as u32)?;
    cpu.check_alignment(lin, bytes as usize)?;
    cpu.store_bytes(lin, image)?;
    cpu.set_rsp(rsp.wrapping_sub(allocate));
    match op.size {
        1 => u16::set(cpu, 5, pointer as u16),
        2 => u32::set(cpu, 5, pointer as u32),
        _ => cpu.state.gpr[5] = pointer,
    }
    cpu.stored()
}

/// Gives an operation without a memory operand the segment SS, so that a non-canonical stack address raises #SS.
fn on_stack(op: &mut Op) {
    if op.r[0] != MEM {
        op.seg = 2;
    }
}

/// Prepares `op` for an instruction that pushes or pops one word. Returns the word's size.
fn word(insn: &Instruction, op: &mut Op) -> u8 {
    on_stack(op);
    op.size = insn
        .stack_pointer_increment()
        .unsigned_abs()
        .trailing_zeros() as u8;
    op.size
}

/// Prepares `op` for an instruction that moves several values of `size` bytes.
fn sized(op: &mut Op, size: u8, handler: Handler) -> Handler {
    on_stack(op);
    op.size = size;
    handler
}

fn is_segment(insn: &Instruction) -> bool {
    insn.op0_kind() == OpKind::Register && insn.op0_register().is_segment_register()
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Push => match word(insn, op) {
        _ if is_segment(insn) => push_segment,
        3 if op.r[0] < 16 => push_r64,
        size => by_size!(size, push),
    },
    Pop => match word(insn, op) {
        _ if is_segment(insn) => pop_segment,
        3 if op.r[0] < 16 => pop_r64,
        size => by_size!(size, pop),
    },
    Pushf | Pushfd | Pushfq => {
        word(insn, op);
        pushf
    },
    Popf | Popfd | Popfq => {
        word(insn, op);
        popf
    },
    Pusha => sized(op, 1, pusha),
    Pushad => sized(op, 2, pusha),
    Popa => sized(op, 1, popa),
    Popad => sized(op, 2, popa),
    Leave => match insn.code() {
        Code::Leavew => sized(op, 1, leave),
        Code::Leaved => sized(op, 2, leave),
        _ => sized(op, 3, leave),
    },
    Enter => {
        op.imm = insn.immediate16().into();
        op.aux = insn.immediate8_2nd();
        match insn.code() {
            Code::Enterw_imm16_imm8 => sized(op, 1, enter),
            Code::Enterd_imm16_imm8 => sized(op, 2, enter),
            _ => sized(op, 3, enter),
        }
    },
};
