//! Tests instructions that 64-bit mode does not have, in compatibility mode. Also tests instructions that raise #UD
//! or do nothing if the CPU does not have a feature.

use crate::common::*;
use slat_x86::*;

const CF: u64 = 1;
const AF: u64 = 1 << 4;
/// The flags that the instructions define: CF, PF, AF, ZF and SF.
const DEFINED: u64 = 0xd5;

/// Makes a guest in compatibility mode: 32-bit code at CPL 0.
fn compatibility(code: &[u8]) -> Guest {
    let mut guest = Guest::new(code);
    guest.cpu.state.cs.rights = 0xc09b;
    guest
}

/// Runs one instruction with the given AX and flags. Returns AX and the defined flags afterwards.
fn adjust(code: &[u8], ax: u64, flags: u64) -> (u64, u64) {
    let mut guest = compatibility(&[code, b"\xf4"].concat());
    guest.cpu.state.gpr[RAX] = ax;
    guest.cpu.state.rflags = 2 | flags;
    guest.halt();
    (
        guest.cpu.state.gpr[RAX],
        guest.cpu.state.rflags & DEFINED & !2,
    )
}

/// Returns AL, CF and AF after DAA or DAS, by the manual's pseudocode.
fn decimal(al: u8, flags: u64, subtract: bool) -> (u8, u64) {
    let (old_al, old_cf) = (al, flags & CF != 0);
    let step = |al: u8, by: u8| match subtract {
        false => al.overflowing_add(by),
        true => al.overflowing_sub(by),
    };
    let (mut al, mut out) = (al, 0);
    if al & 15 > 9 || flags & AF != 0 {
        let (next, carry) = step(al, 6);
        al = next;
        out |= AF | u64::from(old_cf || carry);
    }
    if old_al > 0x99 || old_cf {
        al = step(al, 0x60).0;
        out |= CF;
    }
    (al, out)
}

#[test]
fn daa_and_das_follow_the_manual_for_every_input() {
    for (code, subtract) in [(b"\x27", false), (b"\x2f", true)] {
        for al in 0..=255u8 {
            for flags in [0, CF, AF, CF | AF] {
                let (ax, got) = adjust(code, 0x1200 | u64::from(al), flags);
                let (want, carries) = decimal(al, flags, subtract);
                assert_eq!(ax, 0x1200 | u64::from(want), "{al:#x} {flags:#x}");
                assert_eq!(got & (CF | AF), carries, "{al:#x} {flags:#x}");
                assert_eq!(got & 0x40 != 0, want == 0);
                assert_eq!(got & 0x80 != 0, want >= 0x80);
            }
        }
    }
}

#[test]
fn ascii_adjustments_carry_into_ah() {
    // aaa, aas
    assert_eq!(adjust(b"\x37", 0x010b, 0).0, 0x0201);
    assert_eq!(adjust(b"\x37", 0x0109, 0).0, 0x0109);
    assert_eq!(adjust(b"\x37", 0x00ff, 0), (0x0205, CF | AF | 4));
    assert_eq!(adjust(b"\x3f", 0x020b, 0), (0x0105, CF | AF | 4));
    assert_eq!(adjust(b"\x3f", 0x0200, AF).0, 0x000a);
    // aam 10, aad 10, and other bases
    assert_eq!(adjust(b"\xd4\x0a", 0x003f, 0).0, 0x0603);
    assert_eq!(adjust(b"\xd4\x10", 0x003f, 0).0, 0x030f);
    assert_eq!(adjust(b"\xd5\x0a", 0x0603, 0).0, 0x003f);
    assert_eq!(adjust(b"\xd5\x10", 0x1f0f, 0).0, 0x00ff);
    // salc
    assert_eq!(adjust(b"\xd6", 0x1234, CF).0, 0x12ff);
    assert_eq!(adjust(b"\xd6", 0x1234, 0).0, 0x1200);
    let mut guest = compatibility(b"\xd4\x00");
    guest.halt_in_handler(vector::DE);
}

#[test]
fn bound_is_br_outside_the_inclusive_signed_bounds() {
    for (index, inside) in [(-5i32, true), (7, true), (-6, false), (8, false)] {
        // bound eax, [DATA]; hlt
        let mut guest = compatibility(b"\x62\x05\x00\x00\x02\x00\xf4");
        guest.memory().write(DATA, &(-5i32).to_le_bytes());
        guest.memory().write(DATA + 4, &7i32.to_le_bytes());
        guest.cpu.state.gpr[RAX] = u64::from(index as u32);
        match inside {
            true => {
                guest.halt();
                assert_eq!(guest.cpu.state.rip, CODE + 7);
            }
            false => {
                guest.halt_in_handler(vector::BR);
                assert_eq!(guest.stack(0), CODE, "a fault");
            }
        }
    }
}

#[test]
fn arpl_raises_the_requested_privilege_level() {
    // arpl ax, cx; hlt
    for (ax, cx, want, zero) in [(0x10, 3, 0x13, true), (0x13, 1, 0x13, false)] {
        let mut guest = compatibility(b"\x63\xc8\xf4");
        guest.cpu.state.gpr[RAX] = ax;
        guest.cpu.state.gpr[RCX] = cx;
        guest.halt();
        assert_eq!(guest.cpu.state.gpr[RAX], want);
        assert_eq!(guest.cpu.state.rflags & 0x40 != 0, zero);
    }
    // ARPL does not exist in real mode.
    let mut guest = Guest::new(b"\x63\xc8");
    guest.is_undefined_in_real_mode();
}

#[test]
fn none_of_them_exists_in_64_bit_mode() {
    for code in [
        &b"\x27"[..],
        b"\x2f",
        b"\x37",
        b"\x3f",
        b"\xd4\x0a",
        b"\xd5\x0a",
        b"\xd6",
    ] {
        let mut guest = Guest::new(code);
        guest.halt_in_handler(vector::UD);
        assert_eq!(guest.stack(0), CODE);
    }
}

#[test]
fn shadow_stack_reads_and_branch_targets_do_nothing_without_cet() {
    // rdsspq rax; rdsspd ecx; endbr64; endbr32; hlt
    let mut guest =
        Guest::new(b"\xf3\x48\x0f\x1e\xc8\xf3\x0f\x1e\xc9\xf3\x0f\x1e\xfa\xf3\x0f\x1e\xfb\xf4");
    guest.cpu.state.gpr[RAX] = 0x1234;
    guest.cpu.state.gpr[RCX] = u64::MAX;
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RAX], 0x1234);
    assert_eq!(
        guest.cpu.state.gpr[RCX],
        u64::MAX,
        "not even the upper half"
    );
    // incsspq rax is #UD.
    let mut guest = Guest::new(b"\xf3\x48\x0f\xae\xe8");
    guest.halt_in_handler(vector::UD);
}
