//! Model-specific registers: RDMSR, WRMSR; and the time-stamp counter.

use super::halves::{edx_eax, low_half, set_edx_eax};
use crate::Cpu;
use crate::machine::{Exit, MsrFault};
use crate::op::{Break, Flow, Op, Row, rows};
use crate::state::{control::*, is_pat};
use crate::svm::VM_CR_SVMDIS;

/// The numbers of SVM's MSRs.
const VM_CR: u32 = 0xc001_0114;
const VM_HSAVE_PA: u32 = 0xc001_0117;
const TSC_RATIO: u32 = 0xc000_0104;
/// The MSR of the time-stamp counter.
const TSC: u32 = 0x10;
/// The MSR of the local APIC's task priority in x2APIC mode.
const X2APIC_TPR: u32 = 0x808;
/// Hyper-V's MSRs for the local APIC's registers EOI, ICR and TPR.
const HYPERV_EOI: u32 = 0x4000_0070;
const HYPERV_TPR: u32 = 0x4000_0072;
const TSC_DEADLINE: u32 = 0x6e0;
const X2APIC_FIRST: u32 = 0x800;
const X2APIC_LAST: u32 = 0x83f;

impl Cpu {
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

    /// Returns the bits of an address that the SYSENTER MSRs can hold: on AMD's CPUs, only the lower 32 bits.
    fn sysenter_address(&self, address: u64) -> u64 {
        match self.is_intel() {
            true => address,
            false => low_half(address),
        }
    }

    fn write_msr(&mut self, msr: u32, v: u64) -> Result<(), MsrFault> {
        if !self.machine().allows_msr(msr, true) {
            return Err(MsrFault::Forbidden);
        }
        let needs_canonical = match msr {
            // AMD's SYSENTER MSRs hold only 32 bits of an address.
            0x175 | 0x176 => self.is_intel(),
            0xc000_0082 | 0xc000_0083 | 0xc000_0100..=0xc000_0102 => true,
            _ => false,
        };
        if needs_canonical && !self.canonical_value(v) {
            return Err(MsrFault::Invalid);
        }
        match msr {
            0x174 => self.state.sysenter_cs = low_half(v),
            0x175 => self.state.sysenter_esp = self.sysenter_address(v),
            0x176 => self.state.sysenter_eip = self.sysenter_address(v),
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
                    // AMD's manual (15.4) does not say what happens to GIF when EFER.SVME is cleared. As in KVM, GIF is
                    // set.
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
            0xc000_0103 if self.is_intel() && v >> 32 != 0 => {
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
            // The ratio has 8 integer bits and 32 fraction bits.
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
    pub(super) fn guest_tsc(&mut self) -> u64 {
        let tsc = self.machine().tsc();
        self.svm.tsc(tsc, self.state.tsc_ratio)
    }
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
fn wrmsr(cpu: &mut Cpu, op: &Op) -> Flow {
    cpu.privileged()?;
    let (msr, v) = (cpu.state.gpr[1] as u32, edx_eax(cpu));
    cpu.intercept_msr(op, msr, true)?;
    if let Err(why) = cpu.write_msr(msr, v) {
        return Err(cpu.refuse_msr(op, msr, Some(v), why));
    }
    if cpu.svm.is_guest() && cpu.state.efer & EFER_SVME == 0 {
        // The nested guest has cleared EFER.SVME, which its hypervisor did not intercept (15.4). As in KVM, guest mode
        // ends, and the hypervisor's state is lost.
        cpu.drop_guest_mode();
        return Err(cpu.leave(Exit::Shutdown));
    }
    // Writes to these MSRs do not serialise (SDM volume 3, "Serializing Instructions"). They are excluded because they
    // are frequent: timers and IPIs use them. Hyper-V's MSRs are other names of APIC registers.
    if !matches!(msr, TSC_DEADLINE | X2APIC_FIRST..=X2APIC_LAST | HYPERV_EOI..=HYPERV_TPR) {
        cpu.code.clock.serialize();
    }
    cpu.refresh();
    Err(Break::End)
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Rdmsr => rdmsr,
    Wrmsr => wrmsr,
};
