//! Tests forks that the C library does not see, and the process's limits of descriptors and memory.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{on_both, on_slat};

on_slat! {
    a_number_that_a_forked_child_reuses_is_no_kvm_descriptor
    a_child_of_vfork_leaves_the_parent_its_descriptors
    a_run_needs_no_free_descriptor
    a_program_may_close_all_descriptors_it_does_not_know
    a_child_of_vfork_that_closes_all_descriptors_costs_the_parent_none
    a_child_of_vfork_that_changes_its_root_leaves_the_parent_its_own
    few_descriptors_are_the_programs_in_another_root_too
    memory_that_is_out_is_enomem
    a_vm_needs_no_files
}

on_both! {
    a_program_forks_while_a_lock_of_its_fork_handlers_is_held_over_madvise
    a_childs_child_of_vfork_leaves_the_child_its_descriptors
}

mod client {
    use crate::common::guest::*;
    use kvm_ioctls::{Kvm, VcpuExit};
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    const KVM_GET_API_VERSION: u64 = 0xae00;

    /// Forks by the system call. `child` makes only system calls. Returns the result of `child`.
    fn raw_fork(child: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child ends by `_exit`, or by the alarm.
        unsafe {
            let pid = libc::syscall(libc::SYS_fork) as libc::pid_t;
            assert!(pid >= 0);
            if pid == 0 {
                libc::alarm(20);
                libc::_exit(i32::from(!child()));
            }
            let mut status = -1;
            libc::waitpid(pid, &mut status, 0);
            status == 0
        }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_number_that_a_forked_child_reuses_is_no_kvm_descriptor() {
        let (vm, mut vcpu, _) = guest(OUT);
        let kvm = Kvm::new().unwrap();
        let fine = raw_fork(|| {
            [vm.as_raw_fd(), vcpu.as_raw_fd(), kvm.as_raw_fd()]
                .into_iter()
                .all(|fd| {
                    // SAFETY: the descriptors belong to the child.
                    unsafe {
                        libc::close(fd);
                        let file = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
                        file == fd
                            && libc::ioctl(file, KVM_GET_API_VERSION, 0) == -1
                            && errno() == libc::ENOTTY
                    }
                })
        });
        assert!(fine);
        // The child uses the objects that it has inherited, and makes its own VM.
        let fine = raw_fork(|| {
            // SAFETY: the call takes no pointer.
            let refused =
                unsafe { libc::ioctl(vm.as_raw_fd(), 0xae41, 1) } == -1 && errno() == libc::EIO;
            let (_own, mut cpu, _) = guest(OUT);
            refused && matches!(cpu.run(), Ok(VcpuExit::IoOut(0x10, _)))
        });
        assert!(fine);
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, _)));
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_child_of_vfork_leaves_the_parent_its_descriptors() {
        let (vm, mut vcpu, _) = guest(OUT);
        // The standard library closes and duplicates descriptors in such a child.
        assert!(
            std::process::Command::new("true")
                .status()
                .unwrap()
                .success()
        );
        // SAFETY: the child closes and ends.
        #[allow(deprecated, reason = "what programs do")]
        unsafe {
            let pid = libc::vfork();
            if pid == 0 {
                libc::close(vcpu.as_raw_fd());
                libc::close(vm.as_raw_fd());
                libc::_exit(0);
            }
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, _)));
        assert!(vm.create_vcpu(1).is_ok());
    }

    /// Returns the number of descriptors of this process, including the one that counts them.
    fn descriptors() -> usize {
        std::fs::read_dir("/proc/self/fd").unwrap().count()
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_child_of_vfork_that_closes_all_descriptors_costs_the_parent_none() {
        let (_vm, mut vcpu, memory) = guest(OUT);
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, _)));
        let before = descriptors();
        for _ in 0..10 {
            // SAFETY: the child closes and ends. The parent asks the kernel again what is mapped.
            #[allow(deprecated, reason = "what programs do")]
            unsafe {
                let pid = libc::vfork();
                if pid == 0 {
                    libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
                    for fd in 500..520 {
                        libc::close(fd);
                        libc::dup2(0, fd);
                    }
                    libc::_exit(0);
                }
                libc::waitpid(pid, std::ptr::null_mut(), 0);
                libc::mprotect(memory.cast(), MEMORY, libc::PROT_READ);
                libc::mprotect(memory.cast(), MEMORY, libc::PROT_READ | libc::PROT_WRITE);
            }
            assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, _)));
        }
        assert_eq!(descriptors(), before);
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_child_of_vfork_that_changes_its_root_leaves_the_parent_its_own() {
        // SAFETY: the child makes system calls only, and ends. The kernel may refuse the first one.
        #[allow(deprecated, reason = "what programs do")]
        unsafe {
            let pid = libc::vfork();
            if pid == 0 {
                libc::chroot(c"/".as_ptr());
                libc::_exit(0);
            }
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
        let (_vm, mut vcpu, _) = guest(OUT);
        assert!(matches!(vcpu.run(), Ok(VcpuExit::IoOut(..))));
    }

    #[test]
    #[ignore = "runs under the library"]
    fn few_descriptors_are_the_programs_in_another_root_too() {
        let next = || std::fs::File::open("/dev/null").unwrap().as_raw_fd();
        let limit = libc::rlimit {
            rlim_cur: 100,
            rlim_max: 100,
        };
        let before = next();
        // SAFETY: a live limit, and a path that ends with 0. The kernel may refuse the second call.
        unsafe {
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
            libc::chroot(c"/".as_ptr());
        }
        assert_eq!(next(), before);
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_childs_child_of_vfork_leaves_the_child_its_descriptors() {
        let (vm, vcpu, _) = guest(OUT);
        // SAFETY: the child makes system calls and ends; so does its child.
        #[allow(deprecated, reason = "what programs do")]
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::alarm(20);
                let pid = libc::vfork();
                if pid == 0 {
                    libc::close(vcpu.as_raw_fd());
                    libc::_exit(0);
                }
                libc::waitpid(pid, std::ptr::null_mut(), 0);
                // The child itself closes the descriptor, which frees the number for another file.
                libc::close(vm.as_raw_fd());
                let file = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
                let fine = file == vm.as_raw_fd()
                    && libc::ioctl(file, KVM_GET_API_VERSION, 0) == -1
                    && errno() == libc::ENOTTY;
                libc::_exit(i32::from(!fine));
            }
            let mut status = -1;
            libc::waitpid(child, &mut status, 0);
            assert_eq!(status, 0);
        }
    }

    /// A lock of the program that its fork handlers hold over a fork, like those of a `malloc`. The lock is fair. With
    /// an unfair lock and fewer processors than threads, a thread that takes the lock again and again would prevent
    /// forks.
    static TICKETS: AtomicU32 = AtomicU32::new(0);
    static SERVED: AtomicU32 = AtomicU32::new(0);

    extern "C" fn lock() {
        let ticket = TICKETS.fetch_add(1, Ordering::Relaxed);
        while SERVED.load(Ordering::Acquire) != ticket {
            std::thread::yield_now();
        }
    }

    extern "C" fn unlock() {
        SERVED.fetch_add(1, Ordering::Release);
    }

    extern "C" fn register() {
        // SAFETY: the handlers have the right signature.
        unsafe { libc::pthread_atfork(Some(lock), Some(unlock), Some(unlock)) };
    }

    // A `malloc` registers its handlers when it is first called, before any library's constructor runs.
    #[used]
    #[unsafe(link_section = ".preinit_array")]
    static REGISTER: extern "C" fn() = register;

    #[test]
    #[ignore = "runs under the library"]
    fn a_program_forks_while_a_lock_of_its_fork_handlers_is_held_over_madvise() {
        let (_vm, _vcpu, _) = guest(OUT);
        let page = map(4096) as usize;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    lock();
                    // SAFETY: the page belongs to this test.
                    unsafe { libc::madvise(page as *mut _, 4096, libc::MADV_DONTNEED) };
                    unlock();
                }
            });
            for _ in 0..60 {
                // SAFETY: the child ends at once.
                unsafe {
                    let child = libc::fork();
                    if child == 0 {
                        libc::_exit(0);
                    }
                    libc::waitpid(child, std::ptr::null_mut(), 0);
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    fn limit(resource: libc::__rlimit_resource_t, value: u64) {
        let limit = libc::rlimit {
            rlim_cur: value,
            rlim_max: libc::RLIM_INFINITY,
        };
        let mut now = limit;
        // SAFETY: the limits are on the stack.
        unsafe {
            libc::getrlimit(resource, &mut now);
            now.rlim_cur = value.min(now.rlim_max);
            assert_eq!(libc::setrlimit(resource, &now), 0);
        }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_run_needs_no_free_descriptor() {
        let (_vm, mut vcpu, memory) = guest(OUT);
        limit(libc::RLIMIT_NOFILE, 0);
        // SAFETY: the call fails.
        assert_eq!(unsafe { libc::dup(0) }, -1);
        for _ in 0..3 {
            assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, _)));
            // SAFETY: rights of our own memory change and change back, so that slat has to ask the kernel again.
            unsafe {
                let rights = libc::PROT_READ | libc::PROT_WRITE;
                libc::mprotect(memory.cast(), MEMORY, libc::PROT_READ);
                libc::mprotect(memory.cast(), MEMORY, rights);
            }
        }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_program_may_close_all_descriptors_it_does_not_know() {
        let (_vm, mut vcpu, memory) = guest(OUT);
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, _)));
        // SAFETY: this program uses none of the closed descriptors.
        unsafe {
            let last = libc::dup(vcpu.as_raw_fd());
            for fd in last..1100 {
                libc::close(fd);
            }
            for _ in last..1000 {
                libc::open(c"/dev/zero".as_ptr(), libc::O_RDONLY);
            }
            libc::mprotect(memory.cast(), MEMORY, libc::PROT_READ);
            libc::mprotect(memory.cast(), MEMORY, libc::PROT_READ | libc::PROT_WRITE);
        }
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, _)));
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_vm_needs_no_files() {
        // If slat wrote to a file, the kernel would end this program by SIGXFSZ. The program's own output is a file,
        // too.
        let before = limit_of(libc::RLIMIT_FSIZE);
        limit(libc::RLIMIT_FSIZE, 0);
        let (vm, mut vcpu, _) = guest(OUT);
        let mut runs = 0;
        while runs < 3 {
            assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, _)));
            runs += 1;
        }
        // kvm-ioctls has mapped the vCPU from its first page on. This code maps the vCPU again, from the second page
        // on.
        const PAGES: usize = 2;
        // SAFETY: the kernel chooses the address of the mapping, whose first byte is the port's data.
        unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let null = std::ptr::null_mut();
            let mapped = libc::mmap(
                null,
                PAGES * 4096,
                rights,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                4096,
            );
            assert_ne!(mapped, libc::MAP_FAILED);
            mapped.cast::<u8>().write_volatile(7);
            assert_eq!(libc::munmap(mapped, PAGES * 4096), 0);
        }
        // Objects that cannot be made without a file are refused.
        let memory = kvm_bindings::kvm_create_guest_memfd {
            size: 0x10000,
            ..Default::default()
        };
        const KVM_CREATE_GUEST_MEMFD: u64 = 0xc040_aed4;
        // SAFETY: the struct has the size that the request names.
        let made =
            unsafe { libc::ioctl(vm.as_raw_fd(), KVM_CREATE_GUEST_MEMFD, &raw const memory) };
        let refused = errno();
        limit(libc::RLIMIT_FSIZE, before);
        assert_eq!((made, refused), (-1, libc::EFBIG));
    }

    fn limit_of(resource: libc::__rlimit_resource_t) -> u64 {
        // SAFETY: the limit is on the stack.
        unsafe {
            let mut now = std::mem::zeroed::<libc::rlimit>();
            libc::getrlimit(resource, &mut now);
            now.rlim_cur
        }
    }

    /// Returns the size of this process's address space in bytes.
    fn address_space() -> u64 {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = text.split(' ').next().unwrap().parse().unwrap();
        pages * 4096
    }

    /// Reduces the free memory step by step. Each call succeeds or returns ENOMEM, and the program continues.
    #[test]
    #[ignore = "runs under the library"]
    fn memory_that_is_out_is_enomem() {
        let mut refused = 0;
        for spare in (0..64).map(|step| step * (64 << 10)) {
            let fine = raw_fork(|| {
                limit(libc::RLIMIT_AS, address_space() + spare);
                out_of_memory().is_ok()
            });
            assert!(fine, "{} KiB", spare >> 10);
            refused += 1;
        }
        assert_eq!(refused, 64);
    }

    fn out_of_memory() -> Result<(), i32> {
        use std::ffi::c_ulong;
        // SAFETY: the calls use only structs on the stack and descriptors of this process.
        unsafe {
            let ioctl = |fd: i32, request: c_ulong, argument: usize| match libc::ioctl(
                fd, request, argument,
            ) {
                -1 if errno() == libc::ENOMEM => Ok(-1),
                -1 => Err(errno()),
                value => Ok(value),
            };
            let kvm = libc::open(c"/dev/kvm".as_ptr(), libc::O_RDWR);
            if kvm < 0 {
                return if errno() == libc::ENOMEM {
                    Ok(())
                } else {
                    Err(errno())
                };
            }
            let vm = ioctl(kvm, 0xae01, 0)?;
            if vm < 0 {
                return Ok(());
            }
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let memory = libc::mmap(std::ptr::null_mut(), MEMORY, rights, flags, -1, 0);
            if memory == libc::MAP_FAILED {
                return Ok(());
            }
            let code = OUT;
            memory
                .cast::<u8>()
                .add(0xff0)
                .copy_from_nonoverlapping(code.as_ptr(), code.len());
            // A slot for the reset vector, which is 16 bytes below 4 GiB; and memslots with large dirty logs.
            let top = region(0, (1 << 32) - 4096, memory.cast(), 4096);
            ioctl(vm, 0x4020_ae46, &raw const top as usize)?;
            for (slot, pages) in [(1, 1u64 << 20), (2, 1 << 30)] {
                let mut logged = region(slot, 1 << 32 << slot, memory.cast(), 0);
                logged.memory_size = pages << 12;
                logged.flags = 1;
                match ioctl(vm, 0x4020_ae46, &raw const logged as usize) {
                    Err(libc::EINVAL | libc::EEXIST) | Ok(_) => {}
                    Err(other) => return Err(other),
                }
            }
            let vcpu = ioctl(vm, 0xae41, 0)?;
            for fd in [vm, vcpu] {
                if fd >= 0 {
                    ioctl(fd, 0xaece, 0)?;
                }
            }
            if vcpu >= 0 {
                for _ in 0..3 {
                    ioctl(vcpu, 0xae80, 0)?;
                }
            }
        }
        Ok(())
    }
}
