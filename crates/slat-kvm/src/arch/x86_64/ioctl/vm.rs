//! Requests to a VM that only x86 has.

use super::{Answer, DONE, UNKNOWN, give, value};
use crate::abi::*;
use crate::user;
use crate::vm::VmObject;
use kvm_bindings::*;

// Not inlined: otherwise other requests would also need this function's stack frame.
#[inline(never)]
pub(crate) fn ioctl(vm: &VmObject, request: u32, argument: u64) -> Answer {
    match request {
        KVM_SET_NR_MMU_PAGES => vm.set_nr_mmu_pages(argument)?,
        KVM_SET_TSS_ADDR => vm.set_tss_addr(argument)?,
        KVM_SET_IDENTITY_MAP_ADDR => vm.set_identity_map_addr(user::read(argument)?)?,
        KVM_SET_BOOT_CPU_ID => vm.set_boot_cpu_id(argument)?,
        KVM_CREATE_IRQCHIP => vm.create_irqchip()?,
        KVM_GET_IRQCHIP => {
            let mut chip: kvm_irqchip = user::read(argument)?;
            vm.get_irqchip(&mut chip)?;
            return give(argument, &chip);
        }
        KVM_SET_IRQCHIP => vm.set_irqchip(&user::read(argument)?)?,
        KVM_CREATE_PIT => vm.create_pit(&kvm_pit_config::default())?,
        KVM_CREATE_PIT2 => vm.create_pit(&user::read(argument)?)?,
        KVM_GET_PIT2 => return give(argument, &vm.get_pit2()?),
        KVM_SET_PIT2 => vm.set_pit2(&user::read(argument)?)?,
        // KVM_GET_PIT returns KVM's older struct, which has no flags.
        KVM_GET_PIT => {
            let channels = vm.get_pit2()?.channels;
            return give(argument, &kvm_pit_state { channels });
        }
        KVM_SET_PIT => {
            let kvm_pit_state { channels } = user::read(argument)?;
            let flags = vm.get_pit2()?.flags;
            vm.set_pit2(&kvm_pit_state2 {
                channels,
                flags,
                ..Default::default()
            })?;
        }
        KVM_REINJECT_CONTROL => vm.reinject_control(&user::read(argument)?)?,
        KVM_HYPERV_EVENTFD => vm.hyperv_eventfd(&user::read(argument)?)?,
        KVM_GET_CLOCK => return give(argument, &vm.get_clock()?),
        KVM_SET_CLOCK => vm.set_clock(&user::read(argument)?)?,
        KVM_SET_TSC_KHZ => vm.set_tsc_khz(argument as u32)?,
        KVM_GET_TSC_KHZ => return value(vm.tsc_khz() as i32),
        KVM_X86_SET_MSR_FILTER => vm.set_msr_filter(&user::read(argument)?)?,
        _ => return UNKNOWN,
    }
    DONE
}
