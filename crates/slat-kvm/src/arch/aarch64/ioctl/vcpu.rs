//! Requests to a vCPU that only arm64 has.

use super::Answer;
use crate::vcpu::VcpuObject;

pub(crate) fn ioctl(vcpu: &VcpuObject, _request: u32, _argument: u64) -> Answer {
    match vcpu.lock()?.cpu.state {}
}
