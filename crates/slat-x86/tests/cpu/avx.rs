//! Tests when AVX instructions exist. Also tests effects that the oracle cannot test, because it runs user code with
//! AVX enabled.

use crate::common::*;
use slat_x86::state::{control, xcr0};
use slat_x86::*;

const AVX: u64 = xcr0::X87 | xcr0::SSE | xcr0::AVX;

fn on_host() -> bool {
    is_x86_feature_detected!("avx") && is_x86_feature_detected!("avx2")
}

/// Makes a guest with AVX enabled, whose RSI points to its data.
fn guest(code: &[u8]) -> Guest {
    let mut guest = Guest::new(code);
    let state = &mut guest.cpu.state;
    state.cr4 |= control::CR4_OSXSAVE;
    state.xcr0 = AVX;
    state.gpr[RSI] = DATA;
    guest
}

/// vaddps ymm1,ymm2,[rsi]; hlt
const VADDPS: &[u8] = b"\xc5\xec\x58\x0e\xf4";
/// vpor ymm1,ymm2,[rsi]; hlt. Compiled code has a translation for VPOR.
const VPOR: &[u8] = b"\xc5\xed\xeb\x0e\xf4";

#[test]
fn avx_instructions_exist_where_the_system_saves_their_state() {
    for (cr4, xcr0, exists) in [
        (control::CR4_OSXSAVE, AVX, on_host()),
        (0, AVX, false),
        (control::CR4_OSXSAVE, xcr0::X87 | xcr0::SSE, false),
        (control::CR4_OSXSAVE, xcr0::X87, false),
    ] {
        for code in [VADDPS, VPOR] {
            let mut guest = guest(code);
            guest.cpu.state.cr4 = guest.cpu.state.cr4 & !control::CR4_OSXSAVE | cr4;
            guest.cpu.state.xcr0 = xcr0;
            // Neither EM nor OSFXSR affects VEX-encoded instructions.
            guest.cpu.state.cr0 |= control::CR0_EM;
            guest.cpu.state.cr4 &= !control::CR4_OSFXSR;
            match exists {
                true => guest.halt(),
                false => guest.halt_in_handler(vector::UD),
            }
        }
    }
}

#[test]
fn avx_instructions_are_not_available_after_a_task_switch() {
    for code in [VADDPS, VPOR].into_iter().filter(|_| on_host()) {
        let mut guest = guest(code);
        guest.cpu.state.cr0 |= control::CR0_TS;
        guest.halt_in_handler(vector::NM);
    }
}

#[test]
fn xsetbv_enables_avx_for_the_next_instruction_and_wants_sse_with_it() {
    // xsetbv; vaddps ymm1,ymm2,[rsi]; hlt
    let code = [b"\x0f\x01\xd1", VADDPS].concat();
    for (before, value, ends) in [
        (xcr0::X87, AVX, None),
        (AVX, xcr0::X87 | xcr0::SSE, Some(vector::UD)),
        (AVX, xcr0::X87 | xcr0::AVX, Some(vector::GP)),
    ] {
        let mut guest = guest(&code);
        guest.cpu.state.xcr0 = before;
        let gpr = &mut guest.cpu.state.gpr;
        (gpr[RAX], gpr[RCX], gpr[RDX]) = (value, 0, 0);
        match ends {
            _ if !on_host() => guest.halt_in_handler(match value & xcr0::AVX {
                0 => vector::UD,
                _ => vector::GP,
            }),
            None => guest.halt(),
            Some(vector) => guest.halt_in_handler(vector),
        }
    }
}

#[test]
fn a_guest_without_the_component_has_no_avx() {
    let mut guest = guest(b"\x0f\x01\xd1\xf4");
    // CPUID leaf 0xd reports only x87 and SSE.
    guest
        .cpu
        .set_features(Features::from_cpuid(|leaf, _| match leaf {
            0xd => [3, 0, 0, 0],
            _ => [!0; 4],
        }));
    let gpr = &mut guest.cpu.state.gpr;
    (gpr[RAX], gpr[RCX], gpr[RDX]) = (AVX, 0, 0);
    guest.halt_in_handler(vector::GP);
}

#[test]
fn real_mode_has_no_vex_prefix() {
    // andn eax,ecx,edx; vaddps ymm0,ymm0,ymm0
    for code in [&b"\xc4\xe2\x70\xf2\xc2"[..], b"\xc5\xfc\x58\xc0"] {
        let mut guest = guest(code);
        guest.is_undefined_in_real_mode();
    }
}

#[test]
fn an_unmasked_exception_is_raised_as_the_system_supports_it() {
    // vdivps ymm1,ymm2,ymm3 with zeros
    let code = b"\xc5\xec\x5e\xcb";
    for (supported, vector) in [(true, vector::XM), (false, vector::UD)] {
        let mut guest = guest(code);
        guest.cpu.state.mxcsr = 0x1f00;
        if !supported {
            guest.cpu.state.cr4 &= !control::CR4_OSXMMEXCPT;
        }
        if on_host() {
            guest.halt_in_handler(vector);
            assert_eq!(guest.cpu.state.mxcsr, 0x1f01);
        }
    }
}

#[test]
fn a_gather_reads_device_memory_once_per_element_in_order() {
    if !on_host() {
        return;
    }
    // vpgatherdd xmm1,[rsi+xmm2*4],xmm3; hlt
    let mut guest = guest(b"\xc4\xe2\x61\x90\x0c\x96\xf4");
    let state = &mut guest.cpu.state;
    state.gpr[RSI] = MMIO;
    let vector = |elements: [u32; 4]| {
        (elements.iter().rev()).fold(0, |v, element| v << 32 | u128::from(*element))
    };
    state.xmm[2] = vector([2, 5, 0, 7]);
    state.xmm[3] = vector([1 << 31, 0, 1 << 31, 1 << 31]);
    state.xmm[1] = vector([1, 2, 3, 4]);
    for (n, at) in [8, 0, 28].into_iter().enumerate() {
        let read = Exit::Mmio {
            gpa: MMIO + at,
            len: 4,
            write: false,
            data: [0; 8],
        };
        assert_eq!(guest.run(), read);
        guest.cpu.complete_mmio_read(&[10 + n as u8, 0, 0, 0]);
    }
    guest.halt();
    let state = &guest.cpu.state;
    assert_eq!(state.xmm[1], vector([10, 2, 11, 12]));
    assert_eq!((state.xmm[3], state.ymm_high[1]), (0, 0));
}

#[test]
fn a_gather_goes_on_after_a_page_fault_of_one_element() {
    if !on_host() {
        return;
    }
    // vpgatherqq ymm1,[rsi+ymm2],ymm3; hlt
    let code = b"\xc4\xe2\xe5\x91\x0c\x16\xf4";
    let mut guest = guest(code);
    let state = &mut guest.cpu.state;
    state.xmm[2] = 8;
    (state.xmm[3], state.ymm_high[3]) = (u128::MAX, u128::MAX);
    state.ymm_high[2] = 0x1000;
    guest.memory().write64(DATA, 5);
    guest.memory().write64(DATA + 8, 6);
    guest.memory().write64(DATA + 0x1000, 7);
    guest.machine.absent(DATA + 0x1000);
    guest.halt_in_handler(vector::PF);
    let state = &guest.cpu.state;
    assert_eq!((state.cr2, guest.stack(1)), (DATA + 0x1000, CODE));
    assert_eq!(state.xmm[1], 5 << 64 | 6);
    assert_eq!((state.xmm[3], state.ymm_high[3]), (0, u128::MAX));
}

#[test]
fn masked_accesses_do_not_touch_what_is_not_selected() {
    if !on_host() {
        return;
    }
    // vmaskmovps ymm1,ymm3,[rsi]; vmaskmovps [rsi],ymm3,ymm1; hlt
    let mut guest = guest(b"\xc4\xe2\x65\x2c\x0e\xc4\xe2\x65\x2e\x0e\xf4");
    // The upper half of the operand is in a page that is absent.
    guest.cpu.state.gpr[RSI] = DATA + 0xff0;
    guest.machine.absent(DATA + 0x1000);
    guest.memory().write(DATA + 0xff0, &[9; 16]);
    guest.cpu.state.xmm[3] = 1 << 31;
    guest.halt();
    let state = &guest.cpu.state;
    assert_eq!((state.xmm[1], state.ymm_high[1]), (0x0909_0909, 0));
    assert_eq!(guest.memory().read::<16>(DATA + 0xff0), [9; 16]);
}
