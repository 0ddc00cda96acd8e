//! Control and debug registers: MOV, SMSW, LMSW and CLTS.

use super::halves::low_half;
use crate::Cpu;
use crate::int::{Int, by_size};
use crate::nested::code;
use crate::op::{Break, Flow, Handler, MEM, Op, Row, rows};
use crate::state::control::*;
use crate::watch::DR6_ONES;
use iced_x86::{Instruction, OpKind};

/// The bits of CR0 whose change makes the CPU reload the PDPTEs of PAE paging (SDM volume 3, "PDPTE Registers").
const CR0_LOADS_PDPTES: u64 = CR0_PG | CR0_CD | CR0_NW;
const CR4_LOADS_PDPTES: u64 = CR4_PAE | CR4_PGE | CR4_PSE | CR4_SMEP;

/// Bit 63 of the operand of MOV to CR3. If CR4.PCIDE is set, the bit says that no translations are invalidated.
const CR3_KEEPS: u64 = 1 << 63;

impl Cpu {
    fn write_cr0(&mut self, v: u64) -> Result<(), Break> {
        let v = v | CR0_ET;
        let bad = v >> 32 != 0
            || v & CR0_PG != 0 && v & CR0_PE == 0
            || v & CR0_NW != 0 && v & CR0_CD == 0;
        if bad {
            return Err(self.gp());
        }
        let state = &self.state;
        let (was, is) = (state.cr0 & CR0_PG != 0, v & CR0_PG != 0);
        let mut efer = state.efer;
        if !was && is && state.efer & EFER_LME != 0 {
            if state.cr4 & CR4_PAE == 0 || state.cs.long() {
                return Err(self.gp());
            }
            efer |= EFER_LMA;
        } else if was && !is {
            if self.is_64() || state.cr4 & CR4_PCIDE != 0 {
                return Err(self.gp());
            }
            efer &= !EFER_LMA;
        }
        let changes = (v ^ state.cr0) & CR0_LOADS_PDPTES != 0;
        if changes && is && efer & EFER_LMA == 0 && state.cr4 & CR4_PAE != 0 {
            self.state.pdptes = self.load_pdptes(self.state.cr3)?;
        }
        self.state.efer = efer;
        self.state.cr0 = v & CR0_KNOWN;
        Ok(())
    }

    fn write_cr4(&mut self, v: u64) -> Result<(), Break> {
        let changed = v ^ self.state.cr4;
        let bad = v & !self.features.cr4 != 0
            || self.long_mode() && (v & CR4_PAE == 0 || changed & CR4_LA57 != 0)
            || changed & v & CR4_PCIDE != 0 && (!self.long_mode() || self.state.cr3 & 0xfff != 0);
        if bad {
            return Err(self.gp());
        }
        let pae = v & CR4_PAE != 0 && self.state.cr0 & CR0_PG != 0 && !self.long_mode();
        if pae && changed & CR4_LOADS_PDPTES != 0 {
            self.state.pdptes = self.load_pdptes(self.state.cr3)?;
        }
        self.state.cr4 = v;
        Ok(())
    }

    fn write_cr3(&mut self, mut v: u64) -> Result<(), Break> {
        let keeps = self.state.cr4 & CR4_PCIDE != 0 && v & CR3_KEEPS != 0;
        if keeps {
            v &= !CR3_KEEPS;
        }
        if self.long_mode() && v & self.features.beyond_physical() != 0 {
            return Err(self.gp());
        }
        if self.pae_paging() {
            self.state.pdptes = self.load_pdptes(v)?;
        }
        self.load_cr3(v, keeps);
        Ok(())
    }
}

fn read_control(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.privileged()?;
    let v = match op.r[1] {
        0 => cpu.state.cr0,
        2 => cpu.state.cr2,
        3 => cpu.state.cr3,
        4 => cpu.state.cr4,
        8 if cpu.svm.masks_interrupts() => cpu.svm.virtual_priority(),
        8 => cpu.state.cr8,
        _ => return Err(cpu.ud()),
    };
    cpu.intercept_cr_read(op, op.r[1])?;
    if cpu.is_64() {
        u64::set(cpu, op.r[0], v);
    } else {
        u32::set(cpu, op.r[0], v as u32);
    }
    Ok(())
}
fn write_control(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.privileged()?;
    let v = u64::get(cpu, op.r[1]);
    let v = if cpu.is_64() { v } else { low_half(v) };
    if !matches!(op.r[0], 0 | 2..=4 | 8) {
        return Err(cpu.ud());
    }
    cpu.intercept_cr_write(op, op.r[0], v)?;
    match op.r[0] {
        0 => cpu.write_cr0(v)?,
        2 => cpu.state.cr2 = v,
        3 => cpu.write_cr3(v)?,
        4 => cpu.write_cr4(v)?,
        _ if v > 15 => return Err(cpu.gp()),
        _ if cpu.svm.masks_interrupts() => {
            cpu.svm.set_virtual_priority(v);
            cpu.slow = true;
        }
        _ => {
            cpu.state.cr8 = v;
            cpu.machine().set_task_priority(v);
        }
    }
    cpu.code.clock.serialize();
    cpu.refresh();
    Err(Break::End)
}

/// Returns the number of the debug register that an instruction accesses. DR4 and DR5 mean DR6 and DR7, unless CR4.DE
/// makes them undefined.
fn debug_register(cpu: &mut Cpu, number: u8) -> Result<u8, Break> {
    cpu.privileged()?;
    match number {
        4 | 5 if cpu.state.cr4 & CR4_DE != 0 => Err(cpu.ud()),
        4 | 5 => Ok(number + 2),
        0..8 => Ok(number),
        _ => Err(cpu.ud()),
    }
}
fn read_debug(cpu: &mut Cpu, op: &Op) -> Flow {
    let number = debug_register(cpu, op.r[1])?;
    cpu.intercept_with(
        op,
        code::DR_READ + u64::from(op.r[1]),
        (op.r[0] & 15).into(),
    )?;
    cpu.general_detect()?;
    let v = match number {
        6 => cpu.state.dr6,
        7 => cpu.state.dr7,
        n => cpu.state.dr[usize::from(n)],
    };
    if cpu.is_64() {
        u64::set(cpu, op.r[0], v);
    } else {
        u32::set(cpu, op.r[0], v as u32);
    }
    Ok(())
}
fn write_debug(cpu: &mut Cpu, op: &Op) -> Flow {
    let n = debug_register(cpu, op.r[0])?;
    cpu.intercept_with(
        op,
        code::DR_WRITE + u64::from(op.r[0]),
        (op.r[1] & 15).into(),
    )?;
    cpu.general_detect()?;
    let v = u64::get(cpu, op.r[1]);
    if n >= 6 && v >> 32 != 0 && cpu.is_64() {
        return Err(cpu.gp());
    }
    match n {
        6 => cpu.state.dr6 = v & 0xe00f | DR6_ONES,
        7 => cpu.state.dr7 = low_half(v) & !0xd800 | 0x400,
        n => cpu.state.dr[usize::from(n)] = v,
    }
    cpu.update_watch();
    cpu.slow = true;
    cpu.code.clock.serialize();
    Err(Break::End)
}

fn smsw<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.state.cr4 & CR4_UMIP != 0 {
        cpu.privileged()?;
    }
    cpu.intercept(op, code::CR_READ)?;
    let v = cpu.state.cr0;
    if op.r[0] == MEM {
        cpu.store_mem::<u16>(op, v as u16)?;
    } else {
        T::set(cpu, op.r[0], T::of(v));
    }
    cpu.stored()
}
fn lmsw(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.privileged()?;
    let v = u64::from(cpu.operand::<u16>(op, 0)?) & 15;
    let old = cpu.state.cr0;
    // LMSW can set PE but cannot clear it.
    cpu.intercept_lmsw(op)?;
    cpu.write_cr0(old & !14 | v)?;
    cpu.refresh();
    Err(Break::End)
}
fn clts(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.privileged()?;
    cpu.intercept(op, code::CR_WRITE)?;
    cpu.state.cr0 &= !CR0_TS;
    cpu.refresh();
    Err(Break::End)
}

/// Lowers MOV to or from a control or debug register.
pub(super) fn lower_mov(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    let register = |k| (insn.op_kind(k) == OpKind::Register).then(|| insn.op_register(k));
    let (to, from) = (register(0)?, register(1)?);
    debug_assert!(op.r[0] < 32 && op.r[1] < 32);
    if to.is_cr() {
        Some(write_control)
    } else if from.is_cr() {
        Some(read_control)
    } else if to.is_dr() {
        Some(write_debug)
    } else if from.is_dr() {
        Some(read_debug)
    } else {
        None
    }
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Smsw => by_size!(op.size, smsw),
    Lmsw => lmsw,
    Clts => clts,
};
