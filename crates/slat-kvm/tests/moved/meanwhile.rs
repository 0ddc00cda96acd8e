//! Tests events between an exit and the completion of its instruction, and events during the completion.

use crate::common;
use crate::device::{Access, Device};
use crate::{Guest, LOAD, PLAIN, World, complete, long_mode, programs};
use kvm_bindings::*;
use slat_kvm::{IoEventAddress, VcpuExit};
use slat_kvm::{Jit, Tier};
use std::sync::mpsc;
use std::time::Duration;

extern "C" fn announce(_signal: libc::c_int) {
    slat_kvm::signal_arrived();
}

/// Makes `signal` end the `KVM_RUN` of the thread that receives it. Returns the calling thread.
fn handled(signal: libc::c_int) -> usize {
    // SAFETY: the handler only raises a signal.
    unsafe {
        libc::signal(signal, announce as *const () as libc::sighandler_t);
        libc::pthread_self() as usize
    }
}

fn send(thread: usize, signal: libc::c_int) {
    // SAFETY: the thread waits for the end of the sender, so it still exists.
    unsafe { libc::pthread_kill(thread as libc::pthread_t, signal) };
}

#[test]
fn a_signal_at_any_moment_ends_the_run_after_the_instruction_that_has_read() {
    let jits = [Jit::Off, Jit::AtOnce(Tier::Full)];
    let (me, signal) = (handled(libc::SIGUSR1), libc::SIGUSR1);
    for jit in jits {
        // mov eax,[rbx]; jmp -4
        let mut guest = Guest::about_to_run(World { jit, ..PLAIN }, b"\x8b\x03\xeb\xfc");
        let (ended, ends) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut pause = 1u64;
                while ends.try_recv() == Err(mpsc::TryRecvError::Empty) {
                    pause = pause.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(7) | 1;
                    std::thread::sleep(Duration::from_nanos(pause % 0x2_0000));
                    send(me, signal);
                }
            });
            // This sender is also dropped when a check fails, which ends the other thread.
            let _ended = ended;
            let (mut number, mut interrupted) = (0, 0);
            while interrupted < 200 {
                match guest.vcpu.run() {
                    Ok(VcpuExit::MmioRead(_, data)) => {
                        number += 1;
                        data.copy_from_slice(&u32::to_le_bytes(number));
                    }
                    Ok(other) => panic!("{other:?}"),
                    Err(error) => {
                        assert_eq!(error.errno(), libc::EINTR);
                        interrupted += 1;
                        let rax = guest.vcpu.get_regs().unwrap().rax;
                        if number > 0 {
                            assert_eq!(rax, number.into(), "the data that were read last");
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn a_signal_ends_a_completion_that_waits_for_memory_and_the_data_stay() {
    // movsb copies from the device to a page that is missing in the host.
    let mut guest = Guest::about_to_run(PLAIN, b"\x48\x89\xde\xa4\xf4");
    let page = guest.machine.memory.start as usize + long_mode::DATA as usize;
    // SAFETY: the page belongs to the guest's memory, and its contents do not matter.
    unsafe { libc::madvise(page as *mut _, 0x1000, libc::MADV_DONTNEED) };
    let Some(fd) = common::userfault(page..page + 0x1000) else {
        eprintln!("skipped: this host does not permit userfaultfd");
        return;
    };
    let mut device = Device::default();
    assert!(device.serve(guest.vcpu.run().unwrap()));
    let (me, signal) = (handled(libc::SIGUSR2), libc::SIGUSR2);
    let (returned, returns) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            send(me, signal);
            // If the signal is lost, this thread resolves the page, so that the test fails instead of hanging.
            if returns.recv_timeout(Duration::from_secs(20)).is_err() {
                common::resolve(fd, page, 0);
            }
        });
        assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
        let rip = guest.vcpu.get_regs().unwrap().rip;
        assert_eq!(rip, long_mode::CODE + 3, "it waited on");
        returned.send(()).unwrap();
    });
    common::resolve(fd, page, 0);
    guest.vcpu.set_kvm_immediate_exit(1);
    assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
    assert_eq!(guest.vcpu.get_regs().unwrap().rip, long_mode::CODE + 4);
    let mut stored = [0];
    guest
        .machine
        .memory
        .read(long_mode::DATA + 0x800, &mut stored);
    let [Access { value, .. }] = device.accesses[..] else {
        panic!("{:?}", device.accesses)
    };
    assert_eq!(u64::from(stored[0]), value);
    // SAFETY: the descriptor belongs to this test.
    unsafe { libc::close(fd) };
}

#[test]
fn a_run_that_is_refused_loses_nothing() {
    let (guest, device) = complete(LOAD, |guest| {
        for dirty in [1 << 63, 0] {
            guest.vcpu.get_kvm_run().kvm_dirty_regs = dirty;
            guest.vcpu.get_kvm_run().cr8 = 16;
            assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINVAL);
        }
        guest.vcpu.get_kvm_run().cr8 = 0;
    });
    let regs = guest.vcpu.get_regs().unwrap();
    assert_eq!(regs.rip, long_mode::CODE + 2);
    assert_eq!(
        device.accesses,
        [Access::read(programs::DEVICE, regs.rax, 4)]
    );
}

#[test]
fn a_step_is_the_debuggers_that_there_is_when_an_access_is_completed() {
    let steps = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
        ..Default::default()
    };
    // in al,dx; hlt. rdmsr; hlt. mov eax,[rbx]; hlt
    for (code, len) in [
        (b"\xec\xf4\x90", 1),
        (b"\x0f\x32\xf4", 2),
        (b"\x8b\x03\xf4", 2),
    ] {
        for [first, then] in [[steps, Default::default()], [Default::default(), steps]] {
            let mut guest = Guest::about_to_run(PLAIN, code);
            let mut regs = guest.vcpu.get_regs().unwrap();
            regs.rcx = 0x1234_0000;
            guest.vcpu.set_regs(&regs).unwrap();
            guest.vcpu.set_guest_debug(&first).unwrap();
            assert!(Device::default().serve(guest.vcpu.run().unwrap()));
            guest.vcpu.set_guest_debug(&then).unwrap();
            match guest.vcpu.run().unwrap() {
                VcpuExit::Hlt => assert_eq!(then.control, 0, "no step"),
                VcpuExit::Debug(debug) => {
                    assert_ne!(then.control, 0, "a step that nobody asked for");
                    assert_eq!(debug.pc, long_mode::CODE + len);
                }
                other => panic!("{other:?}"),
            }
            let mut exceptions = [0];
            guest
                .machine
                .memory
                .read(programs::COUNTS + 4, &mut exceptions);
            assert_eq!(exceptions, [0], "#DB of the guest");
        }
    }
}

#[test]
fn pieces_of_a_store_that_the_client_does_not_see_are_written_in_their_turn() {
    // movups [rbx+1],xmm0; the second of its two accesses is coalesced
    let mut guest = Guest::with(PLAIN, |machine| {
        let zone = IoEventAddress::Mmio(programs::DEVICE + 9);
        machine.vm.register_coalesced_mmio(zone, 8).unwrap();
    })
    .about(PLAIN, b"\x0f\x11\x43\x01\xf4");
    guest.vcpu.map_coalesced_mmio_ring().unwrap();
    let mut device = Device::default();
    assert!(device.serve(guest.vcpu.run().unwrap()));
    guest.vcpu.set_kvm_immediate_exit(1);
    assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
    let coalesced = guest.vcpu.coalesced_mmio_read().unwrap().unwrap();
    assert_eq!(coalesced.phys_addr, programs::DEVICE + 9);
    assert_eq!(guest.vcpu.coalesced_mmio_read().unwrap().map(|_| ()), None);
    assert_eq!(device.accesses.len(), 1);
    assert_eq!(guest.vcpu.get_regs().unwrap().rip, long_mode::CODE + 4);
}

#[test]
fn a_page_that_is_absent_at_the_completion_is_one_page_fault() {
    // rep insb; hlt. Between the exit and the completion, the entry of 2 MiB that maps the destination is cleared.
    for (code, rip) in [(b"\xf3\x6c\xf4\x90\x90", 0), (b"\x48\x89\xde\xa4\xf4", 3)] {
        let (mut guest, device) = complete_far(code, |guest| {
            guest.machine.memory.write(DIRECTORY + 8, &[0; 8]);
        });
        let events = guest.vcpu.get_vcpu_events().unwrap();
        let regs = guest.vcpu.get_regs().unwrap();
        assert_eq!(events.exception.nr, 14);
        assert_eq!(events.exception.error_code, 2);
        assert_eq!((regs.rip, regs.rdi), (long_mode::CODE + rip, FAR));
        assert_eq!(guest.vcpu.get_sregs().unwrap().cr2, FAR);
        guest.vcpu.set_kvm_immediate_exit(0);
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        assert_eq!(device.accesses.len(), 1);
    }
}

/// An address in the second page of 2 MiB, whose entry no other access uses.
const FAR: u64 = 0x20_0000;
/// The address of the guest's page directory.
const DIRECTORY: u64 = 0x6000;

/// Like [`complete`], with [`FAR`] as the destination.
fn complete_far(code: &[u8], meanwhile: impl FnOnce(&Guest)) -> (Guest, Device) {
    let mut guest = Guest::about_to_run(PLAIN, code);
    let mut regs = guest.vcpu.get_regs().unwrap();
    regs.rdi = FAR;
    guest.vcpu.set_regs(&regs).unwrap();
    let mut device = Device::default();
    assert!(device.serve(guest.vcpu.run().unwrap()));
    meanwhile(&guest);
    // Makes the vCPU drop its translations, so that it walks the tables again.
    guest
        .vcpu
        .set_sregs(&guest.vcpu.get_sregs().unwrap())
        .unwrap();
    guest.vcpu.set_kvm_immediate_exit(1);
    assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
    (guest, device)
}
