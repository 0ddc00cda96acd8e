//! Tests port and MMIO accesses, and host memory that is inaccessible.

use crate::common::*;
use slat_x86::*;
use std::sync::atomic::Ordering;

#[test]
fn port_input_waits_at_its_instruction_for_the_answer() {
    // in al,dx; hlt
    let mut guest = Guest::new(b"\xec\xf4");
    guest.cpu.state.gpr[RDX] = 0x1000;
    guest.cpu.state.gpr[RAX] = 0x1234_5678;
    let io = Exit::Io {
        port: 0x1000,
        size: 1,
        write: false,
        count: 1,
    };
    assert_eq!(guest.run(), io);
    assert_eq!(guest.cpu.state.rip, CODE);
    assert_eq!(guest.run(), io, "not completed: asked again");
    guest.cpu.complete_io(&[0xff]);
    guest.attention.store(1, Ordering::Relaxed);
    assert_eq!(guest.run(), Exit::Attention);
    assert_eq!(
        (guest.cpu.state.rip, guest.cpu.state.gpr[RAX]),
        (CODE + 1, 0x1234_56ff)
    );
    guest.attention.store(0, Ordering::Relaxed);
    guest.halt();
}

#[test]
fn port_output_and_string_ports() {
    // out 0x80,eax; rep outsb; rep insw; hlt
    let mut guest = Guest::new(b"\xe7\x80\xf3\x6e\xb9\x02\x00\x00\x00\xf3\x66\x6d\xf4");
    guest.memory().write(DATA, b"xy");
    let state = &mut guest.cpu.state;
    (state.gpr[RAX], state.gpr[RDX], state.gpr[RCX]) = (0x0102_0304, 0x3f8, 2);
    (state.gpr[RSI], state.gpr[RDI]) = (DATA, DATA + 0x100);
    let io = |port, size, write, count| Exit::Io {
        port,
        size,
        write,
        count,
    };
    assert_eq!(guest.run(), io(0x80, 4, true, 1));
    assert_eq!(guest.cpu.output(), [4, 3, 2, 1]);
    guest.cpu.complete_io(&[]);
    assert_eq!(guest.run(), io(0x3f8, 1, true, 2));
    assert_eq!(guest.cpu.output(), b"xy");
    guest.cpu.complete_io(&[]);
    assert_eq!(guest.run(), io(0x3f8, 2, false, 2));
    guest.cpu.complete_io(&[1, 2, 3, 4]);
    guest.halt();
    assert_eq!(guest.memory().read::<4>(DATA + 0x100), [1, 2, 3, 4]);
    assert_eq!(guest.cpu.state.gpr[RSI], DATA + 2);
}

#[test]
fn an_mmio_read_is_answered_and_an_mmio_write_follows_its_instruction() {
    // mov rax,[rsi]; add eax,1; mov [rsi+8],eax; hlt
    let mut guest = Guest::new(b"\x48\x8b\x06\x83\xc0\x01\x89\x46\x08\xf4");
    guest.cpu.state.gpr[RSI] = MMIO;
    let read = Exit::Mmio {
        gpa: MMIO,
        len: 8,
        write: false,
        data: [0; 8],
    };
    assert_eq!(guest.run(), read);
    assert_eq!((guest.cpu.state.rip, guest.cpu.state.gpr[RAX]), (CODE, 0));
    guest.cpu.complete_mmio_read(&41u64.to_le_bytes());
    let write = Exit::Mmio {
        gpa: MMIO + 8,
        len: 4,
        write: true,
        data: [42, 0, 0, 0, 0, 0, 0, 0],
    };
    assert_eq!(guest.run(), write);
    assert_eq!(guest.cpu.state.rip, CODE + 9);
    guest.halt();
}

#[test]
fn an_mmio_read_completes_before_attention_is_looked_at() {
    let mut guest = Guest::new(b"\x48\x8b\x06\xf4");
    guest.cpu.state.gpr[RSI] = MMIO;
    assert!(matches!(guest.run(), Exit::Mmio { .. }));
    guest.cpu.complete_mmio_read(&[5, 0, 0, 0, 0, 0, 0, 0]);
    guest.attention.store(1, Ordering::Relaxed);
    assert_eq!(guest.run(), Exit::Attention);
    assert_eq!(
        (guest.cpu.state.rip, guest.cpu.state.gpr[RAX]),
        (CODE + 3, 5)
    );
}

#[test]
fn mmio_across_the_end_of_memory_is_split_at_the_page() {
    // mov [rsi],rax: the store is to four bytes of memory and four bytes of a device.
    let mut guest = Guest::new(b"\x48\x89\x06\xf4");
    guest.cpu.state.gpr[RSI] = MMIO - 4;
    guest.cpu.state.gpr[RAX] = 0x8877_6655_4433_2211;
    let write = Exit::Mmio {
        gpa: MMIO,
        len: 4,
        write: true,
        data: [0x55, 0x66, 0x77, 0x88, 0, 0, 0, 0],
    };
    assert_eq!(guest.run(), write);
    assert_eq!(guest.memory().read::<4>(MMIO - 4), [0x11, 0x22, 0x33, 0x44]);
    guest.halt();
}

#[test]
fn an_event_whose_stack_is_mmio_has_its_frame_written_before_its_handler_runs() {
    let mut guest = Guest::new(b"\x0f\x0b");
    // inc ecx; hlt
    guest.memory().write(HANDLERS, b"\xff\xc1\xf4");
    Guest::gate(guest.memory(), vector::UD, HANDLERS, 0, 0);
    guest.cpu.state.gpr[RSP] = MMIO + 0x100;
    guest.cpu.state.gpr[RCX] = 0;
    for word in 0..5 {
        let exit = guest.run();
        let at = MMIO + 0x100 - 40 + 8 * word;
        assert!(
            matches!(exit, Exit::Mmio { gpa, len: 8, write: true, .. } if gpa == at),
            "{exit:?}"
        );
        let state = &guest.cpu.state;
        assert_eq!((state.rip, state.gpr[RCX]), (HANDLERS, 0));
    }
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RCX], 1);
}

#[test]
fn a_repeated_store_to_mmio_is_one_exit_per_element() {
    // rep stosd
    let mut guest = Guest::new(b"\xf3\xab\xf4");
    let state = &mut guest.cpu.state;
    (state.gpr[RDI], state.gpr[RCX], state.gpr[RAX]) = (MMIO, 3, 7);
    for i in 0..3 {
        let write = Exit::Mmio {
            gpa: MMIO + 4 * i,
            len: 4,
            write: true,
            data: [7, 0, 0, 0, 0, 0, 0, 0],
        };
        assert_eq!(guest.run(), write);
    }
    guest.halt();
}

#[test]
fn retry_starts_the_instruction_again_after_a_look_at_attention() {
    let mut guest = Guest::new(b"\x48\xff\x06\xf4");
    guest.cpu.state.gpr[RSI] = DATA;
    guest.machine.retries = 3;
    guest.halt();
    assert_eq!(guest.memory().read64(DATA), 1);
}

#[test]
fn host_memory_that_is_gone_is_translated_again_or_ends_the_run() {
    // mov rax,[rsi]; hlt
    let mut guest = Guest::new(b"\x48\x8b\x06\xf4");
    guest.cpu.state.gpr[RSI] = DATA;
    guest.halt();
    let page = guest.memory().at(DATA).cast();
    // SAFETY: the page belongs to the test's mapping, which the CPU accesses only by guarded accesses.
    unsafe { libc::mprotect(page, 4096, libc::PROT_NONE) };
    guest.machine.bad_address = true;
    guest.cpu.state.rip = CODE;
    assert_eq!(guest.run(), Exit::BadAddress);
    assert_eq!((guest.cpu.state.rip, guest.machine.rechecks), (CODE, 1));
    // SAFETY: the page belongs to the test's mapping, which the CPU accesses only by guarded accesses.
    unsafe { libc::mprotect(page, 4096, libc::PROT_READ) };
    guest.halt();
}

#[test]
fn attention_ends_an_endless_loop() {
    // jmp $
    let mut guest = Guest::new(b"\xeb\xfe");
    let attention = guest.attention.clone();
    let helper = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        attention.store(1, Ordering::Relaxed);
    });
    assert_eq!(guest.run(), Exit::Attention);
    helper.join().unwrap();
}
