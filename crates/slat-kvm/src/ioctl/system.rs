//! Requests to `/dev/kvm`.

use super::{Answer, Object, of_arch, value};
use crate::abi::*;
use crate::arch;
use crate::errno::{Result, fail};
use crate::system::System;

// Not inlined: otherwise requests to other objects would also need this function's stack frame.
#[inline(never)]
pub(super) fn ioctl(system: &System, request: u32, argument: u64) -> Result<Answer> {
    match request {
        KVM_GET_API_VERSION if argument == 0 => value(system.api_version()),
        KVM_GET_VCPU_MMAP_SIZE if argument == 0 => value(system.vcpu_mmap_size() as i32),
        KVM_GET_API_VERSION | KVM_GET_VCPU_MMAP_SIZE => fail(libc::EINVAL),
        KVM_CHECK_EXTENSION => value(system.check_extension(argument)),
        KVM_CREATE_VM => {
            let (vm, fd) = system.create_vm(argument, None, None)?;
            Ok(Answer::Created(Object::Vm(vm), fd))
        }
        // KVM returns this errno for an unknown request to `/dev/kvm`; for an unknown request to a VM, KVM returns
        // ENOTTY.
        _ => of_arch(
            arch::system_ioctl(system, request, argument)?,
            request,
            libc::EINVAL,
        ),
    }
}
