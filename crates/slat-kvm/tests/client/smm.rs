//! Tests system management mode (SMM): SMRAM, SMIs from all sources, RSM, and the state that a client sees and saves.

use crate::common::*;
use kvm_bindings::*;
use slat_kvm::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::time::Duration;

const SMBASE_MSR: u32 = 0x9e;
const SMI_COUNT: u32 = 0x34;
const SYSTEM_TIME: u32 = 0x4b56_4d01;
/// The value of SMBASE after RESET. In these tests, SMRAM begins at this address.
const SMBASE: u64 = 0x3_0000;
const SMRAM_SIZE: usize = 0x1_0000;
/// The slot of SMRAM, in address space 1.
const SMRAM_SLOT: u32 = 1 << 16 | 1;
/// The offset in SMRAM at which the handler begins.
const HANDLER: u64 = 0x8000;
const SAVED_RIP_32: u64 = 0xfff0;
const REVISION: u64 = 0xfefc;

/// mov al, 0xfe; out 0x11, al; rsm
const TELL: &[u8] = &[0xb0, 0xfe, 0xe6, 0x11, 0x0f, 0xaa];
/// mov al, 1; out 0x10, al; hlt
const OUT_AND_HALT: &[u8] = &[0xb0, 1, 0xe6, 0x10, 0xf4];

/// Maps `memory` at `gpa` in the address space that the slot names.
pub fn map(vm: &VmFd, slot: u32, gpa: u64, memory: &Memory, flags: u32) -> Result<(), i32> {
    let region = kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: gpa,
        memory_size: memory.len as u64,
        userspace_addr: memory.start as u64,
    };
    // SAFETY: the tests access this memory only by raw pointers, so a write of the guest breaks nothing.
    unsafe { vm.set_user_memory_region(region) }.map_err(|error| error.errno())
}

/// Gives a VM memory for SMRAM, which contains the handler.
pub fn smram(vm: &VmFd, handler: &[u8], flags: u32) -> Memory {
    let memory = Memory::new(SMRAM_SIZE);
    memory.write(HANDLER, handler);
    map(vm, SMRAM_SLOT, SMBASE, &memory, flags).unwrap();
    memory
}

/// Creates a guest without features, whose CPU has no long mode.
fn guest(code: &[u8], handler: &[u8]) -> (Guest, Memory) {
    let guest = Guest::new(code);
    forget_features(&guest.vcpu);
    let smram = smram(&guest.vm, handler, 0);
    (guest, smram)
}

fn word(memory: &Memory, at: u64) -> u32 {
    let mut bytes = [0; 4];
    memory.read(at, &mut bytes);
    u32::from_le_bytes(bytes)
}

/// Runs the vCPU until an OUT. Checks the port and the byte, and whether the client is told that the vCPU is in SMM.
fn expect_out(vcpu: &mut VcpuFd, port: u16, byte: u8, in_smm: bool) {
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(at, data) => assert_eq!((at, data), (port, &[byte][..])),
        other => panic!("{other:?}"),
    }
    assert_eq!(flag(vcpu), in_smm);
    assert_eq!(vcpu.get_vcpu_events().unwrap().smi.smm, in_smm.into());
}

/// Runs the vCPU until a HLT, outside SMM.
fn expect_halt(vcpu: &mut VcpuFd) {
    match vcpu.run().unwrap() {
        VcpuExit::Hlt => {}
        other => panic!("{other:?}"),
    }
    assert!(!flag(vcpu));
}

/// Whether `kvm_run` says that the vCPU is in system management mode.
fn flag(vcpu: &mut VcpuFd) -> bool {
    u32::from(vcpu.get_kvm_run().flags) & KVM_RUN_X86_SMM != 0
}

/// An SMI that arrives while the client emulates an OUT is delivered directly after the OUT. Firmware expects the SMI
/// there.
#[test]
fn an_smi_runs_its_handler_and_rsm_returns() {
    let (mut guest, smram) = guest(OUT_AND_HALT, TELL);
    let vcpu = &mut guest.vcpu;
    expect_out(vcpu, 0x10, 1, false);
    vcpu.smi().unwrap();
    assert_eq!(vcpu.get_vcpu_events().unwrap().smi.pending, 1);
    expect_out(vcpu, 0x11, 0xfe, true);
    let events = vcpu.get_vcpu_events().unwrap();
    assert_eq!((events.smi.pending, events.nmi.masked), (0, 1));
    assert_eq!(vcpu.get_sregs().unwrap().cs.base, SMBASE);
    assert_eq!(word(&smram, SAVED_RIP_32), CODE as u32 + 4);
    assert_eq!(
        word(&smram, REVISION),
        0x2_0000,
        "no long mode: the 32-bit map"
    );
    // Another SMI waits until RSM.
    vcpu.smi().unwrap();
    expect_out(vcpu, 0x11, 0xfe, true);
    expect_halt(vcpu);
    let regs = vcpu.get_regs().unwrap();
    assert_eq!((regs.rip, regs.rax), (CODE + 5, 1));
    assert_eq!(vcpu.get_vcpu_events().unwrap().nmi.masked, 0);
    assert_eq!(msr(vcpu, SMI_COUNT), 2);
}

#[test]
fn a_cpu_with_long_mode_saves_the_64_bit_map() {
    let (mut guest, smram) = guest(OUT_AND_HALT, TELL);
    tell_features(&guest.vcpu);
    guest.vcpu.smi().unwrap();
    expect_out(&mut guest.vcpu, 0x11, 0xfe, true);
    assert_eq!(word(&smram, REVISION), 0x2_0064);
    assert_eq!(word(&smram, 0xff78), CODE as u32);
    expect_out(&mut guest.vcpu, 0x10, 1, false);
    expect_halt(&mut guest.vcpu);
}

/// The handler changes SMBASE in the saved state. The client changes SMBASE by the MSR.
#[test]
fn smbase_moves() {
    // mov dword ptr cs:[0xfef8], 0x38000; rsm
    let relocate = [
        0x2e, 0x66, 0xc7, 0x06, 0xf8, 0xfe, 0, 0x80, 3, 0, 0x0f, 0xaa,
    ];
    let (mut guest, _smram) = guest(OUT_AND_HALT, &relocate);
    let more = Memory::new(SMRAM_SIZE);
    more.write(0x8000, TELL);
    map(&guest.vm, SMRAM_SLOT + 1, 0x4_0000, &more, 0).unwrap();
    let vcpu = &mut guest.vcpu;
    vcpu.smi().unwrap();
    expect_out(vcpu, 0x10, 1, false);
    assert_eq!(msr(vcpu, SMBASE_MSR), 0x3_8000);
    assert!(set_msr(vcpu, SMBASE_MSR, 0x4_0000));
    vcpu.smi().unwrap();
    expect_out(vcpu, 0x11, 0xfe, true);
    assert_eq!(vcpu.get_sregs().unwrap().cs.selector, 0x4000);
    expect_halt(vcpu);
}

/// Each address space has its own memory, and its own addresses without memory.
#[test]
fn smram_is_invisible_outside_the_mode() {
    // mov ax, 0x3000; mov ds, ax; mov al, [0x10]; out 0x10, al; hlt: reads 0x30010
    let code = [0xb8, 0, 0x30, 0x8e, 0xd8, 0xa0, 0x10, 0, 0xe6, 0x10, 0xf4];
    // mov al, cs:[0x10]; out 0x11, al; mov al, [0x3000]; out 0x12, al; rsm: reads 0x30010 and the guest's data
    let handler = [
        0x2e, 0xa0, 0x10, 0, 0xe6, 0x11, 0xa0, 0, 0x30, 0xe6, 0x12, 0x0f, 0xaa,
    ];
    let (mut guest, smram) = guest(&code, &handler);
    smram.write(0x10, &[0x55]);
    guest.memory.write(DATA, &[0x66]);
    let vcpu = &mut guest.vcpu;
    vcpu.smi().unwrap();
    expect_out(vcpu, 0x11, 0x55, true);
    match vcpu.run().unwrap() {
        VcpuExit::MmioRead(DATA, data) => data[0] = 0x77,
        other => panic!("{other:?}"),
    }
    assert!(flag(vcpu));
    expect_out(vcpu, 0x12, 0x77, true);
    // If both address spaces contain the same memory, the handler reads the guest's data.
    map(&guest.vm, 1 << 16, 0, &guest.memory, 0).unwrap();
    match vcpu.run().unwrap() {
        VcpuExit::MmioRead(0x3_0010, data) => data[0] = 0x88,
        other => panic!("{other:?}"),
    }
    assert!(!flag(vcpu));
    vcpu.smi().unwrap();
    // The SMI is delivered after the read and before the OUT.
    expect_out(vcpu, 0x11, 0x55, true);
    expect_out(vcpu, 0x12, 0x66, true);
    expect_out(vcpu, 0x10, 0x88, false);
    expect_halt(vcpu);
}

/// In SMM the same address leads to other code. That is so even if both pieces of code have run so often that they
/// are compiled.
#[test]
fn code_of_both_address_spaces_stays_apart() {
    // mov cx, 0xffff; next: inc bx; loop next; mov al, BYTE; out PORT, al; LAST
    let counts = |byte: u8, port: u8, last: &[u8]| {
        let mut code = vec![0xb9, 0xff, 0xff, 0x43, 0xe2, 0xfd, 0xb0, byte, 0xe6, port];
        code.extend(last);
        code
    };
    // jmp to the begin
    let ordinary = counts(1, 0x10, &[0xeb, 0xf4]);
    let management = counts(2, 0x11, &[0x0f, 0xaa]);
    // jmp 0:CODE
    let (mut guest, _smram) = guest(&ordinary, &[0xea, 0, 0x10, 0, 0]);
    let other = Memory::new(MEMORY);
    other.write(CODE, &management);
    map(&guest.vm, 1 << 16, 0, &other, 0).unwrap();
    for _ in 0..30 {
        expect_out(&mut guest.vcpu, 0x10, 1, false);
        guest.vcpu.smi().unwrap();
        expect_out(&mut guest.vcpu, 0x11, 2, true);
    }
}

#[test]
fn stores_in_the_mode_are_in_the_logs_of_its_own_slots() {
    let guest_of = |prepare: fn(&VmFd)| {
        let guest = Guest::with(OUT_AND_HALT, prepare);
        let smram = smram(&guest.vm, TELL, KVM_MEM_LOG_DIRTY_PAGES);
        (guest, smram)
    };
    let (mut guest, _smram) = guest_of(|vm| {
        enable(vm, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, 1).unwrap();
    });
    guest.vcpu.smi().unwrap();
    expect_out(&mut guest.vcpu, 0x11, 0xfe, true);
    let log = |guest: &Guest| guest.vm.get_dirty_log(SMRAM_SLOT, SMRAM_SIZE).unwrap();
    // The log has the page of the saved registers, and the page of the handler, which the first fetch has mapped.
    assert_eq!(log(&guest), [1 << 15 | 1 << 8]);
    (guest.vm.clear_dirty_log(SMRAM_SLOT, 0, 16, &[1 << 8])).unwrap();
    assert_eq!(log(&guest), [1 << 15]);
    (guest.vm.clear_dirty_log(SMRAM_SLOT, 0, 16, &[u64::MAX])).unwrap();
    expect_out(&mut guest.vcpu, 0x10, 1, false);
    assert_eq!(log(&guest), [0]);
    guest.vcpu.smi().unwrap();
    expect_out(&mut guest.vcpu, 0x11, 0xfe, true);
    assert_eq!(log(&guest), [1 << 15]);
    let errno = |slot| {
        guest
            .vm
            .get_dirty_log(slot, SMRAM_SIZE)
            .unwrap_err()
            .errno()
    };
    assert_eq!(errno(1), libc::ENOENT, "the other address space");
    assert_eq!(errno(2 << 16 | 1), libc::EINVAL);
}

/// Copies the vCPU's registers, and the whole SMM state that a client saves.
fn copy_vcpu(from: &VcpuFd, to: &VcpuFd) {
    to.set_regs(&from.get_regs().unwrap()).unwrap();
    to.set_sregs(&from.get_sregs().unwrap()).unwrap();
    assert!(set_msr(to, SMBASE_MSR, msr(from, SMBASE_MSR)));
    to.set_vcpu_events(&from.get_vcpu_events().unwrap())
        .unwrap();
}

#[test]
fn a_vcpu_in_the_mode_can_be_moved_to_another_vm() {
    let (mut guest, smram) = guest(OUT_AND_HALT, TELL);
    expect_out(&mut guest.vcpu, 0x10, 1, false);
    guest.vcpu.smi().unwrap();
    expect_out(&mut guest.vcpu, 0x11, 0xfe, true);
    // This run only completes the OUT.
    guest.vcpu.set_kvm_immediate_exit(1);
    assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
    assert!(flag(&mut guest.vcpu));
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    map(&vm, 0, 0, &guest.memory, 0).unwrap();
    map(&vm, SMRAM_SLOT, SMBASE, &smram, 0).unwrap();
    let mut vcpu = vm.create_vcpu(0).unwrap();
    copy_vcpu(&guest.vcpu, &vcpu);
    assert_eq!(vcpu.get_vcpu_events().unwrap().smi.smm, 1);
    expect_halt(&mut vcpu);
    assert_eq!(vcpu.get_regs().unwrap().rax, 1);
}

#[test]
fn a_client_may_set_a_pending_smi() {
    let (mut guest, _smram) = guest(OUT_AND_HALT, TELL);
    let mut events = guest.vcpu.get_vcpu_events().unwrap();
    assert_ne!(events.flags & KVM_VCPUEVENT_VALID_SMM, 0);
    events.smi.pending = 1;
    guest.vcpu.set_vcpu_events(&events).unwrap();
    // Without KVM_VCPUEVENT_VALID_SMM the call does not change the pending SMI.
    (events.smi.pending, events.flags) = (0, 0);
    guest.vcpu.set_vcpu_events(&events).unwrap();
    expect_out(&mut guest.vcpu, 0x11, 0xfe, true);
}

/// An INIT that arrives in SMM waits until RSM. A SIPI that arrives in SMM is lost.
#[test]
fn init_is_latched_in_the_mode() {
    let guest = Guest::with(OUT_AND_HALT, |vm| vm.create_irq_chip().unwrap());
    let _smram = smram(&guest.vm, TELL, 0);
    let Guest { mut vcpu, vm, .. } = guest;
    vcpu.smi().unwrap();
    expect_out(&mut vcpu, 0x11, 0xfe, true);
    let send = |mode: u32| {
        let msi = kvm_msi {
            address_lo: 0xfee0_0000,
            data: mode << 8 | 1 << 14,
            ..Default::default()
        };
        assert_eq!(vm.signal_msi(msi).unwrap(), 1);
    };
    send(5);
    send(6);
    assert_eq!(vcpu.get_vcpu_events().unwrap().smi.latched_init, 1);
    // After RSM the INIT takes effect: the bootstrap processor starts at its reset vector, where there is no memory.
    match vcpu.run().unwrap() {
        VcpuExit::MmioRead(0xffff_fff0, _) | VcpuExit::InternalError => {}
        other => panic!("{other:?}"),
    }
    assert!(!flag(&mut vcpu));
    let events = vcpu.get_vcpu_events().unwrap();
    assert_eq!((events.smi.latched_init, events.smi.smm), (0, 0));
    assert_eq!(vcpu.get_sregs().unwrap().cs.base, 0xffff_0000);
    assert_eq!(msr(&vcpu, SMBASE_MSR), SMBASE, "INIT keeps it");
}

/// A message of a device, or an IPI, with delivery mode SMI ends a halt.
#[test]
fn a_message_may_be_an_smi() {
    // sti; hlt; mov al, 1; out 0x10, al
    let code = [0xfb, 0xf4, 0xb0, 1, 0xe6, 0x10];
    let guest = Guest::with(&code, |vm| vm.create_irq_chip().unwrap());
    forget_features(&guest.vcpu);
    let smram = smram(&guest.vm, TELL, 0);
    let Guest { mut vcpu, vm, .. } = guest;
    let message = kvm_msi {
        address_lo: 0xfee0_0000,
        data: 2 << 8,
        ..Default::default()
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(vm.signal_msi(message).unwrap(), 1);
        });
        expect_out(&mut vcpu, 0x11, 0xfe, true);
    });
    assert_eq!(word(&smram, SAVED_RIP_32), CODE as u32 + 2, "after HLT");
    // RSM continues after the HLT.
    expect_out(&mut vcpu, 0x10, 1, false);
}

#[test]
fn rsm_outside_the_mode_is_undefined() {
    // The code executes rsm. The handler of #UD executes hlt.
    let mut guest = Guest::new(&[0x0f, 0xaa]);
    guest.memory.write(6 * 4, &0x2000u32.to_le_bytes());
    guest.memory.write(0x2000, &[0xf4]);
    expect_halt(&mut guest.vcpu);
    assert_eq!(guest.vcpu.get_regs().unwrap().rip, 0x2001);
}

#[test]
fn registers_that_no_cpu_can_have_shut_it_down() {
    // mov dword ptr cs:[0xfffc], 0x80000000; rsm: the saved CR0 has paging without protected mode
    let handler = [
        0x2e, 0x66, 0xc7, 0x06, 0xfc, 0xff, 0, 0, 0, 0x80, 0x0f, 0xaa,
    ];
    let (mut guest, smram) = guest(OUT_AND_HALT, &handler);
    guest.vcpu.smi().unwrap();
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Shutdown));
    // The vCPU is still in SMM, and sees SMRAM.
    smram.write(0x9000, TELL);
    let mut regs = guest.vcpu.get_regs().unwrap();
    regs.rip = 0x9000;
    guest.vcpu.set_regs(&regs).unwrap();
    expect_out(&mut guest.vcpu, 0x11, 0xfe, true);
}

/// If the client puts a vCPU into SMM or takes it out, the vCPU sees other memory, also at an address that it has
/// just read.
#[test]
fn a_client_that_sets_the_mode_sets_the_memory() {
    // mov al, [DATA]; out 0x10, al; jmp to the beginning
    let code = [0xa0, 0, 0x30, 0xe6, 0x10, 0xeb, 0xf9];
    let (mut guest, _smram) = guest(&code, TELL);
    let other = Memory::new(MEMORY);
    map(&guest.vm, 1 << 16, 0, &other, 0).unwrap();
    other.write(CODE, &code);
    guest.memory.write(DATA, &[0x66]);
    other.write(DATA, &[0x77]);
    let vcpu = &mut guest.vcpu;
    for _ in 0..3 {
        for (smm, byte) in [(0, 0x66), (1, 0x77)] {
            let mut events = vcpu.get_vcpu_events().unwrap();
            events.smi.smm = smm;
            vcpu.set_vcpu_events(&events).unwrap();
            for _ in 0..2 {
                expect_out(vcpu, 0x10, byte, smm == 1);
            }
        }
    }
}

/// An SMI and RSM also change the memory that the vCPU sees. The handler and the guest alternately read one address,
/// and each reads its own memory.
#[test]
fn the_handler_and_the_guest_read_one_address_in_turns() {
    // The guest: mov al, [DATA]; out 0x10, al; jmp to the beginning. The handler: mov al, [DATA]; out 0x11, al; rsm.
    let code = [0xa0, 0, 0x30, 0xe6, 0x10, 0xeb, 0xf9];
    let handler = [0xa0, 0, 0x30, 0xe6, 0x11, 0x0f, 0xaa];
    let (mut guest, _smram) = guest(&code, &handler);
    let other = Memory::new(MEMORY);
    map(&guest.vm, 1 << 16, 0, &other, 0).unwrap();
    guest.memory.write(DATA, &[0x66]);
    other.write(DATA, &[0x77]);
    let vcpu = &mut guest.vcpu;
    for _ in 0..3 {
        for _ in 0..2 {
            expect_out(vcpu, 0x10, 0x66, false);
        }
        vcpu.smi().unwrap();
        expect_out(vcpu, 0x11, 0x77, true);
    }
}

/// The memory changes within a run, without an exit: the guest sends the SMI to itself. Its registers are saved in
/// SMRAM, even if its page tables are in other memory at the same address.
#[test]
fn memory_changes_within_a_run() {
    const DIRECTORY: u64 = 0xf000;
    // mov ebx, 0xfee00300; mov al, [DATA]; mov dword [ebx], 0x44200 (SMI to itself); mov al, [DATA]; out 0x10, al
    // jmp to the second instruction
    let code = [
        0x66, 0xbb, 0, 3, 0xe0, 0xfe, 0xa0, 0, 0x30, 0x67, 0x66, 0xc7, 3, 0, 0x42, 4, 0, 0xa0, 0,
        0x30, 0xe6, 0x10, 0xeb, 0xee,
    ];
    // mov al, [DATA]; inc ax; mov [DATA], al; rsm
    let handler = [0xa0, 0, 0x30, 0x40, 0xa2, 0, 0x30, 0x0f, 0xaa];
    let guest = Guest::with(&code, |vm| vm.create_irq_chip().unwrap());
    let smram = smram(&guest.vm, &handler, 0);
    let Guest {
        mut vcpu,
        vm,
        memory,
        ..
    } = guest;
    let [other, below] = [MEMORY, SMRAM_SIZE].map(Memory::new);
    map(&vm, 1 << 16, 0, &other, 0).unwrap();
    map(&vm, 1, SMBASE, &below, 0).unwrap();
    memory.write(DATA, &[0x66]);
    // The tables map two pages of 4 MiB: memory, and the local APIC.
    for (page, entry) in [(0, 0x87u32), (0x3fb, 0xfec0_0087)] {
        below.write(DIRECTORY + 4 * page, &entry.to_le_bytes());
    }
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cr0, sregs.cr3, sregs.cr4) = (0x8000_0011, SMBASE + DIRECTORY, 0x10);
    (sregs.cs.type_, sregs.ds.limit) = (11, u32::MAX);
    vcpu.set_sregs(&sregs).unwrap();
    for count in 1..4 {
        expect_out(&mut vcpu, 0x10, 0x66, false);
        assert_eq!(word(&other, DATA), count);
    }
    assert_ne!(word(&smram, REVISION), 0);
    assert_eq!(word(&below, REVISION), 0);
}

/// An INIT that waits for RSM does not end a HLT of the handler.
#[test]
fn a_latched_init_ends_no_halt() {
    // hlt; mov al, 0xfe; out 0x11, al
    let guest = Guest::with(OUT_AND_HALT, |vm| vm.create_irq_chip().unwrap());
    let _smram = smram(&guest.vm, &[&[0xf4], TELL].concat(), 0);
    let Guest { mut vcpu, vm, .. } = guest;
    vcpu.smi().unwrap();
    let init = kvm_msi {
        address_lo: 0xfee0_0000,
        data: 5 << 8 | 1 << 14,
        ..Default::default()
    };
    extern "C" fn nothing(_: i32) {}
    // SAFETY: the signal's handler does nothing.
    unsafe { libc::signal(libc::SIGUSR1, nothing as *const () as usize) };
    // SAFETY: the call has no arguments.
    let thread = unsafe { libc::pthread_self() };
    let (sender, done) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let vm = &vm;
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(vm.signal_msi(init).unwrap(), 1);
            // Sends the signal repeatedly, because a signal that arrives before KVM_RUN ends no run.
            while done.recv_timeout(Duration::from_millis(200)).is_err() {
                // SAFETY: the thread waits for this one.
                unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
            }
        });
        match vcpu.run() {
            Err(error) => assert_eq!(error.errno(), libc::EINTR),
            Ok(exit) => panic!("{exit:?}"),
        }
        sender.send(()).unwrap();
    });
    let events = vcpu.get_vcpu_events().unwrap();
    assert_eq!((events.smi.smm, events.smi.latched_init), (1, 1));
}

/// The state that a client saves contains whether the SMI has interrupted the handler of an NMI.
#[test]
fn nmis_stay_masked_after_rsm_of_a_moved_vcpu() {
    let (guest, smram) = guest(OUT_AND_HALT, TELL);
    let mut from = guest.vcpu;
    let mut events = from.get_vcpu_events().unwrap();
    events.nmi.masked = 1;
    from.set_vcpu_events(&events).unwrap();
    from.smi().unwrap();
    expect_out(&mut from, 0x11, 0xfe, true);
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    map(&vm, 0, 0, &guest.memory, 0).unwrap();
    map(&vm, SMRAM_SLOT, SMBASE, &smram, 0).unwrap();
    let mut to = vm.create_vcpu(0).unwrap();
    copy_vcpu(&from, &to);
    for vcpu in [&mut from, &mut to] {
        loop {
            // The moved vCPU may execute its OUT twice, because its client has not completed the OUT.
            match vcpu.run().unwrap() {
                VcpuExit::IoOut(0x11, _) => {}
                VcpuExit::IoOut(0x10, _) => break,
                other => panic!("{other:?}"),
            }
        }
        let events = vcpu.get_vcpu_events().unwrap();
        assert_eq!((events.smi.smm, events.nmi.masked), (0, 1));
    }
}

/// If there is no memory for SMRAM, an SMI loses the interrupted state.
#[test]
fn an_smi_without_smram_is_the_end_of_the_vm() {
    let mut guest = Guest::new(OUT_AND_HALT);
    guest.vcpu.smi().unwrap();
    assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EIO);
    assert_eq!(guest.vcpu.get_regs().unwrap_err().errno(), libc::EIO);
    assert_eq!(guest.vm.get_clock().unwrap_err().errno(), libc::EIO);
}

/// KVM's own writes to guest memory, such as those of the clock, go to the ordinary address space.
#[test]
fn devices_have_no_system_management_mode() {
    let (mut guest, _smram) = guest(OUT_AND_HALT, TELL);
    let other = Memory::new(MEMORY);
    map(&guest.vm, 1 << 16, 0, &other, 0).unwrap();
    guest.vcpu.smi().unwrap();
    expect_out(&mut guest.vcpu, 0x11, 0xfe, true);
    assert!(set_msr(&guest.vcpu, SYSTEM_TIME, DATA | 1));
    guest.vcpu.set_kvm_immediate_exit(1);
    assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
    guest.vcpu.set_kvm_immediate_exit(0);
    // The vCPU executes one more instruction in SMM, and then returns.
    expect_out(&mut guest.vcpu, 0x10, 1, false);
    assert_ne!(word(&guest.memory, DATA), 0, "the clock's version");
    assert_eq!(word(&other, DATA), 0);
}

#[test]
fn address_spaces_are_as_many_as_claimed() {
    let memory = Memory::new(MEMORY);
    let claimed = |vm: &VmFd| vm.check_extension_raw(KVM_CAP_MULTI_ADDRESS_SPACE.into());
    for (vm, spaces) in [(vm(), 2), (protected(), 1)] {
        assert_eq!(claimed(&vm), spaces);
        for space in 0..3 {
            let expected = match (space as i32) < spaces {
                true => Ok(()),
                false => Err(libc::EINVAL),
            };
            assert_eq!(map(&vm, space << 16 | 7, 0, &memory, 0), expected);
        }
    }
}

/// Runs the tests of this file without support for nested tables. Then nothing else drops the translations when the
/// address space changes.
#[test]
fn all_of_this_without_nested_tables() {
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["smm::", "--skip", "all_of_this"])
        .env("SLAT_SET", "nested=0")
        .status();
    assert!(status.unwrap().success());
}
