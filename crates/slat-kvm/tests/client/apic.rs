//! Tests interrupts between vCPUs.

use crate::common::{DATA, Guest};
use slat_kvm::{VcpuExit, VcpuFd};
use std::sync::mpsc;
use std::time::Duration;

const X2APIC: u64 = 1 << 10;
/// The address at which the second processor starts: the vector of its SIPI is 2.
const START: u64 = 0x2000;
const INIT: u16 = 0x500;
const LEVEL: u16 = 1 << 15;
const ASSERT: u16 = 1 << 14;
const SIPI: u16 = 0x602;

/// Returns code that sends the interrupt commands `commands` to the APIC with id 1, and halts.
fn send(commands: &[u16]) -> Vec<u8> {
    // mov edx, 1; mov ecx, 0x830
    let mut code = vec![0x66, 0xba, 1, 0, 0, 0, 0x66, 0xb9, 0x30, 0x08, 0, 0];
    for command in commands {
        let [low, high] = command.to_le_bytes();
        // mov eax, command; wrmsr
        code.extend([0x66, 0xb8, low, high, 0, 0, 0x0f, 0x30]);
    }
    // mov byte [DATA], 1; hlt
    code.extend([0xc6, 0x06, DATA as u8, (DATA >> 8) as u8, 1, 0xf4]);
    code
}

/// Makes the first processor send the commands `commands`. Returns the second vCPU, and the byte that the second vCPU
/// writes to a port, if it does.
fn second_processor_after(commands: &[u16]) -> (VcpuFd, Option<u8>) {
    let guest = Guest::with(&send(commands), |vm| vm.create_irq_chip().unwrap());
    let Guest {
        vcpu: mut first,
        vm,
        memory,
        kvm: _kvm,
    } = guest;
    // mov al, 42; out 0x10, al; hlt
    memory.write(START, &[0xb0, 42, 0xe6, 0x10, 0xf4]);
    let mut second = vm.create_vcpu(1).unwrap();
    let mut sregs = first.get_sregs().unwrap();
    sregs.apic_base |= X2APIC;
    first.set_sregs(&sregs).unwrap();
    let (done, result) = mpsc::channel();
    let runs = std::thread::spawn(move || {
        loop {
            match second.run() {
                Err(error) if error.errno() == libc::EAGAIN => {}
                Ok(VcpuExit::IoOut(0x10, data)) => {
                    let byte = data[0];
                    done.send(byte).unwrap();
                    break;
                }
                Err(error) if error.errno() == libc::EINTR => break,
                other => panic!("{other:?}"),
            }
        }
        second
    });
    let thread = std::os::unix::thread::JoinHandleExt::as_pthread_t(&runs) as usize;
    // After sending the commands the first vCPU halts for ever, so its thread is not joined.
    std::thread::spawn(move || first.run().map(|_| ()));
    let mut sent = [0];
    while sent == [0] {
        memory.read(DATA, &mut sent);
        std::thread::yield_now();
    }
    let byte = result.recv_timeout(Duration::from_millis(if commands.len() > 1 {
        20_000
    } else {
        100
    }));
    slat_kvm::interrupt_thread(thread);
    std::mem::forget(memory);
    let second = loop {
        if runs.is_finished() {
            break runs.join().unwrap();
        }
        slat_kvm::interrupt_thread(thread);
        std::thread::sleep(Duration::from_millis(1));
    };
    (second, byte.ok())
}

#[test]
fn an_edge_triggered_init_and_a_sipi_start_a_processor() {
    for init in [INIT, INIT | ASSERT, INIT | LEVEL | ASSERT] {
        let (second, byte) = second_processor_after(&[init, SIPI]);
        assert_eq!(byte, Some(42), "INIT {init:#x}");
        let state = second.get_mp_state().unwrap().mp_state;
        assert_eq!(state, kvm_bindings::KVM_MP_STATE_RUNNABLE, "INIT {init:#x}");
    }
}

#[test]
fn the_deassertion_of_init_is_ignored() {
    let (second, byte) = second_processor_after(&[INIT | LEVEL]);
    assert_eq!(byte, None);
    let state = second.get_mp_state().unwrap().mp_state;
    assert_eq!(state, kvm_bindings::KVM_MP_STATE_UNINITIALIZED);
    // The deassertion of INIT does not cancel an earlier INIT either.
    let (_, byte) = second_processor_after(&[INIT, INIT | LEVEL, SIPI]);
    assert_eq!(byte, Some(42));
}

/// KVM_SIGNAL_MSI returns how many vCPUs have accepted the message.
#[test]
fn a_message_is_taken_or_not() {
    let guest = Guest::with(&[0xf4], |vm| vm.create_irq_chip().unwrap());
    let _second = guest.vm.create_vcpu(1).unwrap();
    let message = |data: u16| kvm_bindings::kvm_msi {
        address_lo: 0xfee0_1000,
        data: data.into(),
        ..Default::default()
    };
    assert_eq!(guest.vm.signal_msi(message(INIT)).unwrap(), 1);
    // An APIC that software has not enabled accepts no interrupt with a vector.
    assert_eq!(guest.vm.signal_msi(message(0x40)).unwrap(), 0);
}

/// The id of an x2APIC is the id of its vCPU. A client that uses 32-bit ids has to restore this id.
#[test]
fn a_state_with_another_id_is_refused() {
    let api = kvm_bindings::kvm_enable_cap {
        cap: kvm_bindings::KVM_CAP_X2APIC_API,
        args: [kvm_bindings::KVM_X2APIC_API_USE_32BIT_IDS.into(), 0, 0, 0],
        ..Default::default()
    };
    for wide_ids in [false, true] {
        let guest = Guest::with(&[0xf4], |vm| {
            vm.create_irq_chip().unwrap();
            if wide_ids {
                vm.enable_cap(&api).unwrap();
            }
        });
        let mut sregs = guest.vcpu.get_sregs().unwrap();
        sregs.apic_base |= X2APIC;
        guest.vcpu.set_sregs(&sregs).unwrap();
        let mut state = guest.vcpu.get_lapic().unwrap();
        guest.vcpu.set_lapic(&state).unwrap();
        state.regs[0x20] = 5;
        let error = guest.vcpu.set_lapic(&state).map_err(|error| error.errno());
        assert_eq!(error, if wide_ids { Err(libc::EINVAL) } else { Ok(()) });
        assert_eq!(guest.vcpu.get_lapic().unwrap().regs[0x20], 0);
    }
}
