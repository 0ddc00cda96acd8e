//! Segment registers and descriptor tables: MOV Sreg, LDS and its variants, LGDT LIDT SGDT SIDT, LLDT LTR SLDT STR,
//! LAR LSL VERR VERW ARPL.

use crate::Cpu;
use crate::int::{Int, by_size};
use crate::nested::code;
use crate::op::{Break, Flow, Handler, MEM, Op, Row, rows};
use crate::segment::{Descriptor, system_segment};
use crate::state::flags::ZF;
use crate::state::{Segment, Table, control};
use iced_x86::{Code, Instruction, Mnemonic, OpKind};

fn mov_from_segment<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let selector = cpu.segment(op.r[1]).selector;
    if op.r[0] == MEM {
        cpu.store_mem::<u16>(op, selector)?;
    } else {
        T::set(cpu, op.r[0], T::of(selector.into()));
    }
    cpu.stored()
}

fn mov_to_segment(cpu: &mut Cpu, op: &Op) -> Flow {
    if op.r[0] == 1 {
        return Err(cpu.ud());
    }
    let selector = cpu.operand::<u16>(op, 1)?;
    cpu.load_segment(op.r[0], selector)?;
    if op.r[0] == 2 {
        cpu.state.events.mov_ss_shadow = true;
        cpu.refresh();
    } else {
        cpu.data_segment_loaded();
    }
    Err(Break::End)
}

/// Executes LDS, LES, LFS, LGS or LSS. `aux` is the number of the segment register.
fn load_far(cpu: &mut Cpu, op: &Op) -> Flow {
    let bytes = 1u64 << op.size;
    let lin = cpu.lin(op, bytes as u32 + 2)?;
    let offset = match op.size {
        1 => cpu.load::<u16>(lin)?.zx(),
        2 => cpu.load::<u32>(lin)?.zx(),
        _ => cpu.load::<u64>(lin)?,
    };
    let selector = cpu.load::<u16>(lin.wrapping_add(bytes))?;
    cpu.load_segment(op.aux, selector)?;
    match op.size {
        1 => u16::set(cpu, op.r[0], offset as u16),
        2 => u32::set(cpu, op.r[0], offset as u32),
        _ => u64::set(cpu, op.r[0], offset),
    }
    cpu.refresh();
    Err(Break::End)
}

/// Raises #GP(0) if CR4.UMIP is set and CPL is not 0.
fn umip(cpu: &mut Cpu) -> Result<(), Break> {
    if cpu.state.cr4 & control::CR4_UMIP != 0 {
        cpu.privileged()
    } else {
        Ok(())
    }
}

/// Executes LGDT (`aux` is 0) or LIDT (1).
fn load_table(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.privileged()?;
    cpu.intercept(
        op,
        [code::GDTR_WRITE, code::IDTR_WRITE][usize::from(op.aux & 1)],
    )?;
    let wide = cpu.is_64();
    let mut image = [0; 10];
    let len = if wide { 10 } else { 6 };
    let lin = cpu.lin(op, len as u32)?;
    cpu.load_bytes(lin, &mut image[..len])?;
    let limit = u16::from_le_bytes([image[0], image[1]]);
    let mut base = [0; 8];
    base.copy_from_slice(&image[2..10]);
    let mut base = u64::from_le_bytes(base);
    if op.size == 1 {
        base &= 0xff_ffff;
    }
    if !cpu.canonical(base) {
        return Err(cpu.gp());
    }
    let table = Table { base, limit };
    if op.aux == 0 {
        cpu.state.gdtr = table;
    } else {
        cpu.state.idtr = table;
    }
    cpu.code.clock.serialize();
    Err(Break::End)
}
fn store_table(cpu: &mut Cpu, op: &Op) -> Flow {
    umip(cpu)?;
    cpu.intercept(
        op,
        [code::GDTR_READ, code::IDTR_READ][usize::from(op.aux & 1)],
    )?;
    let table = if op.aux == 0 {
        cpu.state.gdtr
    } else {
        cpu.state.idtr
    };
    let mut image = [0; 10];
    image[..2].copy_from_slice(&table.limit.to_le_bytes());
    image[2..].copy_from_slice(&table.base.to_le_bytes());
    let len = if cpu.is_64() { 10 } else { 6 };
    let lin = cpu.lin(op, len as u32)?;
    cpu.check_alignment(lin, 4)?;
    cpu.store_bytes(lin, &image[..len])?;
    cpu.stored()
}

fn lldt(cpu: &mut Cpu, op: &Op) -> Flow {
    protected_only(cpu)?;
    cpu.privileged()?;
    cpu.intercept(op, code::LDTR_WRITE)?;
    let selector = cpu.operand::<u16>(op, 0)?;
    if selector & !3 == 0 {
        cpu.state.ldtr = Segment {
            selector,
            base: 0,
            limit: 0,
            rights: Segment::UNUSABLE,
        };
    } else {
        cpu.state.ldtr = system_segment(cpu, selector, 2)?;
    }
    cpu.code.clock.serialize();
    Err(Break::End)
}
fn ltr(cpu: &mut Cpu, op: &Op) -> Flow {
    protected_only(cpu)?;
    cpu.privileged()?;
    cpu.intercept(op, code::TR_WRITE)?;
    let selector = cpu.operand::<u16>(op, 0)?;
    if selector & !3 == 0 {
        return Err(cpu.gp());
    }
    let mut segment = system_segment(cpu, selector, 9)?;
    cpu.mark_descriptor(selector, 2)?;
    segment.rights |= 2;
    cpu.state.tr = segment;
    cpu.code.clock.serialize();
    Err(Break::End)
}
/// Executes SLDT (`aux` is 0) or STR (1).
fn store_selector<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    protected_only(cpu)?;
    umip(cpu)?;
    cpu.intercept(
        op,
        [code::LDTR_READ, code::TR_READ][usize::from(op.aux & 1)],
    )?;
    let selector = if op.aux == 0 {
        cpu.state.ldtr
    } else {
        cpu.state.tr
    }
    .selector;
    if op.r[0] == MEM {
        cpu.store_mem::<u16>(op, selector)?;
    } else {
        T::set(cpu, op.r[0], T::of(selector.into()));
    }
    cpu.stored()
}

fn protected_only(cpu: &mut Cpu) -> Result<(), Break> {
    if !cpu.has_paragraphs() {
        Ok(())
    } else {
        Err(cpu.ud())
    }
}

/// Returns the descriptor of `selector`, if its type and privilege level allow LAR, LSL, VERR or VERW to use it.
/// `system` lists the types of system descriptors that the instruction accepts.
fn visible(cpu: &mut Cpu, selector: u16, system: &[u8]) -> Result<Option<Descriptor>, Break> {
    if selector & !3 == 0 {
        return Ok(None);
    }
    let Some(descriptor) = cpu.try_descriptor(selector)? else {
        return Ok(None);
    };
    let kind = descriptor.kind();
    if kind & 16 == 0 && !system.contains(&kind) {
        return Ok(None);
    }
    let reachable =
        descriptor.conforming() || descriptor.dpl() >= cpu.cpl.max((selector & 3) as u8);
    Ok(reachable.then_some(descriptor))
}
fn lar<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    protected_only(cpu)?;
    let selector = cpu.operand::<u16>(op, 1)?;
    let kinds: &[u8] = if cpu.long_mode() {
        &[2, 9, 11, 12]
    } else {
        &[1, 2, 3, 4, 5, 9, 11, 12]
    };
    let found = visible(cpu, selector, kinds)?;
    if let Some(descriptor) = found {
        T::set(cpu, op.r[0], T::of(descriptor.0 >> 32 & 0x00ff_ff00));
    }
    cpu.set_flags(ZF, if found.is_some() { ZF } else { 0 });
    Ok(())
}
fn lsl<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    protected_only(cpu)?;
    let selector = cpu.operand::<u16>(op, 1)?;
    let kinds: &[u8] = if cpu.long_mode() {
        &[2, 9, 11]
    } else {
        &[1, 2, 3, 9, 11]
    };
    let found = visible(cpu, selector, kinds)?;
    if let Some(descriptor) = found {
        T::set(cpu, op.r[0], T::of(descriptor.limit().into()));
    }
    cpu.set_flags(ZF, if found.is_some() { ZF } else { 0 });
    Ok(())
}
/// Executes VERR (`aux` is 0) or VERW (1).
fn verify(cpu: &mut Cpu, op: &Op) -> Flow {
    protected_only(cpu)?;
    let selector = cpu.operand::<u16>(op, 0)?;
    let fine = visible(cpu, selector, &[])?.is_some_and(|d| match op.aux {
        0 => !d.is_code() || d.kind() & 2 != 0,
        _ => !d.is_code() && d.kind() & 2 != 0,
    });
    cpu.set_flags(ZF, if fine { ZF } else { 0 });
    Ok(())
}

/// Executes ARPL, which raises the requested privilege level of the destination to that of the source.
fn arpl(cpu: &mut Cpu, op: &Op) -> Flow {
    protected_only(cpu)?;
    let source = u16::get(cpu, op.r[1]) & 3;
    let adjusted = match op.r[0] {
        MEM => {
            let lin = cpu.lin(op, 2)?;
            let raise = |old: u16| old & !3 | (old & 3).max(source);
            let (old, new) = cpu.update::<u16>(lin, false, raise)?;
            old != new
        }
        r => {
            let old = u16::get(cpu, r);
            let new = old & !3 | (old & 3).max(source);
            u16::set(cpu, r, new);
            old != new
        }
    };
    cpu.set_flags(ZF, if adjusted { ZF } else { 0 });
    cpu.stored()
}

fn is_segment(insn: &Instruction, k: u32) -> bool {
    insn.op_kind(k) == OpKind::Register && insn.op_register(k).is_segment_register()
}

/// Lowers MOV to or from a segment register.
pub(super) fn lower_mov(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    match (is_segment(insn, 0), is_segment(insn, 1)) {
        (true, _) => Some(mov_to_segment),
        (_, true) => Some(by_size!(op.size, mov_from_segment)),
        _ => None,
    }
}

/// Stores in `op` the number of the segment register that LDS, LES, LFS, LGS or LSS loads.
fn far(op: &mut Op, segment: u8) -> Handler {
    op.aux = segment;
    load_far
}

/// Stores in `op` the descriptor table that the instruction accesses, and the size of the table's base.
fn table(insn: &Instruction, op: &mut Op) {
    op.aux = u8::from(matches!(op.mnemonic, Mnemonic::Lidt | Mnemonic::Sidt));
    let narrow = matches!(insn.code(), Code::Lgdt_m1632_16 | Code::Lidt_m1632_16);
    op.size = if narrow { 1 } else { 2 };
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Les => far(op, 0),
    Lss => far(op, 2),
    Lds => far(op, 3),
    Lfs => far(op, 4),
    Lgs => far(op, 5),
    Lgdt | Lidt => {
        table(insn, op);
        load_table
    },
    Sgdt | Sidt => {
        table(insn, op);
        store_table
    },
    Lldt => lldt,
    Ltr => ltr,
    Sldt => by_size!(op.size, store_selector),
    Str => {
        op.aux = 1;
        by_size!(op.size, store_selector)
    },
    Arpl => arpl,
    Lar => by_size!(op.size, lar),
    Lsl => by_size!(op.size, lsl),
    Verr => verify,
    Verw => {
        op.aux = 1;
        verify
    },
};
