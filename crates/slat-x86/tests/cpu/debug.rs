//! Tests breakpoints, watchpoints and single steps, of the guest and of a debugger.

use crate::common::*;
use slat_x86::*;

const TF: u64 = 0x100;
const RF: u64 = 1 << 16;
/// The value of DR6 that names no cause.
const NONE: u64 = 0xffff_0ff0;
const BD: u64 = 1 << 13;
const BS: u64 = 1 << 14;
/// The addresses of the #DB handler and of its log.
const HANDLER: u64 = HANDLERS + 0x2000;
const LOG: u64 = DATA + 0x2000;

/// Makes a guest whose #DB handler logs the return address, DR6 (which it then clears) and the pushed flags at [R9].
fn traced(code: &[u8]) -> Guest {
    let mut guest = Guest::new(code);
    Guest::gate(guest.memory(), vector::DB, HANDLER, 0, 0);
    // mov r8,[rsp]; mov [r9],r8; mov r8,dr6; mov [r9+8],r8; mov r8,[rsp+16]; mov [r9+16],r8; add r9,24;
    // xor r8d,r8d; mov dr6,r8; iretq
    guest.memory().write(
        HANDLER,
        b"\x4c\x8b\x04\x24\x4d\x89\x01\x41\x0f\x21\xf0\x4d\x89\x41\x08\x4c\x8b\x44\x24\x10\x4d\x89\x41\x10\x49\x83\xc1\x18\x45\x31\xc0\x41\x0f\x23\xf0\x48\xcf",
    );
    guest.cpu.state.gpr[9] = LOG;
    guest
}

/// Returns the handler's log: return address relative to CODE, DR6, RF.
fn log(guest: &Guest) -> Vec<(u64, u64, bool)> {
    let word = |at| guest.memory().read64(at);
    (LOG..guest.cpu.state.gpr[9])
        .step_by(24)
        .map(|at| (word(at) - CODE, word(at + 8), word(at + 16) & RF != 0))
        .collect()
}

/// Returns DR7 with breakpoint `n` enabled, with the given R/W and LEN fields.
fn enable(n: u64, kind: u64, len: u64) -> u64 {
    0x400 | 2 << (2 * n) | (kind | len << 2) << (16 + 4 * n)
}

#[test]
fn a_watchpoint_traps_after_the_access_also_on_a_page_that_was_used_before() {
    // mov [rsi],eax; mov dr7,rdx; mov [rsi],eax; mov [rsi+4],eax; mov [rsi-1],ax; mov eax,[rsi]; hlt
    let mut guest = traced(b"\x89\x06\x0f\x23\xfa\x89\x06\x89\x46\x04\x66\x89\x46\xff\x8b\x06\xf4");
    guest.cpu.state.gpr[RSI] = DATA;
    guest.cpu.state.gpr[RDX] = enable(1, 1, 3);
    guest.cpu.state.dr[1] = DATA;
    guest.halt();
    assert_eq!(
        log(&guest),
        [(7, NONE | 2, false), (14, NONE | 2, false)],
        "four bytes, writes only"
    );
    assert_eq!(guest.memory().read::<1>(DATA - 1), [0]);
}

#[test]
fn a_read_watchpoint_traps_for_reads_and_for_all_breakpoints_that_are_hit() {
    // mov al,[rsi+7]; add [rsi],al; nop; hlt
    let mut guest = traced(b"\x8a\x46\x07\x00\x06\x90\xf4");
    guest.cpu.state.gpr[RSI] = DATA;
    guest.cpu.state.dr = [DATA, DATA + 7, 0, DATA + 3];
    // Breakpoints on reads and writes of eight bytes, the same of one byte, and on writes of four bytes (from DATA).
    guest.cpu.state.dr7 = enable(0, 3, 2) | enable(1, 3, 0) | enable(3, 1, 3);
    guest.halt();
    assert_eq!(log(&guest), [(3, NONE | 3, false), (5, NONE | 9, false)]);
}

#[test]
fn a_read_watchpoint_traps_beside_another_read_of_its_page() {
    // mov eax,[rsi+16]; mov al,[rsi+7]; nop; hlt
    let mut guest = traced(b"\x8b\x46\x10\x8a\x46\x07\x90\xf4");
    guest.cpu.state.gpr[RSI] = DATA;
    guest.cpu.state.dr[1] = DATA + 7;
    guest.cpu.state.dr7 = enable(1, 3, 0);
    guest.halt();
    assert_eq!(log(&guest), [(6, NONE | 2, false)]);
}

#[test]
fn a_repeated_instruction_stops_after_the_iteration_that_hits() {
    for code in [&b"\xf3\xa4\xf4"[..], b"\xf3\xaa\xf4"] {
        // rep movsb or rep stosb; hlt
        let mut guest = traced(code);
        let state = &mut guest.cpu.state;
        (state.gpr[RSI], state.gpr[RDI], state.gpr[RCX]) = (DATA + 0x800, DATA, 100);
        state.dr[2] = DATA + 40;
        state.dr7 = enable(2, 1, 0);
        // mov r10,rcx before the rest of the handler
        let handler = guest.memory().read::<37>(HANDLER);
        guest.memory().write(HANDLER, b"\x49\x89\xca");
        guest.memory().write(HANDLER + 3, &handler);
        guest.halt();
        assert_eq!(log(&guest), [(0, NONE | 4, true)]);
        assert_eq!(guest.cpu.state.gpr[10], 59, "41 iterations were done");
        assert_eq!(guest.cpu.state.gpr[RCX], 0);
    }
}

#[test]
fn a_single_step_of_a_repeated_instruction_is_one_iteration() {
    // rep movsb; popfq; hlt
    let mut guest = traced(b"\xf3\xa4\x9d\xf4");
    guest.memory().write64(STACK, 2);
    let state = &mut guest.cpu.state;
    (state.gpr[RSI], state.gpr[RDI], state.gpr[RCX]) = (DATA, DATA + 0x100, 3);
    state.rflags |= TF;
    guest.halt();
    assert_eq!(
        log(&guest),
        [
            (0, NONE | BS, true),
            (0, NONE | BS, true),
            (2, NONE | BS, false),
            (3, NONE | BS, false)
        ]
    );
}

#[test]
fn a_software_interrupt_is_not_stepped_and_its_handler_runs_free() {
    // int 0x80; popfq; hlt
    let mut guest = traced(b"\xcd\x80\x9d\xf4");
    guest.memory().write(HANDLERS + 16 * 0x80, b"\x90\x48\xcf");
    guest.memory().write64(STACK, 2);
    guest.cpu.state.rflags |= TF;
    guest.halt();
    assert_eq!(log(&guest), [(3, NONE | BS, false)], "after POPF only");
}

#[test]
fn sysret_traps_when_it_sets_tf_and_syscall_does_not_when_it_clears_it() {
    // Kernel at CODE: sysretq to CODE + 0x100. User: syscall, to CODE + 8: hlt.
    let mut guest = traced(b"\x48\x0f\x07\x90\x90\x90\x90\x90\xf4");
    guest.memory().write(CODE + 0x100, b"\x0f\x05");
    let state = &mut guest.cpu.state;
    state.star = 8 << 32 | 0x13 << 48;
    state.lstar = CODE + 8;
    state.sfmask = TF;
    state.gpr[RCX] = CODE + 0x100;
    state.gpr[11] = 2 | TF;
    guest.halt();
    assert_eq!(log(&guest), [(0x100, NONE | BS, false)]);
}

#[test]
fn the_shadow_of_mov_ss_swallows_a_step_and_delays_a_watchpoint() {
    // popfq; mov ss,[rsi]; nop; popfq; hlt
    let mut guest = traced(b"\x9d\x8e\x16\x90\x9d\xf4");
    guest.memory().write64(STACK, 2 | TF);
    guest.memory().write64(STACK + 8, 2);
    guest.memory().write(DATA, &16u16.to_le_bytes());
    guest.cpu.state.gpr[RSI] = DATA;
    guest.cpu.state.dr[0] = DATA;
    guest.cpu.state.dr7 = enable(0, 3, 0);
    guest.halt();
    assert_eq!(
        log(&guest),
        [(4, NONE | BS | 1, false), (5, NONE | BS, false)]
    );
}

#[test]
fn intel_has_no_instruction_breakpoint_in_the_shadow_of_mov_ss() {
    for (vendor, hits) in [(b"Genu", vec![]), (b"Auth", vec![(2, NONE | 1, true)])] {
        // mov ss,edx; inc eax; hlt
        let mut guest = traced(b"\x8e\xd2\xff\xc0\xf4");
        // bts qword [rsp+16],16
        let handler = guest.memory().read::<37>(HANDLER);
        guest
            .memory()
            .write(HANDLER, b"\x48\x0f\xba\x6c\x24\x10\x10");
        guest.memory().write(HANDLER + 7, &handler);
        guest
            .cpu
            .set_features(Features::from_cpuid(|leaf, _| match leaf {
                0 => [0xd, u32::from_le_bytes(*vendor), 0, 0],
                _ => [0; 4],
            }));
        guest.cpu.state.gpr[RDX] = 16;
        guest.cpu.state.dr[0] = CODE + 2;
        guest.cpu.state.dr7 = enable(0, 0, 0);
        guest.halt();
        assert_eq!(guest.cpu.state.gpr[RAX], 1);
        assert_eq!(log(&guest), hits);
    }
}

#[test]
fn an_instruction_with_kvms_prefix_begins_after_it() {
    // ud2; "kvm"; inc eax; hlt, with a breakpoint after the prefix
    let mut guest = traced(b"\x0f\x0bkvm\xff\xc0\xf4");
    guest.cpu.state.dr[0] = CODE + 5;
    guest.cpu.state.dr7 = enable(0, 0, 0);
    guest.memory().write(HANDLER, b"\xf4");
    guest.halt();
    assert_eq!(guest.stack(0), CODE + 5);
    // A fault of an instruction, or of bytes that are no instruction: lock nop; lea eax,eax.
    for code in [&b"\x0f\x0bkvm\xf0\x90"[..], b"\x0f\x0bkvm\x8d\xc0"] {
        let mut guest = Guest::new(code);
        guest.halt_in_handler(vector::UD);
        assert_eq!(guest.stack(0), CODE + 5);
    }
}

#[test]
fn an_nmi_waits_for_the_instruction_after_mov_ss() {
    let mut guest = Guest::new(b"\x90\xf4");
    guest.cpu.state.events.mov_ss_shadow = true;
    guest.cpu.inject_nmis(1);
    guest.halt_in_handler(vector::NMI);
    assert_eq!(guest.stack(0), CODE + 1);
}

#[test]
fn icebp_is_a_trap_without_a_cause_in_dr6() {
    let mut guest = traced(b"\xf1\xf4");
    guest.cpu.state.dr6 |= 5;
    guest.halt();
    assert_eq!(log(&guest), [(1, NONE, false)]);
}

#[test]
fn general_detect_is_a_fault_once() {
    // mov rax,dr0; hlt
    let mut guest = traced(b"\x0f\x21\xc0\xf4");
    guest.cpu.state.dr7 = 0x400 | 1 << 13;
    guest.halt();
    assert_eq!(log(&guest), [(0, NONE | BD, false)]);
    assert_eq!(guest.cpu.state.dr7, 0x400);
}

#[test]
fn a_trap_ends_a_halt() {
    // hlt; popfq; hlt
    let mut guest = traced(b"\xf4\x9d\xf4");
    guest.memory().write64(STACK, 2);
    guest.cpu.state.rflags |= TF;
    guest.halt();
    assert_eq!(guest.cpu.state.rip, CODE + 3);
    assert_eq!(log(&guest), [(1, NONE | BS, false), (2, NONE | BS, false)]);
}

#[test]
fn a_port_access_is_stepped_and_watched() {
    // in al,dx; popfq; out 0x81,al; hlt
    let mut guest = traced(b"\xec\x9d\xe6\x81\xf4");
    guest.memory().write64(STACK, 2);
    guest.cpu.state.gpr[RDX] = 0x3f8;
    guest.cpu.state.rflags |= TF;
    guest.cpu.state.cr4 |= 8;
    guest.cpu.state.dr[0] = 0x80;
    guest.cpu.state.dr7 = enable(0, 2, 1);
    assert!(matches!(guest.run(), Exit::Io { write: false, .. }));
    guest.cpu.complete_io(&[1]);
    assert!(matches!(guest.run(), Exit::Io { write: true, .. }));
    guest.cpu.complete_io(&[]);
    guest.halt();
    assert_eq!(
        log(&guest),
        [
            (1, NONE | BS, false),
            (2, NONE | BS, false),
            (4, NONE | 1, false)
        ]
    );
}

#[test]
fn a_hypercall_that_is_answered_from_outside_is_stepped() {
    // vmcall; popfq; hlt
    let mut guest = traced(b"\x0f\x01\xc1\x9d\xf4");
    guest.memory().write64(STACK, 2);
    guest.cpu.state.gpr[RAX] = 100;
    guest.cpu.state.rflags |= TF;
    assert_eq!(guest.run(), Exit::Hypercall);
    guest.cpu.complete_hypercall(|state, _| state.gpr[RAX] = 0);
    guest.halt();
    assert_eq!(log(&guest), [(3, NONE | BS, false), (4, NONE | BS, false)]);
}

#[test]
fn an_instruction_breakpoint_inside_a_block_hits_and_the_rest_runs_in_blocks() {
    // l: inc eax; inc ebx; dec ecx; jnz l; hlt
    let mut guest = traced(b"\xff\xc0\xff\xc3\xff\xc9\x75\xf8\xf4");
    // The handler sets RF by bts qword [rsp+16],16 before its other instructions.
    let handler = guest.memory().read::<37>(HANDLER);
    guest
        .memory()
        .write(HANDLER, b"\x48\x0f\xba\x6c\x24\x10\x10");
    guest.memory().write(HANDLER + 7, &handler);
    guest.cpu.state.gpr[RCX] = 3;
    guest.cpu.state.dr[3] = CODE + 2;
    guest.cpu.state.dr7 = enable(3, 0, 0);
    guest.halt();
    assert_eq!(guest.cpu.state.gpr[RBX], 3);
    assert_eq!(log(&guest), [(2, NONE | 8, true); 3]);
}

fn debug(vector: u8, dr6: u64) -> Exit {
    Exit::Debug { vector, dr6 }
}

/// Runs `pushfq; in al,dx; mov eax,[rbx]` with RBX at a device. Each instruction ends with `step`.
pub(crate) fn steps_over_devices(guest: &mut Guest, step: &Exit) {
    guest.cpu.state.gpr[RBX] = MMIO;
    assert_eq!(guest.run(), *step);
    assert_eq!((guest.cpu.state.rip, guest.stack(0)), (CODE + 1, 2));
    assert!(matches!(guest.run(), Exit::Io { .. }));
    guest.cpu.complete_io(&[0]);
    assert_eq!(guest.run(), *step);
    assert_eq!(guest.cpu.state.rip, CODE + 2);
    assert!(matches!(guest.run(), Exit::Mmio { .. }));
    guest.cpu.complete_mmio_read(&[1, 2, 3, 4]);
    assert_eq!(guest.run(), *step);
}

#[test]
fn a_debugger_steps_without_a_trace_in_the_guest() {
    // pushfq; in al,dx; mov eax,[rbx] (MMIO); int 0x80
    let mut guest = traced(b"\x9c\xec\x8b\x03\xcd\x80");
    guest.cpu.requests.debugger.single_step = true;
    let step = debug(vector::DB, NONE | BS);
    steps_over_devices(&mut guest, &step);
    assert_eq!(guest.run(), step);
    assert_eq!(guest.cpu.state.rip, HANDLERS + 16 * 0x80);
    assert_eq!(guest.cpu.state.rflags & TF, 0);
    assert_eq!(guest.cpu.state.dr6, NONE);
    guest.cpu.requests.debugger.single_step = false;
    guest.halt();
    assert_eq!(log(&guest), []);
}

#[test]
fn a_debuggers_breakpoints_replace_the_guests() {
    // nop; nop; mov [rsi],eax; mov rax,dr7; hlt
    let mut guest = traced(b"\x90\x90\x89\x06\x0f\x21\xf8\xf4");
    guest.cpu.state.gpr[RSI] = DATA;
    guest.cpu.state.dr[0] = CODE + 1;
    guest.cpu.state.dr7 = enable(0, 0, 0);
    let own = guest.cpu.state.dr7;
    guest.cpu.requests.debugger.breakpoints = Some(Breakpoints {
        addresses: [0, 0, CODE, DATA],
        control: enable(2, 0, 0) | enable(3, 1, 3),
    });
    assert_eq!(guest.run(), debug(vector::DB, NONE | 4));
    assert_eq!(guest.cpu.state.rip, CODE);
    guest.cpu.state.rflags |= RF;
    assert_eq!(guest.run(), debug(vector::DB, NONE | 8));
    assert_eq!(guest.cpu.state.rip, CODE + 4);
    guest.halt();
    assert_eq!((guest.cpu.state.gpr[RAX], guest.cpu.state.dr6), (own, NONE));
    // The debugger's DR7 enables general detect.
    guest.cpu.state.rip = CODE + 4;
    guest.cpu.requests.debugger.breakpoints = Some(Breakpoints {
        addresses: [0; 4],
        control: 1 << 13,
    });
    assert_eq!(guest.run(), debug(vector::DB, NONE | BD));
    assert_eq!(guest.cpu.state.rip, CODE + 4);
    // Without the debugger the guest's own breakpoint is in effect again.
    guest.cpu.requests.debugger = Debugger::default();
    guest.cpu.state.rip = CODE;
    guest.cpu.state.dr7 = enable(0, 0, 0);
    guest.memory().write(HANDLER, b"\xf4");
    guest.halt();
    assert_eq!(guest.stack(0), CODE + 1);
}

#[test]
fn a_debuggers_software_breakpoint_is_at_its_int3_and_icebp_is_its_own() {
    // int3; icebp
    let mut guest = traced(b"\xcc\xf1");
    guest.cpu.requests.debugger.software_breakpoints = true;
    assert!(matches!(
        guest.run(),
        Exit::Debug {
            vector: vector::BP,
            ..
        }
    ));
    assert_eq!(guest.cpu.state.rip, CODE);
    // The debugger finds that it has not set this breakpoint, and injects #BP.
    guest.cpu.inject_exception(vector::BP, None);
    guest.halt_in_handler(vector::BP);
    assert_eq!(guest.stack(0), CODE + 1);
    (guest.cpu.state.rip, guest.cpu.state.gpr[RSP]) = (CODE + 1, STACK);
    guest.cpu.requests.debugger.single_step = true;
    assert_eq!(guest.run(), debug(vector::DB, NONE));
    assert_eq!(guest.cpu.state.rip, CODE + 1);
    guest.cpu.requests.debugger = Debugger::default();
    guest.cpu.state.rip = CODE;
    guest.halt_in_handler(vector::BP);
    assert_eq!(guest.stack(0), CODE + 1);
}

#[test]
fn watched_stacks_do_not_stop_the_delivery_of_events() {
    // int 0x80 with a watched frame: the trap is taken at the handler's first instruction.
    let mut guest = traced(b"\xcd\x80");
    guest.cpu.state.dr[0] = STACK - 8;
    guest.cpu.state.dr7 = enable(0, 1, 2);
    // The #DB handler has a stack of its own.
    Guest::gate(guest.memory(), vector::DB, HANDLER, 0, 1);
    guest.halt_in_handler(0x80);
    let at = HANDLERS + 16 * 0x80 - CODE;
    assert_eq!(log(&guest), [(at, NONE | 1, false)]);
}

/// Makes a guest with a breakpoint on the stack of the #DB handler, which begins at the same address in each delivery:
/// no instruction is executed any more.
fn endless() -> Guest {
    // mov [rsi],eax; hlt
    let mut guest = Guest::new(b"\x89\x06\xf4");
    Guest::gate(&guest.machine.memory, vector::DB, HANDLERS, 0, 1);
    let state = &mut guest.cpu.state;
    (state.dr[0], state.gpr[RSI]) = (IST_STACK - 16, IST_STACK - 16);
    // DR7 enables breakpoint 0, for writes of 8 bytes.
    state.dr7 = 0x402 | 9 << 16;
    guest
}

#[test]
fn deliveries_without_an_instruction_end_the_run_after_the_notify_window() {
    let mut guest = endless();
    let window = std::time::Duration::from_millis(2);
    guest.cpu.requests.notify_window = Some(window);
    let begin = std::time::Instant::now();
    for n in 1..3 {
        assert_eq!(guest.run(), Exit::Notify);
        assert!(begin.elapsed() >= n * window);
    }
    let executed = guest.cpu.counters().instructions;
    assert!(executed <= 1, "{executed}");
    // When the breakpoint is disabled, the guest continues.
    guest.cpu.state.dr7 = 0x400;
    guest.halt();
    // Many exceptions with instructions between them are progress. ud2, whose handler returns: dec
    // ecx; jz +2; iretq; hlt
    let mut guest = Guest::new(b"\x0f\x0b");
    let handler = HANDLERS + 16 * u64::from(vector::UD);
    guest
        .memory()
        .write(handler, b"\xff\xc9\x74\x02\x48\xcf\xf4");
    guest.cpu.state.gpr[RCX] = 1000;
    guest.cpu.requests.notify_window = Some(std::time::Duration::ZERO);
    guest.halt();
}
