//! SYSCALL, SYSRET, SYSENTER, SYSEXIT, SWAPGS, and the instructions that read or write the FS and GS bases.

use crate::Cpu;
use crate::int::Int;
use crate::op::{Break, Flow, Op, Row, rows};
use crate::state::{control, flags};
use crate::watch::DR6_BS;

/// Makes SYSCALL or SYSRET cause a single-step trap at its end if the TF that it has loaded is set; its TF before does
/// not matter.
fn step_if_traced(cpu: &mut Cpu) {
    cpu.watch.steps = cpu.requests.debugger.single_step;
    if cpu.state.rflags & flags::TF != 0 {
        cpu.trap(DR6_BS);
    }
}

fn syscall(cpu: &mut Cpu, op: &Op) -> Flow {
    let wide = cpu.is_64() || cpu.long_mode() && !cpu.is_intel();
    if cpu.state.efer & control::EFER_SCE == 0 || !wide {
        return Err(cpu.ud());
    }
    let next = cpu.next_rip(op);
    let rflags = cpu.flags();
    cpu.state.gpr[1] = next;
    cpu.state.gpr[11] = rflags & !flags::RF;
    let target = if cpu.is_64() {
        cpu.state.lstar
    } else {
        cpu.state.cstar
    };
    let selector = (cpu.state.star >> 32) as u16;
    cpu.state.rflags = rflags & !(cpu.state.sfmask | flags::RF) | flags::ALWAYS;
    cpu.adopt_flags();
    step_if_traced(cpu);
    cpu.state.cs = Cpu::flat_code(selector & !3, 0, true);
    cpu.state.ss = Cpu::flat_stack((selector & !3).wrapping_add(8), 0);
    cpu.state.rip = target;
    cpu.refresh();
    Err(Break::Jump)
}

fn sysret(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.state.efer & control::EFER_SCE == 0 || !cpu.long_mode() {
        return Err(cpu.ud());
    }
    cpu.privileged()?;
    let to_64 = op.size == 3;
    let target = if to_64 {
        cpu.state.gpr[1]
    } else {
        cpu.state.gpr[1] & 0xffff_ffff
    };
    if !cpu.canonical(target) {
        return Err(cpu.gp());
    }
    let mask = flags::ARITHMETIC
        | flags::TF
        | flags::IF
        | flags::DF
        | flags::IOPL
        | flags::NT
        | flags::AC
        | flags::VIF
        | flags::VIP
        | flags::ID;
    let saved = cpu.state.gpr[11];
    cpu.set_flags(mask | flags::RF | flags::VM, saved & mask);
    step_if_traced(cpu);
    let selector = (cpu.state.star >> 48) as u16;
    let cs = if to_64 {
        selector.wrapping_add(16)
    } else {
        selector
    };
    cpu.state.cs = Cpu::flat_code(cs | 3, 3, to_64);
    cpu.state.ss = Cpu::flat_stack(selector.wrapping_add(8) | 3, 3);
    cpu.state.rip = target;
    cpu.refresh();
    Err(Break::Jump)
}

fn sysenter(cpu: &mut Cpu, _: &Op) -> Flow {
    if !cpu.protected() || cpu.state.sysenter_cs & !3 == 0 {
        return Err(cpu.gp());
    }
    let long = cpu.long_mode();
    let selector = cpu.state.sysenter_cs as u16 & !3;
    cpu.flags();
    cpu.state.rflags &= !(flags::VM | flags::IF | flags::RF);
    let narrow = |v: u64| if long { v } else { v & 0xffff_ffff };
    cpu.state.cs = Cpu::flat_code(selector, 0, long);
    cpu.state.ss = Cpu::flat_stack(selector.wrapping_add(8), 0);
    cpu.state.gpr[4] = narrow(cpu.state.sysenter_esp);
    cpu.state.rip = narrow(cpu.state.sysenter_eip);
    cpu.refresh();
    Err(Break::Jump)
}

fn sysexit(cpu: &mut Cpu, op: &Op) -> Flow {
    if !cpu.protected() || cpu.state.sysenter_cs & !3 == 0 {
        return Err(cpu.gp());
    }
    cpu.privileged()?;
    let to_64 = op.size == 3;
    let (rip, rsp) = (cpu.state.gpr[2], cpu.state.gpr[1]);
    if to_64 && !(cpu.canonical(rip) && cpu.canonical(rsp)) {
        return Err(cpu.gp());
    }
    let narrow = |v: u64| if to_64 { v } else { v & 0xffff_ffff };
    let selector = (cpu.state.sysenter_cs as u16).wrapping_add(if to_64 { 32 } else { 16 }) | 3;
    cpu.state.cs = Cpu::flat_code(selector, 3, to_64);
    cpu.state.ss = Cpu::flat_stack(selector.wrapping_add(8), 3);
    cpu.state.gpr[4] = narrow(rsp);
    cpu.state.rip = narrow(rip);
    cpu.refresh();
    Err(Break::Jump)
}

fn swapgs(cpu: &mut Cpu, _: &Op) -> Flow {
    if !cpu.is_64() {
        return Err(cpu.ud());
    }
    cpu.privileged()?;
    std::mem::swap(&mut cpu.state.gs.base, &mut cpu.state.kernel_gs_base);
    Ok(())
}

fn base_enabled(cpu: &mut Cpu) -> Result<(), Break> {
    match cpu.is_64() && cpu.state.cr4 & control::CR4_FSGSBASE != 0 {
        true => Ok(()),
        false => Err(cpu.ud()),
    }
}
/// Executes RDFSBASE or RDGSBASE. `aux` is the number of the segment register.
fn read_base<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    base_enabled(cpu)?;
    let base = cpu.segment(op.aux).base;
    T::set(cpu, op.r[0], T::of(base));
    Ok(())
}
fn write_base<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    base_enabled(cpu)?;
    let base = T::get(cpu, op.r[0]).zx();
    if !cpu.canonical(base) {
        return Err(cpu.gp());
    }
    cpu.segment(op.aux).base = base;
    Ok(())
}

/// Chooses a handler of RDFSBASE or a variant, and stores the number of the segment register in `op`.
macro_rules! base {
    ($op:expr, $segment:literal, $f:ident) => {{
        $op.aux = $segment;
        match $op.size {
            3 => $f::<u64>,
            _ => $f::<u32>,
        }
    }};
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Syscall => syscall,
    Sysret => {
        op.size = 2;
        sysret
    },
    Sysretq => {
        op.size = 3;
        sysret
    },
    Sysenter => sysenter,
    Sysexit => {
        op.size = 2;
        sysexit
    },
    Sysexitq => {
        op.size = 3;
        sysexit
    },
    Swapgs => swapgs,
    Rdfsbase => base!(op, 4, read_base),
    Rdgsbase => base!(op, 5, read_base),
    Wrfsbase => base!(op, 4, write_base),
    Wrgsbase => base!(op, 5, write_base),
};
