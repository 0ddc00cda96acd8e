//! Tests programs with known results.

use crate::common::*;
use crate::modes::{Mode, set_mode};
use crate::{BY, guest};
use slat_x86::*;

/// The paragraphs of two code segments, of the data and of the stack.
const FIRST: u16 = 0x1000;
const SECOND: u16 = 0x2003;
const DATA: u16 = 0x3000;
const STACK: u16 = 0x3800;

/// Makes a guest in real mode that begins at `FIRST:ip`.
fn real(tier: Option<Tier>, ip: u64) -> Guest {
    let mut guest = guest(tier);
    let [cs, ss, data] = [FIRST, STACK, DATA].map(|selector| Segment::real(selector, 0x93));
    set_mode(&mut guest, Mode::Real, [data, cs, ss, data, data, data]);
    let state = &mut guest.cpu.state;
    state.gpr = [0; 16];
    (state.rip, state.gpr[RSP]) = (ip, 0x1000);
    guest
}

fn write(guest: &Guest, segment: u16, offset: u64, bytes: &[u8]) {
    guest
        .memory()
        .write((u64::from(segment) << 4) + offset, bytes);
}

#[test]
fn code_at_one_offset_of_two_segments_is_told_apart() {
    for tier in BY {
        let mut guest = real(tier, 0x100);
        // mov cx,50; call 2003:110; inc bx; jmp short; loop to the call; hlt
        write(&guest, FIRST, 0x100, b"\xb9\x32\x00\xeb\x0b");
        write(
            &guest,
            FIRST,
            0x110,
            b"\x9a\x10\x01\x03\x20\x43\xeb\x00\xe2\xf6\xf4",
        );
        // Other code at the same offsets: add dx,3; jmp short to an instruction at an offset that the
        // first code has, too; retf
        write(
            &guest,
            SECOND,
            0x110,
            b"\x83\xc2\x03\xeb\x00\x45\xeb\x00\x46\xcb",
        );
        guest.halt();
        let gpr = &guest.cpu.state.gpr;
        assert_eq!(gpr[RBX], 50, "{tier:?}");
        assert_eq!((gpr[RDX], gpr[RBP], gpr[RSI]), (150, 50, 50), "{tier:?}");
    }
}

#[test]
fn one_code_at_two_offsets_is_told_apart() {
    for tier in BY {
        let mut guest = real(tier, 0x200);
        // mov cx,40; call 1000:300; call 0ff0:400, which is the same linear address; loop; hlt
        let code = b"\xb9\x28\x00\x9a\x00\x03\x00\x10\x9a\x00\x04\xf0\x0f\xe2\xf4\xf4";
        write(&guest, FIRST, 0x200, code);
        // call to the next; pop ax; add bx,ax; retf
        write(&guest, FIRST, 0x300, b"\xe8\x00\x00\x58\x01\xc3\xcb");
        guest.halt();
        let expected = (40 * (0x303 + 0x403)) & 0xffff;
        assert_eq!(guest.cpu.state.gpr[RBX], expected, "{tier:?}");
    }
}

#[test]
fn a_call_at_the_end_of_the_segment_returns_to_its_beginning() {
    for tier in BY {
        let mut guest = real(tier, 0xfffd);
        // call 50, which is: inc bx; ret. At the beginning: hlt
        write(&guest, FIRST, 0xfffd, b"\xe8\x50\x00");
        write(&guest, FIRST, 0x50, b"\x43\xc3");
        write(&guest, FIRST, 0, b"\xf4");
        guest.halt();
        let state = &guest.cpu.state;
        assert_eq!((state.rip, state.gpr[RBX]), (1, 1), "{tier:?}");
    }
}

#[test]
fn a_return_of_16_bits_leads_below_64_kib() {
    for tier in BY {
        // The code is in a segment of 4 GiB, in one page. It consists of the last bytes below 64 KiB and the first
        // bytes above.
        const SEGMENT: u16 = FIRST + 8;
        let mut guest = real(tier, 0x1_0000);
        let cs = &mut guest.cpu.state.cs;
        (cs.base, cs.limit) = (u64::from(SEGMENT) << 4, u32::MAX);
        // inc bx; ret. A call of these; inc si; hlt. At the beginning: hlt
        write(&guest, SEGMENT, 0xffe0, b"\x43\xc3");
        write(&guest, SEGMENT, 0xfffd, b"\xe8\xe0\xff\x46\xf4");
        write(&guest, SEGMENT, 0, b"\xf4");
        write(&guest, STACK, 0x1000, &[0; 2]);
        // Runs each part alone first, so that the last one is compiled together with the others.
        for (from, to) in [(0x1_0000, 0x1_0002), (0xffe0, 1), (0xfffd, 1)] {
            let state = &mut guest.cpu.state;
            (state.rip, state.gpr[RSP]) = (from, 0x1000);
            guest.halt();
            assert_eq!(guest.cpu.state.rip, to, "{tier:?}, from {from:x}");
        }
        let gpr = &guest.cpu.state.gpr;
        assert_eq!((gpr[RBX], gpr[RSI]), (2, 1), "{tier:?}");
    }
}

#[test]
fn the_stack_pointer_is_as_wide_as_the_stack() {
    for tier in BY {
        let mut guest = real(tier, 0x100);
        let state = &guest.cpu.state;
        let segments = [state.es, state.cs, state.ss, state.ds, state.fs, state.gs];
        set_mode(&mut guest, Mode::Protected16, segments);
        // push ax; push bx; pop cx; leave; hlt
        write(&guest, FIRST, 0x100, b"\x50\x53\x59\xc9\xf4");
        for is_big in [false, true, false] {
            let beyond = if is_big { 0x1_0000 } else { 0 };
            write(&guest, STACK, beyond + 0x200, b"\x33\x33");
            write(&guest, STACK, (beyond ^ 0x1_0000) + 0x200, b"\x44\x44");
            write(&guest, STACK, beyond + 0xfe, &[0; 2]);
            let state = &mut guest.cpu.state;
            state.ss.rights = if is_big { 0x4093 } else { 0x93 };
            state.ss.limit = u32::MAX;
            state.rip = 0x100;
            (state.gpr[RAX], state.gpr[RBX], state.gpr[RCX]) = (0x1111, 0x2222, 0);
            (state.gpr[RSP], state.gpr[RBP]) = (0x1_0100, 0x1_0200);
            guest.halt();
            let gpr = &guest.cpu.state.gpr;
            let expected = (0x2222, 0x1_0202, 0x1_3333);
            assert_eq!((gpr[RCX], gpr[RSP], gpr[RBP]), expected, "{tier:?}");
            let at = (u64::from(STACK) << 4) + beyond + 0xfe;
            assert_eq!(guest.memory().read(at), [0x11; 2], "{tier:?}");
        }
    }
}

#[test]
fn a_word_that_ends_beyond_its_segment_is_not_stored() {
    for tier in BY {
        let mut guest = real(tier, 0x100);
        // mov bx,ffff; mov [bx],ax
        write(&guest, FIRST, 0x100, b"\xbb\xff\xff\x89\x07\xf4");
        write(&guest, DATA, 0xffff, &[0x55; 2]);
        guest.halt();
        assert_eq!(guest.cpu.state.rip, 0x9000 + u64::from(vector::GP) + 1);
        let bytes: [u8; 2] = guest.memory().read((u64::from(DATA) << 4) + 0xffff);
        assert_eq!(bytes, [0x55; 2], "{tier:?}");
    }
}

#[test]
fn a_hot_loop_with_segments_is_compiled() {
    let compiler = compiled::compiler();
    for tier in [Tier::Baseline, Tier::Full] {
        let compiler = compiler.clone();
        std::thread::spawn(move || compiler.work(tier));
    }
    let mut guest = real(None, 0x100);
    guest.cpu.set_compiler(compiler, Compile::Hot).unwrap();
    // mov cx,0; add [bx],ax; add bx,si; push bx; pop dx; loop; dec di; jnz; hlt
    let code = b"\xb9\x00\x00\x01\x07\x01\xf3\x53\x5a\xe2\xf8\x4f\x75\xf2\xf4";
    write(&guest, FIRST, 0x100, code);
    guest.cpu.state.gpr[RDI] = 200;
    guest.halt();
    let counters = guest.cpu.counters();
    let (all, compiled) = (counters.instructions, counters.instructions_compiled);
    assert!(compiled > all / 2, "{compiled} of {all}");
}
