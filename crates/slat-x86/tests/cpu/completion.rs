//! Tests the completion of an instruction for which the caller has provided data: with state that has changed
//! meanwhile, and with side effects.

use crate::common::*;
use slat_x86::state::flags;
use slat_x86::*;
use std::sync::atomic::Ordering;

impl Guest {
    /// Completes the last exit, and executes nothing else. If the instruction needs more than that, this ends with
    /// [`Exit::Attention`].
    pub fn complete(&mut self) -> Option<Exit> {
        self.attention.store(1, Ordering::Relaxed);
        let exit = self.cpu.complete(&mut self.machine, &self.attention);
        self.attention.store(0, Ordering::Relaxed);
        exit
    }

    /// Runs until a read of a device, and provides `data` for it.
    pub fn read_device(&mut self, data: &[u8]) {
        let exit = self.run();
        assert!(
            matches!(exit, Exit::Mmio { write: false, .. }),
            "{exit:?} is not a read"
        );
        self.cpu.complete_mmio_read(data);
    }
}

#[test]
fn data_for_a_page_that_is_absent_now_become_one_page_fault() {
    // rep insb; hlt. movsb; hlt
    for (code, is_port) in [(b"\xf3\x6c\xf4", true), (b"\x90\xa4\xf4", false)] {
        let mut guest = Guest::new(code);
        let state = &mut guest.cpu.state;
        (state.gpr[RCX], state.gpr[RSI], state.gpr[RDI]) = (4, MMIO, DATA);
        if is_port {
            assert!(matches!(guest.run(), Exit::Io { count: 4, .. }));
            guest.cpu.complete_io(&[1, 2, 3, 4]);
        } else {
            guest.read_device(&[1]);
        }
        let before = guest.cpu.state.clone();
        guest.machine.absent(DATA);
        guest.cpu.flush_tlb();
        assert_eq!(guest.complete(), None);
        let state = &guest.cpu.state;
        assert_eq!((state.gpr, state.rip), (before.gpr, before.rip));
        assert_eq!(state.cr2, DATA);
        guest.halt_in_handler(vector::PF);
        assert_eq!((guest.stack(0), guest.stack(1)), (2, before.rip));
    }
}

#[test]
fn an_instruction_that_turns_out_to_be_unknown_is_not_completed_again() {
    // jmp far [rsi], whose selector names a call gate
    let mut guest = Guest::new(b"\xff\x2e\xf4");
    guest.memory().write64(GDT + 8, 0x0000_8c00_0008_0000);
    guest.cpu.state.gpr[RSI] = MMIO;
    guest.read_device(&[0; 4]);
    guest.read_device(&[8, 0]);
    assert!(matches!(guest.complete(), Some(Exit::Emulation { .. })));
    assert_eq!(guest.complete(), None);
    assert_eq!(guest.cpu.state.rip, CODE);
}

#[test]
fn no_interrupt_is_taken_before_flags_that_are_read_from_a_device() {
    // popfq; hlt
    let mut guest = Guest::new(b"\x9d\xf4");
    guest.cpu.state.gpr[RSP] = MMIO;
    guest.cpu.state.rflags |= flags::IF;
    guest.read_device(&[2, 0, 0, 0, 0, 0, 0, 0]);
    assert!(!guest.cpu.can_take_interrupt(), "the flags are not known");
    assert_eq!(guest.complete(), None);
    assert!(!guest.cpu.can_take_interrupt(), "IF is clear");
}
