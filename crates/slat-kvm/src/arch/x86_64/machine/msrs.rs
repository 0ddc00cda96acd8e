//! Access to model-specific registers. Access to an unknown MSR is #GP for the guest and ends
//! `KVM_GET_MSRS`/`KVM_SET_MSRS` early, as with KVM's `ignore_msrs=0`.

use crate::arch::x86_64::clock::{TscChange, ordered_tsc};
use crate::arch::x86_64::cpu_policies;
use crate::arch::x86_64::machine::{VcpuMachine, speculation};
use crate::arch::x86_64::msr::index::*;
use crate::arch::x86_64::msr::{PLATFORM_INFO_CPUID_FAULT, fixed, microcode_revision};
use crate::arch::x86_64::{cpu_features, cpuid};
use kvm_bindings::KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT;
use slat_hyperv::Writer;
use slat_hyperv::msr::is_synthetic;
use slat_irqchip::lapic::Effect;
use slat_x86::state::{control, is_pat};
use slat_x86::{MsrFault, State};

const MISC_FEATURES_CPUID_FAULT: u64 = 1;
/// The bit of HWCR: a guest may write more than 0 to the status of a machine-check bank.
const HWCR_MC_STATUS_WRITABLE: u64 = 1 << 18;
const HWCR_TSC_FREQUENCY: u64 = 1 << 24;
/// MISC_ENABLE after reset: no branch trace store and no PEBS. Performance monitoring and MONITOR are off, too.
const MISC_ENABLE_RESET: u64 = MISC_ENABLE_READ_ONLY;
/// The bits for "no branch trace store" and "no PEBS", which a guest cannot change.
const MISC_ENABLE_READ_ONLY: u64 = 1 << 11 | 1 << 12;
const MISC_ENABLE_PERFMON: u64 = 1 << 7;
const MISC_ENABLE_MWAIT: u64 = 1 << 18;
const FEATURE_CONTROL_LOCKED: u64 = 1;
/// The bits of FEATURE_CONTROL that a client may restore: the lock, VMX inside and outside SMX, SGX and its launch
/// control, local machine checks.
const FEATURE_CONTROL_BITS: u64 = 1 | 1 << 1 | 1 << 2 | 1 << 17 | 1 << 18 | 1 << 20;
/// The number of AMD's errata about which a guest can ask. The CPU has none of these errata.
const OSVW_ERRATA: u64 = 4;
/// The value of MTRRcap: eight variable ranges, fixed ranges, write-combining.
const MTRR_CAP_VALUE: u64 = 8 | 1 << 8 | 1 << 10;

/// Returns the canonical address with the lower 48 bits of `value`.
fn sign_extended(value: u64) -> u64 {
    ((value << 16) as i64 >> 16) as u64
}

/// Whether the guest's CPUID names Intel as the vendor.
fn is_intel(machine: &VcpuMachine) -> bool {
    cpuid::lookup(&machine.cpuid, 0, 0)[1] == u32::from_le_bytes(*b"Genu")
}

fn canonical(value: u64) -> Result<u64, MsrFault> {
    if sign_extended(value) == value {
        Ok(value)
    } else {
        Err(MsrFault::Invalid)
    }
}

/// Whether MTRR ranges can have a memory type (SDM volume 3, table 12-8).
fn is_memory_type(kind: u8) -> bool {
    matches!(kind, 0 | 1 | 4 | 5 | 6)
}

/// Returns the bits that a client can set in EFER.
fn known_efer() -> u64 {
    match cpu_policies::current().nested {
        true => control::EFER_KNOWN,
        false => control::EFER_KNOWN & !control::EFER_SVME,
    }
}

/// Returns the register of the CPU's state that holds this MSR. `None`: the CPU's state does not hold the MSR.
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
        SMBASE => &mut state.smbase,
        VM_CR => &mut state.vm_cr,
        VM_HSAVE_PA => &mut state.vm_hsave_pa,
        TSC_RATIO => &mut state.tsc_ratio,
        _ => return None,
    })
}

/// Reads an MSR for a client.
pub(crate) fn read(
    state: &mut State,
    machine: &mut VcpuMachine,
    index: u32,
) -> Result<u64, MsrFault> {
    match cpu_register(state, index) {
        Some(register) => Ok(*register),
        None => read_machine(machine, index, false),
    }
}

/// Writes an MSR for a client.
pub(crate) fn write(
    state: &mut State,
    machine: &mut VcpuMachine,
    index: u32,
    value: u64,
) -> Result<(), MsrFault> {
    let value = match index {
        EFER if value & !known_efer() != 0 => return Err(MsrFault::Invalid),
        // As in KVM, the client cannot change EFER.LMA by this MSR, only by KVM_SET_SREGS and KVM_SET_SREGS2.
        EFER => value & !control::EFER_LMA | state.efer & control::EFER_LMA,
        LSTAR | CSTAR | KERNEL_GS_BASE | FS_BASE | GS_BASE => canonical(value)?,
        // As in KVM, an address that is not canonical is accepted and made canonical.
        SYSENTER_ESP | SYSENTER_EIP if is_intel(machine) => sign_extended(value),
        TSC_AUX if is_intel(machine) && value >> 32 != 0 => return Err(MsrFault::Invalid),
        SYSENTER_ESP | SYSENTER_EIP | SFMASK | TSC_AUX => value & 0xffff_ffff,
        VM_CR => state.written_vm_cr(value).ok_or(MsrFault::Invalid)?,
        // As in KVM, the low 12 bits of the address are dropped.
        VM_HSAVE_PA => value & !0xfff,
        TSC_RATIO if value >> 40 != 0 => return Err(MsrFault::Invalid),
        PAT if !is_pat(value) => return Err(MsrFault::Invalid),
        _ => value,
    };
    match cpu_register(state, index) {
        Some(register) => {
            *register = value;
            Ok(())
        }
        None => write_machine(machine, index, value, false),
    }
}

/// Refuses an access to a paravirtual MSR if the guest does not have the MSR's feature.
fn check_pv_feature(machine: &VcpuMachine, index: u32) -> Result<(), MsrFault> {
    let feature = match index {
        KVM_WALL_CLOCK | KVM_SYSTEM_TIME => cpuid::KVM_FEATURE_CLOCKSOURCE,
        KVM_WALL_CLOCK_NEW | KVM_SYSTEM_TIME_NEW => cpuid::KVM_FEATURE_CLOCKSOURCE2,
        KVM_STEAL_TIME => cpuid::KVM_FEATURE_STEAL_TIME,
        KVM_PV_EOI => cpuid::KVM_FEATURE_PV_EOI,
        KVM_ASYNC_PF_EN => cpuid::KVM_FEATURE_ASYNC_PF,
        KVM_ASYNC_PF_INT | KVM_ASYNC_PF_ACK => cpuid::KVM_FEATURE_ASYNC_PF_INT,
        _ => return Ok(()),
    };
    match machine.has_pv_feature(feature) {
        true => Ok(()),
        false => Err(MsrFault::Unknown),
    }
}

/// Writes IA32_MISC_ENABLE. A guest must not change the two bits of [`MISC_ENABLE_READ_ONLY`], and its write does not
/// change the bit for performance monitoring. The bit for MONITOR enables MONITOR and MWAIT in CPUID, unless the VM has
/// KVM's quirk.
fn write_misc_enable(
    machine: &mut VcpuMachine,
    mut value: u64,
    by_guest: bool,
) -> Result<(), MsrFault> {
    let old = machine.stored(MISC_ENABLE).unwrap_or(MISC_ENABLE_RESET);
    if by_guest {
        if (old ^ value) & MISC_ENABLE_READ_ONLY != 0 {
            return Err(MsrFault::Invalid);
        }
        value = value & !MISC_ENABLE_PERFMON | old & MISC_ENABLE_PERFMON;
    }
    let switches = (old ^ value) & MISC_ENABLE_MWAIT != 0;
    if switches
        && !machine
            .vm
            .arch
            .quirks
            .has(KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT)
    {
        if cpuid::lookup(&machine.cpuid, 1, 0)[2] & cpuid::LEAF1_ECX_SSE3 == 0 {
            return Err(MsrFault::Invalid);
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

fn platform_info(machine: &VcpuMachine) -> u64 {
    (machine.stored(PLATFORM_INFO)).unwrap_or(PLATFORM_INFO_CPUID_FAULT)
}

/// Whether the guest has enabled CPUID faulting: CPUID outside CPL 0 is a fault.
pub(crate) fn cpuid_faults(machine: &VcpuMachine) -> bool {
    machine.msr(MISC_FEATURES) & MISC_FEATURES_CPUID_FAULT != 0
}

fn writer(by_guest: bool) -> Writer {
    match by_guest {
        true => Writer::Guest,
        false => Writer::Host,
    }
}

fn has_xsaves(machine: &VcpuMachine) -> bool {
    cpuid::lookup(&machine.cpuid, 0xd, 1)[0] & cpuid::LEAF_D1_EAX_XSAVES != 0
}

fn has_osvw(machine: &VcpuMachine) -> bool {
    cpuid::lookup(&machine.cpuid, 0x8000_0001, 0)[2] & cpuid::EXT1_ECX_OSVW != 0
}

fn tells_arch_capabilities(machine: &VcpuMachine) -> bool {
    cpuid::lookup(&machine.cpuid, 7, 0)[3] & cpuid::LEAF7_EDX_ARCH_CAPABILITIES != 0
}

/// Reads an MSR whose value is not part of the CPU's state.
pub(crate) fn read_machine(
    machine: &mut VcpuMachine,
    index: u32,
    by_guest: bool,
) -> Result<u64, MsrFault> {
    let now = machine.vm.arch.clock.now();
    check_pv_feature(machine, index)?;
    let known =
        (machine.mce.read(index, by_guest)).or_else(|| speculation::read(machine, index, by_guest));
    if let Some(result) = known {
        return result;
    }
    Ok(match index {
        TSC => machine.guest_tsc(),
        // As in KVM, a client reads 0 from an MSR of the index list if the guest's CPUID does not have that MSR.
        ARCH_CAPABILITIES if !tells_arch_capabilities(machine) => match by_guest {
            true => return Err(MsrFault::Unknown),
            false => 0,
        },
        ARCH_CAPABILITIES => {
            (machine.stored(ARCH_CAPABILITIES)).unwrap_or(cpu_features::ARCH_CAPABILITIES)
        }
        TSC_ADJUST => machine.msr(TSC_ADJUST),
        APIC_BASE => machine.apic_base(),
        TSC_DEADLINE => (machine.common.lapic()).map_or(0, |lapic| lapic.tsc_deadline()),
        X2APIC_FIRST..=X2APIC_LAST => {
            machine.collect_pv_eoi();
            let lapic = machine.common.lapic().ok_or(MsrFault::Invalid)?;
            (lapic.read_msr(index, now)).map_err(|_| MsrFault::Invalid)?
        }
        MTRR_CAP => MTRR_CAP_VALUE,
        UCODE_REV => machine.stored(UCODE_REV).unwrap_or_else(microcode_revision),
        MISC_ENABLE => machine.stored(MISC_ENABLE).unwrap_or(MISC_ENABLE_RESET),
        PLATFORM_INFO if by_guest && !machine.vm.arch.options.guest_reads_platform_info() => {
            return Err(MsrFault::Invalid);
        }
        PLATFORM_INFO => platform_info(machine),
        // A guest can read the MSR only if it has performance monitoring, which no guest has. A client can always read
        // the MSR.
        PERF_CAPABILITIES if !by_guest => 0,
        PERF_CAPABILITIES | SMBASE => return Err(MsrFault::Invalid),
        KVM_SYSTEM_TIME | KVM_SYSTEM_TIME_NEW => machine.msr(KVM_SYSTEM_TIME_NEW),
        KVM_WALL_CLOCK | KVM_WALL_CLOCK_NEW => machine.msr(KVM_WALL_CLOCK_NEW),
        FEATURE_CONTROL | MISC_FEATURES | DEBUGCTL | MTRR_DEF_TYPE | AMD_HWCR | POWER_CTL
        | SMI_COUNT | KVM_STEAL_TIME | KVM_PV_EOI | KVM_ASYNC_PF_EN | KVM_ASYNC_PF_INT => {
            machine.msr(index)
        }
        KVM_ASYNC_PF_ACK => 0,
        XSS if !has_xsaves(machine) => return Err(MsrFault::Unknown),
        XSS => 0,
        AMD_OSVW_ID_LENGTH | AMD_OSVW_STATUS if !has_osvw(machine) => {
            return Err(MsrFault::Invalid);
        }
        AMD_OSVW_ID_LENGTH => OSVW_ERRATA,
        AMD_OSVW_STATUS => 0,
        MTRR_PHYS_FIRST..=MTRR_PHYS_LAST
        | MTRR_FIX_64K
        | MTRR_FIX_16K..=MTRR_FIX_16K_LAST
        | MTRR_FIX_4K..=MTRR_FIX_4K_LAST => machine.msr(index),
        _ if is_synthetic(index) => return machine.read_synthetic(index, writer(by_guest)),
        _ => return fixed::read(index).ok_or(MsrFault::Unknown),
    })
}

/// Writes an MSR whose value is not part of the CPU's state.
pub(crate) fn write_machine(
    machine: &mut VcpuMachine,
    index: u32,
    value: u64,
    by_guest: bool,
) -> Result<(), MsrFault> {
    let now = machine.vm.arch.clock.now();
    check_pv_feature(machine, index)?;
    let sets_status = machine.msr(AMD_HWCR) & HWCR_MC_STATUS_WRITABLE != 0 && cpuid::is_amd();
    let known = (machine.mce.write(index, value, by_guest, sets_status))
        .or_else(|| speculation::write(machine, index, value, by_guest));
    if let Some(result) = known {
        return result;
    }
    let only = |mask: u64| {
        if value & !mask == 0 {
            Ok(())
        } else {
            Err(MsrFault::Invalid)
        }
    };
    match index {
        TSC if !by_guest => {
            machine.change_tsc(TscChange::Value(value));
        }
        TSC => {
            let change = value.wrapping_sub(machine.guest_tsc());
            machine.change_tsc(TscChange::Shift(change));
            let adjust = machine.msr(TSC_ADJUST).wrapping_add(change);
            machine.store(TSC_ADJUST, adjust);
        }
        TSC_ADJUST => {
            if by_guest {
                let change = value.wrapping_sub(machine.msr(TSC_ADJUST));
                machine.change_tsc(TscChange::Shift(change));
            }
            machine.store(TSC_ADJUST, value);
        }
        APIC_BASE => machine.set_apic_base(value, by_guest)?,
        TSC_DEADLINE => {
            // Both clocks are computed from one reading of the host's TSC. So a timer for a TSC value does not expire
            // before the TSC has that value.
            let host_tsc = ordered_tsc();
            let (tsc, now) = (
                machine.tsc.at(host_tsc),
                machine.vm.arch.clock.timer_time(host_tsc),
            );
            let effect = (machine.common.lapic()).map_or(Effect::None, |mut lapic| {
                lapic.set_tsc_deadline(value, tsc, now)
            });
            machine.carry_out(effect);
        }
        X2APIC_FIRST..=X2APIC_LAST => {
            machine.collect_pv_eoi();
            let effect = machine
                .common
                .lapic()
                .ok_or(MsrFault::Invalid)?
                .write_msr(index, value, now)
                .map_err(|_| MsrFault::Invalid)?;
            machine.carry_out(effect);
            match index {
                X2APIC_TPR => machine.task_priority_changed(),
                X2APIC_SVR | X2APIC_LINT0 => machine.look_for_interrupts(),
                _ => {}
            }
        }
        KVM_SYSTEM_TIME | KVM_SYSTEM_TIME_NEW => {
            machine.set_kvmclock(value);
            machine.clock_page_changed();
        }
        KVM_WALL_CLOCK | KVM_WALL_CLOCK_NEW => {
            machine.store(KVM_WALL_CLOCK_NEW, value);
            machine.wall_clock_wanted();
        }
        MTRR_PHYS_FIRST..=MTRR_PHYS_LAST => {
            // An MSR with an even number has the base and the memory type of a range; an MSR with an odd number has the
            // mask and the valid bit.
            let (low, is_base) = match index & 1 {
                0 => (0xff, true),
                _ => (0x800, false),
            };
            only(((1 << machine.physical_bits) - 1) & !0xfff | low)?;
            if is_base && !is_memory_type(value as u8) {
                return Err(MsrFault::Invalid);
            }
            machine.store(index, value);
        }
        MTRR_FIX_64K | MTRR_FIX_16K..=MTRR_FIX_16K_LAST | MTRR_FIX_4K..=MTRR_FIX_4K_LAST => {
            if !value.to_le_bytes().into_iter().all(is_memory_type) {
                return Err(MsrFault::Invalid);
            }
            machine.store(index, value);
        }
        MTRR_DEF_TYPE => {
            only(0xcff)?;
            if !is_memory_type(value as u8) {
                return Err(MsrFault::Invalid);
            }
            machine.store(index, value);
        }
        MISC_ENABLE => write_misc_enable(machine, value, by_guest)?,
        FEATURE_CONTROL => {
            // A guest may set only the lock bit, and only once, because no guest has the features that the other bits
            // enable.
            if by_guest && machine.msr(FEATURE_CONTROL) & FEATURE_CONTROL_LOCKED != 0 {
                return Err(MsrFault::Invalid);
            }
            only(match by_guest {
                true => FEATURE_CONTROL_LOCKED,
                false => FEATURE_CONTROL_BITS,
            })?;
            machine.store(index, value);
        }
        // Only 0 can be written, because the CPU has none of the features that these bits enable.
        DEBUGCTL => only(0)?,
        MISC_FEATURES => {
            only(match platform_info(machine) & PLATFORM_INFO_CPUID_FAULT {
                0 => 0,
                _ => MISC_FEATURES_CPUID_FAULT,
            })?;
            machine.store(index, value);
        }
        // Bits 3, 6 and 8 have no effect; old firmware sets them. The two bits in `kept` are stored.
        AMD_HWCR => {
            let kept = HWCR_MC_STATUS_WRITABLE | HWCR_TSC_FREQUENCY;
            only(kept | 1 << 3 | 1 << 6 | 1 << 8)?;
            machine.store(index, value & kept);
        }
        ARCH_CAPABILITIES if !by_guest && tells_arch_capabilities(machine) => {
            machine.store(index, value);
        }
        ARCH_CAPABILITIES if !by_guest && value == 0 => {}
        PLATFORM_INFO => {
            let takes_away = value & PLATFORM_INFO_CPUID_FAULT == 0 && cpuid_faults(machine);
            if by_guest || takes_away {
                return Err(MsrFault::Invalid);
            }
            machine.store(index, value);
        }
        POWER_CTL => machine.store(index, value),
        // The guest cannot write the following MSRs.
        SMI_COUNT | PERF_CAPABILITIES if by_guest => return Err(MsrFault::Invalid),
        SMI_COUNT => machine.store(index, value),
        // SMBASE is part of the CPU's state, so a client's write never reaches this code.
        SMBASE => return Err(MsrFault::Invalid),
        PERF_CAPABILITIES => only(0)?,
        UCODE_REV if by_guest => {}
        UCODE_REV => machine.store(index, value),
        KVM_STEAL_TIME => machine.set_steal_time(value)?,
        KVM_PV_EOI => machine.set_pv_eoi(value)?,
        KVM_ASYNC_PF_EN => machine.set_async_pf(value, by_guest)?,
        KVM_ASYNC_PF_INT => machine.set_async_pf_vector(value)?,
        KVM_ASYNC_PF_ACK => machine.acknowledge_async_pf(value),
        XSS if !has_xsaves(machine) => return Err(MsrFault::Unknown),
        // There are no supervisor state components, so only 0 can be written.
        XSS => only(0)?,
        _ if is_synthetic(index) => machine.write_synthetic(index, value, writer(by_guest))?,
        _ => return fixed::write(index, value),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu::Inner;

    #[test]
    fn every_msr_that_can_be_written_has_its_place() {
        let vm = crate::vm::VmObject::new(Default::default(), None, Default::default()).unwrap();
        let (vcpu, _fd) = vm.create_vcpu(0).unwrap();
        let mut inner = vcpu.lock().unwrap();
        let Inner { cpu, machine, .. } = &mut *inner;
        let known = [
            0..0x1000,
            0x4b56_4d00..0x4b56_4e00,
            0xc000_0000..0xc001_1000,
        ];
        let written = known
            .into_iter()
            .flatten()
            .filter(|index| write(&mut cpu.state, machine, *index, 0).is_ok());
        assert!(written.count() > 30);
    }
}
