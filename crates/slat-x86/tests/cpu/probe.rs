//! Tests probes. A probe ends the run, whatever breakpoints the guest and a debugger have set. The guest cannot
//! notice a probe.

use crate::common::*;
use crate::debug::steps_over_devices;
use slat_x86::*;

fn code(first: u64) -> Probe {
    data(ProbeKind::Execute, first, 1)
}

fn data(kind: ProbeKind, first: u64, bytes: u64) -> Probe {
    Probe { kind, first, bytes }
}

#[test]
fn a_code_probe_stops_before_its_instruction_until_it_is_passed() {
    // l: inc eax; inc ebx; dec ecx; jnz l; hlt
    let mut guest = Guest::new(b"\xff\xc0\xff\xc3\xff\xc9\x75\xf8\xf4");
    guest.cpu.state.gpr[RCX] = 3;
    let mut many: Vec<_> = (0..40).map(|at| code(CODE + 0x100 + at)).collect();
    many.push(code(CODE + 2));
    guest.cpu.set_probes(many, false);
    for round in 0..3 {
        assert_eq!(guest.run(), Exit::Probe(ProbeHit::Code));
        assert_eq!(guest.run(), Exit::Probe(ProbeHit::Code), "not passed");
        let state = &guest.cpu.state;
        assert_eq!((state.rip, state.gpr[RBX]), (CODE + 2, round));
        guest.cpu.pass_probe();
    }
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RBX], 3);
}

#[test]
fn a_string_instruction_is_passed_as_a_whole() {
    // rep stosb; jmp to it
    let mut guest = Guest::new(b"\xf3\xaa\xeb\xfc");
    guest.cpu.state.gpr[RDI] = DATA;
    guest.cpu.state.gpr[RCX] = 100;
    guest.cpu.set_probes(vec![code(CODE)], false);
    assert_eq!(guest.run(), Exit::Probe(ProbeHit::Code));
    guest.cpu.pass_probe();
    assert_eq!(guest.run(), Exit::Probe(ProbeHit::Code));
    let state = &guest.cpu.state;
    assert_eq!((state.rip, state.gpr[RCX]), (CODE, 0));
}

#[test]
fn data_probes_stop_after_the_access_on_a_page_that_was_used_before() {
    // mov [rsi],eax; mov eax,[rsi]; mov [rsi+9],al; hlt
    let mut guest = Guest::new(b"\x89\x06\x8b\x06\x88\x46\x09\xf4");
    guest.cpu.state.gpr[RSI] = DATA;
    guest.halt();
    for (kind, hits) in [
        (ProbeKind::Write, &[2, 7][..]),
        (ProbeKind::Read, &[4]),
        (ProbeKind::Access, &[2, 4, 7]),
    ] {
        guest.cpu.set_probes(vec![data(kind, DATA + 3, 7)], false);
        guest.cpu.state.rip = CODE;
        for after in hits {
            let at = if *after == 7 { DATA + 9 } else { DATA + 3 };
            assert_eq!(guest.run(), Exit::Probe(ProbeHit::Data(kind, at)));
            assert_eq!(guest.cpu.state.rip, CODE + after);
        }
        guest.halt();
    }
    guest.cpu.set_probes(Vec::new(), false);
    guest.cpu.state.rip = CODE;
    guest.halt();
}

#[test]
fn steps_stop_after_each_instruction_also_of_devices_and_at_a_halt() {
    // pushfq; in al,dx; mov eax,[rbx] (MMIO); int 0x80
    let mut guest = Guest::new(b"\x9c\xec\x8b\x03\xf4\xcd\x80");
    guest.cpu.set_probes(Vec::new(), true);
    let step = Exit::Probe(ProbeHit::Step);
    steps_over_devices(&mut guest, &step);
    assert_eq!(guest.run(), step);
    assert_eq!(guest.cpu.state.rip, CODE + 5);
    assert_eq!(guest.run(), step);
    assert_eq!(guest.cpu.state.rip, HANDLERS + 16 * 0x80);
    assert_eq!(guest.cpu.state.dr6, 0xffff_0ff0);
}

/// If the guest has a breakpoint at the address of a probe, the breakpoint takes effect after the probe.
#[test]
fn probes_and_the_guests_breakpoints_share_addresses() {
    // mov [rsi],eax; hlt
    let mut guest = Guest::new(b"\x89\x06\xf4");
    Guest::gate(guest.memory(), vector::DB, HANDLERS + 0x2000, 0, 0);
    guest.memory().write(HANDLERS + 0x2000, b"\xf4");
    guest.cpu.state.gpr[RSI] = DATA;
    guest.cpu.state.dr = [CODE, DATA, 0, 0];
    // Breakpoint 0 executes; breakpoint 1 writes a byte.
    let watched = 0x400 | 2 << 2 | 1 << 20;
    guest.cpu.state.dr7 = watched | 2;
    let probes = vec![code(CODE), data(ProbeKind::Write, DATA, 1)];
    guest.cpu.set_probes(probes, false);
    assert_eq!(guest.run(), Exit::Probe(ProbeHit::Code));
    guest.cpu.pass_probe();
    guest.halt();
    assert_eq!(guest.stack(0), CODE, "the guest's handler ran");
    guest.cpu.state.rip = CODE;
    guest.cpu.state.dr7 = watched;
    guest.cpu.pass_probe();
    let hit = ProbeHit::Data(ProbeKind::Write, DATA);
    assert_eq!(guest.run(), Exit::Probe(hit));
    guest.halt();
    assert_eq!(guest.stack(0), CODE + 2, "the guest's handler ran");
}

/// Runs a guest to its probe, which must be at `at`.
#[track_caller]
fn stops_at(guest: &mut Guest, at: u64) {
    assert_eq!(guest.run(), Exit::Probe(ProbeHit::Code), "{at:#x}");
    assert_eq!(guest.cpu.linear_rip(), at);
}

/// The instructions include: instructions with one byte, the last one of a block, code with a base in CS, and code that
/// has run often before.
#[test]
fn a_code_probe_stops_at_each_instruction() {
    // l: inc eax; dec ecx; jnz l; push eax; ret; hlt. In 32-bit code the first two instructions have one byte each.
    let bytes = b"\x40\x49\x75\xfc\x50\xc3\xf4";
    let instructions = [0, 1, 2, 4, 5, 6];
    for base in [0, 0x3000] {
        let mut guest = Guest::new(b"");
        guest.memory().write(base + CODE, bytes);
        let state = &mut guest.cpu.state;
        (state.efer, state.cr0) = (0, state.cr0 & !(1 << 31));
        state.cs.rights = 0xc09b;
        state.cs.base = base;
        for probed in instructions {
            let begin = |guest: &mut Guest| {
                let gpr = &mut guest.cpu.state.gpr;
                (gpr[RAX], gpr[RCX], gpr[RSP]) = (CODE + 6 - 3, 3, STACK);
                guest.cpu.state.rip = CODE;
            };
            for _ in 0..3 {
                begin(&mut guest);
                guest.halt();
            }
            begin(&mut guest);
            let at = base + CODE + probed;
            guest.cpu.set_probes(vec![code(at)], false);
            for _ in 0..if probed < 4 { 3 } else { 1 } {
                stops_at(&mut guest, at);
                guest.cpu.pass_probe();
            }
            guest.halt();
            guest.cpu.set_probes(Vec::new(), false);
        }
    }
}

/// The run passes the probe once, although the instruction exits for each of its accesses to a device.
#[test]
fn a_string_instruction_is_passed_as_a_whole_if_it_writes_to_a_device() {
    // rep stosb; hlt
    let mut guest = Guest::new(b"\xf3\xaa\xf4");
    guest.cpu.state.gpr[RDI] = MMIO;
    guest.cpu.state.gpr[RCX] = 3;
    guest.cpu.set_probes(vec![code(CODE)], false);
    stops_at(&mut guest, CODE);
    guest.cpu.pass_probe();
    for at in 0..3 {
        match guest.run() {
            Exit::Mmio { gpa, .. } => assert_eq!(gpa, MMIO + at),
            other => panic!("{other:?} after {at} bytes"),
        }
    }
    guest.halt();
}

/// The probe is on the last bytes of a page and the first bytes of the next page.
#[test]
fn a_data_probe_may_be_in_two_pages() {
    const END: u64 = DATA + 0x1000;
    // mov [rsi],eax; hlt
    let mut guest = Guest::new(b"\x89\x06\xf4");
    for to in [END - 4, END] {
        guest.cpu.state.rip = CODE;
        guest.cpu.state.gpr[RSI] = to;
        guest.halt();
    }
    let probe = data(ProbeKind::Write, END - 2, 4);
    guest.cpu.set_probes(vec![probe], false);
    for (to, at) in [
        (END - 5, Some(END - 2)),
        (END - 3, Some(END - 2)),
        (END - 1, Some(END - 1)),
        (END, Some(END)),
        (END + 1, Some(END + 1)),
        (END - 6, None),
        (END + 2, None),
    ] {
        guest.cpu.state.rip = CODE;
        guest.cpu.state.gpr[RSI] = to;
        if let Some(at) = at {
            let hit = ProbeHit::Data(ProbeKind::Write, at);
            assert_eq!(guest.run(), Exit::Probe(hit), "{to:#x}");
        }
        guest.halt();
    }
}

/// If a debugger steps over an access, the data probe is reported, and the step is not reported again.
#[test]
fn a_step_that_hits_a_data_probe_is_a_hit() {
    // mov [rsi],eax; rep stosb; mov [rbx],eax (MMIO); hlt
    let mut guest = Guest::new(b"\x89\x06\xf3\xaa\x89\x03\xf4");
    guest.cpu.state.gpr[RSI] = DATA;
    guest.cpu.state.gpr[RDI] = DATA;
    guest.cpu.state.gpr[RBX] = MMIO;
    guest.cpu.state.gpr[RCX] = 2;
    let probes = vec![
        data(ProbeKind::Write, DATA, 4),
        data(ProbeKind::Write, MMIO, 4),
    ];
    guest.cpu.set_probes(probes, true);
    let hit = |at| Exit::Probe(ProbeHit::Data(ProbeKind::Write, at));
    assert_eq!(guest.run(), hit(DATA));
    assert_eq!(guest.run(), hit(DATA));
    assert_eq!(guest.run(), hit(DATA + 1));
    assert_eq!(guest.cpu.state.rip, CODE + 4);
    assert!(matches!(guest.run(), Exit::Mmio { write: true, .. }));
    assert_eq!(guest.run(), hit(MMIO));
    assert_eq!(guest.run(), Exit::Probe(ProbeHit::Step));
    assert_eq!(guest.cpu.state.rip, CODE + 7);
}
