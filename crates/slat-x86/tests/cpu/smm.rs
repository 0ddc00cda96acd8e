//! Tests when an SMI is taken, and when RSM leaves.

use crate::common::*;
use slat_x86::*;

/// Enters system management mode as a client does. Returns the saved registers.
fn enter(guest: &mut Guest) -> [u8; SMRAM_BYTES] {
    let smram = guest.cpu.state.smram(SmramMap::Bits64);
    guest.cpu.enter_smm();
    smram
}

#[test]
fn an_smi_is_taken_between_instructions() {
    // inc eax; hlt
    let mut guest = Guest::new(b"\xff\xc0\xf4");
    guest.cpu.inject_smi();
    for _ in 0..2 {
        assert_eq!(guest.run(), Exit::Smi, "until it is taken");
        assert_eq!(guest.cpu.state.rip, CODE);
    }
    assert!(!guest.cpu.can_take_interrupt());
    // The handler: inc ecx; rsm.
    let handler = guest.cpu.state.smbase + 0x8000;
    guest.memory().write(handler, b"\x41\x0f\xaa");
    let smram = enter(&mut guest);
    // Another SMI, and an NMI, wait for RSM.
    guest.cpu.inject_smi();
    guest.cpu.inject_nmis(1);
    assert_eq!(guest.run(), Exit::Rsm);
    assert_eq!(guest.cpu.state.gpr[RCX], 1);
    let leave = guest.cpu.leave_smm(SmramMap::Bits64, &smram, |_| None);
    assert_eq!(leave, Ok(()));
    assert_eq!(guest.cpu.state.gpr[RCX], 0);
    assert_eq!(guest.run(), Exit::Smi, "before the NMI");
    let smram = enter(&mut guest);
    assert_eq!(guest.run(), Exit::Rsm);
    (guest.cpu.leave_smm(SmramMap::Bits64, &smram, |_| None)).unwrap();
    guest.halt_in_handler(vector::NMI);
    assert_eq!(guest.stack(0), CODE);
}

/// An SMI waits for the unfinished work of an earlier instruction: the data of its access, its exception, or an
/// acknowledged interrupt.
#[test]
fn an_smi_waits_for_what_has_begun() {
    // out 0x10, al; hlt
    let mut guest = Guest::new(b"\xe6\x10\xf4");
    assert!(matches!(guest.run(), Exit::Io { port: 0x10, .. }));
    guest.cpu.inject_smi();
    guest.cpu.complete_io(&[]);
    assert_eq!(guest.run(), Exit::Smi);
    assert_eq!(guest.cpu.state.rip, CODE + 2);
    // mov eax, [MMIO]; hlt
    let mut code = b"\x8b\x04\x25".to_vec();
    code.extend((MMIO as u32).to_le_bytes());
    code.push(0xf4);
    let mut guest = Guest::new(&code);
    assert!(matches!(guest.run(), Exit::Mmio { write: false, .. }));
    guest.cpu.inject_smi();
    guest.cpu.complete_mmio_read(&[1, 2, 3, 4]);
    assert_eq!(guest.run(), Exit::Smi);
    assert_eq!(guest.cpu.state.rip, CODE + 7);
    assert_eq!(guest.cpu.state.gpr[RAX], 0x0403_0201);
    // nop
    let mut guest = Guest::new(b"\x90");
    guest.cpu.inject_interrupt(0x80);
    guest.cpu.inject_exception(vector::UD, None);
    guest.cpu.inject_smi();
    while guest.run() != Exit::Smi {}
    let handlers = [vector::UD, 0x80].map(|vector| HANDLERS + 16 * u64::from(vector));
    let rip = guest.cpu.state.rip;
    assert!(handlers.iter().any(|at| (*at..*at + 2).contains(&rip)));
    assert_eq!(guest.cpu.state.events.exception, None);
}

#[test]
fn the_shadow_of_sti_delays_no_smi() {
    // sti; hlt
    let mut guest = Guest::new(b"\xfb\xf4");
    guest.cpu.state.events.sti_shadow = true;
    guest.cpu.inject_smi();
    assert_eq!(guest.run(), Exit::Smi);
    let smram = enter(&mut guest);
    assert!(!guest.cpu.state.events.sti_shadow);
    (guest.cpu.leave_smm(SmramMap::Bits64, &smram, |_| None)).unwrap();
    assert!(guest.cpu.state.events.sti_shadow);
}

#[test]
fn rsm_is_undefined_outside_the_mode() {
    let mut guest = Guest::new(b"\x0f\xaa");
    guest.halt_in_handler(vector::UD);
    assert_eq!(guest.stack(0), CODE);
}

/// A debugger that single-steps sees the handler's first instruction, and the one to which RSM returns.
#[test]
fn a_debugger_steps_through_the_handler() {
    // nop; hlt
    let mut guest = Guest::new(b"\x90\xf4");
    let handler = guest.cpu.state.smbase + 0x8000;
    guest.memory().write(handler, b"\x90\x0f\xaa");
    guest.cpu.requests.debugger.single_step = true;
    guest.cpu.inject_smi();
    assert_eq!(guest.run(), Exit::Smi);
    let smram = enter(&mut guest);
    assert!(matches!(guest.run(), Exit::Debug { .. }));
    assert_eq!(guest.cpu.linear_rip(), handler + 1);
    assert_eq!(guest.run(), Exit::Rsm);
    (guest.cpu.leave_smm(SmramMap::Bits64, &smram, |_| None)).unwrap();
    assert!(matches!(guest.run(), Exit::Debug { .. }));
    assert_eq!(guest.cpu.linear_rip(), CODE);
}
