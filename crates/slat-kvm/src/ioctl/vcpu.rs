//! Requests to a vCPU.

use super::{Answer, DONE, Object, give, of_arch};
use crate::abi::*;
use crate::arch;
use crate::errno::{Result, fail};
use crate::user;
use crate::vcpu::VcpuObject;
use kvm_bindings::*;
use slat::Shared;

/// The offset of the signal set in `kvm_signal_mask`.
const SIGSET: u64 = 4;
/// The size of the kernel's signal set.
const SIGSET_BYTES: u32 = 8;

/// Carries out `KVM_RUN`. Not inlined: otherwise other requests would also need this function's stack frame.
#[inline(never)]
pub(super) fn run(vcpu: &VcpuObject, argument: u64) -> Result<Answer> {
    let _call = vcpu.vm.begin()?;
    if argument != 0 {
        return fail(libc::EINVAL);
    }
    vcpu.run()?;
    DONE
}

/// Carries out all requests except `KVM_RUN`. Not inlined: otherwise other requests would also need this function's
/// stack frame, which has structures of several KiB.
#[inline(never)]
pub(super) fn ioctl(vcpu: &Shared<VcpuObject>, request: u32, argument: u64) -> Result<Answer> {
    let _call = vcpu.vm.begin()?;
    match request {
        KVM_SET_SIGNAL_MASK => vcpu.set_signal_mask(take_signal_mask(argument)?)?,
        KVM_GET_MP_STATE => return give(argument, &vcpu.get_mp_state()?),
        KVM_SET_MP_STATE => vcpu.set_mp_state(user::read(argument)?)?,
        KVM_GET_VCPU_EVENTS => return give(argument, &vcpu.get_vcpu_events()?),
        KVM_SET_VCPU_EVENTS => vcpu.set_vcpu_events(&user::read(argument)?)?,
        KVM_SET_GUEST_DEBUG => vcpu.set_guest_debug(&user::read(argument)?)?,
        KVM_PRE_FAULT_MEMORY => {
            let mut range: kvm_pre_fault_memory = user::read(argument)?;
            let result = vcpu.pre_fault(&mut range);
            // The range is written back even after an error, because it tells the client which part is not mapped yet.
            user::write(argument, &range)?;
            result?;
        }
        KVM_GET_STATS_FD => {
            let (stats, fd) = VcpuObject::stats(vcpu)?;
            return Ok(Answer::Created(Object::Stats(stats), fd));
        }
        // KVM returns this errno for an unknown request to a vCPU; for an unknown request to a VM, KVM returns ENOTTY.
        _ => {
            return of_arch(
                arch::vcpu_ioctl(vcpu, request, argument)?,
                request,
                libc::EINVAL,
            );
        }
    }
    DONE
}

fn take_signal_mask(argument: u64) -> Result<Option<u64>> {
    if argument == 0 {
        return Ok(None);
    }
    if user::read::<u32>(argument)? != SIGSET_BYTES {
        return fail(libc::EINVAL);
    }
    Ok(Some(user::read(argument + SIGSET)?))
}
