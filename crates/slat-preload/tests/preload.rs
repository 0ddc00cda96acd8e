//! Tests a client of the kernel's KVM API that runs under the library.
//!
//! Each test starts this same program again with `LD_PRELOAD`, to execute one of the ignored tests in
//! [`client`] (see [`common`]).
#![cfg(target_arch = "x86_64")]

mod common;

use common::on_slat;

on_slat! {
    a_guest_runs
    the_device_can_be_asked_about
    module_parameters_can_be_read
    module_parameters_can_be_written
    statistics_are_fresh_at_every_read
    a_dirty_ring_is_mapped_shared_and_not_executable
    descriptors_may_be_duplicated_and_closed_in_any_order
    descriptors_beyond_4096_work
    stray_calls_on_kvm_descriptors_do_no_harm
    wrong_ioctls_get_kvms_errno
    a_handler_ends_the_run_and_is_shown_as_it_was_set
    memory_unmapped_under_a_running_guest_is_efault
    dropped_pages_read_as_zero
    a_forked_child_gets_eio_and_leaves_the_parent_alone
    a_cancelled_thread_leaves_the_run
    one_vcpu_serves_two_threads_one_after_the_other
    faults_of_the_client_reach_its_handler
}

mod client {
    use crate::common::guest::*;
    use kvm_ioctls::{Kvm, VcpuExit};
    use std::ffi::CString;
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    const DATA: usize = 0x3000;
    /// `mov al,[0x3000]; out 0x10,al; jmp -7`
    const REPORT_DATA: &[u8] = &[0xa0, 0x00, 0x30, 0xe6, 0x10, 0xeb, 0xf9];

    #[test]
    #[ignore = "runs under the library"]
    fn a_guest_runs() {
        // mov al,7; out 0x10,al; hlt
        let (_vm, mut vcpu, _) = guest(&[0xb0, 7, 0xe6, 0x10, 0xf4]);
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [7])));
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
        let cpuid = Kvm::new().unwrap().get_supported_cpuid(80).unwrap();
        assert!(cpuid.as_slice().len() > 10);
    }

    #[test]
    #[ignore = "runs under the library"]
    fn the_device_can_be_asked_about() {
        use std::os::unix::fs::{FileTypeExt, MetadataExt};
        let found = std::fs::metadata("/dev/kvm").unwrap();
        assert!(found.file_type().is_char_device());
        assert_eq!(found.rdev(), libc::makedev(10, 232));
        let path = CString::new("/dev/kvm").unwrap();
        assert_eq!(
            // SAFETY: the path is a C string.
            unsafe { libc::access(path.as_ptr(), libc::R_OK | libc::W_OK) },
            0
        );
        let missing = CString::new("/dev/kvm-missing").unwrap();
        assert_eq!(
            // SAFETY: the path is a C string.
            unsafe { libc::access(missing.as_ptr(), libc::F_OK) },
            -1
        );
        assert_eq!(errno(), libc::ENOENT);
        // SAFETY: the kernel refuses a bad pointer.
        assert_eq!(unsafe { libc::open(8 as *const _, libc::O_RDONLY) }, -1);
        assert_eq!(errno(), libc::EFAULT);
    }

    #[test]
    #[ignore = "runs under the library"]
    fn module_parameters_can_be_read() {
        let path = "/sys/module/kvm/parameters/force_emulation_prefix";
        assert_eq!(std::fs::read_to_string(path).unwrap(), "0\n");
        assert!(std::fs::write(path, "1").is_err());
        let path = CString::new(path).unwrap();
        // SAFETY: the paths are C strings, and the buffer is live.
        unsafe {
            let file = libc::fopen(path.as_ptr(), c"r".as_ptr());
            assert!(!file.is_null());
            assert_eq!(libc::fgetc(file), i32::from(b'0'));
            libc::fclose(file);
        }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn module_parameters_can_be_written() {
        let path = "/sys/module/kvm/parameters/nx_huge_pages_recovery_ratio";
        std::fs::write(path, "7\n").unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "7\n");
        let refused = std::fs::write(path, "many").unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
        // The client makes the same calls by number, and through a descriptor that has replaced another.
        // SAFETY: the calls use only descriptors and memory of this client.
        unsafe {
            let path = CString::new(path).unwrap();
            let file = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_TRUNC);
            assert_eq!(libc::dup2(file, 300), 300);
            libc::close(file);
            assert_eq!(libc::syscall(libc::SYS_write, 300, c"9".as_ptr(), 1), 1);
            assert_eq!(libc::write(300, 8 as *const _, 1), -1);
            assert_eq!(errno(), libc::EFAULT);
            libc::close(300);
            assert_eq!(libc::access(path.as_ptr(), libc::R_OK | libc::W_OK), 0);
        }
        assert_eq!(std::fs::read_to_string(path).unwrap(), "9\n");
    }

    #[test]
    #[ignore = "runs under the library"]
    fn statistics_are_fresh_at_every_read() {
        const KVM_GET_STATS_FD: u64 = 0xaece;
        // out 0x10,al; out 0x10,al; hlt
        let (_vm, mut vcpu, _) = guest(&[0xe6, 0x10, 0xe6, 0x10, 0xf4]);
        // SAFETY: the calls use only descriptors of this client, and buffers on the stack.
        unsafe {
            let stats = libc::ioctl(vcpu.as_raw_fd(), KVM_GET_STATS_FD, 0);
            assert!(stats >= 0);
            let read_at = |to: &mut [u8], offset: u32| {
                let got = libc::pread(stats, to.as_mut_ptr().cast(), to.len(), offset.into());
                assert_eq!(got, to.len() as isize);
            };
            let word = |offset| {
                let mut bytes = [0; 4];
                read_at(&mut bytes, offset);
                u32::from_le_bytes(bytes)
            };
            let (count, descriptors, data) = (word(8), word(16), word(20));
            let place = (0..count)
                .map(|index| descriptors + index * 64)
                .find(|descriptor| {
                    let mut name = [0; 9];
                    read_at(&mut name, descriptor + 16);
                    &name == b"io_exits\0"
                })
                .unwrap();
            let place = data + word(place + 8);
            let exits = || word(place);
            assert_eq!(exits(), 0);
            vcpu.run().unwrap();
            assert_eq!(exits(), 1);
            vcpu.run().unwrap();
            let mut bytes = [0u8; 8];
            let bytes_at = bytes.as_mut_ptr();
            // A seek does not change the position.
            assert_eq!(libc::lseek(stats, place.into(), libc::SEEK_SET), 0);
            assert_eq!(libc::pread(stats, bytes_at.cast(), 8, place.into()), 8);
            assert_eq!(u64::from_le_bytes(bytes), 2);
            assert_eq!(
                libc::write(stats, bytes_at.cast(), 8),
                -1,
                "for reading only"
            );
        }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_dirty_ring_is_mapped_shared_and_not_executable() {
        const RING: u64 = 64 * 4096;
        let vm = Kvm::new().unwrap().create_vm().unwrap();
        let mut cap = kvm_bindings::kvm_enable_cap {
            cap: kvm_bindings::KVM_CAP_DIRTY_LOG_RING_ACQ_REL,
            ..Default::default()
        };
        cap.args[0] = 4096;
        vm.enable_cap(&cap).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let map = |rights, flags| {
            // SAFETY: the call makes a new mapping at an address of the kernel's choice.
            unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    4096,
                    rights,
                    flags,
                    vcpu.as_raw_fd(),
                    RING as i64,
                )
            }
        };
        let read = libc::PROT_READ;
        for (rights, flags) in [
            (read, libc::MAP_PRIVATE),
            (read | libc::PROT_EXEC, libc::MAP_SHARED),
        ] {
            assert_eq!(map(rights, flags), libc::MAP_FAILED);
            assert_eq!(errno(), libc::EINVAL);
        }
        assert_ne!(
            map(read | libc::PROT_WRITE, libc::MAP_SHARED),
            libc::MAP_FAILED
        );
    }

    #[test]
    #[ignore = "runs under the library"]
    fn descriptors_may_be_duplicated_and_closed_in_any_order() {
        const KVM_CREATE_VM: u64 = 0xae01;
        const KVM_CREATE_VCPU: u64 = 0xae41;
        const KVM_GET_VCPU_MMAP_SIZE: u64 = 0xae04;
        const KVM_CHECK_EXTENSION: u64 = 0xae03;
        const KVM_RUN: u64 = 0xae80;
        // SAFETY: the calls use only descriptors and memory of this client.
        unsafe {
            let kvm = libc::open(c"/dev/kvm".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            assert_eq!(libc::fcntl(kvm, libc::F_GETFD), libc::FD_CLOEXEC);
            assert_eq!(
                libc::syscall(libc::SYS_ioctl, kvm, KVM_GET_VCPU_MMAP_SIZE, 0),
                12288
            );
            let vm = libc::ioctl(kvm, KVM_CREATE_VM, 0);
            let vcpu = libc::ioctl(vm, KVM_CREATE_VCPU, 0);
            assert!(kvm >= 0 && vm >= 0 && vcpu >= 0);
            libc::close(kvm);
            let other = libc::dup(vcpu);
            let third = libc::fcntl(other, libc::F_DUPFD_CLOEXEC, 200);
            assert!(third >= 200);
            assert_eq!(libc::dup2(third, 300), 300);
            libc::close(vm);
            libc::close(vcpu);
            assert_eq!(libc::close_range(other as u32, other as u32, 0), 0);
            assert_eq!(libc::ioctl(other, KVM_RUN, 0), -1);
            assert_eq!(errno(), libc::EBADF);
            libc::close(third);
            // There is no memory, so the run ends with an internal error. The error shows that the vCPU has run.
            assert_eq!(libc::ioctl(300, KVM_RUN, 0), 0);
            // A descriptor number that is reused for another file is no longer KVM's.
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
            assert_eq!(libc::dup2(null, 300), 300);
            assert_eq!(libc::ioctl(300, KVM_CHECK_EXTENSION, 0), -1);
            assert_eq!(errno(), libc::ENOTTY);
        }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn descriptors_beyond_4096_work() {
        // SAFETY: the calls use only live variables of this client.
        unsafe {
            let mut limit = std::mem::zeroed::<libc::rlimit>();
            libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
            let kvm = Kvm::new().unwrap();
            let high = libc::fcntl(kvm.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 4096 * 4 - 10);
            if high < 0 {
                eprintln!("skipped: this host does not permit so many descriptors");
                return;
            }
            drop(kvm);
            let kvm = Kvm::from_raw_fd(high);
            assert_eq!(kvm.get_api_version(), 12);
        }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn stray_calls_on_kvm_descriptors_do_no_harm() {
        let (vm, mut vcpu, _) = guest(&[0xf4]);
        let mut byte = 0u8;
        // SAFETY: the calls use only live variables of this client.
        unsafe {
            libc::read(vm.as_raw_fd(), (&raw mut byte).cast(), 1);
            libc::lseek(vm.as_raw_fd(), 0, libc::SEEK_END);
            let mut poll = libc::pollfd {
                fd: vcpu.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            libc::poll(&mut poll, 1, 0);
            libc::fsync(vcpu.as_raw_fd());
        }
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    }

    #[test]
    #[ignore = "runs under the library"]
    fn wrong_ioctls_get_kvms_errno() {
        let (vm, vcpu, _) = guest(&[0xf4]);
        let refused = |fd: i32, request: u64, argument: usize, expected: i32| {
            // SAFETY: the arguments are meant to be refused.
            assert_eq!(unsafe { libc::ioctl(fd, request, argument) }, -1);
            assert_eq!(errno(), expected, "{request:#x}");
        };
        refused(vm.as_raw_fd(), 0xaeff, 0, libc::ENOTTY);
        refused(vcpu.as_raw_fd(), 0x8090_ae81, 8, libc::EFAULT);
        refused(
            vcpu.as_raw_fd(),
            0x4138_ae84,
            usize::MAX - 100,
            libc::EFAULT,
        );
        refused(vcpu.as_raw_fd(), 0xae80, 1, libc::EINVAL);
        refused(vm.as_raw_fd(), 0xae41, 0, libc::EEXIST);
        refused(vm.as_raw_fd(), 0x4020_ae46, 0, libc::EFAULT);
    }

    static HANDLED: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn count(_signal: libc::c_int) {
        HANDLED.fetch_add(1, Ordering::SeqCst);
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_handler_ends_the_run_and_is_shown_as_it_was_set() {
        let handler = count as *const () as usize;
        // SAFETY: the handler only counts, and the actions are on the stack.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler;
            action.sa_flags = libc::SA_RESTART;
            assert_eq!(
                libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()),
                0
            );
            let mut shown: libc::sigaction = std::mem::zeroed();
            assert_eq!(
                libc::sigaction(libc::SIGUSR1, std::ptr::null(), &mut shown),
                0
            );
            assert_eq!(
                (shown.sa_sigaction, shown.sa_flags & libc::SA_RESTART),
                (handler, libc::SA_RESTART)
            );
            assert_eq!(libc::signal(libc::SIGUSR2, handler), libc::SIG_DFL);
            assert_eq!(libc::signal(libc::SIGUSR2, libc::SIG_IGN), handler);
        }
        let (_vm, mut vcpu, _) = guest(SPIN);
        // SAFETY: the call takes no pointer.
        let me = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                // SAFETY: the thread waits for the scope's end.
                unsafe {
                    libc::pthread_kill(me, libc::SIGUSR2);
                    libc::usleep(50_000);
                    assert_eq!(
                        HANDLED.load(Ordering::SeqCst),
                        0,
                        "an ignored signal ends no run"
                    );
                    libc::pthread_kill(me, libc::SIGUSR1);
                }
            });
            assert_eq!(vcpu.run().unwrap_err().errno(), libc::EINTR);
        });
        assert_eq!(HANDLED.load(Ordering::SeqCst), 1);
    }

    #[test]
    #[ignore = "runs under the library"]
    fn memory_unmapped_under_a_running_guest_is_efault() {
        // mov al,[0x3000]; jmp -5
        let (_vm, mut vcpu, memory) = guest(&[0xa0, 0x00, 0x30, 0xeb, 0xfb]);
        let page = memory as usize + DATA;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                // SAFETY: the mapping belongs to this client, and only the guest uses it.
                assert_eq!(unsafe { libc::munmap(page as *mut _, 4096) }, 0);
            });
            assert_eq!(vcpu.run().unwrap_err().errno(), libc::EFAULT);
        });
    }

    #[test]
    #[ignore = "runs under the library"]
    fn dropped_pages_read_as_zero() {
        let (_vm, mut vcpu, memory) = guest(REPORT_DATA);
        // SAFETY: the address is inside this client's mapping.
        unsafe { memory.add(DATA).write_volatile(5) };
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [5])));
        // SAFETY: the address is inside this client's mapping.
        unsafe { libc::madvise(memory.add(DATA).cast(), 4096, libc::MADV_DONTNEED) };
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [0])));
        // SAFETY: the new mapping replaces a page that only the guest uses.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            let at = memory.add(DATA);
            assert_eq!(
                libc::mmap(
                    at.cast(),
                    4096,
                    libc::PROT_READ | libc::PROT_WRITE,
                    flags,
                    -1,
                    0
                ),
                at.cast()
            );
            at.write_volatile(9);
        }
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [9])));
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_forked_child_gets_eio_and_leaves_the_parent_alone() {
        let (vm, mut vcpu, _) = guest(&[0xf4]);
        // SAFETY: the child makes system calls and exits.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                let first = libc::ioctl(vcpu.as_raw_fd(), 0xae80, 0) == -1 && errno() == libc::EIO;
                let second = libc::ioctl(vm.as_raw_fd(), 0xae41, 1) == -1 && errno() == libc::EIO;
                libc::close(vm.as_raw_fd());
                libc::close(vcpu.as_raw_fd());
                let page = map(4096);
                libc::munmap(page.cast(), 4096);
                // The child can have its own VM.
                let (own, mut cpu, _) = guest(&[0xf4]);
                let third = matches!(cpu.run(), Ok(VcpuExit::Hlt));
                drop(own);
                libc::_exit(i32::from(!(first && second && third)));
            }
            let mut status = -1;
            libc::waitpid(child, &mut status, 0);
            status
        };
        assert_eq!(status, 0);
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_cancelled_thread_leaves_the_run() {
        unsafe extern "C-unwind" {
            fn pthread_create(
                thread: *mut libc::pthread_t,
                attributes: *const libc::c_void,
                start: extern "C-unwind" fn(*mut libc::c_void) -> *mut libc::c_void,
                argument: *mut libc::c_void,
            ) -> i32;
            fn pthread_cancel(thread: libc::pthread_t) -> i32;
            fn pthread_setcanceltype(kind: i32, old: *mut i32) -> i32;
            fn ioctl(fd: i32, request: u64, argument: usize) -> i32;
        }
        extern "C-unwind" fn run(fd: *mut libc::c_void) -> *mut libc::c_void {
            // SAFETY: the cancellation type is the thread's own, and the descriptor stays open.
            unsafe {
                let mut old = 0;
                pthread_setcanceltype(1, &mut old);
                ioctl(fd as usize as i32, 0xae80, 0);
            }
            std::ptr::null_mut()
        }
        let (_vm, vcpu, _) = guest(SPIN);
        // SAFETY: the thread is joined.
        unsafe {
            let mut thread = std::mem::zeroed();
            assert_eq!(
                pthread_create(
                    &mut thread,
                    std::ptr::null(),
                    run,
                    vcpu.as_raw_fd() as usize as *mut _
                ),
                0
            );
            libc::usleep(100_000);
            assert_eq!(pthread_cancel(thread), 0);
            let mut result = std::ptr::null_mut();
            assert_eq!(libc::pthread_join(thread, &mut result), 0);
            assert_eq!(result as isize, -1, "it was cancelled");
        }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn one_vcpu_serves_two_threads_one_after_the_other() {
        let (_vm, vcpu, _) = guest(REPORT_DATA);
        let fd = vcpu.as_raw_fd();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(move || {
                    for _ in 0..1000 {
                        // SAFETY: the descriptor is open, and KVM_RUN takes no pointer. The second call waits for the
                        // first.
                        assert_eq!(unsafe { libc::ioctl(fd, 0xae80, 0) }, 0);
                    }
                });
            }
        });
    }

    extern "C" fn skip_fault(
        _signal: libc::c_int,
        _info: *mut libc::siginfo_t,
        context: *mut libc::c_void,
    ) {
        HANDLED.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the context is the kernel's, and the skipped instruction `mov al,[rdi]` is two bytes long.
        unsafe {
            (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] += 2
        };
    }

    #[test]
    #[ignore = "runs under the library"]
    fn faults_of_the_client_reach_its_handler() {
        for before_kvm in [true, false] {
            // SAFETY: the handler only skips the one instruction that faults.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = skip_fault as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO;
                assert_eq!(
                    libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut()),
                    0
                );
                if before_kvm {
                    let (_vm, mut vcpu, _) = guest(&[0xf4]);
                    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
                }
                let count = HANDLED.load(Ordering::SeqCst);
                std::arch::asm!("mov al, [rdi]", in("rdi") 8, out("al") _);
                assert_eq!(HANDLED.load(Ordering::SeqCst), count + 1);
                let mut shown: libc::sigaction = std::mem::zeroed();
                assert_eq!(
                    libc::sigaction(libc::SIGSEGV, std::ptr::null(), &mut shown),
                    0
                );
                assert_eq!(shown.sa_sigaction, action.sa_sigaction);
            }
        }
    }
}
