//! Tests events that arrive at the same time, and events that must not be lost in some state of the vCPU.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{DATA, DEVICE, Guest, forget_features, resolve, start_at_code, userfault};
use kvm_bindings::*;
use slat_kvm::{VcpuExit, VcpuFd};
use std::sync::mpsc;
use std::time::Duration;

const VECTOR: u8 = 0x20;
/// The address of the handler of [`VECTOR`].
const HANDLER: u64 = 0x2000;
/// The address of the handler of NMIs.
const NMI_HANDLER: u64 = 0x2100;

fn set_msr(vcpu: &VcpuFd, index: u32, data: u64) {
    assert!(common::set_msr(vcpu, index, data), "MSR {index:#x}");
}

/// Creates a guest with interrupts enabled. Its handler of interrupts writes to port 0x11, and its handler of NMIs to
/// port 0x10.
fn guest() -> Guest {
    // 1: nop; jmp 1b
    let guest = Guest::with(&[0x90, 0xeb, 0xfd], |vm| vm.create_irq_chip().unwrap());
    for (vector, handler, port) in [(2, NMI_HANDLER, 0x10), (VECTOR, HANDLER, 0x11)] {
        let entry = &handler.to_le_bytes()[..4];
        guest.memory.write(u64::from(vector) * 4, entry);
        // out port, al; iret
        guest.memory.write(handler, &[0xe6, port, 0xcf]);
    }
    let mut regs = guest.vcpu.get_regs().unwrap();
    regs.rflags |= 1 << 9;
    guest.vcpu.set_regs(&regs).unwrap();
    let mut sregs = guest.vcpu.get_sregs().unwrap();
    sregs.apic_base |= 1 << 10;
    guest.vcpu.set_sregs(&sregs).unwrap();
    set_msr(&guest.vcpu, 0x80f, 0x1ff);
    guest
}

fn port_and_stack(vcpu: &mut VcpuFd) -> (u16, u64) {
    let port = match vcpu.run().unwrap() {
        VcpuExit::IoOut(port, _) => port,
        other => panic!("{other:?}"),
    };
    (port, vcpu.get_regs().unwrap().rsp)
}

/// The handler of an NMI runs with interrupts disabled: a pending interrupt is delivered only after the handler has
/// ended.
#[test]
fn an_interrupt_waits_for_the_handler_of_an_nmi() {
    let mut guest = guest();
    let stack = guest.vcpu.get_regs().unwrap().rsp;
    guest.vcpu.nmi().unwrap();
    // The vCPU sends an IPI to itself.
    set_msr(&guest.vcpu, 0x830, 1 << 18 | u64::from(VECTOR));
    assert_eq!(port_and_stack(&mut guest.vcpu), (0x10, stack - 6));
    assert_eq!(port_and_stack(&mut guest.vcpu), (0x11, stack - 6));
}

/// Sends an INIT to the vCPU itself.
fn init(guest: &Guest) {
    set_msr(&guest.vcpu, 0x830, 1 << 18 | 0x500);
    guest.vcpu.get_mp_state().unwrap();
}

/// SDM volume 3, table 11-1: INIT sets EDX to the processor's signature, whatever software stored there.
#[test]
fn after_init_edx_tells_the_processor() {
    let guest = guest();
    forget_features(&guest.vcpu);
    let signature = |guest: &Guest| {
        let mut regs = guest.vcpu.get_regs().unwrap();
        (regs.rdx, regs.rax) = (0x1234, 0x1234);
        guest.vcpu.set_regs(&regs).unwrap();
        init(guest);
        guest.vcpu.get_regs().unwrap().rdx
    };
    assert_eq!(signature(&guest), 0x600);
    let leaf = kvm_cpuid_entry2 {
        function: 1,
        eax: 0x806f8,
        ..Default::default()
    };
    let table = CpuId::from_entries(&[leaf]).unwrap();
    guest.vcpu.set_cpuid2(&table).unwrap();
    assert_eq!(signature(&guest), 0x806f8);
}

/// SDM volume 3, table 11-1: INIT does not change these registers.
#[test]
fn an_init_leaves_registers_of_the_fpu_and_of_system_calls() {
    const STAR: u32 = 0xc000_0081;
    let guest = guest();
    let mut fpu = guest.vcpu.get_fpu().unwrap();
    (fpu.xmm[3], fpu.fcw) = ([7; 16], 0x37f);
    guest.vcpu.set_fpu(&fpu).unwrap();
    set_msr(&guest.vcpu, STAR, 0x1234);
    init(&guest);
    let after = guest.vcpu.get_fpu().unwrap();
    assert_eq!((after.xmm[3], after.fcw), ([7; 16], 0x37f));
    let entry = kvm_msr_entry {
        index: STAR,
        ..Default::default()
    };
    let mut msrs = Msrs::from_entries(&[entry]).unwrap();
    guest.vcpu.get_msrs(&mut msrs).unwrap();
    assert_eq!(msrs.as_slice()[0].data, 0x1234);
}

#[test]
fn an_init_forgets_nmis_that_wait() {
    let mut guest = guest();
    guest.vcpu.nmi().unwrap();
    init(&guest);
    assert_eq!(guest.vcpu.get_vcpu_events().unwrap().nmi.pending, 0);
    start_at_code(&guest.vcpu);
    let mut regs = guest.vcpu.get_regs().unwrap();
    regs.rflags |= 1 << 9;
    guest.vcpu.set_regs(&regs).unwrap();
    set_msr(&guest.vcpu, 0x80f, 0x1ff);
    set_msr(&guest.vcpu, 0x830, 1 << 18 | u64::from(VECTOR));
    assert_eq!(port_and_stack(&mut guest.vcpu).0, 0x11, "no NMI");
}

/// A halted vCPU wakes up for a pending exception, too.
#[test]
fn an_exception_wakes_a_halted_vcpu() {
    let mut guest = guest();
    let halted = kvm_mp_state {
        mp_state: KVM_MP_STATE_HALTED,
    };
    guest.vcpu.set_mp_state(halted).unwrap();
    // The handler of #DB.
    guest.memory.write(4, &HANDLER.to_le_bytes()[..4]);
    let debug = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_INJECT_DB,
        ..Default::default()
    };
    guest.vcpu.set_guest_debug(&debug).unwrap();
    // SAFETY: the call takes no pointer.
    let me = unsafe { libc::pthread_self() } as usize;
    let (awake, woken) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if woken.recv_timeout(Duration::from_secs(20)).is_err() {
                slat_kvm::interrupt_thread(me);
            }
        });
        let port = guest.vcpu.run().map(|exit| match exit {
            VcpuExit::IoOut(port, _) => port,
            other => panic!("{other:?}"),
        });
        awake.send(()).ok();
        assert_eq!(port.map_err(|error| error.errno()), Ok(0x11));
    });
}

/// The low 4 bits of the task priority are stored and have no effect. CR8 does not contain them.
#[test]
fn the_task_priority_keeps_its_low_half() {
    // mov dword [0x8080], 0x3f; mov eax, [0x8080]; out 0x10, al
    let code = [
        0x66, 0xc7, 0x06, 0x80, 0x80, 0x3f, 0, 0, 0, 0x66, 0xa1, 0x80, 0x80, 0xe6, 0x10,
    ];
    let mut guest = Guest::with(&code, |vm| vm.create_irq_chip().unwrap());
    let mut sregs = guest.vcpu.get_sregs().unwrap();
    sregs.apic_base = sregs.apic_base & 0xfff | DEVICE;
    guest.vcpu.set_sregs(&sregs).unwrap();
    match guest.vcpu.run().unwrap() {
        VcpuExit::IoOut(0x10, data) => assert_eq!(data, [0x3f]),
        other => panic!("{other:?}"),
    }
    assert_eq!(guest.vcpu.get_sregs().unwrap().cr8, 3);
}

/// An exception that a debugger injects does not replace a pending exception.
#[test]
fn an_injected_exception_does_not_replace_a_pending_one() {
    let payload = kvm_enable_cap {
        cap: KVM_CAP_EXCEPTION_PAYLOAD,
        args: [1, 0, 0, 0],
        ..Default::default()
    };
    let guest = Guest::with(&[0xf4], |vm| vm.enable_cap(&payload).unwrap());
    let mut events = guest.vcpu.get_vcpu_events().unwrap();
    events.flags |= KVM_VCPUEVENT_VALID_PAYLOAD;
    (events.exception.pending, events.exception.nr) = (1, 6);
    guest.vcpu.set_vcpu_events(&events).unwrap();
    let debug = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_INJECT_DB,
        ..Default::default()
    };
    let error = guest.vcpu.set_guest_debug(&debug).unwrap_err();
    assert_eq!(error.errno(), libc::EBUSY);
    assert_eq!(guest.vcpu.get_vcpu_events().unwrap().exception.nr, 6);
}

/// The task priority is one register with three names: a client's write to the MSR changes CR8, too.
#[test]
fn a_client_sets_the_task_priority_by_its_msr() {
    let mut guest = guest();
    set_msr(&guest.vcpu, 0x808, 0x52);
    let entry = kvm_msr_entry {
        index: 0x808,
        ..Default::default()
    };
    let mut msrs = Msrs::from_entries(&[entry]).unwrap();
    guest.vcpu.get_msrs(&mut msrs).unwrap();
    assert_eq!(msrs.as_slice()[0].data, 0x52);
    assert_eq!(guest.vcpu.get_sregs().unwrap().cr8, 5);
    set_msr(&guest.vcpu, 0x830, 1 << 18 | u64::from(VECTOR));
    guest.vcpu.nmi().unwrap();
    assert_eq!(port_and_stack(&mut guest.vcpu).0, 0x10);
    let pending = kvm_msr_entry {
        index: 0x820 + u32::from(VECTOR) / 32,
        ..Default::default()
    };
    let mut msrs = Msrs::from_entries(&[pending]).unwrap();
    guest.vcpu.get_msrs(&mut msrs).unwrap();
    assert_eq!(msrs.as_slice()[0].data, 1, "it is held back");
}

extern "C" fn announce(_signal: libc::c_int) {
    slat_kvm::signal_arrived();
}

fn announce_signals() {
    // SAFETY: the handler only stores and raises a signal.
    unsafe { libc::signal(libc::SIGUSR2, announce as *const () as libc::sighandler_t) };
}

/// Sends SIGUSR2 to `thread` until `has_left` says that the thread has left `KVM_RUN`.
fn call_out(thread: usize, has_left: &mpsc::Receiver<()>) {
    for _ in 0..200 {
        // SAFETY: the thread lives until it has reported that it left.
        unsafe { libc::pthread_kill(thread as libc::pthread_t, libc::SIGUSR2) };
        if has_left.recv_timeout(Duration::from_millis(100)).is_ok() {
            break;
        }
    }
}

/// A guest ends an interrupt in its memory (PV EOI), and a signal arrives while slat waits for that memory: the EOI is
/// not lost.
#[test]
fn an_end_of_interrupt_in_memory_survives_a_signal() {
    const REACHED: u64 = 0x800;
    const IN_SERVICE: u32 = 0x811;
    announce_signals();
    // The vCPU does not poll, so only signals end its run.
    slat_kvm::watch_signals();
    // sti; nop; hlt
    let guest = Guest::with(&[0xfb, 0x90, 0xf4], |vm| vm.create_irq_chip().unwrap());
    let Guest {
        mut vcpu,
        vm: _vm,
        memory,
        ..
    } = guest;
    let entry = |index, data| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    // btr word [DATA], 0; mov byte [REACHED], 1; 1: cmp byte [REACHED], 2; jne 1b; out 0x10, al
    let handler = [
        0x0f, 0xba, 0x36, 0x00, 0x30, 0, 0xc6, 0x06, 0x00, 0x08, 1, 0x80, 0x3e, 0x00, 0x08, 2,
        0x75, 0xf9, 0xe6, 0x10,
    ];
    memory.write(HANDLER, &handler);
    memory.write(0x20 * 4, &HANDLER.to_le_bytes()[..4]);
    memory.write(DATA, &[0]);
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.apic_base |= 1 << 10;
    vcpu.set_sregs(&sregs).unwrap();
    // The MSRs enable PV EOI and the APIC, and send an IPI to the vCPU itself.
    let msrs = [
        entry(0x4b56_4d04, DATA | 1),
        entry(0x80f, 0x1ff),
        entry(0x830, 1 << 18 | 0x20),
    ];
    let msrs = Msrs::from_entries(&msrs).unwrap();
    assert_eq!(vcpu.set_msrs(&msrs).unwrap(), 3);
    let page = memory.range(DATA);
    let Some(fd) = userfault(page.clone()) else {
        eprintln!("skipped: this host does not permit userfaultfd");
        return;
    };
    // SAFETY: the call takes no pointer.
    let me = unsafe { libc::pthread_self() } as usize;
    let memory = &memory;
    std::thread::scope(|scope| {
        let (left, has_left) = mpsc::channel();
        scope.spawn(move || {
            let mut reached = [0];
            while reached == [0] {
                memory.read(REACHED, &mut reached);
            }
            // Discards the page without an invalidation, as when another process discards memory that it shares.
            // SAFETY: the page belongs to this test.
            unsafe { libc::madvise(page.start as *mut _, 4096, libc::MADV_DONTNEED) };
            // The first signal ends the guest's run, and the next one finds slat waiting for the page.
            call_out(me, &has_left);
            resolve(fd, page.start, 0);
            memory.write(REACHED, &[2]);
        });
        assert_eq!(vcpu.run().unwrap_err().errno(), libc::EINTR);
        left.send(()).unwrap();
        let exit = loop {
            match vcpu.run() {
                Err(error) if error.errno() == libc::EINTR => {}
                exit => break format!("{:?}", exit.unwrap()),
            }
        };
        assert!(exit.starts_with("IoOut(16"), "{exit}");
    });
    let mut msrs = Msrs::from_entries(&[entry(IN_SERVICE, 0)]).unwrap();
    vcpu.get_msrs(&mut msrs).unwrap();
    assert_eq!(msrs.as_slice()[0].data, 0, "the interrupt has ended");
    // SAFETY: the descriptor belongs to this test.
    unsafe { libc::close(fd) };
}

/// A signal arrives while slat waits for the page of the guest's clock: the next run writes the page.
#[test]
fn the_page_of_the_clock_is_written_after_a_signal() {
    announce_signals();
    let mut guest = Guest::new(&[0xf4]);
    let page = guest.memory.range(DATA);
    let Some(fd) = userfault(page.clone()) else {
        eprintln!("skipped: this host does not permit userfaultfd");
        return;
    };
    set_msr(&guest.vcpu, 0x4b56_4d01, DATA | 1);
    // SAFETY: the call takes no pointer.
    let me = unsafe { libc::pthread_self() } as usize;
    std::thread::scope(|scope| {
        let (left, has_left) = mpsc::channel();
        scope.spawn(move || {
            call_out(me, &has_left);
            resolve(fd, page.start, 0);
        });
        assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
        left.send(()).unwrap();
    });
    while guest.vcpu.run().is_err() {}
    let mut version = [0; 4];
    guest.memory.read(DATA, &mut version);
    assert_ne!(u32::from_le_bytes(version), 0, "it was written");
    // SAFETY: the descriptor belongs to this test.
    unsafe { libc::close(fd) };
}
