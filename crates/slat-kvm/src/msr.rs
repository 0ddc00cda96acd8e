//! Model-specific registers: which exist, what a write does. An unknown one is #GP for the guest and ends
//! `KVM_GET_MSRS`/`KVM_SET_MSRS` early, as with KVM's `ignore_msrs=0`.

use crate::cpuid;
use crate::machine::VcpuMachine;
use crate::vcpu::Inner;
use kvm_bindings::KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT;
use slat_irqchip::lapic::Effect;
use slat_x86::state::control;
use slat_x86::{MsrFault, State};

#[allow(missing_docs)]
pub(crate) mod index {
    pub const TSC: u32 = 0x10;
    pub const KVM_WALL_CLOCK: u32 = 0x11;
    pub const KVM_SYSTEM_TIME: u32 = 0x12;
    pub const PLATFORM_ID: u32 = 0x17;
    pub const APIC_BASE: u32 = 0x1b;
    pub const EBL_CR_POWERON: u32 = 0x2a;
    pub const FEATURE_CONTROL: u32 = 0x3a;
    pub const TSC_ADJUST: u32 = 0x3b;
    pub const UCODE_WRITE: u32 = 0x79;
    pub const UCODE_REV: u32 = 0x8b;
    pub const P6_PERFCTR0: u32 = 0xc1;
    pub const P6_PERFCTR1: u32 = 0xc2;
    pub const PLATFORM_INFO: u32 = 0xce;
    pub const MTRR_CAP: u32 = 0xfe;
    pub const MISC_FEATURES: u32 = 0x140;
    pub const SYSENTER_CS: u32 = 0x174;
    pub const SYSENTER_ESP: u32 = 0x175;
    pub const SYSENTER_EIP: u32 = 0x176;
    pub const MCG_CAP: u32 = 0x179;
    pub const MCG_STATUS: u32 = 0x17a;
    pub const P6_EVNTSEL0: u32 = 0x186;
    pub const P6_EVNTSEL1: u32 = 0x187;
    pub const MISC_ENABLE: u32 = 0x1a0;
    pub const DEBUGCTL: u32 = 0x1d9;
    pub const MTRR_PHYS_FIRST: u32 = 0x200;
    pub const MTRR_PHYS_LAST: u32 = 0x20f;
    pub const MTRR_FIX_64K: u32 = 0x250;
    pub const MTRR_FIX_16K: u32 = 0x258;
    pub const MTRR_FIX_16K_LAST: u32 = 0x259;
    pub const MTRR_FIX_4K: u32 = 0x268;
    pub const MTRR_FIX_4K_LAST: u32 = 0x26f;
    pub const PAT: u32 = 0x277;
    pub const MTRR_DEF_TYPE: u32 = 0x2ff;
    pub const TSC_DEADLINE: u32 = 0x6e0;
    pub const X2APIC_FIRST: u32 = 0x800;
    pub const X2APIC_LAST: u32 = 0x8ff;
    pub const KVM_WALL_CLOCK_NEW: u32 = 0x4b56_4d00;
    pub const KVM_SYSTEM_TIME_NEW: u32 = 0x4b56_4d01;
    pub const EFER: u32 = 0xc000_0080;
    pub const STAR: u32 = 0xc000_0081;
    pub const LSTAR: u32 = 0xc000_0082;
    pub const CSTAR: u32 = 0xc000_0083;
    pub const SFMASK: u32 = 0xc000_0084;
    pub const FS_BASE: u32 = 0xc000_0100;
    pub const GS_BASE: u32 = 0xc000_0101;
    pub const KERNEL_GS_BASE: u32 = 0xc000_0102;
    pub const TSC_AUX: u32 = 0xc000_0103;
    pub const K7_EVNTSEL0: u32 = 0xc001_0000;
    pub const K7_PERFCTR3: u32 = 0xc001_0007;
    pub const AMD_SYSCFG: u32 = 0xc001_0010;
    pub const AMD_HWCR: u32 = 0xc001_0015;
    pub const AMD_NB_CFG: u32 = 0xc001_001f;
}
use index::*;

/// `KVM_GET_MSR_INDEX_LIST`: what a client saves and restores.
pub const SAVED: &[u32] = &[
    TSC,
    SYSENTER_CS,
    SYSENTER_ESP,
    SYSENTER_EIP,
    STAR,
    CSTAR,
    KERNEL_GS_BASE,
    SFMASK,
    LSTAR,
    PAT,
    TSC_AUX,
    FEATURE_CONTROL,
    KVM_WALL_CLOCK,
    KVM_SYSTEM_TIME,
    KVM_WALL_CLOCK_NEW,
    KVM_SYSTEM_TIME_NEW,
    TSC_ADJUST,
    TSC_DEADLINE,
    MISC_ENABLE,
    MCG_STATUS,
    MISC_FEATURES,
    PLATFORM_INFO,
    MTRR_DEF_TYPE,
    APIC_BASE,
    EFER,
];

/// `KVM_GET_MSR_FEATURE_INDEX_LIST`: what can be asked of the system.
pub const FEATURES: &[u32] = &[UCODE_REV];

/// A feature MSR as a new vCPU has it.
pub fn feature(index: u32) -> Option<u64> {
    (index == UCODE_REV).then_some(UCODE_REV_VALUE)
}

/// A microcode revision that no erratum list knows.
const UCODE_REV_VALUE: u64 = 1 << 32;
const EFER_BITS: u64 =
    control::EFER_SCE | control::EFER_LME | control::EFER_LMA | control::EFER_NXE;
/// Performance monitoring and fast strings are there, MONITOR is not.
const MISC_ENABLE_RESET: u64 = 1;
/// There is no branch trace store and no PEBS: the guest cannot change that.
const MISC_ENABLE_READ_ONLY: u64 = 1 << 11 | 1 << 12;
const MISC_ENABLE_PERFMON: u64 = 1 << 7;
const MISC_ENABLE_MWAIT: u64 = 1 << 18;
const FEATURE_CONTROL_LOCKED: u64 = 1;
/// What a client may restore: the lock, VMX in and outside SMX, SGX and who launches it, local machine checks.
const FEATURE_CONTROL_BITS: u64 = 1 | 1 << 1 | 1 << 2 | 1 << 17 | 1 << 18 | 1 << 20;
/// Eight variable ranges, fixed ranges, write-combining.
const MTRR_CAP_VALUE: u64 = 8 | 1 << 8 | 1 << 10;

/// The values of those MSRs that are nothing but a value.
#[derive(Clone, Debug)]
pub(crate) struct Stored([Option<u64>; Stored::LEN]);

impl Stored {
    const ONE_BY_ONE: [u32; 11] = [
        FEATURE_CONTROL,
        TSC_ADJUST,
        PLATFORM_INFO,
        MISC_FEATURES,
        MCG_STATUS,
        MISC_ENABLE,
        DEBUGCTL,
        MTRR_DEF_TYPE,
        KVM_WALL_CLOCK_NEW,
        KVM_SYSTEM_TIME_NEW,
        AMD_HWCR,
    ];
    /// Those of the memory type ranges follow each other.
    const RANGES: [(u32, u32); 4] = [
        (MTRR_PHYS_FIRST, MTRR_PHYS_LAST),
        (MTRR_FIX_64K, MTRR_FIX_64K),
        (MTRR_FIX_16K, MTRR_FIX_16K_LAST),
        (MTRR_FIX_4K, MTRR_FIX_4K_LAST),
    ];
    const LEN: usize = Self::ONE_BY_ONE.len() + 16 + 1 + 2 + 8;

    fn place(index: u32) -> Option<usize> {
        if let Some(place) = Self::ONE_BY_ONE.iter().position(|known| *known == index) {
            return Some(place);
        }
        let mut place = Self::ONE_BY_ONE.len();
        for (first, last) in Self::RANGES {
            if (first..=last).contains(&index) {
                return Some(place + (index - first) as usize);
            }
            place += (last - first) as usize + 1;
        }
        None
    }

    /// The value that was stored last; `None` before the first one, and for MSRs that are not kept here.
    pub(crate) fn get(&self, index: u32) -> Option<u64> {
        self.0[Self::place(index)?]
    }

    /// Stores a value.
    ///
    /// # Panics
    /// If `index` is more than a value.
    pub(crate) fn set(&mut self, index: u32, value: u64) {
        let place = Self::place(index).expect("an MSR that is stored has a place");
        self.0[place] = Some(value);
    }
}

impl Default for Stored {
    fn default() -> Self {
        Stored([None; Self::LEN])
    }
}

fn canonical(value: u64) -> Result<u64, MsrFault> {
    let extended = ((value << 16) as i64 >> 16) as u64;
    if extended == value {
        Ok(value)
    } else {
        Err(MsrFault)
    }
}

fn valid_pat(value: u64) -> bool {
    value
        .to_le_bytes()
        .iter()
        .all(|kind| matches!(kind, 0 | 1 | 4 | 5 | 6 | 7))
}

/// A register that stands in the CPU's state.
fn cpu_register(state: &mut State, index: u32) -> Option<&mut u64> {
    Some(match index {
        EFER => &mut state.efer,
        STAR => &mut state.star,
        LSTAR => &mut state.lstar,
        CSTAR => &mut state.cstar,
        SFMASK => &mut state.sfmask,
        KERNEL_GS_BASE => &mut state.kernel_gs_base,
        FS_BASE => &mut state.fs.base,
        GS_BASE => &mut state.gs.base,
        SYSENTER_CS => &mut state.sysenter_cs,
        SYSENTER_ESP => &mut state.sysenter_esp,
        SYSENTER_EIP => &mut state.sysenter_eip,
        TSC_AUX => &mut state.tsc_aux,
        PAT => &mut state.pat,
        _ => return None,
    })
}

/// A client reads an MSR.
pub(crate) fn read(inner: &mut Inner, index: u32) -> Result<u64, MsrFault> {
    match cpu_register(&mut inner.cpu.state, index) {
        Some(register) => Ok(*register),
        None => read_machine(&mut inner.machine, index),
    }
}

/// A client writes an MSR.
pub(crate) fn write(inner: &mut Inner, index: u32, value: u64) -> Result<(), MsrFault> {
    let value = match index {
        EFER if value & !EFER_BITS != 0 => return Err(MsrFault),
        LSTAR | CSTAR | KERNEL_GS_BASE | FS_BASE | GS_BASE | SYSENTER_ESP | SYSENTER_EIP => {
            canonical(value)?
        }
        SFMASK | TSC_AUX => value & 0xffff_ffff,
        PAT if !valid_pat(value) => return Err(MsrFault),
        _ => value,
    };
    match cpu_register(&mut inner.cpu.state, index) {
        Some(register) => {
            *register = value;
            Ok(())
        }
        None => write_machine(&mut inner.machine, index, value, false),
    }
}

/// The clock's old and new MSRs are features of their own.
fn check_pv_feature(machine: &VcpuMachine, index: u32) -> Result<(), MsrFault> {
    let feature = match index {
        KVM_WALL_CLOCK | KVM_SYSTEM_TIME => cpuid::KVM_FEATURE_CLOCKSOURCE,
        KVM_WALL_CLOCK_NEW | KVM_SYSTEM_TIME_NEW => cpuid::KVM_FEATURE_CLOCKSOURCE2,
        _ => return Ok(()),
    };
    match machine.has_pv_feature(feature) {
        true => Ok(()),
        false => Err(MsrFault),
    }
}

/// IA32_MISC_ENABLE: two bits are read-only for a guest, one keeps its value, and one switches MONITOR and MWAIT, unless the
/// VM has KVM's quirk.
fn write_misc_enable(
    machine: &mut VcpuMachine,
    mut value: u64,
    by_guest: bool,
) -> Result<(), MsrFault> {
    let old = machine.stored(MISC_ENABLE).unwrap_or(MISC_ENABLE_RESET);
    if by_guest {
        if (old ^ value) & MISC_ENABLE_READ_ONLY != 0 {
            return Err(MsrFault);
        }
        value = value & !MISC_ENABLE_PERFMON | old & MISC_ENABLE_PERFMON;
    }
    let switches = (old ^ value) & MISC_ENABLE_MWAIT != 0;
    if switches && !machine.vm.quirks.has(KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT) {
        if cpuid::lookup(&machine.cpuid, 1, 0)[2] & cpuid::LEAF1_ECX_SSE3 == 0 {
            return Err(MsrFault);
        }
        for entry in machine.cpuid.iter_mut().filter(|e| e.function == 1) {
            if value & MISC_ENABLE_MWAIT != 0 {
                entry.ecx |= cpuid::LEAF1_ECX_MWAIT;
            } else {
                entry.ecx &= !cpuid::LEAF1_ECX_MWAIT;
            }
        }
    }
    machine.store(MISC_ENABLE, value);
    Ok(())
}

/// Reads an MSR that the CPU does not hold itself.
pub(crate) fn read_machine(machine: &mut VcpuMachine, index: u32) -> Result<u64, MsrFault> {
    let now = machine.vm.clock.now();
    check_pv_feature(machine, index)?;
    Ok(match index {
        TSC => machine.guest_tsc(),
        TSC_ADJUST => machine.msr(TSC_ADJUST),
        APIC_BASE => machine.apic_base(),
        TSC_DEADLINE => (machine.common.lapic()).map_or(0, |lapic| lapic.tsc_deadline()),
        X2APIC_FIRST..=X2APIC_LAST => machine
            .common
            .lapic()
            .ok_or(MsrFault)?
            .read_msr(index, now)
            .map_err(|_| MsrFault)?,
        MTRR_CAP => MTRR_CAP_VALUE,
        UCODE_REV => UCODE_REV_VALUE,
        MISC_ENABLE => machine.stored(MISC_ENABLE).unwrap_or(MISC_ENABLE_RESET),
        PLATFORM_INFO => machine.stored(PLATFORM_INFO).unwrap_or(1 << 31),
        KVM_SYSTEM_TIME | KVM_SYSTEM_TIME_NEW => machine.msr(KVM_SYSTEM_TIME_NEW),
        KVM_WALL_CLOCK | KVM_WALL_CLOCK_NEW => machine.msr(KVM_WALL_CLOCK_NEW),
        FEATURE_CONTROL | MISC_FEATURES | DEBUGCTL | MCG_STATUS | MTRR_DEF_TYPE | AMD_HWCR => {
            machine.msr(index)
        }
        MTRR_PHYS_FIRST..=MTRR_PHYS_LAST
        | MTRR_FIX_64K
        | MTRR_FIX_16K..=MTRR_FIX_16K_LAST
        | MTRR_FIX_4K..=MTRR_FIX_4K_LAST => machine.msr(index),
        // Guests probe these without asking CPUID. There are no counters.
        P6_PERFCTR0 | P6_PERFCTR1 | P6_EVNTSEL0 | P6_EVNTSEL1 | K7_EVNTSEL0..=K7_PERFCTR3 => 0,
        PLATFORM_ID | EBL_CR_POWERON | MCG_CAP | UCODE_WRITE | AMD_SYSCFG | AMD_NB_CFG => 0,
        _ => return Err(MsrFault),
    })
}

/// Writes an MSR that the CPU does not hold itself.
pub(crate) fn write_machine(
    machine: &mut VcpuMachine,
    index: u32,
    value: u64,
    by_guest: bool,
) -> Result<(), MsrFault> {
    let now = machine.vm.clock.now();
    check_pv_feature(machine, index)?;
    let only = |mask: u64| {
        if value & !mask == 0 {
            Ok(())
        } else {
            Err(MsrFault)
        }
    };
    match index {
        TSC => {
            let change = value.wrapping_sub(machine.guest_tsc());
            machine.move_tsc(change);
            if by_guest {
                let adjust = machine.msr(TSC_ADJUST).wrapping_add(change);
                machine.store(TSC_ADJUST, adjust);
            }
        }
        TSC_ADJUST => {
            if by_guest {
                machine.move_tsc(value.wrapping_sub(machine.msr(TSC_ADJUST)));
            }
            machine.store(TSC_ADJUST, value);
        }
        APIC_BASE => machine.set_apic_base(value, by_guest)?,
        TSC_DEADLINE => {
            let tsc = machine.guest_tsc();
            let effect = (machine.common.lapic()).map_or(Effect::None, |mut lapic| {
                lapic.set_tsc_deadline(value, tsc, now)
            });
            machine.carry_out(effect);
        }
        X2APIC_FIRST..=X2APIC_LAST => {
            let effect = machine
                .common
                .lapic()
                .ok_or(MsrFault)?
                .write_msr(index, value, now)
                .map_err(|_| MsrFault)?;
            machine.carry_out(effect);
        }
        KVM_SYSTEM_TIME | KVM_SYSTEM_TIME_NEW => {
            machine.store(KVM_SYSTEM_TIME_NEW, value);
            machine.clock_page_changed();
        }
        KVM_WALL_CLOCK | KVM_WALL_CLOCK_NEW => {
            machine.store(KVM_WALL_CLOCK_NEW, value);
            machine.wall_clock_wanted();
        }
        MTRR_PHYS_FIRST..=MTRR_PHYS_LAST => {
            // Even numbers are bases with a type, odd ones are masks with a valid bit.
            only(if index & 1 == 0 {
                0x0000_ffff_ffff_f007
            } else {
                0x0000_ffff_ffff_f800
            })?;
            machine.store(index, value);
        }
        MTRR_FIX_64K | MTRR_FIX_16K..=MTRR_FIX_16K_LAST | MTRR_FIX_4K..=MTRR_FIX_4K_LAST => {
            if value
                .to_le_bytes()
                .iter()
                .any(|kind| !matches!(kind, 0 | 1 | 4 | 5 | 6))
            {
                return Err(MsrFault);
            }
            machine.store(index, value);
        }
        MTRR_DEF_TYPE => {
            only(0xc07)?;
            machine.store(index, value);
        }
        MISC_ENABLE => write_misc_enable(machine, value, by_guest)?,
        FEATURE_CONTROL => {
            // A guest may lock it, once. There is nothing else in here that it could switch on.
            if by_guest && machine.msr(FEATURE_CONTROL) & FEATURE_CONTROL_LOCKED != 0 {
                return Err(MsrFault);
            }
            only(match by_guest {
                true => FEATURE_CONTROL_LOCKED,
                false => FEATURE_CONTROL_BITS,
            })?;
            machine.store(index, value);
        }
        // What is not there may be switched off, not on.
        MISC_FEATURES | DEBUGCTL | MCG_STATUS => only(0)?,
        // Three bits that old firmware sets have no effect; two are kept.
        AMD_HWCR => {
            only(1 << 18 | 1 << 24 | 1 << 3 | 1 << 6 | 1 << 8)?;
            machine.store(index, value & (1 << 18 | 1 << 24));
        }
        PLATFORM_INFO if !by_guest => machine.store(index, value),
        UCODE_WRITE | UCODE_REV => {}
        P6_PERFCTR0 | P6_PERFCTR1 | P6_EVNTSEL0 | P6_EVNTSEL1 | K7_EVNTSEL0..=K7_PERFCTR3 => {}
        _ => return Err(MsrFault),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_msr_that_can_be_written_has_its_place() {
        let vm = crate::vm::VmObject::new(false).unwrap();
        let (vcpu, _fd) = vm.create_vcpu(0).unwrap();
        let mut inner = vcpu.lock().unwrap();
        let known = [
            0..0x1000,
            0x4b56_4d00..0x4b56_4e00,
            0xc000_0000..0xc001_1000,
        ];
        let written = known
            .into_iter()
            .flatten()
            .filter(|index| write(&mut inner, *index, 0).is_ok());
        assert!(written.count() > 30);
    }
}
