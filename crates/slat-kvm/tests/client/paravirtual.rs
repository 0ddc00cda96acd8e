//! Tests KVM's paravirtual features: steal time, EOIs in memory (PV EOI), and hypercalls.

use crate::common::{
    CODE, DATA, Guest, Memory, RawGuest, msr, run_until_told_of_steal_time, set_msr, start_at_code,
    tell_features,
};
use kvm_bindings::*;
use slat_kvm::{VcpuExit, VcpuFd};
use std::time::{Duration, Instant};

const APIC_BASE: u32 = 0x1b;
const SPURIOUS: u32 = 0x80f;
const EOI: u32 = 0x80b;
const IN_SERVICE: u32 = 0x810;
const ICR: u32 = 0x830;
const STEAL_TIME: u32 = 0x4b56_4d03;
const PV_EOI: u32 = 0x4b56_4d04;
const SYSTEM_TIME: u32 = 0x4b56_4d01;
const ASYNC_PF: u32 = 0x4b56_4d02;
const ASYNC_PF_VECTOR: u32 = 0x4b56_4d06;
const ASYNC_PF_ACK: u32 = 0x4b56_4d07;
const VECTOR: u8 = 0x20;
/// The address of the handler of [`VECTOR`].
const HANDLER: u64 = 0x2000;

/// Switches the vCPU's APIC to x2APIC mode, and enables it by software.
fn enable_apic(vcpu: &VcpuFd) {
    tell_features(vcpu);
    let base = msr(vcpu, APIC_BASE);
    assert!(set_msr(vcpu, APIC_BASE, base | 1 << 10));
    assert!(set_msr(vcpu, SPURIOUS, 0x1ff));
}

fn byte(memory: &Memory, at: u64) -> u8 {
    let mut byte = [0];
    memory.read(at, &mut byte);
    byte[0]
}

fn word(memory: &Memory, at: u64) -> u64 {
    let mut bytes = [0; 8];
    memory.read(at, &mut bytes);
    u64::from_le_bytes(bytes)
}

/// Creates a guest that waits for [`VECTOR`], which is pending and has the handler `handler`.
fn interrupted(handler: &[u8]) -> Guest {
    // sti; nop; hlt
    let guest = Guest::with(&[0xfb, 0x90, 0xf4], |vm| vm.create_irq_chip().unwrap());
    let vector = u64::from(VECTOR) * 4;
    guest.memory.write(vector, &HANDLER.to_le_bytes()[..4]);
    guest.memory.write(HANDLER, handler);
    enable_apic(&guest.vcpu);
    // The vCPU sends an IPI to itself.
    assert!(set_msr(&guest.vcpu, ICR, 1 << 18 | u64::from(VECTOR)));
    guest
}

fn in_service(vcpu: &VcpuFd) -> bool {
    msr(vcpu, IN_SERVICE + u32::from(VECTOR) / 32) >> (VECTOR % 32) & 1 != 0
}

/// Runs guests whose handler ends the interrupt in memory (PV EOI), until one of them has found the bit set in
/// memory. The handler writes the bit to a port. (slat takes the offer back at every exit, and an exit may come at
/// any moment.) Returns that guest.
fn ends_in_memory(guest: impl Fn() -> Guest) -> Guest {
    for _ in 0..100 {
        let mut guest = guest();
        assert!(set_msr(&guest.vcpu, PV_EOI, DATA | 1));
        match guest.vcpu.run().unwrap() {
            VcpuExit::IoOut(0x10, [1]) => return guest,
            VcpuExit::IoOut(0x10, [0]) => {}
            other => panic!("{other:?}"),
        }
    }
    panic!("the bit was never set");
}

#[test]
fn a_guest_ends_an_interrupt_in_its_memory() {
    // btr word [DATA], 0; setc al; out 0x10, al
    let handler = [
        0x0f, 0xba, 0x36, 0x00, 0x30, 0, 0x0f, 0x92, 0xc0, 0xe6, 0x10,
    ];
    let guest = ends_in_memory(|| {
        let guest = interrupted(&handler);
        assert!(!set_msr(&guest.vcpu, PV_EOI, DATA | 2 | 1), "not aligned");
        guest
    });
    assert!(!in_service(&guest.vcpu), "the interrupt has ended");
    assert_eq!(byte(&guest.memory, DATA), 0);
}

#[test]
fn an_end_in_memory_that_is_not_taken_is_an_end_at_the_apic() {
    // out 0x10, al; btr word [DATA], 0; setc al; out 0x11, al
    let handler = [
        0xe6, 0x10, 0x0f, 0xba, 0x36, 0x00, 0x30, 0, 0x0f, 0x92, 0xc0, 0xe6, 0x11,
    ];
    let mut guest = interrupted(&handler);
    assert!(set_msr(&guest.vcpu, PV_EOI, DATA | 1));
    let exit = guest.vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::IoOut(0x10, _)), "{exit:?}");
    assert!(in_service(&guest.vcpu));
    match guest.vcpu.run().unwrap() {
        VcpuExit::IoOut(0x11, data) => assert_eq!(data, [0], "the offer was taken back"),
        other => panic!("{other:?}"),
    }
    assert!(in_service(&guest.vcpu));
    assert!(set_msr(&guest.vcpu, EOI, 0));
    assert!(!in_service(&guest.vcpu));
}

/// A guest ends an interrupt in its memory and at once disables PV EOI, as a CPU does that goes offline.
#[test]
fn an_end_in_memory_counts_also_when_it_is_the_last() {
    // btr word [DATA], 0; setc bl; mov ecx, PV_EOI; xor eax, eax; xor edx, edx; wrmsr; mov al, bl; out 0x10, al
    let [a, b, c, d] = PV_EOI.to_le_bytes();
    let handler = [
        0x0f, 0xba, 0x36, 0x00, 0x30, 0, 0x0f, 0x92, 0xc3, 0x66, 0xb9, a, b, c, d, 0x66, 0x31,
        0xc0, 0x66, 0x31, 0xd2, 0x0f, 0x30, 0x88, 0xd8, 0xe6, 0x10,
    ];
    for first_byte in [0, 1] {
        let guest = ends_in_memory(|| {
            let guest = interrupted(&handler);
            guest.memory.write(0, &[first_byte]);
            guest
        });
        assert!(!in_service(&guest.vcpu), "the interrupt has ended");
        assert_eq!(byte(&guest.memory, 0), first_byte, "not the guest's bit");
    }
}

/// After an INIT, slat does not write to the structures in memory that the guest has enabled before.
#[test]
fn an_init_ends_what_is_shared_in_memory() {
    let mut guest = interrupted(&[0xe6, 0x10]);
    let mut shared = vec![PV_EOI, SYSTEM_TIME, ASYNC_PF];
    if is_offered(&guest, 5) {
        shared.push(STEAL_TIME);
    }
    for index in &shared {
        assert!(set_msr(&guest.vcpu, *index, DATA | 1));
    }
    let exit = guest.vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::IoOut(0x10, _)), "{exit:?}");
    assert!(set_msr(&guest.vcpu, ICR, 1 << 18 | 0x500));
    guest.vcpu.get_mp_state().unwrap();
    for index in shared {
        assert_eq!(msr(&guest.vcpu, index), 0, "MSR {index:#x}");
    }
}

#[test]
fn steal_time_is_written_to_the_dirty_log() {
    let mut guest = Guest::new(&[0xf4]);
    if !is_offered(&guest, 5) {
        return;
    }
    assert!(
        !set_msr(&guest.vcpu, STEAL_TIME, DATA | 2 | 1),
        "not aligned"
    );
    let region = kvm_userspace_memory_region {
        flags: KVM_MEM_LOG_DIRTY_PAGES,
        memory_size: crate::common::MEMORY as u64,
        userspace_addr: guest.memory.start as u64,
        ..Default::default()
    };
    // SAFETY: the memory belongs to the guest, and outlives it.
    unsafe { guest.vm.set_user_memory_region(region).unwrap() };
    assert!(set_msr(&guest.vcpu, STEAL_TIME, DATA | 1));
    run_until_told_of_steal_time(&mut guest);
    let mut versions = Vec::new();
    for _ in 0..3 {
        start_at_code(&guest.vcpu);
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        versions.push(word(&guest.memory, DATA + 8) as u32);
        assert_eq!(byte(&guest.memory, DATA + 16), 1, "the vCPU does not run");
        let log = guest.vm.get_dirty_log(0, crate::common::MEMORY).unwrap();
        assert_eq!(log[0] & 1 << (DATA / 4096), 1 << (DATA / 4096));
    }
    assert!(
        versions.is_sorted_by(|a, b| a < b && b % 2 == 0),
        "{versions:?}"
    );
}

/// Returns whether the guest's CPUID offers the paravirtual feature with this bit.
fn is_offered(guest: &Guest, bit: u32) -> bool {
    let table = guest
        .kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .unwrap();
    let features = table
        .as_slice()
        .iter()
        .find(|it| it.function == 0x4000_0001);
    features.unwrap().eax >> bit & 1 != 0
}

#[test]
fn what_a_guest_may_use_is_offered() {
    let guest = Guest::new(&[]);
    // The features are, in this order: both clocks, and that they are stable; PV EOIs in memory; ends of halts; IPIs by
    // hypercall; asynchronous page faults, also for nested guests, and by interrupt. The last feature is a hypercall
    // that yields, which slat does not offer.
    for (bit, offered) in [
        (0, true),
        (3, true),
        (24, true),
        (6, true),
        (7, true),
        (11, true),
        (4, true),
        (10, true),
        (14, true),
        (13, false),
    ] {
        assert_eq!(is_offered(&guest, bit), offered, "{bit}");
    }
}

/// Makes the vCPU `first` execute a hypercall. Returns its result.
fn hypercall(first: &mut VcpuFd, memory: &Memory, args: [u32; 5]) -> u32 {
    // mov eax, nr; mov ebx, …; mov ecx, …; mov edx, …; mov esi, …; vmcall; out 0x10, al
    let mut code = Vec::new();
    for (register, value) in [0xb8, 0xbb, 0xb9, 0xba, 0xbe].into_iter().zip(args) {
        code.extend([0x66, register]);
        code.extend(value.to_le_bytes());
    }
    code.extend([0x0f, 0x01, 0xc1, 0xe6, 0x10]);
    memory.write(CODE, &code);
    start_at_code(first);
    let exit = first.run().unwrap();
    assert!(matches!(exit, VcpuExit::IoOut(0x10, _)), "{exit:?}");
    first.get_regs().unwrap().rax as u32
}

#[test]
fn an_ipi_by_hypercall_reaches_every_vcpu_that_it_names() {
    const SEND_IPI: u32 = 10;
    let mut guest = Guest::with(&[], |vm| vm.create_irq_chip().unwrap());
    let others = [1, 3, 40].map(|id| guest.vm.create_vcpu(id).unwrap());
    for vcpu in &others {
        enable_apic(vcpu);
    }
    let pending = |vcpu: &VcpuFd| msr(vcpu, 0x820 + 1) & 1 != 0;
    // The bitmap starts at id 1. Bits 0 to 2 of the low word name ids 1 to 3, and bit 7 of the high word names id 40.
    // There is no vCPU 2.
    let call = [SEND_IPI, 0b111, 1 << 7, 1, VECTOR.into()];
    assert_eq!(hypercall(&mut guest.vcpu, &guest.memory, call), 3);
    assert!(others.iter().all(pending));
    // The command has a logical destination, which is refused.
    let call = [SEND_IPI, 1, 0, 1, 1 << 11];
    let answer = hypercall(&mut guest.vcpu, &guest.memory, call);
    assert_eq!(answer, 22u32.wrapping_neg());
}

#[test]
fn a_kicked_vcpu_wakes_from_its_halt() {
    const KICK_CPU: u32 = 5;
    let mut guest = Guest::with(&[], |vm| vm.create_irq_chip().unwrap());
    let mut second = guest.vm.create_vcpu(1).unwrap();
    let runnable = kvm_mp_state {
        mp_state: KVM_MP_STATE_RUNNABLE,
    };
    second.set_mp_state(runnable).unwrap();
    // hlt, with interrupts disabled; mov byte [DATA], 1; out 0x11, al
    let waits = [0xf4, 0xc6, 0x06, 0x00, 0x30, 1, 0xe6, 0x11];
    guest.memory.write(HANDLER, &waits);
    start_at_code(&second);
    let mut regs = second.get_regs().unwrap();
    regs.rip = HANDLER;
    second.set_regs(&regs).unwrap();
    std::thread::scope(|scope| {
        let woken = scope.spawn(move || {
            let exit = second.run().unwrap();
            assert!(matches!(exit, VcpuExit::IoOut(0x11, _)), "{exit:?}");
        });
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(byte(&guest.memory, DATA), 0, "it halts");
        let call = [KICK_CPU, 0, 1, 0, 0];
        assert_eq!(hypercall(&mut guest.vcpu, &guest.memory, call), 0);
        let begin = Instant::now();
        while byte(&guest.memory, DATA) == 0 && begin.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        assert_eq!(byte(&guest.memory, DATA), 1);
        woken.join().unwrap();
    });
}

/// KVM_SET_VAPIC_ADDR puts the guest's task priority into memory. When the guest writes to it, the APIC's task
/// priority changes, and the word in memory shows the pending vector.
#[test]
fn a_guest_has_its_task_priority_in_memory() {
    // mov byte [DATA + 4], 0x50; out 0x10, al
    let code = [0xc6, 0x06, 0x04, 0x30, 0x50, 0xe6, 0x10];
    let guest = RawGuest::new(&code, |vm| {
        vm.ioctl(slat_kvm::abi::KVM_CREATE_IRQCHIP, 0).unwrap();
    });
    let vcpu = &guest.vcpu;
    let set = |vapic_addr| vcpu.set_vapic_address(&kvm_vapic_addr { vapic_addr });
    assert_eq!(set(1 << 30).unwrap_err().errno(), libc::EINVAL, "no memory");
    set(DATA + 4).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr8 = 3;
    vcpu.set_sregs(&sregs).unwrap();
    vcpu.run().unwrap();
    assert_eq!(vcpu.get_sregs().unwrap().cr8, 5);
    set(0).unwrap();
    vcpu.run().unwrap();
    assert_eq!(vcpu.get_sregs().unwrap().cr8, 5);
}

/// Each write that enables asynchronous page faults, by the guest or by its client after a migration, sends the guest
/// one event: all pages for which the guest waits are ready. While the guest has not acknowledged an event, the next
/// event waits.
#[test]
fn who_enables_asynchronous_page_faults_is_told_that_all_pages_are_ready() {
    const BY_INTERRUPT: u64 = 1 << 3;
    let [a, b, c, d] = ASYNC_PF_ACK.to_le_bytes();
    // mov al, [DATA + 4]; out 0x10, al; mov word [DATA + 4], 0; mov word [DATA + 6], 0; mov ecx, ACK; mov eax, 1; xor
    // edx, edx; wrmsr; out 0x11, al; iret
    let handler = [
        0xa0, 0x04, 0x30, 0xe6, 0x10, 0xc7, 0x06, 0x04, 0x30, 0, 0, 0xc7, 0x06, 0x06, 0x30, 0, 0,
        0x66, 0xb9, a, b, c, d, 0x66, 0xb8, 1, 0, 0, 0, 0x66, 0x31, 0xd2, 0x0f, 0x30, 0xe6, 0x11,
        0xcf,
    ];
    // sti; nop; hlt; jmp back
    let mut guest = Guest::with(&[0xfb, 0x90, 0xf4, 0xeb, 0xfd], |vm| {
        vm.create_irq_chip().unwrap()
    });
    let vector = u64::from(VECTOR) * 4;
    guest.memory.write(vector, &HANDLER.to_le_bytes()[..4]);
    guest.memory.write(HANDLER, &handler);
    assert!(set_msr(&guest.vcpu, ASYNC_PF_VECTOR, VECTOR.into()));
    assert!(set_msr(&guest.vcpu, ASYNC_PF, DATA | BY_INTERRUPT | 1));
    enable_apic(&guest.vcpu);
    for _ in 0..2 {
        match guest.vcpu.run().unwrap() {
            VcpuExit::IoOut(0x10, token) => assert_eq!(token, [0xff]),
            other => panic!("{other:?}"),
        }
        assert!(in_service(&guest.vcpu));
        // The client enables the events once more, as it does after a migration. The guest has not taken the token
        // yet, so the second event waits.
        assert!(set_msr(&guest.vcpu, ASYNC_PF, DATA | BY_INTERRUPT | 1));
        let exit = guest.vcpu.run().unwrap();
        assert!(matches!(exit, VcpuExit::IoOut(0x11, _)), "{exit:?}");
        assert!(set_msr(&guest.vcpu, EOI, 0));
    }
    assert_eq!(msr(&guest.vcpu, ASYNC_PF), DATA | BY_INTERRUPT | 1);
    assert_eq!(msr(&guest.vcpu, ASYNC_PF_VECTOR), VECTOR.into());
}

/// CPUID offers these MSRs even if KVM emulates no local APIC, so guests write to them then. Such a write is not #GP,
/// but no event is sent.
#[test]
fn asynchronous_page_faults_may_be_enabled_without_local_apic() {
    let value = (DATA | 1 << 3 | 1) as u32;
    let mut code = Vec::new();
    for (index, value) in [(ASYNC_PF_VECTOR, VECTOR.into()), (ASYNC_PF, value)] {
        code.extend([0x66, 0xb9]); // mov ecx, index
        code.extend(index.to_le_bytes());
        code.extend([0x66, 0xb8]); // mov eax, value
        code.extend(value.to_le_bytes());
        code.extend([0x66, 0x31, 0xd2, 0x0f, 0x30]); // xor edx, edx; wrmsr
    }
    code.push(0xf4);
    let mut guest = Guest::with(&code, |_| {});
    let exit = guest.vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::Hlt), "{exit:?}");
    assert_eq!(msr(&guest.vcpu, ASYNC_PF), value.into());
    assert_eq!(msr(&guest.vcpu, ASYNC_PF_VECTOR), VECTOR.into());
}

/// A guest that enables the structure at an address without memory gets #GP.
#[test]
fn asynchronous_page_faults_need_memory() {
    // mov ecx, ASYNC_PF; mov eax, 0x4000_0009; xor edx, edx; wrmsr; hlt
    let [a, b, c, d] = ASYNC_PF.to_le_bytes();
    let code = [
        0x66, 0xb9, a, b, c, d, 0x66, 0xb8, 9, 0, 0, 0x40, 0x66, 0x31, 0xd2, 0x0f, 0x30, 0xf4,
    ];
    let mut guest = Guest::with(&code, |vm| vm.create_irq_chip().unwrap());
    // out 0x10, al
    guest.memory.write(13 * 4, &HANDLER.to_le_bytes()[..4]);
    guest.memory.write(HANDLER, &[0xe6, 0x10]);
    let exit = guest.vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::IoOut(0x10, _)), "{exit:?}");
    assert_eq!(msr(&guest.vcpu, ASYNC_PF), 0);
}
