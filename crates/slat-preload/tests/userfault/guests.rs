//! Tests guests whose memory is registered with a userfaultfd that slat serves.

use crate::on_slat;

#[test]
fn a_guest_waits_for_a_page() {
    on_slat_guest("a_guest_waits_for_a_page");
}

#[test]
fn a_guests_write_waits_for_the_protection() {
    on_slat_guest("a_guests_write_waits_for_the_protection");
}

#[test]
fn a_signal_ends_a_run_that_waits() {
    on_slat_guest("a_signal_ends_a_run_that_waits");
}

/// Runs a client of this module.
fn on_slat_guest(name: &str) {
    on_slat(&format!("guests::client::{name}"));
}

mod client {
    use crate::common::guest::*;
    use crate::uffd::*;
    use kvm_ioctls::VcpuExit;
    use std::thread;

    const DATA: usize = 0x3000;

    #[test]
    #[ignore = "runs under the library"]
    fn a_guest_waits_for_a_page() {
        // mov al,[0x3000]; out 0x10,al; jmp -7
        let (_vm, mut vcpu, memory) = guest(&[0xa0, 0x00, 0x30, 0xe6, 0x10, 0xeb, 0xf9]);
        let data = memory as usize + DATA;
        let uffd = Uffd::new(FEATURE_REMOVE);
        uffd.register(data, PAGE, MODE_MISSING);
        let handler = thread::spawn(move || {
            uffd.fault(data, 0);
            assert_eq!(uffd.copy(data, &page_of(42)).0, Ok(()));
            assert_eq!(uffd.event().0, REMOVE);
            uffd.fault(data, 0);
            assert_eq!(uffd.copy(data, &page_of(43)).0, Ok(()));
            uffd
        });
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [42])));
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [42])));
        // As a balloon does.
        // SAFETY: the page belongs to the guest.
        let answer = unsafe { libc::madvise(data as *mut _, PAGE, libc::MADV_DONTNEED) };
        assert_eq!(answer, 0);
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [43])));
        drop(handler.join().unwrap());
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_guests_write_waits_for_the_protection() {
        // inc byte [0x3000]; mov al,[0x3000]; out 0x10,al; jmp -11
        let code = [
            0xfe, 0x06, 0x00, 0x30, 0xa0, 0x00, 0x30, 0xe6, 0x10, 0xeb, 0xf5,
        ];
        let (_vm, mut vcpu, memory) = guest(&code);
        let data = memory as usize + DATA;
        store(data, 1);
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [2])));
        let uffd = Uffd::new(FEATURE_WP);
        uffd.register(data, PAGE, MODE_WP);
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [3])));
        assert_eq!(uffd.protect(data, PAGE, 1), Ok(()));
        let handler = thread::spawn(move || {
            uffd.fault(data, WRITE | WP);
            let saved = load(data);
            assert_eq!(uffd.protect(data, PAGE, 0), Ok(()));
            saved
        });
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [4])));
        // The handler has saved the content of the moment of the protection.
        assert_eq!(handler.join().unwrap(), 3);
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_signal_ends_a_run_that_waits() {
        use std::os::unix::thread::JoinHandleExt;
        extern "C" fn nothing(_: i32) {}
        let (_vm, mut vcpu, memory) = guest(&[0xa0, 0x00, 0x30, 0xe6, 0x10, 0xeb, 0xf9]);
        let data = memory as usize + DATA;
        let uffd = Uffd::new(0);
        uffd.register(data, PAGE, MODE_MISSING);
        // SAFETY: the handler does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
        }
        let runner = thread::spawn(move || {
            let refusal = vcpu.run().err().map(|error| error.errno());
            assert_eq!(refusal, Some(libc::EINTR));
            assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [5])));
        });
        uffd.fault(data, 0);
        thread::sleep(std::time::Duration::from_millis(20));
        // SAFETY: the thread runs the vCPU.
        unsafe { libc::pthread_kill(runner.as_pthread_t(), libc::SIGUSR1) };
        thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(uffd.copy(data, &page_of(5)).0, Ok(()));
        runner.join().unwrap();
    }
}
