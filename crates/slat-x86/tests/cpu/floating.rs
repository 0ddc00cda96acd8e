//! Tests the behaviour of SSE and x87 instructions besides their results: when they are unavailable, how their
//! exceptions are raised, and the state after a fault. (The oracle tests the results.)

use crate::common::*;
use slat_x86::state::control::{CR0_EM, CR0_NE, CR0_TS, CR4_OSFXSR, CR4_OSXMMEXCPT};
use slat_x86::vector::{MF, NM, XM};
use slat_x86::*;

/// addps xmm0,xmm1; hlt
const ADDPS: &[u8] = b"\x0f\x58\xc1\xf4";
/// pxor xmm0,xmm1; hlt. Compiled code has a translation for PXOR.
const PXOR: &[u8] = b"\x66\x0f\xef\xc1\xf4";
/// divss xmm0,xmm1; hlt
const DIVSS: &[u8] = b"\xf3\x0f\x5e\xc1\xf4";
/// fld1; hlt
const FLD1: &[u8] = b"\xd9\xe8\xf4";

/// Makes a guest whose x87 unit is in the state after FNINIT.
fn guest(code: &[u8]) -> Guest {
    let mut guest = Guest::new(code);
    let state = &mut guest.cpu.state;
    (state.fcw, state.fsw, state.ftw) = (0x37f, 0, 0);
    guest
}

#[test]
fn sse_is_undefined_until_the_system_enables_it() {
    for code in [ADDPS, PXOR] {
        let mut off = guest(code);
        off.cpu.state.cr4 &= !CR4_OSFXSR;
        off.halt_in_handler(vector::UD);
        let mut emulated = guest(code);
        emulated.cpu.state.cr0 |= CR0_EM;
        emulated.halt_in_handler(vector::UD);
    }
}

#[test]
fn a_task_switch_makes_sse_and_x87_unavailable_until_clts() {
    for code in [ADDPS, PXOR, FLD1] {
        let mut guest = guest(code);
        guest.cpu.state.cr0 |= CR0_TS;
        guest.halt_in_handler(NM);
        assert_eq!(guest.stack(0), CODE);
    }
    // clts; fld1; hlt
    let mut guest = guest(b"\x0f\x06\xd9\xe8\xf4");
    guest.cpu.state.cr0 |= CR0_TS;
    guest.halt();
    assert_eq!(guest.cpu.state.rip, CODE + 5);
}

#[test]
fn x87_is_unavailable_under_emulation() {
    let mut guest = guest(FLD1);
    guest.cpu.state.cr0 |= CR0_EM;
    guest.halt_in_handler(NM);
}

#[test]
fn an_unmasked_sse_exception_leaves_the_destination_and_sets_its_flag() {
    let mut guest = guest(DIVSS);
    let one = u128::from(1f32.to_bits());
    guest.cpu.state.xmm[0] = one;
    guest.cpu.state.mxcsr = 0x1d80;
    guest.halt_in_handler(XM);
    assert_eq!(guest.stack(0), CODE);
    assert_eq!(guest.cpu.state.xmm[0], one);
    assert_eq!(guest.cpu.state.mxcsr, 0x1d84);
}

#[test]
fn an_unmasked_sse_exception_is_undefined_for_a_system_that_does_not_know_it() {
    let mut guest = guest(DIVSS);
    guest.cpu.state.xmm[0] = 1;
    guest.cpu.state.mxcsr = 0;
    guest.cpu.state.cr4 &= !CR4_OSXMMEXCPT;
    guest.halt_in_handler(vector::UD);
}

#[test]
fn an_x87_exception_waits_for_the_next_instruction_that_waits() {
    // fldz; fld1; fdiv st0,st(1); fnstsw ax; fnop; hlt
    let mut guest = guest(b"\xd9\xee\xd9\xe8\xd8\xf1\xdf\xe0\xd9\xd0\xf4");
    guest.cpu.state.fcw = 0x37b;
    guest.halt_in_handler(MF);
    assert_eq!(guest.stack(0), CODE + 8, "the instruction after FNSTSW");
    assert_eq!(
        guest.cpu.state.gpr[RAX] & 0x8084,
        0x8084,
        "busy, summary, division by zero"
    );
    assert_eq!(guest.cpu.state.fip, CODE + 4, "the division");
    assert_eq!(guest.cpu.state.fop, 0xf1);
}

#[test]
fn fwait_takes_a_waiting_exception_and_fnclex_drops_it() {
    let mut waits = guest(b"\x9b\xf4");
    (waits.cpu.state.fcw, waits.cpu.state.fsw) = (0x37e, 0x8081);
    waits.halt_in_handler(MF);
    let mut cleared = guest(b"\xdb\xe2\x9b\xf4");
    (cleared.cpu.state.fcw, cleared.cpu.state.fsw) = (0x37e, 0x8081);
    cleared.halt();
    assert_eq!(cleared.cpu.state.rip, CODE + 4);
}

#[test]
fn an_x87_exception_is_mf_also_where_it_would_go_to_the_interrupt_controller() {
    let mut guest = guest(b"\x9b\xf4");
    (guest.cpu.state.fcw, guest.cpu.state.fsw) = (0x37e, 0x8081);
    guest.cpu.state.cr0 &= !CR0_NE;
    guest.halt_in_handler(MF);
    assert_eq!(guest.stack(0), CODE);
}

#[test]
fn aligned_forms_fault_on_an_odd_address_and_others_do_not() {
    // movaps xmm0,[rsi] / paddd xmm0,[rsi] / movups xmm0,[rsi] / movsd xmm0,[rsi]
    for (code, faults) in [
        (&b"\x0f\x28\x06\xf4"[..], true),
        (b"\x66\x0f\xfe\x06\xf4", true),
        (b"\x0f\x10\x06\xf4", false),
        (b"\xf2\x0f\x10\x06\xf4", false),
    ] {
        let mut guest = guest(code);
        guest.cpu.state.gpr[RSI] = DATA + 4;
        if faults {
            guest.halt_in_handler(vector::GP);
        } else {
            guest.halt();
            assert_eq!(guest.cpu.state.rip, CODE + code.len() as u64);
        }
    }
}

#[test]
fn a_masked_store_touches_selected_bytes_only() {
    // maskmovdqu xmm0,xmm1
    let mut guest = guest(b"\x66\x0f\xf7\xc1\xf4");
    guest.machine.absent(DATA + 0x1000);
    guest.cpu.state.gpr[RDI] = DATA + 0xff8;
    guest.cpu.state.xmm[0] = u128::MAX;
    guest.cpu.state.xmm[1] = 0x80 << 8;
    guest.halt();
    assert_eq!(
        guest.cpu.state.rip,
        CODE + 5,
        "the absent page has no selected byte"
    );
    assert_eq!(guest.memory().read64(DATA + 0xff8), 0xff00);
}

#[test]
fn a_masked_store_that_faults_has_stored_nothing() {
    let mut guest = guest(b"\x66\x0f\xf7\xc1\xf4");
    guest.machine.absent(DATA + 0x1000);
    guest.cpu.state.gpr[RDI] = DATA + 0xff8;
    guest.cpu.state.xmm[0] = u128::MAX;
    guest.cpu.state.xmm[1] = u128::MAX;
    guest.halt_in_handler(vector::PF);
    assert_eq!(guest.memory().read64(DATA + 0xff8), 0);
}

#[test]
fn an_x87_store_whose_second_page_faults_has_changed_nothing() {
    // fstp tbyte [rsi]
    let mut guest = guest(b"\xdb\x3e\xf4");
    guest.machine.absent(DATA + 0x1000);
    guest.cpu.state.gpr[RSI] = DATA + 0xffc;
    (guest.cpu.state.fsw, guest.cpu.state.ftw) = (7 << 11, 0x80);
    let one = F80 {
        mantissa: 1 << 63,
        exponent: 0x3fff,
    };
    guest.cpu.state.st[7] = one;
    guest.halt_in_handler(vector::PF);
    assert_eq!(guest.cpu.state.cr2, DATA + 0x1000);
    assert_eq!(guest.memory().read64(DATA + 0xff8), 0);
    let state = &guest.cpu.state;
    assert_eq!(
        (state.fsw, state.ftw, state.st[7]),
        (7 << 11, 0x80, one),
        "not popped"
    );
}

#[test]
fn the_callers_floating_point_flags_are_not_the_guests() {
    let mxcsr = || {
        let mut value = 0u32;
        // SAFETY: the instruction stores MXCSR to a local variable.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value) };
        value
    };
    let mut guest = guest(DIVSS);
    guest.cpu.state.xmm[0] = u128::from(1f32.to_bits());
    guest.cpu.state.mxcsr = 0x7f80;
    let before = mxcsr();
    guest.halt();
    assert_eq!(guest.cpu.state.mxcsr, 0x7f84);
    assert_eq!(mxcsr(), before);
}

#[test]
fn the_guests_x87_flags_do_not_stay_in_the_host() {
    // fld1; fldz; fdivp (1 / 0); hlt
    let mut guest = guest(b"\xd9\xe8\xd9\xee\xde\xf9\xf4");
    guest.halt();
    assert_eq!(guest.cpu.state.fsw & 0x7f, 4);
    let status: u16;
    // SAFETY: the instruction reads a register.
    unsafe { std::arch::asm!("fnstsw ax", out("ax") status) };
    assert_eq!(status & 0x7f, 0);
}

#[test]
fn what_is_offered_contains_the_baseline() {
    let features = simd::features();
    const FPU_MMX_SSE_SSE2: u32 = 1 | 1 << 23 | 1 << 25 | 1 << 26;
    assert_eq!(features.leaf1_edx, FPU_MMX_SSE_SSE2);
    assert_eq!(
        features.leaf1_ecx & 1 != 0,
        std::arch::is_x86_feature_detected!("sse3")
    );
}
