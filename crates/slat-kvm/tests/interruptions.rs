//! Tests events that end a vCPU's run, and events that must not wait for a running vCPU.
#![cfg(target_arch = "x86_64")]

mod common;

use common::*;
use slat_kvm::VcpuExit;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

static IMMEDIATE_EXIT: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn set_immediate_exit(_signal: libc::c_int) {
    // SAFETY: the pointer is into a vCPU's `kvm_run`. The test keeps the vCPU as long as the signal may arrive.
    unsafe { IMMEDIATE_EXIT.load(Ordering::SeqCst).write_volatile(1) };
}

extern "C" fn announce(_signal: libc::c_int) {
    slat_kvm::signal_arrived();
}

fn handle(signal: libc::c_int, handler: extern "C" fn(libc::c_int)) {
    // SAFETY: the handlers only store, or raise a signal.
    unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
}

/// The time that an immediate operation may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Sends `signal` to the calling thread after a short time.
fn signal_soon<'scope>(scope: &'scope std::thread::Scope<'scope, '_>, signal: libc::c_int) {
    // SAFETY: the call takes no pointer.
    let me = unsafe { libc::pthread_self() } as usize;
    scope.spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        // SAFETY: the thread waits for the scope's end.
        unsafe { libc::pthread_kill(me as libc::pthread_t, signal) };
    });
}

#[test]
fn immediate_exit_set_by_a_handler_ends_the_run() {
    let mut guest = Guest::new(SPIN);
    IMMEDIATE_EXIT.store(
        &raw mut guest.vcpu.get_kvm_run().immediate_exit,
        Ordering::SeqCst,
    );
    handle(libc::SIGUSR1, set_immediate_exit);
    std::thread::scope(|scope| {
        signal_soon(scope, libc::SIGUSR1);
        assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
    });
    assert_eq!(
        guest.vcpu.run().unwrap_err().errno(),
        libc::EINTR,
        "it stays set"
    );
}

#[test]
fn a_handler_that_announces_itself_ends_the_run_also_in_a_halt() {
    handle(libc::SIGUSR2, announce);
    let mut spinning = Guest::new(SPIN);
    let mut halted = Guest::with(&[0xf4], |vm| vm.create_irq_chip().unwrap());
    for guest in [&mut spinning, &mut halted] {
        std::thread::scope(|scope| {
            signal_soon(scope, libc::SIGUSR2);
            assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
        });
    }
}

#[test]
fn a_signal_that_only_the_run_lets_through_ends_it_and_stays_pending() {
    let mut guest = Guest::new(SPIN);
    // SAFETY: the signal sets are on the stack, and only this thread's mask changes.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGRTMIN() + 2);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        guest.vcpu.set_signal_mask(Some(0)).unwrap();
        std::thread::scope(|scope| {
            signal_soon(scope, libc::SIGRTMIN() + 2);
            assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
        });
        let timeout = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        assert_eq!(
            libc::sigtimedwait(&set, std::ptr::null_mut(), &timeout),
            libc::SIGRTMIN() + 2
        );
    }
}

#[test]
fn a_vcpu_moves_between_threads() {
    // out 0x10,al; jmp -4
    let Guest {
        mut vcpu,
        vm: _vm,
        memory: _memory,
        ..
    } = Guest::new(&[0xe6, 0x10, 0xeb, 0xfc]);
    for _ in 0..4 {
        vcpu = std::thread::spawn(move || {
            assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, _)));
            vcpu
        })
        .join()
        .unwrap();
    }
}

#[test]
fn a_vcpu_that_waits_for_host_memory_holds_up_nobody() {
    // mov al,[0x3000]; out 0x10,al
    let Guest {
        mut vcpu,
        vm,
        memory,
        ..
    } = Guest::new(&[0xa0, 0x00, 0x30, 0xe6, 0x10]);
    let page = memory.range(DATA);
    let Some(fd) = userfault(page.clone()) else {
        eprintln!("skipped: this host does not permit userfaultfd");
        return;
    };
    let (done, waits) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let VcpuExit::IoOut(0x10, data) = vcpu.run().unwrap() else {
                panic!()
            };
            done.send(data[0]).unwrap();
        });
        assert!(
            waits.recv_timeout(Duration::from_millis(100)).is_err(),
            "the vCPU did not wait"
        );
        let start = Instant::now();
        for _ in 0..10 {
            slat_kvm::notify::around(page.clone(), || {
                // SAFETY: the page belongs to this test.
                unsafe { libc::madvise(page.start as *mut _, 4096, libc::MADV_DONTNEED) };
            });
            let other = Memory::new(0x1000);
            let region = kvm_bindings::kvm_userspace_memory_region {
                slot: 7,
                flags: 0,
                guest_phys_addr: 1 << 30,
                memory_size: 0x1000,
                userspace_addr: other.start as u64,
            };
            // SAFETY: the guest does not use the page.
            unsafe {
                vm.set_user_memory_region(region).unwrap();
                vm.set_user_memory_region(kvm_bindings::kvm_userspace_memory_region {
                    memory_size: 0,
                    ..region
                })
                .unwrap();
            }
        }
        let took = start.elapsed();
        assert!(
            waits.try_recv().is_err(),
            "the vCPU went on without its page"
        );
        resolve(fd, page.start, 0x5a);
        assert_eq!(waits.recv_timeout(PATIENCE).unwrap(), 0x5a);
        assert!(took < PATIENCE, "held up for {took:?}");
    });
    // SAFETY: the descriptor belongs to this test.
    unsafe { libc::close(fd) };
}

#[test]
fn a_signal_reaches_a_vcpu_that_waits_for_host_memory() {
    handle(libc::SIGUSR2, announce);
    let Guest {
        mut vcpu, memory, ..
    } = Guest::new(&[0xa0, 0x00, 0x30, 0xe6, 0x10]);
    let page = memory.range(DATA);
    let Some(fd) = userfault(page.clone()) else {
        eprintln!("skipped: this host does not permit userfaultfd");
        return;
    };
    let (returned, returns) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        signal_soon(scope, libc::SIGUSR2);
        // If the signal is lost, this thread ends the wait, so that the test fails instead of hanging.
        scope.spawn(move || {
            if returns.recv_timeout(PATIENCE).is_err() {
                resolve(fd, page.start, 1);
            }
        });
        assert_eq!(vcpu.run().unwrap_err().errno(), libc::EINTR);
        returned.send(()).unwrap();
    });
    // SAFETY: the descriptor belongs to this test.
    unsafe { libc::close(fd) };
}
