//! Requests to `/dev/kvm` that only arm64 has: none.

use super::{Answer, UNKNOWN};
use crate::system::System;

pub(crate) fn ioctl(_: &System, _request: u32, _argument: u64) -> Answer {
    UNKNOWN
}
