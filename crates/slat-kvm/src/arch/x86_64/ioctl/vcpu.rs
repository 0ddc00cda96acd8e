//! Requests to a vCPU that only x86 has.

use super::tables::{ENTRIES, give_cpuid, take_cpuid, take_msrs, take_old_cpuid};
use super::{Answer, DONE, UNKNOWN, give, value};
use crate::abi::*;
use crate::arch::x86_64::nested::{self, NestedState};
use crate::errno::fail;
use crate::user;
use crate::vcpu::VcpuObject;
use kvm_bindings::*;

/// Carries out a request. Not inlined: otherwise other requests would also need this function's stack frame, which has
/// structures of several KiB.
#[inline(never)]
pub(crate) fn ioctl(vcpu: &VcpuObject, request: u32, argument: u64) -> Answer {
    match request {
        KVM_HAS_DEVICE_ATTR => vcpu.has_device_attribute(&user::read(argument)?)?,
        KVM_GET_DEVICE_ATTR => {
            let attribute: kvm_device_attr = user::read(argument)?;
            return give(attribute.addr, &vcpu.device_attribute(&attribute)?);
        }
        KVM_SET_DEVICE_ATTR => {
            vcpu.set_device_attribute(&user::read(argument)?, user::read::<u64>)?;
        }
        KVM_ENABLE_CAP => vcpu.enable_cap(&user::read(argument)?)?,
        KVM_GET_ONE_REG => {
            let register: kvm_one_reg = user::read(argument)?;
            return give(register.addr, &vcpu.get_one_reg(register.id)?);
        }
        KVM_SET_ONE_REG => {
            let register: kvm_one_reg = user::read(argument)?;
            vcpu.set_one_reg(register.id, || user::read(register.addr))?;
        }
        KVM_GET_REGS => return give(argument, &vcpu.get_regs()?),
        KVM_SET_REGS => vcpu.set_regs(&user::read(argument)?)?,
        KVM_GET_SREGS => return give(argument, &vcpu.get_sregs()?),
        KVM_SET_SREGS => vcpu.set_sregs(&user::read(argument)?)?,
        KVM_GET_SREGS2 => return give(argument, &vcpu.get_sregs2()?),
        KVM_SET_SREGS2 => vcpu.set_sregs2(&user::read(argument)?)?,
        KVM_TRANSLATE => {
            let asked: kvm_translation = user::read(argument)?;
            return give(argument, &vcpu.translate(asked.linear_address)?);
        }
        KVM_INTERRUPT => {
            let interrupt: kvm_interrupt = user::read(argument)?;
            vcpu.interrupt(interrupt.irq)?;
        }
        KVM_NMI => vcpu.nmi()?,
        KVM_SMI => vcpu.smi()?,
        KVM_GET_MSRS => {
            let mut entries = take_msrs(argument)?;
            let done = vcpu.get_msrs(&mut entries)?;
            user::write_slice(argument + ENTRIES, &entries)?;
            return value(done as i32);
        }
        KVM_SET_MSRS => return value(vcpu.set_msrs(&take_msrs(argument)?)? as i32),
        KVM_GET_FPU => return give(argument, &vcpu.get_fpu()?),
        KVM_SET_FPU => vcpu.set_fpu(&user::read(argument)?)?,
        KVM_GET_LAPIC => return give(argument, &vcpu.get_lapic()?),
        KVM_SET_LAPIC if !vcpu.vm.has_irqchip() => return fail(libc::EINVAL),
        KVM_SET_LAPIC => vcpu.set_lapic(&user::read(argument)?)?,
        KVM_GET_CPUID2 => return give_cpuid(argument, &vcpu.get_cpuid()?),
        KVM_GET_SUPPORTED_HV_CPUID => return give_cpuid(argument, &vcpu.supported_hv_cpuid()?),
        KVM_SET_CPUID2 => vcpu.set_cpuid(take_cpuid(argument)?)?,
        KVM_SET_CPUID => vcpu.set_cpuid(take_old_cpuid(argument)?)?,
        KVM_GET_DEBUGREGS => return give(argument, &vcpu.get_debugregs()?),
        KVM_SET_DEBUGREGS => vcpu.set_debugregs(&user::read(argument)?)?,
        KVM_GET_XSAVE | KVM_GET_XSAVE2 => return give(argument, &vcpu.get_xsave()?),
        KVM_SET_XSAVE => vcpu.set_xsave(&user::read(argument)?)?,
        KVM_GET_XCRS => return give(argument, &vcpu.get_xcrs()?),
        KVM_SET_XCRS => vcpu.set_xcrs(&user::read(argument)?)?,
        KVM_GET_TSC_KHZ => return value(vcpu.tsc_khz()? as i32),
        KVM_SET_TSC_KHZ => vcpu.set_tsc_khz(argument as u32)?,
        KVM_GET_NESTED_STATE => return give_nested_state(argument, &vcpu.nested_state()?),
        KVM_SET_NESTED_STATE => {
            // The size in the header is checked first. If the size is too small, the rest of the header is not read.
            let first: u64 = user::read(argument)?;
            if (first >> 32) < u64::from(nested::HEADER) {
                return fail(libc::EINVAL);
            }
            let vmcb = argument + u64::from(nested::HEADER);
            vcpu.set_nested_state(&user::read(argument)?, || user::read(vmcb))?;
        }
        KVM_SET_VAPIC_ADDR => vcpu.set_vapic_address(&user::read(argument)?)?,
        KVM_TPR_ACCESS_REPORTING => {
            let control: kvm_tpr_access_ctl = user::read(argument)?;
            vcpu.set_tpr_access_reporting(&control)?;
            return give(argument, &control);
        }
        KVM_X86_SETUP_MCE => vcpu.setup_mce(user::read(argument)?)?,
        KVM_X86_SET_MCE => vcpu.set_mce(&user::read(argument)?)?,
        // The list is empty: the only registers are MSRs, and KVM_GET_MSR_INDEX_LIST lists those. As in KVM, the
        // client's count is read first.
        KVM_GET_REG_LIST => {
            user::read::<u64>(argument)?;
            return give(argument, &0u64);
        }
        KVM_KVMCLOCK_CTRL => vcpu.kvmclock_ctrl()?,
        _ => return UNKNOWN,
    }
    DONE
}

/// Writes the nested state to the client's `kvm_nested_state`. The struct's field `size` says how many bytes fit.
fn give_nested_state(address: u64, state: &NestedState) -> Answer {
    const SIZE_OFFSET: u64 = 4;
    if user::read::<u32>(address + SIZE_OFFSET)? < state.size() {
        user::write(address + SIZE_OFFSET, &state.size())?;
        return fail(libc::E2BIG);
    }
    if let Some(vmcb) = state.vmcb() {
        user::write(address + u64::from(nested::HEADER), vmcb)?;
    }
    give(address, state.words())
}
