//! `KVM_GET_NESTED_STATE` and `KVM_SET_NESTED_STATE`: no guest has VMX or SVM, so the state is only a header that says so.

use crate::cpuid::host_is_amd;
use crate::errno::{Result, fail};
use kvm_bindings::*;

/// Bytes of the state, which is only a header: what `KVM_CHECK_EXTENSION` returns.
pub(crate) const SIZE: u32 = 128;
/// Words of the header. The first one holds flags and format, of 16 bits each, and the size.
pub(crate) const WORDS: usize = (SIZE / 8) as usize;
/// The address of VMXON region and current VMCS when there are none.
const NO_ADDRESS: u64 = u64::MAX;

/// A vCPU's nested state: flags, format and size, then the format's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NestedState([u64; WORDS]);

impl NestedState {
    /// The words of the state, in the client's format.
    pub fn words(&self) -> &[u64; WORDS] {
        &self.0
    }
}

/// Returns the state of a vCPU with VMX, or on AMD's processors SVM, disabled.
pub(crate) fn off() -> NestedState {
    let mut words = [0; WORDS];
    let (flags, format) = match host_is_amd() {
        true => (KVM_STATE_NESTED_GIF_SET, KVM_STATE_NESTED_FORMAT_SVM),
        false => (0, KVM_STATE_NESTED_FORMAT_VMX),
    };
    words[0] = u64::from(flags | format << 16) | u64::from(SIZE) << 32;
    if !host_is_amd() {
        (words[1], words[2]) = (NO_ADDRESS, NO_ADDRESS);
    }
    NestedState(words)
}

/// Accepts the state of a vCPU without nested guest.
///
/// # Errors
/// `EINVAL` for any other state, and for another vendor's.
pub(crate) fn check(header: &[u64; WORDS]) -> Result<()> {
    let NestedState(off) = off();
    // The size may include a nested guest's state, which is ignored.
    let fits = header[0] >> 32 >= u64::from(SIZE) && header[0] as u32 == off[0] as u32;
    let no_region = host_is_amd() || header[1..4] == off[1..4];
    match fits && no_region {
        true => Ok(()),
        false => fail(libc::EINVAL),
    }
}
