//! System instructions: CPUID, time, HLT, flags, TLB and cache control. Other system instructions are in `registers`,
//! `msr` and `hypercall`.

use super::halves::{low_half, set_edx_eax};
use crate::Cpu;
use crate::exec::v86::InterruptFlag;
use crate::int::{Int, by_size};
use crate::machine::{Exit, GuestFlush};
use crate::mem::CACHE_LINE;
use crate::nested::code;
use crate::op::segment;
use crate::op::{Break, Flow, Handler, NONE, Op, Row, form, rows};
use crate::state::{control::*, flags};
use crate::tlb::Which;
use iced_x86::{Code, CodeSize, Instruction, Register};
use slat_process::calls::{self, Call};
use std::sync::atomic::{Ordering, fence};

fn cpuid(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.cpl != 0 && cpu.machine().cpuid_faults() {
        return Err(cpu.gp());
    }
    cpu.intercept(op, code::CPUID)?;
    let (leaf, subleaf) = (cpu.state.gpr[0] as u32, cpu.state.gpr[1] as u32);
    let mut out = cpu.machine().cpuid(leaf, subleaf);
    cpu.show_state(leaf, subleaf, &mut out);
    for (register, v) in [0, 3, 1, 2].into_iter().zip(out) {
        cpu.state.gpr[register] = v.into();
    }
    cpu.code.clock.serialize();
    Err(Break::End)
}

impl Cpu {
    /// Sets the parts of a CPUID leaf (EAX, EBX, ECX, EDX) that depend on the CPU's state: OSXSAVE and OSPKE, which
    /// depend on CR4, and the sizes of XSAVE areas, which depend on XCR0.
    pub fn show_state(&self, leaf: u32, subleaf: u32, out: &mut [u32; 4]) {
        let cr4 = self.state.cr4;
        let mut mirror = |feature: u32, bit: u32, enable: u64| {
            let on = out[2] >> feature & 1 != 0 && cr4 & enable != 0;
            out[2] = out[2] & !(1 << bit) | u32::from(on) << bit;
        };
        match (leaf, subleaf) {
            (1, _) => mirror(26, 27, CR4_OSXSAVE),
            (7, 0) => mirror(3, 4, CR4_PKE),
            (0xd, 0) if out[0] != 0 => out[1] = self.xsave_bytes() as u32,
            (0xd, 1) if self.features.xsavec || self.features.xsaves => {
                out[1] = self.compacted_bytes() as u32;
            }
            _ => {}
        }
    }
}

/// Raises #UD unless `feature`, which says whether the CPU has a feature, is true.
fn has(cpu: &mut Cpu, feature: bool) -> Result<(), Break> {
    match feature {
        true => Ok(()),
        false => Err(cpu.ud()),
    }
}

fn time_allowed(cpu: &mut Cpu) -> Result<(), Break> {
    if cpu.state.cr4 & CR4_TSD != 0 {
        cpu.privileged()
    } else {
        Ok(())
    }
}
fn rdtsc(cpu: &mut Cpu, op: &Op) -> Flow {
    read_tsc(cpu, op, code::RDTSC)
}
/// Executes RDTSC or RDTSCP. `code` is the SVM exit code for its interception.
fn read_tsc(cpu: &mut Cpu, op: &Op, code: u64) -> Flow {
    time_allowed(cpu)?;
    cpu.intercept(op, code)?;
    let tsc = cpu.guest_tsc();
    set_edx_eax(cpu, tsc);
    Ok(())
}
fn rdtscp(cpu: &mut Cpu, op: &Op) -> Flow {
    has(cpu, cpu.features.rdtscp)?;
    read_tsc(cpu, op, code::RDTSCP)?;
    cpu.state.gpr[1] = low_half(cpu.state.tsc_aux);
    Ok(())
}
fn rdpid(cpu: &mut Cpu, op: &Op) -> Flow {
    has(cpu, cpu.features.rdpid)?;
    let v = low_half(cpu.state.tsc_aux);
    u64::set(cpu, op.r[0], v);
    Ok(())
}

fn hlt(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.privileged()?;
    cpu.intercept(op, code::HLT)?;
    cpu.raised.exit = Some(Exit::Hlt);
    Err(Break::ExitAfter)
}

/// Executes RSM: ends the run, so that the caller restores the saved state.
fn rsm(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.intercept(op, code::RSM)?;
    match cpu.state.events.smm {
        true => Err(cpu.leave(Exit::Rsm)),
        false => Err(cpu.ud()),
    }
}

fn cli(cpu: &mut Cpu, _: &Op) -> Flow {
    cpu.state.rflags &= match cpu.interrupt_flag()? {
        InterruptFlag::Real => !flags::IF,
        InterruptFlag::Virtual => !flags::VIF,
    };
    Ok(())
}
fn sti(cpu: &mut Cpu, _: &Op) -> Flow {
    if cpu.interrupt_flag()? == InterruptFlag::Virtual {
        return cpu.enable_virtual_interrupts();
    }
    if cpu.state.rflags & flags::IF != 0 {
        return Ok(());
    }
    cpu.state.rflags |= flags::IF;
    cpu.state.events.sti_shadow = true;
    cpu.slow = true;
    Err(Break::End)
}
fn cld(cpu: &mut Cpu, _: &Op) -> Flow {
    cpu.state.rflags &= !flags::DF;
    Ok(())
}
fn std(cpu: &mut Cpu, _: &Op) -> Flow {
    cpu.state.rflags |= flags::DF;
    Ok(())
}
fn clc(cpu: &mut Cpu, _: &Op) -> Flow {
    cpu.set_flags(flags::CF, 0);
    Ok(())
}
fn stc(cpu: &mut Cpu, _: &Op) -> Flow {
    cpu.set_flags(flags::CF, flags::CF);
    Ok(())
}
fn cmc(cpu: &mut Cpu, _: &Op) -> Flow {
    let flipped = !cpu.flags() & flags::CF;
    cpu.set_flags(flags::CF, flipped);
    Ok(())
}
fn lahf(cpu: &mut Cpu, _: &Op) -> Flow {
    let v = cpu.flags() as u8;
    u8::set(cpu, 16, v);
    Ok(())
}
fn sahf(cpu: &mut Cpu, _: &Op) -> Flow {
    let v = u8::get(cpu, 16).into();
    cpu.set_flags(flags::SF | flags::ZF | flags::AF | flags::PF | flags::CF, v);
    Ok(())
}
/// Executes STAC (`aux` is 1) or CLAC.
fn access_flag(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.cpl != 0 {
        return Err(cpu.ud());
    }
    cpu.state.rflags = cpu.state.rflags & !flags::AC | (u64::from(op.aux) * flags::AC);
    cpu.update_table();
    Ok(())
}

fn invlpg(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.privileged()?;
    let offset = cpu.offset(op);
    let base = cpu.segment(op.seg).base;
    let lin = match cpu.is_64() {
        true if op.seg < 4 => offset,
        true => base.wrapping_add(offset),
        false => low_half(base.wrapping_add(offset)),
    };
    cpu.intercept_with(op, code::INVLPG, lin)?;
    // INVLPG does nothing if the address is not canonical (SDM volume 2).
    if cpu.canonical(lin) {
        cpu.flush_page(lin, Which::CurrentAndGlobal);
        cpu.tell_flush(GuestFlush::Page(lin));
    }
    cpu.code.clock.serialize();
    Err(Break::End)
}
fn invpcid(cpu: &mut Cpu, op: &Op) -> Flow {
    has(cpu, cpu.features.invpcid)?;
    cpu.privileged()?;
    cpu.intercept(op, code::INVPCID)?;
    let kind = if cpu.is_64() {
        u64::get(cpu, op.r[0])
    } else {
        u32::get(cpu, op.r[0]).zx()
    };
    let descriptor = cpu.load_mem::<u128>(op)?;
    let pcid = descriptor as u64;
    let address = (descriptor >> 64) as u64;
    let (pcids, current) = match cpu.state.cr4 & CR4_PCIDE != 0 {
        true => (12, cpu.state.cr3 & 0xfff),
        false => (0, 0),
    };
    if kind > 3 || kind < 2 && pcid >> pcids != 0 || kind == 0 && !cpu.canonical(address) {
        return Err(cpu.gp());
    }
    match kind {
        0 => cpu.flush_page(address, Which::Of(cpu.space_of(pcid as u16))),
        1 => cpu.flush_pcid(pcid as u16),
        2 => cpu.flush_other(),
        _ => cpu.flush_spaces(),
    }
    cpu.tell_flush(match kind == 0 && pcid == current {
        true => GuestFlush::Page(address),
        false => GuestFlush::All,
    });
    cpu.code.clock.serialize();
    Err(Break::End)
}
/// Executes INVD (`aux` is 1) or WBINVD.
fn invalidate_caches(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.privileged()?;
    cpu.intercept(op, [code::WBINVD, code::INVD][usize::from(op.aux & 1)])?;
    cpu.code.clock.serialize();
    Err(Break::End)
}
/// Executes MONITOR, or MWAIT (`aux` is 1).
fn monitor(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.cpl != 0 || !cpu.machine().has_monitor() {
        return Err(cpu.ud());
    }
    cpu.intercept(op, [code::MONITOR, code::MWAIT][usize::from(op.aux & 1)])
}
fn pause(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.intercept_pause(op)
}
/// Executes RDPMC, which always fails: the CPU has no performance counters.
fn rdpmc(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.intercept(op, code::RDPMC)?;
    Err(cpu.ud())
}
/// Executes CLZERO, which zeroes the cache line of the address in RAX.
fn clzero(cpu: &mut Cpu, op: &Op) -> Flow {
    has(cpu, cpu.features.clzero)?;
    let lin = cpu.lin(op, 1)? & !(CACHE_LINE - 1);
    cpu.store_bytes(lin, &[0; CACHE_LINE as usize])?;
    cpu.stored()
}
/// Executes an instruction that flushes a cache line: checks the address as a load does, but flushes nothing.
fn touch(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.load_mem::<u8>(op).map(|_| ())
}
fn barrier(_: &mut Cpu, _: &Op) -> Flow {
    fence(Ordering::SeqCst);
    Ok(())
}
fn serialize(cpu: &mut Cpu, _: &Op) -> Flow {
    cpu.code.clock.serialize();
    Err(Break::End)
}

/// Executes RDRAND (`aux` is 0) or RDSEED.
fn random<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    has(
        cpu,
        [cpu.features.rdrand, cpu.features.rdseed][usize::from(op.aux & 1)],
    )?;
    let mut value = 0u64;
    let (start, len) = (&raw mut value as usize, size_of_val(&value));
    // SAFETY: the kernel writes at most the eight bytes of this buffer.
    let got = unsafe { calls::make(Call::Random, [start, len, 0, 0, 0, 0]) };
    let ok = got == Ok(8);
    T::set(cpu, op.r[0], T::of(value));
    cpu.set_flags(flags::ARITHMETIC, if ok { flags::CF } else { 0 });
    Ok(())
}

/// Marks `op` as the second of two instructions that share a handler: sets `aux` to 1.
fn second(op: &mut Op, handler: Handler) -> Handler {
    op.aux = 1;
    handler
}

/// Fills in the implicit memory operand of CLZERO: the address in RAX, in DS or the segment that a prefix selects.
fn address_in_ax(insn: &Instruction, op: &mut Op) {
    (op.base, op.index, op.disp, op.form) = (0, NONE, 0, form::FULL);
    op.seg = match insn.segment_prefix() {
        r @ (Register::FS | Register::GS) => segment(r),
        _ if insn.code_size() == CodeSize::Code64 => segment(Register::DS),
        r => segment(r),
    };
    op.address_size = match insn.code() {
        Code::Clzerow => 2,
        Code::Clzerod => 4,
        _ => 8,
    };
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Cpuid => cpuid,
    Rdtsc => rdtsc,
    Rdtscp => rdtscp,
    Rdpid => rdpid,
    Hlt => hlt,
    Rsm => rsm,
    Cli => cli,
    Sti => sti,
    Cld => cld,
    Std => std,
    Clc => clc,
    Stc => stc,
    Cmc => cmc,
    Lahf => lahf,
    Sahf => sahf,
    Clac => access_flag,
    Stac => second(op, access_flag),
    Invlpg => invlpg,
    Invpcid => invpcid,
    Wbinvd | Wbnoinvd => invalidate_caches,
    Invd => second(op, invalidate_caches),
    Monitor => monitor,
    Mwait => second(op, monitor),
    Pause => pause,
    Rdpmc => rdpmc,
    Clflush | Clflushopt | Clwb => touch,
    Clzero => {
        address_in_ax(insn, op);
        clzero
    },
    Mfence | Lfence | Sfence => barrier,
    Serialize => serialize,
    Rdrand => by_size!(op.size, random),
    Rdseed => {
        op.aux = 1;
        by_size!(op.size, random)
    },
};
