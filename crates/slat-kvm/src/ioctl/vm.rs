//! Requests to a VM.

use super::{Answer, DONE, Object, give, of_arch, value};
use crate::abi::*;
use crate::arch;
use crate::errno::{Result, fail};
use crate::routing::MAX_ROUTES;
use crate::user;
use crate::vm::VmObject;
use kvm_bindings::*;
use std::os::fd::AsRawFd;
use std::sync::Arc;

// Not inlined: otherwise requests to other objects would also need this function's stack frame.
#[inline(never)]
pub(super) fn ioctl(vm: &Arc<VmObject>, request: u32, argument: u64) -> Result<Answer> {
    let _call = vm.begin()?;
    match request {
        KVM_CHECK_EXTENSION => return value(vm.check_extension(argument)),
        KVM_CREATE_VCPU => {
            let (vcpu, fd) = vm.create_vcpu(argument)?;
            return Ok(Answer::Created(Object::Vcpu(vcpu), fd));
        }
        KVM_SET_USER_MEMORY_REGION => vm.set_user_memory_region(&user::read(argument)?)?,
        KVM_SET_USER_MEMORY_REGION2 => vm.set_user_memory_region2(&user::read(argument)?)?,
        KVM_SET_MEMORY_ATTRIBUTES => vm.set_memory_attributes(&user::read(argument)?)?,
        KVM_CREATE_GUEST_MEMFD => {
            let (guest_memfd, fd) = vm.create_guest_memfd(&user::read(argument)?)?;
            return Ok(Answer::Created(Object::GuestMemfd(guest_memfd), fd));
        }
        KVM_CREATE_DEVICE => {
            let mut device: kvm_create_device = user::read(argument)?;
            if device.flags & KVM_CREATE_DEVICE_TEST != 0 {
                vm.test_device(&device)?;
                return DONE;
            }
            // The client's memory is checked before the device is created. If it were checked later and could not be
            // written, the client would not learn the device's descriptor.
            user::check_writable(argument, size_of_val(&device))?;
            let (object, fd) = vm.create_device(&device)?;
            device.fd = fd.as_raw_fd() as u32;
            user::write(argument, &device)?;
            return Ok(Answer::Stored(Object::Device(object), fd));
        }
        KVM_GET_DIRTY_LOG => {
            let log: kvm_dirty_log = user::read(argument)?;
            // SAFETY: every bit pattern of both fields of the union is valid, and the fields have the same size.
            let to = unsafe { log.__bindgen_anon_1.padding2 };
            // The client's memory is checked before the log is harvested. If it were checked later and could not be
            // written, the harvested pages would be lost.
            let bitmap = vm.dirty_log(log.slot, |bytes| user::check_writable(to, bytes))?;
            user::write_slice(to, &bitmap)?;
        }
        KVM_CLEAR_DIRTY_LOG => {
            let log: kvm_clear_dirty_log = user::read(argument)?;
            // SAFETY: every bit pattern of both fields of the union is valid, and the fields have the same size.
            let from = unsafe { log.__bindgen_anon_1.padding2 };
            let bitmap = |words| user::read_words(from, words);
            vm.clear_dirty_log(log.slot, log.first_page, log.num_pages, bitmap)?;
        }
        KVM_RESET_DIRTY_RINGS => return value(vm.reset_dirty_rings()?),
        KVM_REGISTER_COALESCED_MMIO => vm.register_coalesced(&user::read(argument)?)?,
        KVM_UNREGISTER_COALESCED_MMIO => vm.unregister_coalesced(&user::read(argument)?)?,
        KVM_GET_STATS_FD => {
            let (stats, fd) = vm.stats()?;
            return Ok(Answer::Created(Object::Stats(stats), fd));
        }
        KVM_IRQ_LINE => {
            let line: kvm_irq_level = user::read(argument)?;
            vm.irq_line(gsi(&line), line.level != 0)?;
        }
        KVM_IRQ_LINE_STATUS => {
            let mut line: kvm_irq_level = user::read(argument)?;
            line.__bindgen_anon_1.status = vm.irq_line(gsi(&line), line.level != 0)?;
            return give(argument, &line);
        }
        KVM_SET_GSI_ROUTING => {
            let [count, flags]: [u32; 2] = user::read(argument)?;
            if !vm.has_irqchip() || flags != 0 || count > MAX_ROUTES {
                return fail(libc::EINVAL);
            }
            let entries = argument + size_of::<[u32; 2]>() as u64;
            vm.set_gsi_routing(flags, &user::read_vec(entries, count as usize)?)?;
        }
        KVM_IRQFD => vm.irqfd(&user::read(argument)?)?,
        KVM_IOEVENTFD => vm.ioeventfd(&user::read(argument)?)?,
        KVM_SIGNAL_MSI => return value(vm.signal_msi(&user::read(argument)?)?),
        KVM_ENABLE_CAP => vm.enable_cap(&user::read(argument)?)?,
        _ => {
            return of_arch(
                arch::vm_ioctl(vm, request, argument)?,
                request,
                libc::ENOTTY,
            );
        }
    }
    DONE
}

fn gsi(line: &kvm_irq_level) -> u32 {
    // SAFETY: both fields of the union are integers, so every bit pattern is valid.
    unsafe { line.__bindgen_anon_1.irq }
}
