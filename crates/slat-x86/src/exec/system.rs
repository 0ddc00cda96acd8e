//! System instructions: control and debug registers, MSRs, CPUID, time, HLT, flags, TLB and cache control.

use crate::Cpu;
use crate::debug::DR6_ONES;
use crate::exec::v86::InterruptFlag;
use crate::int::{Int, by_size};
use crate::machine::{
    Exit, GuestFlush, HypercallInstruction, HypercallOutcome, Hypercalls, MsrFault,
};
use crate::mem::CACHE_LINE;
use crate::op::segment;
use crate::op::{Break, Flow, Handler, MEM, NONE, Op, form};
use crate::state::{control::*, flags, is_pat};
use crate::svm::VM_CR_SVMDIS;
use crate::svm::intercept::code;
use crate::tlb::Which;
use iced_x86::{Code, CodeSize, Instruction, Mnemonic, OpKind, Register};
use slat_process::calls::{self, Call};
use std::sync::atomic::{Ordering, fence};

/// Bits of CR0 whose change loads the page-directory-pointer entries of PAE paging again (SDM volume 3, "PDPTE Registers").
const CR0_LOADS_PDPTES: u64 = CR0_PG | CR0_CD | CR0_NW;
const CR4_LOADS_PDPTES: u64 = CR4_PAE | CR4_PGE | CR4_PSE | CR4_SMEP;

/// Bit of MOV to CR3's operand with CR4.PCIDE: no translations are invalidated.
const CR3_KEEPS: u64 = 1 << 63;

/// SVM's MSRs.
const VM_CR: u32 = 0xc001_0114;
const VM_HSAVE_PA: u32 = 0xc001_0117;
const TSC_RATIO: u32 = 0xc000_0104;
/// The time-stamp counter.
const TSC: u32 = 0x10;
/// The task priority of a local APIC in x2APIC mode.
const X2APIC_TPR: u32 = 0x808;
/// Hyper-V's MSRs for registers of the APIC: EOI, ICR, TPR.
const HYPERV_EOI: u32 = 0x4000_0070;
const HYPERV_TPR: u32 = 0x4000_0072;

fn low_half(v: u64) -> u64 {
    v & 0xffff_ffff
}
fn edx_eax(cpu: &Cpu) -> u64 {
    low_half(cpu.state.gpr[0]) | cpu.state.gpr[2] << 32
}
fn set_edx_eax(cpu: &mut Cpu, v: u64) {
    cpu.state.gpr[0] = low_half(v);
    cpu.state.gpr[2] = v >> 32;
}

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

    /// Whether PAE paging is in use.
    pub(crate) fn pae_paging(&self) -> bool {
        let state = &self.state;
        state.cr0 & CR0_PG != 0 && state.cr4 & CR4_PAE != 0 && !self.long_mode()
    }

    /// Reads the page-directory-pointer entries at CR3. #GP(0) if a present one has a reserved bit, or if there is no memory.
    pub(crate) fn load_pdptes(&mut self, cr3: u64) -> Result<[u64; 4], Break> {
        // With nested paging each walk reads them (AMD64 volume 2, 15.25.10).
        match self.svm.nested_paging() {
            Some(_) => Ok([0; 4]),
            None => self.read_pdptes(cr3),
        }
    }

    /// Does [`load_pdptes`](Self::load_pdptes) from memory.
    pub(crate) fn read_pdptes(&mut self, cr3: u64) -> Result<[u64; 4], Break> {
        let gpa = cr3 & 0xffff_ffe0;
        let mut bytes = [0; 32];
        if !self.read_physical(gpa, &mut bytes)? {
            return Err(self.gp());
        }
        let mut pdptes = [0; 4];
        for (pdpte, bytes) in pdptes.iter_mut().zip(bytes.as_chunks().0) {
            *pdpte = u64::from_le_bytes(*bytes);
        }
        match self.features.valid_pdptes(&pdptes) {
            true => Ok(pdptes),
            false => Err(self.gp()),
        }
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

    fn read_msr(&mut self, msr: u32) -> Result<u64, MsrFault> {
        if !self.machine().allows_msr(msr, false) {
            return Err(MsrFault::Forbidden);
        }
        let state = &self.state;
        Ok(match msr {
            0x174 => state.sysenter_cs,
            0x175 => state.sysenter_esp,
            0x176 => state.sysenter_eip,
            0x277 => state.pat,
            0xc000_0080 => state.efer,
            0xc000_0081 => state.star,
            0xc000_0082 => state.lstar,
            0xc000_0083 => state.cstar,
            0xc000_0084 => state.sfmask,
            0xc000_0100 => state.fs.base,
            0xc000_0101 => state.gs.base,
            0xc000_0102 => state.kernel_gs_base,
            0xc000_0103 if !self.features.has_tsc_aux() => return Err(MsrFault::Unknown),
            0xc000_0103 => state.tsc_aux,
            VM_CR if self.features.has_svm() => state.vm_cr,
            VM_HSAVE_PA if self.features.has_svm() => state.vm_hsave_pa,
            TSC_RATIO if self.features.has_tsc_ratio() => state.tsc_ratio,
            TSC => {
                let tsc = self.machine().rdmsr(msr)?;
                self.svm.tsc(tsc, self.state.tsc_ratio)
            }
            _ => self.machine().rdmsr(msr)?,
        })
    }

    fn write_msr(&mut self, msr: u32, v: u64) -> Result<(), MsrFault> {
        if !self.machine().allows_msr(msr, true) {
            return Err(MsrFault::Forbidden);
        }
        let needs_canonical = match msr {
            // AMD's CPUs have 32 bits of these.
            0x175 | 0x176 => self.features.is_intel,
            0xc000_0082 | 0xc000_0083 | 0xc000_0100..=0xc000_0102 => true,
            _ => false,
        };
        if needs_canonical && !self.canonical_value(v) {
            return Err(MsrFault::Invalid);
        }
        match msr {
            0x174 => self.state.sysenter_cs = low_half(v),
            0x175 => self.state.sysenter_esp = self.features.sysenter_address(v),
            0x176 => self.state.sysenter_eip = self.features.sysenter_address(v),
            0x277 => {
                if !is_pat(v) {
                    return Err(MsrFault::Invalid);
                }
                self.state.pat = v;
            }
            0xc000_0080 => {
                let known = self.features.efer;
                let paging = self.state.cr0 & CR0_PG != 0;
                if v & !known != 0 || paging && (v ^ self.state.efer) & EFER_LME != 0 {
                    return Err(MsrFault::Invalid);
                }
                let enables = v & EFER_SVME != 0;
                if enables && self.state.vm_cr & VM_CR_SVMDIS != 0 {
                    return Err(MsrFault::Invalid);
                }
                if !enables && self.state.efer & EFER_SVME != 0 {
                    // 15.4 leaves it open; as KVM.
                    self.state.events.gif_clear = false;
                }
                self.state.efer = v & !EFER_LMA | self.state.efer & EFER_LMA;
            }
            0xc000_0081 => self.state.star = v,
            0xc000_0082 => self.state.lstar = v,
            0xc000_0083 => self.state.cstar = v,
            0xc000_0084 => self.state.sfmask = low_half(v),
            0xc000_0100 => self.state.fs.base = v,
            0xc000_0101 => self.state.gs.base = v,
            0xc000_0102 => self.state.kernel_gs_base = v,
            0xc000_0103 if !self.features.has_tsc_aux() => return Err(MsrFault::Unknown),
            0xc000_0103 if self.features.is_intel && v >> 32 != 0 => {
                return Err(MsrFault::Invalid);
            }
            0xc000_0103 => self.state.tsc_aux = low_half(v),
            VM_CR if self.features.has_svm() => {
                self.state.vm_cr = self.state.written_vm_cr(v).ok_or(MsrFault::Invalid)?;
            }
            VM_HSAVE_PA if self.features.has_svm() => {
                if v & (0xfff | self.features.beyond_physical()) != 0 {
                    return Err(MsrFault::Invalid);
                }
                self.state.vm_hsave_pa = v;
            }
            // 8 bits of integer, 32 of fraction.
            TSC_RATIO if self.features.has_tsc_ratio() => match v >> 40 {
                0 => self.state.tsc_ratio = v,
                _ => return Err(MsrFault::Invalid),
            },
            _ => {
                self.machine().wrmsr(msr, v)?;
                if matches!(msr, X2APIC_TPR | HYPERV_TPR) {
                    self.state.cr8 = v >> 4 & 15;
                }
            }
        }
        Ok(())
    }

    /// Returns the guest's time-stamp counter.
    fn guest_tsc(&mut self) -> u64 {
        let tsc = self.machine().tsc();
        self.svm.tsc(tsc, self.state.tsc_ratio)
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
    cpu.clock.serialize();
    cpu.refresh();
    Err(Break::End)
}

/// Returns the number of a debug register: DR4 and DR5 are other names of DR6 and DR7 unless CR4.DE forbids them.
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
    cpu.clock.serialize();
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
    // PE can be set here but not cleared.
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

fn rdmsr(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.privileged()?;
    let msr = cpu.state.gpr[1] as u32;
    cpu.intercept_msr(op, msr, false)?;
    match cpu.read_msr(msr) {
        Ok(v) => set_edx_eax(cpu, v),
        Err(why) => return Err(cpu.refuse_msr(op, msr, None, why)),
    }
    Ok(())
}
const TSC_DEADLINE: u32 = 0x6e0;
const X2APIC_FIRST: u32 = 0x800;
const X2APIC_LAST: u32 = 0x83f;

fn wrmsr(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.privileged()?;
    let (msr, v) = (cpu.state.gpr[1] as u32, edx_eax(cpu));
    cpu.intercept_msr(op, msr, true)?;
    if let Err(why) = cpu.write_msr(msr, v) {
        return Err(cpu.refuse_msr(op, msr, Some(v), why));
    }
    if cpu.svm.is_guest() && cpu.state.efer & EFER_SVME == 0 {
        // The guest has disabled the world that it is in, which its hypervisor should have intercepted (15.4). As in KVM, that one is lost.
        cpu.drop_guest_mode();
        return Err(cpu.leave(Exit::Shutdown));
    }
    // SDM volume 3, "Serializing Instructions": these writes are none, and timers and IPIs are made of them. Hyper-V's are the same
    // registers of the APIC.
    if !matches!(msr, TSC_DEADLINE | X2APIC_FIRST..=X2APIC_LAST | HYPERV_EOI..=HYPERV_TPR) {
        cpu.clock.serialize();
    }
    cpu.refresh();
    Err(Break::End)
}

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
    cpu.clock.serialize();
    Err(Break::End)
}

impl Cpu {
    /// Sets in a leaf of CPUID (EAX, EBX, ECX, EDX) what follows from the CPU's state: OSXSAVE and OSPKE, which mirror CR4, and the
    /// bytes of XSAVE areas, which follow from XCR0.
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

/// Raises #UD without a feature.
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
/// RDTSC and RDTSCP, which have intercepts of their own.
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
    cpu.exit = Some(Exit::Hlt);
    Err(Break::ExitAfter)
}

/// RSM: the caller of the run carries it out.
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
/// STAC (`aux` 1) and CLAC.
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
    // SDM volume 2: does nothing for an address that is not canonical.
    if cpu.canonical(lin) {
        cpu.flush_page(lin, Which::CurrentAndGlobal);
        cpu.tell_flush(GuestFlush::Page(lin));
    }
    cpu.clock.serialize();
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
    cpu.clock.serialize();
    Err(Break::End)
}
/// INVD (`aux` 1) and WBINVD.
fn invalidate_caches(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.privileged()?;
    cpu.intercept(op, [code::WBINVD, code::INVD][usize::from(op.aux & 1)])?;
    cpu.clock.serialize();
    Err(Break::End)
}
/// MONITOR, and MWAIT (`aux` 1).
fn monitor(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.cpl != 0 || !cpu.machine().has_monitor() {
        return Err(cpu.ud());
    }
    cpu.intercept(op, [code::MONITOR, code::MWAIT][usize::from(op.aux & 1)])
}
fn pause(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.intercept_pause(op)
}
/// RDPMC: there are no performance counters.
fn rdpmc(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.intercept(op, code::RDPMC)?;
    Err(cpu.ud())
}
/// CLZERO: zeroes the cache line of the address in RAX.
fn clzero(cpu: &mut Cpu, op: &Op) -> Flow {
    has(cpu, cpu.features.clzero)?;
    let lin = cpu.lin(op, 1)? & !(CACHE_LINE - 1);
    cpu.store_bytes(lin, &[0; CACHE_LINE as usize])?;
    cpu.stored()
}
/// Checks the access as a load; the line is not flushed.
fn touch(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.load_mem::<u8>(op).map(|_| ())
}
fn barrier(_: &mut Cpu, _: &Op) -> Flow {
    fence(Ordering::SeqCst);
    Ok(())
}
fn serialize(cpu: &mut Cpu, _: &Op) -> Flow {
    cpu.clock.serialize();
    Err(Break::End)
}

fn vmcall(cpu: &mut Cpu, op: &Op) -> Flow {
    hypercall_by(cpu, op, HypercallInstruction::Vmcall)
}
fn vmmcall(cpu: &mut Cpu, op: &Op) -> Flow {
    hypercall_by(cpu, op, HypercallInstruction::Vmmcall)
}
fn hypercall_by(cpu: &mut Cpu, op: &Op, which: HypercallInstruction) -> Flow {
    if cpu.svm.is_guest() {
        return nested_hypercall(cpu, op, which);
    }
    match cpu.machine().hypercall_instruction(which) {
        Hypercalls::Executed => hypercall(cpu, op),
        Hypercalls::Undefined => Err(cpu.ud()),
        Hypercalls::Patched(by) => patch(cpu, op, by),
    }
}
/// VMMCALL of a guest whose hypervisor is a guest: it calls that one, or nobody. VMCALL becomes VMMCALL, as in KVM, where the machine
/// corrects such guests at all.
fn nested_hypercall(cpu: &mut Cpu, op: &Op, which: HypercallInstruction) -> Flow {
    match which {
        HypercallInstruction::Vmmcall => cpu.intercept(op, code::VMMCALL)?,
        HypercallInstruction::Vmcall => {
            if cpu.machine().hypercall_instruction(which) != Hypercalls::Undefined {
                return patch(cpu, op, HypercallInstruction::Vmmcall);
            }
        }
    }
    Err(cpu.ud())
}
/// Overwrites the instruction by `by`, which is executed.
fn patch(cpu: &mut Cpu, op: &Op, by: HypercallInstruction) -> Flow {
    let at = cpu.state.cs.base.wrapping_add(cpu.rip_of(op));
    cpu.store_bytes(at, &by.bytes())?;
    Err(Break::Retry)
}
fn hypercall(cpu: &mut Cpu, op: &Op) -> Flow {
    Err(match cpu.call_machine() {
        HypercallOutcome::Done => Break::End,
        HypercallOutcome::Outside => cpu.ask_hypercall(op),
        HypercallOutcome::Undefined => cpu.ud(),
        HypercallOutcome::Retry => Break::Retry,
    })
}

/// RDRAND (`aux` 0) and RDSEED.
fn random<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    has(
        cpu,
        [cpu.features.rdrand, cpu.features.rdseed][usize::from(op.aux & 1)],
    )?;
    let mut value = 0u64;
    let (start, len) = (&raw mut value as usize, size_of_val(&value));
    // SAFETY: the kernel writes at most the eight bytes given.
    let got = unsafe { calls::make(Call::Random, [start, len, 0, 0, 0, 0]) };
    let ok = got == Ok(8);
    T::set(cpu, op.r[0], T::of(value));
    cpu.set_flags(flags::ARITHMETIC, if ok { flags::CF } else { 0 });
    Ok(())
}

fn move_to_system(insn: &Instruction, op: &Op) -> Option<Handler> {
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

pub(crate) fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    use Mnemonic::*;
    Some(match insn.mnemonic() {
        Mov => move_to_system(insn, op)?,
        Smsw => by_size!(op.size, smsw),
        Lmsw => lmsw,
        Clts => clts,
        Rdmsr => rdmsr,
        Wrmsr => wrmsr,
        Cpuid => cpuid,
        Rdtsc => rdtsc,
        Rdtscp => rdtscp,
        Rdpid => rdpid,
        Hlt => hlt,
        Rsm => rsm,
        Cli => cli,
        Sti => sti,
        Cld => cld,
        Mnemonic::Std => std,
        Clc => clc,
        Stc => stc,
        Cmc => cmc,
        Lahf => lahf,
        Sahf => sahf,
        Stac | Clac => {
            op.aux = u8::from(insn.mnemonic() == Stac);
            access_flag
        }
        Invlpg => invlpg,
        Invpcid => invpcid,
        Invd | Wbinvd | Wbnoinvd => {
            op.aux = u8::from(insn.mnemonic() == Invd);
            invalidate_caches
        }
        Monitor | Mwait => {
            op.aux = u8::from(insn.mnemonic() == Mwait);
            monitor
        }
        Pause => pause,
        Rdpmc => rdpmc,
        Clflush | Clflushopt | Clwb => touch,
        Clzero => {
            // The memory operand, which the instruction does not name: at RAX in DS, or in another segment.
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
            clzero
        }
        Mfence | Lfence | Sfence => barrier,
        Serialize => serialize,
        Vmcall => vmcall,
        Vmmcall => vmmcall,
        Rdrand | Rdseed => {
            op.aux = u8::from(insn.mnemonic() == Rdseed);
            by_size!(op.size, random)
        }
        _ => return None,
    })
}
