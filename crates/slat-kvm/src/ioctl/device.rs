//! Requests to a device.

use super::{Answer, DONE, unknown};
use crate::abi::*;
use crate::device::DeviceObject;
use crate::errno::Result;
use crate::user;

// Not inlined: otherwise requests to other objects would also need this function's stack frame.
#[inline(never)]
pub(super) fn ioctl(device: &DeviceObject, request: u32, argument: u64) -> Result<Answer> {
    match request {
        KVM_SET_DEVICE_ATTR => device.set_attribute(&user::read(argument)?)?,
        KVM_GET_DEVICE_ATTR => device.get_attribute(&user::read(argument)?)?,
        KVM_HAS_DEVICE_ATTR => device.has_attribute(&user::read(argument)?)?,
        _ => return unknown(request, libc::ENOTTY),
    }
    DONE
}
