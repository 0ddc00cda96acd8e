//! Tests stores to tracked pages: each store is reported to the machine when its bytes are in memory.

use crate::common::*;
use slat_x86::*;

/// Makes a guest that executes `code` and a HLT. RSI and RDI are `at`, and the pages of `tracked` are tracked.
fn guest(code: &[u8], at: u64, tracked: &[u64]) -> Guest {
    let mut guest = Guest::new(&[code, b"\xf4"].concat());
    (guest.cpu.state.gpr[RSI], guest.cpu.state.gpr[RDI]) = (at, at);
    for &gpa in tracked {
        guest.machine.track(gpa);
    }
    guest
}

/// Returns the address and length of each reported store. Checks that each store was reported when its bytes were in
/// memory, and before any other access was translated. (The check requires that no test stores a byte twice with
/// different values.)
fn told(guest: &Guest) -> Vec<(u64, usize)> {
    for stored in &guest.machine.stores {
        for (at, byte) in (stored.gpa..).zip(&stored.bytes) {
            assert_eq!([*byte], guest.memory().read(at), "at {at:#x}");
        }
        let (_, access) = guest.machine.translations[stored.translations - 1];
        assert_eq!(access, Access::Write, "at {:#x}", stored.gpa);
    }
    (guest.machine.stores.iter())
        .map(|stored| (stored.gpa, stored.bytes.len()))
        .collect()
}

#[test]
fn every_store_to_a_tracked_page_is_told_also_after_a_load() {
    // mov rbx,[rsi]; mov [rsi],rax; mov rbx,[rsi]; mov [rsi+8],eax; mov [rsi],rax; mov [rsi+4096],rax
    let code =
        b"\x48\x8b\x1e\x48\x89\x06\x48\x8b\x1e\x89\x46\x08\x48\x89\x06\x48\x89\x86\x00\x10\x00\x00";
    let mut guest = guest(code, DATA, &[0x3_0000]);
    guest.machine.moved.insert(DATA >> 12, 0x30);
    guest.cpu.state.gpr[RAX] = 0x0102_0304_0506_0708;
    guest.halt();
    let expected = [(0x3_0000, 8), (0x3_0008, 4), (0x3_0000, 8)];
    assert_eq!(
        told(&guest),
        expected,
        "guest-physical, and not the page after it"
    );
    assert_eq!(guest.cpu.state.gpr[RBX], 0x0102_0304_0506_0708);
}

#[test]
fn a_store_across_pages_is_told_when_both_parts_are_written() {
    let (first, second) = ((DATA + 0xffd, 3), (DATA + 0x1000, 5));
    for (tracked, expected) in [
        (&[DATA][..], &[first][..]),
        (&[DATA + 0x1000], &[second]),
        (&[DATA, DATA + 0x1000], &[first, second]),
    ] {
        for (name, code) in [
            ("mov [rsi],rax", &b"\x48\x89\x06"[..]),
            ("add [rsi],rax", b"\x48\x01\x06"),
            ("lock xadd [rsi],rax", b"\xf0\x48\x0f\xc1\x06"),
            ("movq [rsi],xmm0", b"\x66\x0f\xd6\x06"),
            ("stosq", b"\x48\xab"),
            ("push [rsp]", b"\xff\x34\x24"),
        ] {
            let mut guest = guest(code, DATA + 0xffd, tracked);
            let word = 0x0102_0304_0506_0708;
            guest.cpu.state.gpr[RAX] = word;
            guest.cpu.state.gpr[RSP] = DATA + 0x1005;
            guest.cpu.state.xmm[0] = word.into();
            if name == "push [rsp]" {
                guest.memory().write64(DATA + 0x1005, word);
            }
            guest.halt();
            assert_eq!(told(&guest), expected, "{name}");
            for stored in &guest.machine.stores {
                assert_eq!(stored.around[5..13], word.to_le_bytes(), "{name}");
            }
        }
    }
}

#[test]
fn a_read_modify_write_is_told_once() {
    for (name, code, bytes) in [
        ("add [rsi],rax", &b"\x48\x01\x06"[..], 8),
        ("lock add [rsi],rax", b"\xf0\x48\x01\x06", 8),
        ("inc dword [rsi]", b"\xff\x06", 4),
        ("not byte [rsi]", b"\xf6\x16", 1),
        ("shl qword [rsi],1", b"\x48\xd1\x26", 8),
        ("lock bts dword [rsi],3", b"\xf0\x0f\xba\x2e\x03", 4),
        ("xchg [rsi],rax", b"\x48\x87\x06", 8),
        ("xadd [rsi],rax", b"\x48\x0f\xc1\x06", 8),
        ("lock xadd [rsi],rax", b"\xf0\x48\x0f\xc1\x06", 8),
        ("cmpxchg [rsi],rbx", b"\x48\x0f\xb1\x1e", 8),
        ("lock cmpxchg [rsi],rbx", b"\xf0\x48\x0f\xb1\x1e", 8),
        ("lock cmpxchg8b [rsi]", b"\xf0\x0f\xc7\x0e", 8),
        ("lock cmpxchg16b [rsi]", b"\xf0\x48\x0f\xc7\x0e", 16),
    ] {
        // In the second round the comparisons fail. Then a CPU writes the old value back.
        for high in [0, 1] {
            let mut guest = guest(code, DATA, &[DATA]);
            guest.memory().write64(DATA, 0x55);
            guest.cpu.state.gpr[RAX] = 0x55;
            guest.cpu.state.gpr[RDX] = high;
            (guest.cpu.state.gpr[RBX], guest.cpu.state.gpr[RCX]) = (0x77, 0x88);
            if high == 1 {
                guest.cpu.state.gpr[RAX] = 0x56;
            }
            guest.halt();
            assert_eq!(told(&guest), [(DATA, bytes)], "{name}, {high}");
        }
    }
}

#[test]
fn string_instructions_tell_each_chunk_before_the_next_page_is_translated() {
    let pages = [DATA, DATA + 0x1000, DATA + 0x2000];
    // rep stosq of 0x1900 bytes, beginning in the middle of the first page
    let start = DATA + 0x800;
    let mut stos = guest(b"\xf3\x48\xab", start, &pages);
    (stos.cpu.state.gpr[RAX], stos.cpu.state.gpr[RCX]) = (u64::MAX, 0x320);
    stos.halt();
    let chunks = [
        (start, 0x800),
        (DATA + 0x1000, 0x1000),
        (DATA + 0x2000, 0x100),
    ];
    assert_eq!(told(&stos), chunks);
    for stored in &stos.machine.stores {
        let (lin, _) = stos.machine.translations[stored.translations - 1];
        assert_eq!(lin, stored.gpa, "the last page translated is the store's");
    }

    // rep movsb from an untracked page
    let mut movs = guest(b"\xf3\xa4", start, &pages);
    movs.memory().write(DATA + 0x1_0000, &[7; 0x1900]);
    (movs.cpu.state.gpr[RSI], movs.cpu.state.gpr[RCX]) = (DATA + 0x1_0000, 0x1900);
    movs.halt();
    let stores = told(&movs);
    assert_eq!(stores.iter().map(|(_, bytes)| bytes).sum::<usize>(), 0x1900);
    let mut next = start;
    for (gpa, bytes) in stores {
        assert_eq!(gpa, next, "each byte once, in order");
        next += bytes as u64;
    }

    // std; rep stosd
    let mut down = guest(b"\xfd\xf3\xab", DATA + 0x1004, &pages);
    down.cpu.state.gpr[RCX] = 3;
    down.halt();
    assert_eq!(told(&down), [(DATA + 0x1000, 8), (DATA + 0xffc, 4)]);
}

#[test]
fn the_stack_may_be_tracked() {
    let page = STACK - 0x1000;
    for (name, code, expected) in [
        ("push rax", &b"\x50"[..], &[(STACK - 8, 8)][..]),
        ("call", b"\xe8\x00\x00\x00\x00", &[(STACK - 8, 8)]),
        ("enter 16,1", b"\xc8\x10\x00\x01", &[(STACK - 16, 16)]),
        ("call far [rsi]", b"\x48\xff\x1e", &[(STACK - 16, 16)]),
    ] {
        let mut guest = guest(code, DATA, &[page]);
        guest.memory().write64(DATA, CODE + code.len() as u64);
        guest.memory().write(DATA + 8, &[8, 0]);
        guest.halt();
        assert_eq!(told(&guest), expected, "{name}");
    }
}

#[test]
fn the_frame_of_an_interrupt_is_told() {
    // int 0x80
    let mut soft = guest(b"\xcd\x80", DATA, &[STACK - 0x1000]);
    soft.halt_in_handler(0x80);
    assert_eq!(told(&soft), [(STACK - 40, 40)]);
    // The interrupt is injected by the caller.
    let mut external = guest(b"", DATA, &[STACK - 0x1000]);
    external.cpu.inject_interrupt(0x81);
    external.halt_in_handler(0x81);
    assert_eq!(told(&external), [(STACK - 40, 40)]);
    // mov rax,[rdi] raises an exception with an error code
    let mut fault = guest(b"\x48\x8b\x07", DATA, &[STACK - 0x1000]);
    fault.machine.absent(DATA);
    fault.halt_in_handler(vector::PF);
    assert_eq!(told(&fault), [(STACK - 48, 48)]);
}

#[test]
fn fxsave_and_xsave_are_told_by_parts() {
    // fxsave [rsi]
    let fxsave = b"\x0f\xae\x06";
    let mut one = guest(fxsave, DATA, &[DATA]);
    one.halt();
    assert_eq!(told(&one), [(DATA, 416)]);
    let mut two = guest(fxsave, DATA + 0xf00, &[DATA, DATA + 0x1000]);
    two.halt();
    assert_eq!(told(&two), [(DATA + 0xf00, 256), (DATA + 0x1000, 160)]);

    // xsave [rsi]
    let mut xsave = guest(b"\x0f\xae\x26", DATA, &[DATA]);
    let state = &mut xsave.cpu.state;
    state.cr4 |= state::control::CR4_OSXSAVE;
    (state.xcr0, state.gpr[RAX]) = (3, 3);
    xsave.halt();
    let stores = told(&xsave);
    for part in [DATA, DATA + 24, DATA + 32, DATA + 160, DATA + 512] {
        let is_in = |&(gpa, bytes): &(u64, usize)| part.wrapping_sub(gpa) < bytes as u64;
        assert!(stores.iter().any(is_in), "{part:#x} of {stores:x?}");
    }
}

#[test]
fn string_input_is_told_by_units() {
    // rep insw
    let mut guest = guest(b"\xf3\x66\x6d", DATA + 0xffe, &[DATA, DATA + 0x1000]);
    (guest.cpu.state.gpr[RCX], guest.cpu.state.gpr[RDX]) = (2, 0x3f8);
    for data in [[1, 2], [3, 4]] {
        let exit = guest.run();
        assert!(matches!(exit, Exit::Io { count: 1, .. }), "{exit:?}");
        assert!(guest.machine.stores.len() < 2, "only what was answered");
        guest.cpu.complete_io(&data);
    }
    guest.halt();
    assert_eq!(told(&guest), [(DATA + 0xffe, 2), (DATA + 0x1000, 2)]);
}

#[test]
fn a_watched_page_may_be_tracked() {
    // mov [rsi],rax; mov [rsi+8],rax; lock add [rsi+16],rax
    let code = b"\x48\x89\x06\x48\x89\x46\x08\xf0\x48\x01\x46\x10";
    let mut guest = guest(code, DATA, &[DATA]);
    guest.cpu.state.dr[0] = DATA + 8;
    // DR7 enables breakpoint 0, for writes of 8 bytes.
    guest.cpu.state.dr7 = 0x400 | 2 | (1 | 2 << 2) << 16;
    guest.halt_in_handler(vector::DB);
    assert_eq!(told(&guest), [(DATA, 8), (DATA + 8, 8)]);
    guest.cpu.state.rip = guest.stack(0);
    guest.halt();
    assert_eq!(told(&guest), [(DATA, 8), (DATA + 8, 8), (DATA + 16, 8)]);
}

#[test]
fn a_store_half_to_a_device_tells_of_the_other_half() {
    // mov [rsi],rax
    let mut guest = guest(b"\x48\x89\x06", MMIO - 4, &[MMIO - 0x1000]);
    let exit = guest.run();
    assert!(
        matches!(
            exit,
            Exit::Mmio {
                gpa: MMIO,
                len: 4,
                ..
            }
        ),
        "{exit:?}"
    );
    assert_eq!(told(&guest), [(MMIO - 4, 4)]);
}

#[test]
fn a_store_that_faults_is_not_told() {
    for code in [&b"\x48\x89\x06"[..], b"\xf0\x48\x01\x06"] {
        let mut guest = guest(code, DATA + 0xffc, &[DATA]);
        guest.machine.absent(DATA + 0x1000);
        guest.halt_in_handler(vector::PF);
        assert_eq!(told(&guest), []);
    }
}

#[test]
fn the_accessed_flag_of_a_descriptor_is_told() {
    // mov ds,eax
    let mut guest = guest(b"\x8e\xd8", DATA, &[GDT]);
    guest.cpu.state.gpr[RAX] = 16;
    guest.memory().write(GDT + 16 + 5, &[0x92]);
    guest.halt();
    assert_eq!(told(&guest), [(GDT + 16 + 5, 1)]);
    assert_eq!(guest.machine.stores[0].bytes, [0x93]);
}

#[test]
fn the_written_part_of_a_store_that_fails_is_told() {
    // mov [rsi],rax
    let mut guest = guest(b"\x48\x89\x06", DATA + 0xffc, &[DATA]);
    guest.cpu.state.gpr[RAX] = u64::MAX;
    guest.machine.bad_address = true;
    guest.machine.memory.protect(DATA + 0x1000, libc::PROT_READ);
    assert_eq!(guest.run(), Exit::BadAddress);
    assert_eq!(told(&guest), [(DATA + 0xffc, 4)]);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    guest.machine.memory.protect(DATA + 0x1000, protection);
    guest.halt();
    assert_eq!(told(&guest), [(DATA + 0xffc, 4); 2]);
}
