//! Far transfers: JMP and CALL far, RETF, IRET, INT.

use crate::Cpu;
use crate::nested::code;
use crate::op::{Break, Flow, Handler, MEM, Op, Row, rows};
use crate::segment::Descriptor;
use crate::source::Source;
use crate::state::{Segment, flags};
use crate::task::Initiator;
use crate::vector;
use iced_x86::{Code, Instruction};

/// Reads selector and offset of a far target.
fn far_target(cpu: &mut Cpu, op: &Op) -> Result<(u16, u64), Break> {
    if op.r[0] != MEM {
        return Ok((op.imm as u16, op.disp));
    }
    let bytes = 1u64 << op.size;
    let lin = cpu.lin(op, bytes as u32 + 2)?;
    let offset = match op.size {
        1 => cpu.load::<u16>(lin)?.into(),
        2 => cpu.load::<u32>(lin)?.into(),
        _ => cpu.load::<u64>(lin)?,
    };
    Ok((cpu.load::<u16>(lin.wrapping_add(bytes))?, offset))
}

/// Returns the code segment that a far jump or call selects. If the selector names another task (a TSS or a task gate),
/// switches to that task, which completes the instruction.
fn far_code(cpu: &mut Cpu, op: &Op, selector: u16, initiator: Initiator) -> Result<Segment, Break> {
    if cpu.has_paragraphs() {
        let mut cs = cpu.state.cs;
        cs.selector = selector;
        cs.base = u64::from(selector) << 4;
        return Ok(cs);
    }
    if selector & !3 == 0 {
        return Err(cpu.gp());
    }
    let descriptor = cpu.descriptor(selector, vector::GP)?;
    if descriptor.kind() & 16 == 0 {
        return Err(match descriptor.kind() {
            4 | 12 => cpu.unimplemented("a far transfer through a call gate"),
            1 | 3 | 5 | 9 | 11 if !cpu.long_mode() => {
                let next = cpu.next_rip(op);
                cpu.far_to_task(descriptor, selector, initiator, next)
            }
            _ => cpu.raise(vector::GP, Some(u32::from(selector & !3))),
        });
    }
    let cpl = cpu.cpl;
    cpu.check_code(descriptor, selector, cpl, false)
}

fn far_jump(cpu: &mut Cpu, op: &Op) -> Flow {
    let (selector, offset) = far_target(cpu, op)?;
    let cs = far_code(cpu, op, selector, Initiator::Jump)?;
    cpu.state.cs = cs;
    cpu.state.rip = offset;
    cpu.code.clock.serialize();
    cpu.refresh();
    Err(Break::Jump)
}

fn far_call(cpu: &mut Cpu, op: &Op) -> Flow {
    let (selector, offset) = far_target(cpu, op)?;
    let cs = far_code(cpu, op, selector, Initiator::Call)?;
    let bytes = 1usize << op.size;
    let mut frame = [0; 16];
    let next = cpu.next_rip(op).to_le_bytes();
    frame[..bytes].copy_from_slice(&next[..bytes]);
    frame[bytes..bytes + 2].copy_from_slice(&cpu.state.cs.selector.to_le_bytes());
    let rsp = cpu.rsp_plus((2 * bytes as u64).wrapping_neg());
    let lin = cpu.stack_address(rsp, 2 * bytes as u32)?;
    cpu.check_alignment(lin, bytes)?;
    cpu.store_bytes(lin, &frame[..2 * bytes])?;
    cpu.set_rsp(rsp);
    cpu.state.cs = cs;
    cpu.state.rip = offset;
    cpu.code.clock.serialize();
    cpu.refresh();
    Err(Break::Jump)
}

/// Returns the stack segment for a far return to privilege level `cpl`.
fn return_stack(cpu: &mut Cpu, selector: u16, cpl: u8, to_64: bool) -> Result<Segment, Break> {
    if selector & !3 == 0 {
        if to_64 && cpl != 3 && (selector & 3) as u8 == cpl {
            let rights = Segment::UNUSABLE | u32::from(cpl) << 5;
            return Ok(Segment {
                selector,
                base: 0,
                limit: 0xffff_ffff,
                rights,
            });
        }
        return Err(cpu.gp());
    }
    let error = Some(u32::from(selector & !3));
    let descriptor = cpu.descriptor(selector, vector::GP)?;
    let writable_data = descriptor.kind() & 0x1a == 0x12;
    if !writable_data || (selector & 3) as u8 != cpl || descriptor.dpl() != cpl {
        return Err(cpu.raise(vector::GP, error));
    }
    if !descriptor.present() {
        return Err(cpu.raise(vector::SS, error));
    }
    cpu.mark_descriptor(selector, 1)?;
    Ok(Descriptor(descriptor.0 | 1 << 40).segment(selector))
}

/// Call after a return to an outer ring: nulls the data segments that the outer ring may not use.
fn drop_inner_segments(cpu: &mut Cpu, cpl: u8) {
    for number in [0, 3, 4, 5] {
        let segment = cpu.segment(number);
        let conforming = segment.kind() & 12 == 12;
        if segment.usable() && segment.dpl() < cpl && !conforming {
            *segment = Segment {
                selector: 0,
                rights: Segment::UNUSABLE,
                ..*segment
            };
        }
    }
}

fn retf(cpu: &mut Cpu, op: &Op) -> Flow {
    let bytes = 1u64 << op.size;
    let rip = cpu.peek_sized(op.size, 0)?;
    let selector = cpu.peek_sized(op.size, bytes)? as u16;
    if cpu.has_paragraphs() {
        let rsp = cpu.rsp_plus(2 * bytes + op.imm);
        cpu.set_rsp(rsp);
        cpu.state.cs.selector = selector;
        cpu.state.cs.base = u64::from(selector) << 4;
        cpu.state.rip = rip;
        cpu.code.clock.serialize();
        cpu.refresh();
        return Err(Break::Jump);
    }
    let rpl = (selector & 3) as u8;
    if rpl < cpu.cpl {
        return Err(cpu.raise(vector::GP, Some(u32::from(selector & !3))));
    }
    let cs = cpu.code_descriptor(selector, rpl, true)?;
    check_return_rip(cpu, &cs, rip)?;
    if rpl == cpu.cpl {
        let rsp = cpu.rsp_plus(2 * bytes + op.imm);
        cpu.set_rsp(rsp);
    } else {
        let rsp = cpu.peek_sized(op.size, 2 * bytes + op.imm)?;
        let ss = cpu.peek_sized(op.size, 3 * bytes + op.imm)? as u16;
        let ss = return_stack(cpu, ss, rpl, cs.long())?;
        cpu.state.ss = ss;
        cpu.state.gpr[4] = rsp.wrapping_add(op.imm);
        drop_inner_segments(cpu, rpl);
    }
    cpu.state.cs = cs;
    cpu.state.rip = rip;
    cpu.code.clock.serialize();
    cpu.refresh();
    Err(Break::Jump)
}

fn check_return_rip(cpu: &mut Cpu, cs: &Segment, rip: u64) -> Result<(), Break> {
    let fine = match cpu.long_mode() && cs.long() {
        true => cpu.canonical(rip),
        false => rip <= u64::from(cs.limit),
    };
    if fine { Ok(()) } else { Err(cpu.gp()) }
}

fn iret(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.intercept(op, code::IRET)?;
    if cpu.has_paragraphs() {
        return iret_8086(cpu, op);
    }
    let old = cpu.flags();
    if old & flags::NT != 0 {
        let next = cpu.next_rip(op);
        return Err(match cpu.long_mode() {
            true => cpu.gp(),
            false => cpu.return_to_task(next),
        });
    }
    let bytes = 1u64 << op.size;
    let rip = cpu.peek_sized(op.size, 0)?;
    let selector = cpu.peek_sized(op.size, bytes)? as u16;
    let new = cpu.peek_sized(op.size, 2 * bytes)?;
    if !cpu.long_mode() && new & flags::VM != 0 && cpu.cpl == 0 {
        return cpu.enter_virtual_8086(rip, selector, new);
    }
    let rpl = (selector & 3) as u8;
    if rpl < cpu.cpl {
        return Err(cpu.raise(vector::GP, Some(u32::from(selector & !3))));
    }
    let cs = cpu.code_descriptor(selector, rpl, true)?;
    check_return_rip(cpu, &cs, rip)?;
    if cpu.is_64() || rpl != cpu.cpl {
        let rsp = cpu.peek_sized(op.size, 3 * bytes)?;
        let ss = cpu.peek_sized(op.size, 4 * bytes)? as u16;
        let ss = return_stack(cpu, ss, rpl, cs.long())?;
        cpu.state.ss = ss;
        // RSP becomes the popped value, zero-extended: a 16- or 32-bit return clears the upper bits.
        cpu.state.gpr[4] = rsp;
        if rpl != cpu.cpl {
            drop_inner_segments(cpu, rpl);
        }
    } else {
        let rsp = cpu.rsp_plus(3 * bytes);
        cpu.set_rsp(rsp);
    }
    let mut mask = flags::ARITHMETIC | flags::TF | flags::DF | flags::NT;
    if op.size > 1 {
        mask |= flags::RF | flags::AC | flags::ID;
    }
    if cpu.cpl == 0 {
        mask |= flags::IOPL;
        if op.size > 1 {
            mask |= flags::VIF | flags::VIP;
        }
    }
    if u64::from(cpu.cpl) <= (old & flags::IOPL) >> 12 {
        mask |= flags::IF;
    }
    cpu.set_flags(mask, new);
    cpu.state.cs = cs;
    cpu.state.rip = rip;
    cpu.unblock_nmis();
    cpu.refresh();
    cpu.code.clock.serialize_return();
    Err(Break::Jump)
}

/// Executes IRET in real mode or in virtual-8086 mode.
fn iret_8086(cpu: &mut Cpu, op: &Op) -> Flow {
    let flag = cpu.pushed_interrupt_flag(op.size)?;
    let bytes = 1u64 << op.size;
    let rip = cpu.peek_sized(op.size, 0)?;
    let selector = cpu.peek_sized(op.size, bytes)? as u16;
    let image = cpu.peek_sized(op.size, 2 * bytes)?;
    let (mut mask, new) = cpu.flags_to_load(flag, op.size, image)?;
    if op.size > 1 {
        mask |= flags::RF;
    }
    if !cpu.protected() {
        mask |= flags::IOPL;
    }
    let rsp = cpu.rsp_plus(3 * bytes);
    cpu.set_rsp(rsp);
    cpu.state.cs.selector = selector;
    cpu.state.cs.base = u64::from(selector) << 4;
    cpu.state.rip = rip;
    cpu.set_flags(mask, new);
    cpu.unblock_nmis();
    cpu.code.clock.serialize();
    cpu.refresh();
    Err(Break::Jump)
}

/// Executes INT n (`aux` is the vector).
fn int_n(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.intercept_with(op, code::SOFTWARE_INTERRUPT, op.aux.into())?;
    if cpu.redirects(op.aux)? {
        let next = cpu.next_rip(op);
        cpu.deliver_redirected(op.aux, next)?;
        return Err(Break::Jump);
    }
    int(cpu, op, Source::Software)
}
/// Delivers the event of INT n, INT3 or INTO to the guest.
fn int(cpu: &mut Cpu, op: &Op, source: Source) -> Flow {
    let next = cpu.next_rip(op);
    cpu.deliver(op.aux, None, source, next)?;
    // The guest's single step ends with the delivery of the event. The single step of a debugger outside the guest does
    // not.
    cpu.watch.steps = cpu.requests.debugger.single_step;
    Err(Break::Jump)
}
/// Executes INT3. A debugger outside the guest may claim the INT3 as its own breakpoint.
fn int3(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.requests.debugger.software_breakpoints {
        cpu.watch.int3 = Some((cpu.rip_of(op), cpu.next_rip(op)));
        return Err(cpu.raise(vector::BP, None));
    }
    cpu.intercept_trap(op, vector::BP)?;
    int(cpu, op, Source::SoftwareException)
}
fn into(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.flags() & flags::OF == 0 {
        return Ok(());
    }
    cpu.intercept_trap(op, vector::OF)?;
    int(cpu, op, Source::SoftwareException)
}
/// Executes INT1: raises #DB, without a check of the gate's DPL, and without a bit in DR6.
fn int1(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.requests.debugger.claims_debug() {
        return Err(cpu.raise_debug(0));
    }
    cpu.intercept(op, code::ICEBP)?;
    cpu.intercept_trap(op, vector::DB)?;
    let next = cpu.next_rip(op);
    cpu.deliver(vector::DB, None, Source::External, next)?;
    // DR6 also gets the bits of traps that the shadow of MOV SS has delayed.
    let hits = std::mem::take(&mut cpu.state.events.debug);
    cpu.debug_delivered(hits);
    Err(Break::Jump)
}

fn ud(cpu: &mut Cpu, _: &Op) -> Flow {
    Err(cpu.ud())
}

/// Lowers the far forms of JMP and CALL.
pub(super) fn lower_branch(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    let code = insn.code();
    let is_jump = code.is_jmp_far() || code.is_jmp_far_indirect();
    if code.is_jmp_far() || code.is_call_far() {
        op.imm = insn.far_branch_selector().into();
        let narrow = matches!(code, Code::Jmp_ptr1616 | Code::Call_ptr1616);
        op.disp = match narrow {
            true => insn.far_branch16().into(),
            false => insn.far_branch32().into(),
        };
        op.size = if code == Code::Call_ptr1616 { 1 } else { 2 };
    } else if is_jump || code.is_call_far_indirect() {
        op.size = match code {
            Code::Jmp_m1616 | Code::Call_m1616 => 1,
            Code::Jmp_m1632 | Code::Call_m1632 => 2,
            _ => 3,
        };
    } else {
        return None;
    }
    Some(if is_jump { far_jump } else { far_call })
}

fn pops(op: &mut Op, size: u8) {
    op.size = size;
    op.seg = 2;
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Retf => {
        let size = match insn.code() {
            Code::Retfw | Code::Retfw_imm16 => 1,
            Code::Retfd | Code::Retfd_imm16 => 2,
            _ => 3,
        };
        pops(op, size);
        op.imm &= 0xffff;
        retf
    },
    Iret => {
        pops(op, 1);
        iret
    },
    Iretd => {
        pops(op, 2);
        iret
    },
    Iretq => {
        pops(op, 3);
        iret
    },
    Int => {
        op.aux = op.imm as u8;
        int_n
    },
    Int3 => {
        op.aux = vector::BP;
        int3
    },
    Into => {
        op.aux = vector::OF;
        into
    },
    Int1 => int1,
    Ud0 | Ud1 | Ud2 => ud,
};
