//! Instructions that invalidate translations: which of them the machine is told.

mod common;
use common::*;
use slat_x86::GuestFlush::{All, Page};
use slat_x86::state::control;
use slat_x86::*;

/// Runs `code` and a HLT with some registers changed. Returns what the machine was told.
fn told(code: &[u8], change: impl FnOnce(&mut State)) -> Vec<GuestFlush> {
    let mut guest = Guest::new(&[code, b"\xf4"].concat());
    change(&mut guest.cpu.state);
    guest.halt();
    guest.machine.flushes
}

fn with_pcids(state: &mut State) {
    state.cr4 |= control::CR4_PCIDE;
}

#[test]
fn mov_to_cr3_invalidates_all_unless_its_operand_says_no() {
    // mov cr3,rax
    let code = b"\x0f\x22\xd8";
    for cr3 in [0, 0x1000] {
        assert_eq!(told(code, |state| state.gpr[RAX] = cr3), [All]);
        let other_pcid = |state: &mut State| {
            with_pcids(state);
            state.gpr[RAX] = cr3 | 5;
        };
        assert_eq!(told(code, other_pcid), [All]);
        let keeps = |state: &mut State| {
            with_pcids(state);
            state.gpr[RAX] = cr3 | 5 | 1 << 63;
        };
        assert_eq!(told(code, keeps), []);
    }
    let reserved = |state: &mut State| state.gpr[RAX] = 1 << 63;
    assert_eq!(told(code, reserved), [], "#GP");
}

#[test]
fn a_cr3_that_keeps_translations_still_changes_the_cpus() {
    // mov rbx,[rsi]; mov cr3,rax; mov rcx,[rsi]
    let mut guest = Guest::new(b"\x48\x8b\x1e\x0f\x22\xd8\x48\x8b\x0e\xf4");
    guest.memory().write64(DATA, 1);
    guest.memory().write64(DATA + 0x1000, 2);
    let spaces = &mut guest.machine.spaces;
    spaces.insert((0x1005, DATA >> 12), (DATA >> 12) + 1);
    with_pcids(&mut guest.cpu.state);
    guest.cpu.state.gpr[RAX] = 0x1005 | 1 << 63;
    guest.cpu.state.gpr[RSI] = DATA;
    guest.halt();
    let gpr = guest.cpu.state.gpr;
    assert_eq!((gpr[RBX], gpr[RCX]), (1, 2));
    assert_eq!(guest.cpu.state.cr3, 0x1005);
    assert_eq!(guest.machine.flushes, []);
}

#[test]
fn changes_of_control_bits_invalidate_all() {
    // mov rax,cr4; xor rax,rbx; mov cr4,rax
    let cr4 = b"\x0f\x20\xe0\x48\x31\xd8\x0f\x22\xe0";
    for bit in [
        control::CR4_PGE,
        control::CR4_PSE,
        control::CR4_SMEP,
        control::CR4_PCIDE,
    ] {
        assert_eq!(told(cr4, |state| state.gpr[RBX] = bit), [All], "{bit:#x}");
        let clear = |state: &mut State| {
            state.cr4 |= bit;
            state.gpr[RBX] = bit;
        };
        assert_eq!(told(cr4, clear), [All], "{bit:#x}");
    }
    assert_eq!(told(cr4, |state| state.gpr[RBX] = 0), []);

    // mov rax,cr0; xor rax,rbx; mov cr0,rax
    let cr0 = b"\x0f\x20\xc0\x48\x31\xd8\x0f\x22\xc0";
    assert_eq!(told(cr0, |state| state.gpr[RBX] = control::CR0_WP), [All]);
    assert_eq!(told(cr0, |state| state.gpr[RBX] = 0), []);

    // rdmsr; xor eax,ebx; wrmsr
    let efer = b"\x0f\x32\x31\xd8\x0f\x30";
    for (change, expected) in [(control::EFER_NXE, &[All][..]), (0, &[])] {
        let flushes = told(efer, |state| {
            (state.gpr[RCX], state.gpr[RBX]) = (0xc000_0080, change);
        });
        assert_eq!(flushes, expected);
    }
}

#[test]
fn paging_that_is_turned_off_and_on_invalidates_all() {
    // mov eax,cr0; btc eax,31; mov cr0,eax; and once more
    let flip = b"\x0f\x20\xc0\x0f\xba\xf8\x1f\x0f\x22\xc0";
    let flushes = told(&[&flip[..], flip].concat(), |state| {
        state.efer = 0;
        state.cs.rights = 0xc09b;
        state.cr4 &= !control::CR4_PAE;
    });
    assert_eq!(flushes, [All, All]);
}

#[test]
fn invlpg_invalidates_its_page() {
    // invlpg [rsi]
    let code = b"\x0f\x01\x3e";
    let at = |lin| move |state: &mut State| state.gpr[RSI] = lin;
    assert_eq!(told(code, at(DATA + 5)), [Page(DATA + 5)]);
    let top = 0xffff_8000_0000_0000;
    assert_eq!(told(code, at(top)), [Page(top)]);
    assert_eq!(told(code, at(1 << 50)), [], "not canonical: does nothing");
    // invlpg gs:[rsi]
    let flushes = told(b"\x65\x0f\x01\x3e", |state| {
        (state.gs.base, state.gpr[RSI]) = (0x10_0000, 0x234);
    });
    assert_eq!(flushes, [Page(0x10_0234)]);
    // In 32-bit code addresses wrap around.
    let flushes = told(b"\x65\x0f\x01\x3e", |state| {
        state.cs.rights = 0xc09b;
        (state.gs.base, state.gpr[RSI]) = (0xffff_f000, 0x2000);
    });
    assert_eq!(flushes, [Page(0x1000)]);
}

#[test]
fn invpcid_invalidates_a_page_of_the_current_pcid_or_all() {
    let (current, other) = (0x1000 | 5, 6);
    for (pcids, kind, pcid, expected) in [
        (false, 0, 0, Page(DATA)),
        (true, 0, current & 0xfff, Page(DATA)),
        (true, 0, other, All),
        (true, 1, current & 0xfff, All),
        (true, 1, other, All),
        (true, 2, 0, All),
        (true, 3, 0, All),
    ] {
        // invpcid rax,[rsi]
        let mut guest = Guest::new(b"\x66\x0f\x38\x82\x06\xf4");
        guest.memory().write64(DATA, pcid);
        guest.memory().write64(DATA + 8, DATA);
        let state = &mut guest.cpu.state;
        if pcids {
            with_pcids(state);
            state.cr3 = current;
        }
        (state.gpr[RAX], state.gpr[RSI]) = (kind, DATA);
        guest.halt();
        let name = format!("type {kind} of {pcid}");
        assert_eq!(guest.machine.flushes, [expected], "{name}");
    }
    // Without PCIDs: type 0 of another one is #GP.
    let mut guest = Guest::new(b"\x66\x0f\x38\x82\x06\xf4");
    guest.memory().write64(DATA, 1);
    guest.cpu.state.gpr[RAX] = 0;
    guest.cpu.state.gpr[RSI] = DATA;
    guest.halt_in_handler(vector::GP);
    assert_eq!(guest.machine.flushes, []);
}

#[test]
fn other_instructions_and_the_client_invalidate_nothing() {
    // wrpkru; stac; clac; swapgs; mov dr7,rdx; int 0x80
    let code = b"\x0f\x01\xef\x0f\x01\xcb\x0f\x01\xca\x0f\x01\xf8\x0f\x23\xfa\xcd\x80\xf4";
    let mut guest = Guest::new(code);
    let state = &mut guest.cpu.state;
    state.cr4 |= control::CR4_PKE;
    state.gpr[RDX] = 0;
    guest.halt_in_handler(0x80);
    guest.cpu.state.cr3 = 0x1000;
    guest.cpu.state.cr4 |= control::CR4_PGE;
    guest.cpu.flush_tlb();
    guest.cpu.state.rip = CODE + 17;
    guest.halt();
    assert_eq!(guest.machine.flushes, []);
}
