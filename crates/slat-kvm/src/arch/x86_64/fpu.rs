//! The x87, SSE, AVX and PKRU state in KVM's structs: `kvm_fpu` and the XSAVE area.

use crate::arch::x86_64::cpuid::{avx_offset, is_amd, pkru_offset, supported_xcr0};
use crate::errno::{Result, fail};
use kvm_bindings::*;
use slat_x86::State;
use slat_x86::state::{MXCSR_MASK, MXCSR_MM, xcr0};

/// The offset of XSTATE_BV in an XSAVE area.
const XSTATE_BV: usize = 512;

/// Carries out `KVM_GET_FPU`. As in KVM, `mxcsr` is always 0. Clients save MXCSR by `KVM_GET_XSAVE`.
pub fn get_fpu(state: &State) -> kvm_fpu {
    let image = state.to_fxsave();
    let mut fpu = kvm_fpu {
        fcw: state.fcw,
        fsw: state.fsw,
        ftwx: state.ftw,
        last_opcode: state.fop,
        last_ip: state.fip,
        last_dp: state.fdp,
        ..Default::default()
    };
    for (index, register) in fpu.fpr.iter_mut().enumerate() {
        register.copy_from_slice(&image[32 + 16 * index..][..16]);
    }
    for (index, register) in fpu.xmm.iter_mut().enumerate() {
        register.copy_from_slice(&image[160 + 16 * index..][..16]);
    }
    fpu
}

/// Carries out `KVM_SET_FPU`. As in KVM, MXCSR keeps its value.
pub fn set_fpu(state: &mut State, fpu: &kvm_fpu) {
    let mut image = [0; 512];
    image[0..2].copy_from_slice(&fpu.fcw.to_le_bytes());
    image[2..4].copy_from_slice(&fpu.fsw.to_le_bytes());
    image[4] = fpu.ftwx;
    image[6..8].copy_from_slice(&fpu.last_opcode.to_le_bytes());
    image[8..16].copy_from_slice(&fpu.last_ip.to_le_bytes());
    image[16..24].copy_from_slice(&fpu.last_dp.to_le_bytes());
    image[24..28].copy_from_slice(&state.mxcsr.to_le_bytes());
    for (index, register) in fpu.fpr.iter().enumerate() {
        image[32 + 16 * index..][..16].copy_from_slice(register);
    }
    for (index, register) in fpu.xmm.iter().enumerate() {
        image[160 + 16 * index..][..16].copy_from_slice(register);
    }
    state.set_fxsave(&image);
}

/// Carries out `KVM_GET_XSAVE`. Returns 4096 bytes in the standard format.
pub fn get_xsave(state: &State) -> [u8; 4096] {
    let mut area = [0; 4096];
    area[..512].copy_from_slice(&state.to_fxsave());
    area[XSTATE_BV..][..8].copy_from_slice(&supported_xcr0().to_le_bytes());
    if let Some(at) = avx_offset() {
        for (half, bytes) in (state.ymm_high.iter()).zip(area[at..].chunks_exact_mut(16)) {
            bytes.copy_from_slice(&half.to_le_bytes());
        }
    }
    if let Some(at) = pkru_offset() {
        area[at..][..4].copy_from_slice(&state.pkru.to_le_bytes());
    }
    area
}

/// Carries out `KVM_SET_XSAVE`. A component that is not present gets its initial state. As in KVM, PKRU is an
/// exception: if the component is not present, PKRU keeps its value.
///
/// # Errors
/// `EINVAL` for components that the CPU does not have, for the compacted format, and for reserved words of the header.
/// `EINVAL` also for reserved bits of MXCSR, if a component that uses MXCSR is present.
pub fn set_xsave(state: &mut State, area: &[u8; 4096]) -> Result<()> {
    let word = |at: usize| u64::from_le_bytes(area[at..at + 8].try_into().expect("8 bytes"));
    let present = word(XSTATE_BV);
    let mut reserved = (XSTATE_BV + 8..XSTATE_BV + 64).step_by(8).map(word);
    if present & !supported_xcr0() != 0 || reserved.any(|word| word != 0) {
        return fail(libc::EINVAL);
    }
    let mut initial = State::reset();
    initial.initialize_x87();
    let mut image = initial.to_fxsave();
    if present & 1 != 0 {
        image[..24].copy_from_slice(&area[..24]);
        image[32..160].copy_from_slice(&area[32..160]);
    }
    if present & 2 != 0 {
        image[160..416].copy_from_slice(&area[160..416]);
    }
    let high = avx_offset().filter(|_| present & xcr0::AVX != 0);
    // As in KVM, MXCSR is copied if x87, SSE or AVX state is present.
    image[24..28].copy_from_slice(&state.mxcsr.to_le_bytes());
    if present & (xcr0::X87 | xcr0::SSE | xcr0::AVX) != 0 {
        let mxcsr = u32::from_le_bytes(area[24..28].try_into().expect("4 bytes"));
        // As in KVM, the known bits of MXCSR depend on the vendor of the processor that guests are offered, not on the
        // vendor in the guest's CPUID.
        let known = match is_amd() {
            true => MXCSR_MASK | MXCSR_MM,
            false => MXCSR_MASK,
        };
        if mxcsr & !known != 0 {
            return fail(libc::EINVAL);
        }
        image[24..28].copy_from_slice(&area[24..28]);
    }
    state.set_fxsave(&image);
    for (n, half) in state.ymm_high.iter_mut().enumerate() {
        *half = high.map_or(0, |at| {
            u128::from_le_bytes(area[at + 16 * n..][..16].try_into().expect("16 bytes"))
        });
    }
    if let Some(at) = pkru_offset().filter(|_| present & xcr0::PKRU != 0) {
        state.pkru = u32::from_le_bytes(area[at..][..4].try_into().expect("4 bytes"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_x86::state::MXCSR_INIT;

    #[test]
    fn the_fpu_state_comes_back_as_it_was_set() {
        let mut fpu = kvm_fpu {
            fcw: 0x37f,
            fsw: 0x3800,
            ftwx: 3,
            ..Default::default()
        };
        fpu.fpr[0][..10].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        fpu.xmm[15] = [7; 16];
        let mut state = State::reset();
        set_fpu(&mut state, &fpu);
        assert_eq!(get_fpu(&state), fpu);
        let area = get_xsave(&state);
        let mut other = State::reset();
        set_xsave(&mut other, &area).unwrap();
        assert_eq!(get_fpu(&other), fpu);
        assert_eq!(other.mxcsr, MXCSR_INIT);
    }

    #[test]
    fn the_upper_halves_come_back_as_they_were_set() {
        let mut state = State::reset();
        state.ymm_high = std::array::from_fn(|n| 1 << n);
        let has = avx_offset().is_some();
        let mut area = get_xsave(&state);
        let mut other = State::reset();
        set_xsave(&mut other, &area).unwrap();
        assert_eq!(other.ymm_high == state.ymm_high, has);
        // A component that the XSAVE header does not list gets its initial state.
        area[XSTATE_BV] &= !4;
        set_xsave(&mut other, &area).unwrap();
        assert_eq!(other.ymm_high, [0; 16]);
    }

    #[test]
    fn unknown_components_are_refused() {
        let mut area = get_xsave(&State::reset());
        area[XSTATE_BV] |= 8;
        assert!(set_xsave(&mut State::reset(), &area).is_err());
    }
}
