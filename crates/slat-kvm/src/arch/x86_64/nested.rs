//! `KVM_GET_NESTED_STATE` and `KVM_SET_NESTED_STATE` (KVM's api document, 4.114 and 4.115). The nested state says
//! whether a vCPU runs a nested guest by SVM, and has the registers of the hypervisor that runs it. slat does not offer
//! VMX. So if the policy offers Intel's processor, a guest has no nested virtualization. Its nested state is a header
//! without VMXON region.

use crate::arch::x86_64::cpuid::is_amd;
use crate::errno::{Result, fail};
use kvm_bindings::*;
use slat_x86::svm::VMCB_BYTES;
use slat_x86::{Cpu, state::control};

/// The number of bytes of the header. It consists of flags and format (16 bits each), the size, and the format's own
/// words.
pub(crate) const HEADER: u32 = 128;
/// The number of 8-byte words in the header of `kvm_nested_state`.
pub(crate) const WORDS: usize = (HEADER / 8) as usize;
/// The number of bytes of the state in guest mode: the value that `KVM_CHECK_EXTENSION` returns.
pub(crate) const SIZE: u32 = HEADER + VMCB_BYTES as u32;
/// The value that means "no address", for the VMXON region and the current VMCS.
const NO_ADDRESS: u64 = u64::MAX;
/// All flags of `kvm_nested_state` that KVM knows, for VMX and SVM together.
const FLAGS: u32 = KVM_STATE_NESTED_GUEST_MODE
    | KVM_STATE_NESTED_RUN_PENDING
    | KVM_STATE_NESTED_EVMCS
    | KVM_STATE_NESTED_MTF_PENDING
    | KVM_STATE_NESTED_GIF_SET;
/// The flags of `kvm_nested_state` that exist with SVM.
const SVM_FLAGS: u32 =
    KVM_STATE_NESTED_GUEST_MODE | KVM_STATE_NESTED_RUN_PENDING | KVM_STATE_NESTED_GIF_SET;

/// A vCPU's nested state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NestedState {
    words: [u64; WORDS],
    vmcb: Option<[u8; VMCB_BYTES]>,
}

impl NestedState {
    /// Returns the words of the header, in the layout of `kvm_nested_state`.
    pub fn words(&self) -> &[u64; WORDS] {
        &self.words
    }

    /// Returns the VMCB, which is the page after the header, if the vCPU is in guest mode.
    pub fn vmcb(&self) -> Option<&[u8; VMCB_BYTES]> {
        self.vmcb.as_ref()
    }

    /// Returns the number of bytes of the state.
    pub fn size(&self) -> u32 {
        (self.words[0] >> 32) as u32
    }
}

/// Whether the nested state of `cpu` has SVM's format. The nested state has SVM's format if the CPU has SVM, or if
/// guests are offered AMD's processor.
fn is_svm(cpu: &Cpu) -> bool {
    is_amd() || cpu.features().has_svm()
}

fn first_word(flags: u32, format: u32, size: u32) -> u64 {
    u64::from(flags | format << 16) | u64::from(size) << 32
}

/// Returns the nested state of `cpu`.
pub(crate) fn get(cpu: &Cpu) -> NestedState {
    let mut words = [0; WORDS];
    if !is_svm(cpu) {
        words[0] = first_word(0, KVM_STATE_NESTED_FORMAT_VMX, HEADER);
        (words[1], words[2]) = (NO_ADDRESS, NO_ADDRESS);
        return NestedState { words, vmcb: None };
    }
    let mut flags = match cpu.state.events.gif_clear {
        true => 0,
        false => KVM_STATE_NESTED_GIF_SET,
    };
    let vmcb = cpu.vmcb().map(|address| {
        words[1] = address;
        flags |= KVM_STATE_NESTED_GUEST_MODE;
        if cpu.injected_event().is_some() {
            flags |= KVM_STATE_NESTED_RUN_PENDING;
        }
        cpu.saved_vmcb()
    });
    let size = if vmcb.is_some() { SIZE } else { HEADER };
    words[0] = first_word(flags, KVM_STATE_NESTED_FORMAT_SVM, size);
    NestedState { words, vmcb }
}

/// Sets the nested state of `cpu`. `read_vmcb` reads the page that follows the header.
///
/// # Errors
/// `EINVAL`, as in KVM: for unknown flags, a wrong format, and a size that is too small; for guest mode without
/// EFER.SVME or in system management mode; for an address that no control block can have; for a page that cannot be the
/// result of a VMRUN.
pub(crate) fn set(
    cpu: &mut Cpu,
    header: &[u64; WORDS],
    read_vmcb: impl FnOnce() -> Result<[u8; VMCB_BYTES]>,
) -> Result<()> {
    let (flags, format) = (header[0] as u32 & 0xffff, header[0] as u32 >> 16);
    let size = (header[0] >> 32) as u32;
    let enters = flags & KVM_STATE_NESTED_GUEST_MODE != 0;
    let runs = flags & KVM_STATE_NESTED_RUN_PENDING != 0;
    if size < HEADER || flags & !FLAGS != 0 || runs && !enters {
        return fail(libc::EINVAL);
    }
    if !is_svm(cpu) {
        let regions = header[1..4] == [NO_ADDRESS, NO_ADDRESS, 0];
        return match flags == 0 && format == KVM_STATE_NESTED_FORMAT_VMX && regions {
            true => Ok(()),
            false => fail(libc::EINVAL),
        };
    }
    let enabled = cpu.state.efer & control::EFER_SVME != 0;
    if format != KVM_STATE_NESTED_FORMAT_SVM
        || flags & !SVM_FLAGS != 0
        || !enabled && enters
        || cpu.state.events.smm && enters
    {
        return fail(libc::EINVAL);
    }
    if !enters {
        cpu.drop_guest_mode();
    } else {
        let address = header[1];
        let is_page = address & 0xfff == 0 && address >> cpu.features().physical_bits() == 0;
        if !is_page || size < SIZE {
            return fail(libc::EINVAL);
        }
        let vmcb = read_vmcb()?;
        if cpu.restore_guest_mode(address, &vmcb).is_err() {
            return fail(libc::EINVAL);
        }
    }
    cpu.state.events.gif_clear = flags & KVM_STATE_NESTED_GIF_SET == 0;
    Ok(())
}
