//! Tests instructions and bits that exist only with a feature of the CPU: XSAVE, protection keys, control bits. Also
//! tests the page-directory-pointer entries of PAE.

use crate::common::*;
use slat_x86::state::{control, xcr0};
use slat_x86::*;

/// Returns the state components of a CPU on this host.
fn components() -> u64 {
    match is_x86_feature_detected!("avx") {
        true => xcr0::ALL,
        false => xcr0::ALL & !xcr0::AVX,
    }
}

/// Makes a guest with XSAVE and all state components enabled. RAX and RDX request all components.
fn with_xsave(code: &[u8]) -> Guest {
    let mut guest = Guest::new(code);
    let state = &mut guest.cpu.state;
    state.cr4 |= control::CR4_OSXSAVE | control::CR4_PKE;
    state.xcr0 = components();
    (state.gpr[RAX], state.gpr[RDX]) = (u64::MAX, u64::MAX);
    (state.gpr[RSI], state.gpr[RDI]) = (DATA, DATA + 0x1000);
    guest
}

/// Returns the features of a CPUID table in which only some leaves are not zero.
fn features(leaves: &[((u32, u32), [u32; 4])]) -> Features {
    Features::from_cpuid(|leaf, subleaf| {
        (leaves.iter())
            .find(|(of, _)| *of == (leaf, subleaf))
            .map_or([0; 4], |(_, registers)| *registers)
    })
}

#[test]
fn xsave_and_xrstor_keep_all_components_in_both_formats() {
    // xsave [rsi], xsaveopt [rsi], xsavec [rsi] or xsaves [rsi]; then with other values xrstor [rsi]
    for (code, compacted) in [
        (&b"\x0f\xae\x26\xf4"[..], false),
        (b"\x0f\xae\x36\xf4", false),
        (b"\x0f\xc7\x26\xf4", true),
        (b"\x0f\xc7\x2e\xf4", true),
    ] {
        let mut guest = with_xsave(code);
        let state = &mut guest.cpu.state;
        state.xmm[15] = 0x1234;
        state.ymm_high[14] = match components() & xcr0::AVX {
            0 => 0,
            _ => 0x5678 << 64,
        };
        state.mxcsr = 0x1fa0;
        state.st[3].mantissa = 7;
        state.pkru = 0x5555_5554;
        let before = state.clone();
        guest.memory().write(DATA, &[0xaa; 4096]);
        guest.memory().write(DATA + 512, &[0; 64]);
        guest.halt();
        let header = |at| guest.memory().read64(DATA + 512 + at);
        assert_eq!(header(0), components());
        let format = match compacted {
            true => 1 << 63 | components(),
            false => 0,
        };
        assert_eq!(header(8), format);
        let at = match (compacted, components() & xcr0::AVX) {
            (false, _) => PKRU_OFFSET as u64,
            (true, 0) => 576,
            (true, _) => 832,
        };
        if components() & xcr0::AVX != 0 {
            let high = u128::from_le_bytes(guest.memory().read(DATA + 576 + 16 * 14));
            assert_eq!(high, before.ymm_high[14]);
        }
        assert_eq!(guest.memory().read64(DATA + at), 0x5555_5554);
        assert_eq!(guest.memory().read::<1>(DATA + 464), [0xaa], "software's");
        let state = &mut guest.cpu.state;
        (state.xmm, state.pkru, state.mxcsr) = ([1; 16], 1, 0x1f80);
        if components() & xcr0::AVX != 0 {
            state.ymm_high = [1; 16];
        }
        state.st[3].mantissa = 8;
        // xrstor [rsi]
        guest.memory().write(CODE, b"\x0f\xae\x2e\xf4");
        guest.cpu.state.rip = CODE;
        guest.halt();
        let state = &guest.cpu.state;
        assert_eq!((state.xmm, state.st), (before.xmm, before.st));
        assert_eq!(state.ymm_high, before.ymm_high);
        assert_eq!((state.pkru, state.mxcsr), (0x5555_5554, 0x1fa0));
    }
}

#[test]
fn components_in_their_initial_state_are_told_and_not_written() {
    // xsavec [rsi]; xsaveopt [rdi]; mov ecx,1; xgetbv; hlt
    let mut guest = with_xsave(b"\x0f\xc7\x26\x0f\xae\x37\xb9\x01\x00\x00\x00\x0f\x01\xd0\xf4");
    guest.cpu.state.initialize_x87();
    guest.cpu.state.pkru = 4;
    for at in [DATA, DATA + 0x1000] {
        guest.memory().write(at, &[0xaa; 4096]);
    }
    guest.halt();
    let read = |at| guest.memory().read64(at);
    assert_eq!(read(DATA + 512), 0x200);
    assert_eq!(read(DATA + 520), 1 << 63 | components());
    assert_eq!(read(DATA + 528), 0xaaaa_aaaa_aaaa_aaaa);
    assert_eq!(
        (read(DATA), read(DATA + 160)),
        (0xaaaa_aaaa_aaaa_aaaa, 0xaaaa_aaaa_aaaa_aaaa)
    );
    // XSAVEOPT does not change the bits of components that were not requested.
    assert_eq!(
        read(DATA + 0x1000 + 512),
        0xaaaa_aaaa_aaaa_aaaa & !components() | 0x200
    );
    assert_eq!(read(DATA + 0x1000 + 24) as u32, 0x1f80, "MXCSR is written");
    assert_eq!(
        (guest.cpu.state.gpr[RAX], guest.cpu.state.gpr[RDX]),
        (0x200, 0)
    );
}

#[test]
fn xrstor_refuses_bad_headers_and_restores_initial_states() {
    // xrstor [rsi]
    let code = b"\x0f\xae\x2e\xf4";
    for (at, value) in [
        (512, 8u64),
        (520, 1),
        (528, 1),
        (520, 1 << 63 | 8),
        (24, 1 << 16),
    ] {
        let mut guest = with_xsave(code);
        guest.memory().write64(DATA + at, value);
        guest.halt_in_handler(vector::GP);
    }
    // XSTATE_BV must not have a component that the compacted format does not hold.
    let mut guest = with_xsave(code);
    guest.memory().write64(DATA + 512, 2);
    guest.memory().write64(DATA + 520, 1 << 63 | 1);
    guest.halt_in_handler(vector::GP);
    let mut guest = with_xsave(b"\x0f\xae\x6e\x08");
    guest.halt_in_handler(vector::GP);
    let mut guest = with_xsave(code);
    guest.memory().write(DATA + 24, &0x1f80u32.to_le_bytes());
    let state = &mut guest.cpu.state;
    (state.xmm, state.pkru, state.fcw) = ([5; 16], 5, 0x27f);
    guest.halt();
    let state = &guest.cpu.state;
    assert_eq!((state.xmm, state.pkru, state.fcw), ([0; 16], 0, 0x37f));
}

#[test]
fn xrstors_takes_the_compacted_format_alone_and_both_are_privileged() {
    // xsaves [rsi]; xrstors [rsi]; hlt
    let code = b"\x0f\xc7\x2e\x0f\xc7\x1e\xf4";
    let mut guest = with_xsave(code);
    guest.cpu.state.xmm[3] = 0x1234;
    guest.halt();
    assert_eq!(guest.cpu.state.xmm[3], 0x1234);
    // xrstors [rsi] of the standard format
    let mut guest = with_xsave(b"\x0f\xc7\x1e");
    guest.memory().write64(DATA + 512, 3);
    guest.memory().write(DATA + 24, &0x1f80u32.to_le_bytes());
    guest.halt_in_handler(vector::GP);
    for code in [b"\x0f\xc7\x2e", b"\x0f\xc7\x1e"] {
        let mut guest = with_xsave(code);
        guest.memory().write64(DATA + 520, 1 << 63);
        let state = &mut guest.cpu.state;
        (state.cs.selector, state.cs.rights) = (0x23, 0xa0fb);
        (state.ss.selector, state.ss.rights) = (0x1b, 0xc0f3);
        guest.halt_in_handler(vector::GP);
    }
}

#[test]
fn clzero_zeroes_the_line_of_its_address() {
    // clzero; fs clzero; hlt
    let mut guest = Guest::new(b"\x0f\x01\xfc\x64\x0f\x01\xfc\xf4");
    guest.memory().write(DATA, &[0xaa; 0x200]);
    guest.cpu.state.fs.base = 0x80;
    guest.cpu.state.gpr[RAX] = DATA + 70;
    guest.halt();
    let mut expected = [0xaa; 0x200];
    expected[64..128].fill(0);
    expected[192..256].fill(0);
    assert_eq!(guest.memory().read::<0x200>(DATA), expected);
}

#[test]
fn lock_mov_cr0_is_mov_cr8_in_32_bit_code() {
    // lock mov cr0,eax; lock mov ebx,cr0; hlt
    let code = b"\xf0\x0f\x22\xc0\xf0\x0f\x20\xc3\xf4";
    for has in [true, false] {
        let mut guest = Guest::new(code);
        guest.cpu.state.cs.rights = 0xc09b;
        guest.cpu.state.gpr[RAX] = 5;
        let cr0 = guest.cpu.state.cr0;
        match has {
            true => {
                guest.halt();
                assert_eq!((guest.cpu.state.cr8, guest.cpu.state.gpr[RBX]), (5, 5));
            }
            false => {
                guest.cpu.set_features(features(&[]));
                guest.halt_in_handler(vector::UD);
            }
        }
        assert_eq!(guest.cpu.state.cr0, cr0);
    }
}

#[test]
fn fxsave_and_fxrstor_of_a_kernel_leave_out_xmm_with_ffxsr() {
    // fxsave [rsi]; then, with other values, fxrstor [rsi]; hlt
    for (efer, fast) in [(control::EFER_FFXSR, true), (0, false)] {
        let mut guest = Guest::new(b"\x0f\xae\x06\xf4\x0f\xae\x0e\xf4");
        guest.memory().write(DATA, &[0xaa; 512]);
        guest.cpu.state.gpr[RSI] = DATA;
        guest.cpu.state.efer |= efer;
        guest.cpu.state.mxcsr = 0x1fa0;
        guest.cpu.state.xmm = [5; 16];
        guest.halt();
        let saved = u128::from_le_bytes(guest.memory().read(DATA + 160));
        assert_eq!(saved == 5, !fast);
        guest.cpu.state.xmm = [7; 16];
        guest.cpu.state.mxcsr = 0x1f80;
        guest.halt();
        assert_eq!(guest.cpu.state.mxcsr, 0x1fa0, "MXCSR is not left out");
        assert_eq!(guest.cpu.state.xmm, [if fast { 7 } else { 5 }; 16]);
    }
}

/// MXCSR.MM: memory operands of computations need not be aligned; those of MOVAPS and similar moves must be.
#[test]
fn operands_need_not_be_aligned_with_mm() {
    const MM: u32 = 1 << 17;
    // addps xmm0,[rsi]; paddd xmm0,[rsi]; movaps xmm0,[rsi]
    for (code, obeys) in [
        (&b"\x0f\x58\x06"[..], true),
        (b"\x66\x0f\xfe\x06", true),
        (b"\x0f\x28\x06", false),
    ] {
        for (mxcsr, at) in [(0x1f80, 0), (0x1f80, 4), (0x1f80 | MM, 4), (0x1d80 | MM, 4)] {
            let mut guest = Guest::new(&[code, b"\xf4"].concat());
            guest.cpu.state.mxcsr = mxcsr;
            guest.cpu.state.gpr[RSI] = DATA + at;
            match at == 0 || obeys && mxcsr & MM != 0 {
                true => guest.halt(),
                false => guest.halt_in_handler(vector::GP),
            }
            assert_eq!(guest.cpu.state.mxcsr, mxcsr);
        }
    }
    // ldmxcsr [rsi]: without the feature the bit is reserved.
    for has in [true, false] {
        let mut guest = Guest::new(b"\x0f\xae\x16\xf4");
        guest.memory().write(DATA, &(0x1f80 | MM).to_le_bytes());
        guest.cpu.state.gpr[RSI] = DATA;
        match has {
            true => guest.halt(),
            false => {
                guest.cpu.set_features(features(&[]));
                guest.halt_in_handler(vector::GP);
            }
        }
    }
}

#[test]
fn protection_keys_are_read_and_written_and_reach_the_machine() {
    // wrpkru; rdpkru; mov ebx,[rsi]; hlt
    let code = b"\x0f\x01\xef\x0f\x01\xee\x8b\x1e\xf4";
    let mut guest = with_xsave(code);
    guest.cpu.state.gpr[RAX] = 0x1234;
    guest.cpu.state.gpr[RDX] = 0;
    guest.cpu.state.gpr[RCX] = 0;
    guest.halt();
    let state = &guest.cpu.state;
    assert_eq!(
        (state.gpr[RAX], state.gpr[RDX], state.pkru),
        (0x1234, 0, 0x1234)
    );
    // A change of PKRU drops the TLB's entries.
    let asked = guest.machine.translations.len();
    guest.cpu.state.rip = CODE;
    guest.cpu.state.gpr[RAX] = 0x1235;
    guest.halt();
    assert!(guest.machine.translations[asked..].contains(&(DATA, Access::Read)));
    for register in [RCX, RDX] {
        let mut guest = with_xsave(code);
        (guest.cpu.state.gpr[RCX], guest.cpu.state.gpr[RDX]) = (0, 0);
        guest.cpu.state.gpr[register] = 1;
        guest.halt_in_handler(vector::GP);
    }
    let mut guest = Guest::new(code);
    guest.halt_in_handler(vector::UD);
}

#[test]
fn what_cpuid_does_not_tell_is_reserved_or_undefined() {
    // mov cr4,rax; xsetbv; invpcid rax,[rsi]; rdtscp; rdpid rax; xsaveopt [rsi]; wrmsr
    let all = u64::from(u32::MAX);
    for (code, rax, rcx, without) in [
        (&b"\x0f\x22\xe0"[..], 0x40_0620, 0, vector::GP),
        (b"\x0f\x01\xd1", 0x203, 0, vector::GP),
        (b"\x66\x0f\x38\x82\x06", 2, 0, vector::UD),
        (b"\x0f\x01\xf9", 0, 0, vector::UD),
        (b"\xf3\x0f\xc7\xf8", 0, 0, vector::UD),
        (b"\x0f\xae\x36", all, 0, vector::UD),
        (b"\x0f\xc7\x26", all, 0, vector::UD),
        // xsaves [rsi]; clzero; extrq xmm0,xmm1; movntss [rsi],xmm0; insertq xmm0,xmm1,1,2
        (b"\x0f\xc7\x2e", all, 0, vector::UD),
        (b"\x0f\x01\xfc", DATA, 0, vector::UD),
        (b"\x66\x0f\x79\xc1", 0, 0, vector::UD),
        (b"\xf3\x0f\x2b\x06", 0, 0, vector::UD),
        (b"\xf2\x0f\x78\xc1\x01\x02", 0, 0, vector::UD),
        // The next two write EFER.FFXSR and EFER.AIBRSE.
        (b"\x0f\x30", 0x4d01, 0xc000_0080, vector::GP),
        (b"\x0f\x30", 0x20_0d01, 0xc000_0080, vector::GP),
        (b"\x0f\xc7\xf0", 0, 0, vector::UD),
        (b"\x0f\xc7\xf8", 0, 0, vector::UD),
        (b"\x0f\x30", 0xd01, 0xc000_0080, vector::GP),
    ] {
        for has in [true, false] {
            let code = [code, b"\xf4"].concat();
            let mut guest = with_xsave(&code);
            guest.cpu.state.gpr[RAX] = rax;
            (guest.cpu.state.gpr[RCX], guest.cpu.state.gpr[RDX]) = (rcx, 0);
            match has {
                true => guest.halt(),
                false => {
                    guest.cpu.set_features(features(&[]));
                    guest.halt_in_handler(without);
                }
            }
        }
    }
}

#[test]
fn intel_has_syscall_in_64_bit_mode_only() {
    for (vendor, exists) in [(b"Auth", true), (b"Genu", false)] {
        let mut guest = Guest::new(b"\x0f\x05");
        guest.cpu.set_features(features(&[(
            (0, 0),
            [0xd, u32::from_le_bytes(*vendor), 0, 0],
        )]));
        guest.cpu.state.cs.rights = 0xc09b;
        guest.cpu.state.star = 8 << 32;
        guest.cpu.state.cstar = CODE + 0x100;
        guest.memory().write(CODE + 0x100, b"\xf4");
        match exists {
            true => {
                guest.halt();
                assert_eq!(guest.cpu.state.rip, CODE + 0x101);
            }
            false => guest.halt_in_handler(vector::UD),
        }
    }
}

/// Makes a guest in 32-bit mode with PAE on, before it executes `code`. Its exception handlers halt.
fn pae(code: &[u8]) -> Guest {
    let mut guest = Guest::new(code);
    let state = &mut guest.cpu.state;
    (state.cr0, state.efer) = (0x8005_0033, 0);
    state.cs.rights = 0xc09b;
    state.cr3 = DATA;
    guest.memory().write64(GDT + 8, 0x00cf_9b00_0000_ffff);
    for vector in 0..32 {
        let at = HANDLERS + 16 * vector;
        let gate = at & 0xffff | 8 << 16 | 0x8e << 40 | (at >> 16) << 48;
        guest.memory().write64(IDT + 8 * vector, gate);
    }
    guest
}

#[test]
fn page_directory_pointers_are_loaded_with_cr3_and_paging_bits_only() {
    // mov eax,cr3; mov cr3,eax; hlt; mov cr4,ebx; hlt
    let code = b"\x0f\x20\xd8\x0f\x22\xd8\xf4\x0f\x22\xe3\xf4";
    let mut guest = pae(code);
    let entries = [0x1001u64, 0x2001, 0, 0x3001];
    for (i, entry) in entries.into_iter().enumerate() {
        guest.memory().write64(DATA + 8 * i as u64, entry);
    }
    guest.halt();
    assert_eq!(guest.cpu.state.pdptes, entries);
    guest.memory().write64(DATA, 0x9001);
    guest.cpu.state.gpr[RBX] = guest.cpu.state.cr4;
    guest.halt();
    assert_eq!(guest.cpu.state.pdptes, entries, "nothing changed in CR4");
    guest.cpu.state.rip = CODE + 7;
    guest.cpu.state.gpr[RBX] ^= control::CR4_PGE;
    guest.halt();
    assert_eq!(guest.cpu.state.pdptes[0], 0x9001);
    // If a present entry has a reserved bit, or an entry is not in memory, the instruction raises #GP and changes
    // nothing.
    for entry in [1 | 1 << 1, 1 | 1 << 63, 1 | 1 << 48] {
        let mut guest = pae(code);
        guest.memory().write64(DATA + 16, entry);
        guest.halt_in_handler(vector::GP);
        assert_eq!(guest.cpu.state.pdptes, [0; 4]);
    }
    let mut guest = pae(code);
    guest.memory().write64(DATA + 16, 1 << 63);
    guest.halt();
    let mut guest = pae(b"\x0f\x22\xd8");
    guest.cpu.state.gpr[RAX] = MMIO;
    guest.halt_in_handler(vector::GP);
    assert_eq!(guest.cpu.state.cr3, DATA);
}

#[test]
fn sysenter_enters_32_bit_code_from_legacy_and_64_bit_code_from_long_mode() {
    for long in [false, true] {
        // sysenter from 32-bit code
        let mut guest = pae(b"\x0f\x34");
        let state = &mut guest.cpu.state;
        if long {
            state.efer = 0xd01;
        }
        state.cs.selector = 0x23;
        (state.cs.rights, state.ss.rights) = (0xc0fb, 0xc0f3);
        state.sysenter_cs = 8;
        (state.sysenter_esp, state.sysenter_eip) = (STACK, CODE + 0x100);
        // The first byte is dec eax in 32-bit code, and a REX.W prefix in 64-bit code. Then: inc eax (modrm form); hlt
        guest.memory().write(CODE + 0x100, b"\x48\xff\xc0\xf4");
        guest.cpu.state.gpr[RAX] = 0xffff_ffff;
        guest.halt();
        let state = &guest.cpu.state;
        let rax = if long { 0x1_0000_0000 } else { 0xffff_ffff };
        assert_eq!((state.gpr[RAX], state.gpr[RSP]), (rax, STACK));
        assert_eq!((state.cs.selector, state.ss.selector), (8, 16));
    }
}

#[test]
fn invlpg_forgets_all_of_a_large_page_and_leaves_code_alone() {
    // mov eax,[rsi]; mov ebx,[rdi]; invlpg [rsi]; mov eax,[rsi]; mov ebx,[rdi]; hlt
    let code = b"\x8b\x06\x8b\x1f\x0f\x01\x3e\x8b\x06\x8b\x1f\xf4";
    for (bits, asked) in [(12, vec![DATA]), (21, vec![CODE, DATA, DATA + 0x1000])] {
        let mut guest = Guest::new(code);
        guest.machine.page_bits = bits;
        (guest.cpu.state.gpr[RSI], guest.cpu.state.gpr[RDI]) = (DATA, DATA + 0x1000);
        guest.halt();
        let all: Vec<u64> = (guest.machine.translations.iter())
            .map(|(gva, _)| gva & !0xfff)
            .collect();
        assert_eq!(all[..3], [CODE, DATA, DATA + 0x1000]);
        assert_eq!(all[3..], asked, "pages of 2^{bits} bytes");
    }
}
