//! Tests signal handlers of a program under the library. On a real KVM an ioctl is complete before a handler runs, so
//! the handler may do anything and may leave by longjmp. The same must hold under the library.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{on_both, on_slat};

on_both! {
    a_handler_may_use_the_vcpu_it_interrupted
    a_handler_may_jump_out_of_the_run
    queued_signals_keep_their_values
    timers_of_the_program_go_on
    a_signal_before_the_run_ends_it
    a_handler_that_resets_itself_runs_once
    a_fault_signal_that_was_sent_ends_the_run
    a_handler_may_end_its_thread
    a_child_of_vfork_leaves_the_parent_its_handlers
}

// The clients do not run on the machine's own KVM, because its KVM_CREATE_VM may return EINTR if signals arrive very
// often.
on_slat! {
    handlers_may_do_anything_at_any_moment
    a_trapped_system_call_is_answered_by_its_handler
}

mod client {
    use crate::common::guest::*;
    use kvm_bindings::{kvm_regs, kvm_userspace_memory_region};
    use kvm_ioctls::VcpuFd;
    use std::mem::zeroed;
    use std::os::fd::AsRawFd;
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering::SeqCst};
    use std::time::{Duration, Instant};

    const KVM_RUN: u64 = 0xae80;
    const KVM_GET_REGS: u64 = 0x8090_ae81;
    const KVM_SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
    const KVM_CREATE_VM: u64 = 0xae01;

    static VM: AtomicI32 = AtomicI32::new(-1);
    static VCPU: AtomicI32 = AtomicI32::new(-1);
    static HANDLED: AtomicUsize = AtomicUsize::new(0);
    static SUM: AtomicUsize = AtomicUsize::new(0);
    static ANSWERS: AtomicI32 = AtomicI32::new(0);
    static SPARE: AtomicPtr<u8> = AtomicPtr::new(null_mut());

    type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

    fn handle(signal: i32, handler: Handler, flags: i32) {
        // SAFETY: the action is on the stack. The handlers are async-signal-safe.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = flags;
            assert_eq!(libc::sigaction(signal, &action, null_mut()), 0);
        }
    }

    /// A timer that sends SIGALRM to this thread until the value is dropped.
    struct Alarm(libc::timer_t);

    impl Alarm {
        /// Starts a timer that fires after `first`, and then every `next` unless that is zero.
        fn new(first: Duration, next: Duration) -> Self {
            let timespec = |time: Duration| libc::timespec {
                tv_sec: time.as_secs() as i64,
                tv_nsec: time.subsec_nanos().into(),
            };
            let times = libc::itimerspec {
                it_interval: timespec(next),
                it_value: timespec(first),
            };
            // SAFETY: the timer belongs to this value, and the structs are on the stack.
            unsafe {
                let mut event: libc::sigevent = zeroed();
                event.sigev_notify = libc::SIGEV_THREAD_ID;
                event.sigev_signo = libc::SIGALRM;
                event.sigev_notify_thread_id = libc::gettid();
                let mut timer = null_mut();
                let made = libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer);
                assert_eq!(made, 0);
                assert_eq!(libc::timer_settime(timer, 0, &times, null_mut()), 0);
                Alarm(timer)
            }
        }

        fn once(after: Duration) -> Self {
            Self::new(after, Duration::ZERO)
        }
    }

    impl Drop for Alarm {
        fn drop(&mut self) {
            // SAFETY: `new` has made it, and nothing uses it any more.
            unsafe { libc::timer_delete(self.0) };
        }
    }

    fn run(vcpu: &VcpuFd) -> Result<(), i32> {
        // SAFETY: the call takes no pointer, and the descriptor is open.
        match unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_RUN, 0) } {
            0 => Ok(()),
            _ => Err(errno()),
        }
    }

    extern "C" fn count(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        HANDLED.fetch_add(1, SeqCst);
    }

    extern "C" fn use_the_vcpu(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the calls use live structs on the stack.
        unsafe {
            let mut regs: kvm_regs = zeroed();
            let got = libc::ioctl(VCPU.load(SeqCst), KVM_GET_REGS, &mut regs);
            let spare: kvm_userspace_memory_region = region(7, 1 << 20, SPARE.load(SeqCst), 4096);
            let set = libc::ioctl(VM.load(SeqCst), KVM_SET_USER_MEMORY_REGION, &spare);
            ANSWERS.store(got | set, SeqCst);
        }
        HANDLED.fetch_add(1, SeqCst);
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_handler_may_use_the_vcpu_it_interrupted() {
        let (vm, vcpu, _) = guest(SPIN);
        SPARE.store(map(4096), SeqCst);
        VM.store(vm.as_raw_fd(), SeqCst);
        VCPU.store(vcpu.as_raw_fd(), SeqCst);
        handle(libc::SIGALRM, use_the_vcpu, libc::SA_SIGINFO);
        for round in 1..=3 {
            let _alarm = Alarm::once(Duration::from_millis(20));
            assert_eq!(run(&vcpu), Err(libc::EINTR));
            assert_eq!((HANDLED.load(SeqCst), ANSWERS.load(SeqCst)), (round, 0));
        }
    }

    // These functions leave nested calls like `sigsetjmp` and `siglongjmp`. `sigsetjmp` returns twice, which Rust
    // cannot express.
    std::arch::global_asm!(
        // extern "C" fn(function, argument, *mut stack) -> whether it was left by `jump_out`
        "call_with_a_way_out:",
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "mov [rdx], rsp",
        "mov rax, rdi",
        "mov rdi, rsi",
        "call rax",
        "xor eax, eax",
        "2: add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
        // extern "C" fn(stack) -> !
        "jump_out:",
        "mov rsp, rdi",
        "mov eax, 1",
        "jmp 2b",
    );

    unsafe extern "C" {
        fn call_with_a_way_out(
            function: extern "C" fn(usize) -> i32,
            argument: usize,
            stack: *mut usize,
        ) -> i32;
        fn jump_out(stack: usize) -> !;
    }

    unsafe extern "C-unwind" {
        fn pthread_setcancelstate(state: i32, old: *mut i32) -> i32;
        fn pthread_exit(result: *mut libc::c_void) -> !;
        fn ioctl(fd: i32, request: u64, ...) -> i32;
        fn munmap(start: *mut libc::c_void, len: usize) -> i32;
    }

    const PTHREAD_CANCEL_ENABLE: i32 = 0;

    fn cancel_state() -> i32 {
        let mut state = -1;
        // SAFETY: no thread cancels this thread.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &mut state) };
        state
    }

    extern "C-unwind" fn run_for_ever(_: *mut libc::c_void) -> *mut libc::c_void {
        loop {
            HANDLED.store(1, SeqCst);
            // SAFETY: the call takes no pointer, and the descriptor is open.
            unsafe { ioctl(VCPU.load(SeqCst), KVM_RUN, 0) };
        }
    }

    extern "C-unwind" fn unmap_for_ever(_: *mut libc::c_void) -> *mut libc::c_void {
        loop {
            HANDLED.store(1, SeqCst);
            // SAFETY: nothing is mapped in the first page.
            unsafe { munmap(4096 as *mut _, 4096) };
        }
    }

    extern "C-unwind" fn end_the_thread(_: i32) {
        // SAFETY: no frame of the thread holds a value to drop.
        unsafe { pthread_exit(7 as *mut _) }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_handler_may_end_its_thread() {
        let (_vm, vcpu, _) = guest(SPIN);
        VCPU.store(vcpu.as_raw_fd(), SeqCst);
        // SAFETY: the thread's function may unwind, as `pthread_create` lets it.
        unsafe {
            libc::signal(libc::SIGUSR1, end_the_thread as *const () as usize);
            for round in 0..20 {
                HANDLED.store(0, SeqCst);
                let mut thread = 0;
                let main = std::mem::transmute::<
                    extern "C-unwind" fn(*mut libc::c_void) -> *mut libc::c_void,
                    extern "C" fn(*mut libc::c_void) -> *mut libc::c_void,
                >(if round % 2 == 0 {
                    run_for_ever
                } else {
                    unmap_for_ever
                });
                libc::pthread_create(&mut thread, std::ptr::null(), main, null_mut());
                while HANDLED.load(SeqCst) == 0 {
                    std::thread::yield_now();
                }
                libc::usleep(5000);
                libc::pthread_kill(thread, libc::SIGUSR1);
                let mut result = null_mut();
                libc::pthread_join(thread, &mut result);
                assert_eq!(result as usize, 7);
            }
        }
        // No thread runs the vCPU any more, so its registers can be read.
        assert_eq!(vcpu.get_regs().unwrap().rip, CODE as u64);
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_child_of_vfork_leaves_the_parent_its_handlers() {
        let (_vm, _vcpu, _) = guest(SPIN);
        let signals = [libc::SIGSEGV, libc::SIGUSR1];
        for signal in signals {
            handle(signal, count, libc::SA_SIGINFO);
        }
        // SAFETY: the child sets its actions and ends.
        #[allow(deprecated, reason = "what programs do")]
        unsafe {
            let pid = libc::vfork();
            if pid == 0 {
                for signal in signals {
                    libc::signal(signal, jump as *const () as usize);
                    libc::signal(signal, libc::SIG_DFL);
                }
                libc::_exit(0);
            }
            libc::waitpid(pid, null_mut(), 0);
            for signal in signals {
                libc::raise(signal);
            }
        }
        assert_eq!(HANDLED.load(SeqCst), signals.len());
    }

    extern "C" fn say_eperm(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
        HANDLED.fetch_add(1, SeqCst);
        // SAFETY: the context is the kernel's, and RAX in it becomes the call's result.
        unsafe {
            let context = &mut *context.cast::<libc::ucontext_t>();
            context.uc_mcontext.gregs[libc::REG_RAX as usize] = -i64::from(libc::EPERM);
        }
    }

    /// Installs a seccomp filter that traps memfd_create, by which slat makes its descriptors. A handler
    /// serves the trapped call.
    #[test]
    #[ignore = "runs under the library"]
    fn a_trapped_system_call_is_answered_by_its_handler() {
        let kvm = kvm_ioctls::Kvm::new().unwrap();
        handle(libc::SIGSYS, say_eperm, libc::SA_SIGINFO);
        let statement = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let mut filter = [
            statement(0x20, 0, 0, 0),
            statement(0x15, 0, 1, libc::SYS_memfd_create as u32),
            statement(0x06, 0, 0, libc::SECCOMP_RET_TRAP),
            statement(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog {
            len: filter.len() as u16,
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: the filter is on the stack, and is for this thread only.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let set = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program);
            assert_eq!(set, 0);
        }
        for round in 1..=3 {
            assert_eq!(kvm.create_vm().unwrap_err().errno(), libc::EPERM);
            assert_eq!(HANDLED.load(SeqCst), round);
        }
    }

    static STACK: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn jump(signal: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        HANDLED.fetch_add(1, SeqCst);
        // SAFETY: the set contains only this signal, which `siglongjmp` would unblock, too. The skipped frames hold no
        // value to drop.
        unsafe {
            let mut set = zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, null_mut());
            jump_out(STACK.load(SeqCst))
        }
    }

    extern "C" fn run_fd(fd: usize) -> i32 {
        // SAFETY: the call takes no pointer, and the descriptor is open.
        unsafe { libc::ioctl(fd as i32, KVM_RUN, 0) }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_handler_may_jump_out_of_the_run() {
        let (vm, vcpu, memory) = guest(SPIN);
        for round in 1..=30 {
            handle(libc::SIGALRM, jump, libc::SA_SIGINFO);
            let _alarm = Alarm::once(Duration::from_millis(2));
            // SAFETY: `run_fd` holds no value to drop.
            let left =
                unsafe { call_with_a_way_out(run_fd, vcpu.as_raw_fd() as usize, STACK.as_ptr()) };
            assert_eq!((left, HANDLED.load(SeqCst)), (1, round));
            assert_eq!(cancel_state(), PTHREAD_CANCEL_ENABLE);
            let rip = vcpu.get_regs().unwrap().rip;
            assert_eq!(rip, CODE as u64);
            // SAFETY: deletes a memslot and creates it again.
            unsafe {
                vm.set_user_memory_region(region(0, 0, memory, 0)).unwrap();
                vm.set_user_memory_region(region(0, 0, memory, MEMORY))
                    .unwrap();
            }
        }
        handle(libc::SIGALRM, count, libc::SA_SIGINFO);
        let _alarm = Alarm::once(Duration::from_millis(2));
        assert_eq!(run(&vcpu), Err(libc::EINTR));
        // Closing the descriptors drops the VM, so the jump has leaked nothing.
        drop((vm, vcpu));
        assert!(std::fs::read_dir("/proc/self/fd").unwrap().count() < 20);
    }

    extern "C" fn do_anything(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        let nth = HANDLED.fetch_add(1, SeqCst);
        // SAFETY: the calls use only memory and descriptors of this handler.
        unsafe {
            let page = map(8192);
            libc::madvise(page.cast(), 4096, libc::MADV_DONTNEED);
            libc::mprotect(page.cast(), 4096, libc::PROT_READ);
            libc::munmap(page.cast(), 8192);
            if nth.is_multiple_of(4) {
                let kvm = libc::open(c"/dev/kvm".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
                let vm = libc::ioctl(kvm, KVM_CREATE_VM, 0);
                libc::close(kvm);
                if vm < 0 || libc::close(vm) != 0 {
                    ANSWERS.store(errno(), SeqCst);
                }
            }
        }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn handlers_may_do_anything_at_any_moment() {
        handle(
            libc::SIGALRM,
            do_anything,
            libc::SA_SIGINFO | libc::SA_RESTART,
        );
        let period = Duration::from_micros(150);
        let alarm = Alarm::new(period, period);
        let begin = Instant::now();
        let mut cycles = 0;
        while cycles <= 100 || cycles < 1000 && begin.elapsed() < Duration::from_secs(8) {
            let (vm, vcpu, memory) = guest(OUT);
            while run(&vcpu).is_err() {}
            drop((vm, vcpu));
            // SAFETY: the mapping belongs to this test, and is not used any more.
            assert_eq!(0, unsafe { libc::munmap(memory.cast(), MEMORY) });
            cycles += 1;
        }
        drop(alarm);
        assert_eq!(ANSWERS.load(SeqCst), 0);
        assert!(
            HANDLED.load(SeqCst) > 100 && cycles > 100,
            "{cycles} cycles"
        );
    }

    extern "C" fn add_up(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the information is the kernel's, and belongs to a queued signal.
        SUM.fetch_add(unsafe { (*info).si_value().sival_ptr } as usize, SeqCst);
        HANDLED.fetch_add(1, SeqCst);
    }

    #[test]
    #[ignore = "runs under the library"]
    fn queued_signals_keep_their_values() {
        const SIGNALS: usize = 200;
        let signal = libc::SIGRTMIN() + 1;
        let (_vm, vcpu, _) = guest(SPIN);
        handle(signal, add_up, libc::SA_SIGINFO);
        // SAFETY: the call takes no pointer.
        let me = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for value in 1..=SIGNALS {
                    let value = libc::sigval {
                        sival_ptr: value as *mut _,
                    };
                    // SAFETY: the thread waits for the scope's end.
                    unsafe {
                        assert_eq!(libc::pthread_sigqueue(me, signal, value), 0);
                        libc::usleep(100);
                    }
                }
            });
            while HANDLED.load(SeqCst) < SIGNALS {
                assert_eq!(run(&vcpu), Err(libc::EINTR));
            }
        });
        assert_eq!(SUM.load(SeqCst), SIGNALS * (SIGNALS + 1) / 2);
    }

    #[test]
    #[ignore = "runs under the library"]
    fn timers_of_the_program_go_on() {
        const TICKS: usize = 50;
        let signal = libc::SIGRTMIN() + 2;
        let (_vm, vcpu, _) = guest(SPIN);
        handle(signal, add_up, libc::SA_SIGINFO);
        // SAFETY: the timer belongs to this test, and the structs are on the stack.
        unsafe {
            let mut event: libc::sigevent = zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_notify_thread_id = libc::gettid();
            event.sigev_signo = signal;
            event.sigev_value = libc::sigval {
                sival_ptr: 3 as *mut _,
            };
            let mut timer = null_mut();
            assert_eq!(
                libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer),
                0
            );
            let millisecond = libc::timespec {
                tv_sec: 0,
                tv_nsec: 1_000_000,
            };
            let every = libc::itimerspec {
                it_interval: millisecond,
                it_value: millisecond,
            };
            assert_eq!(libc::timer_settime(timer, 0, &every, null_mut()), 0);
            while HANDLED.load(SeqCst) < TICKS {
                assert_eq!(run(&vcpu), Err(libc::EINTR));
            }
            libc::timer_delete(timer);
        }
        assert_eq!(SUM.load(SeqCst), 3 * HANDLED.load(SeqCst));
    }

    static IMMEDIATE_EXIT: AtomicPtr<u8> = AtomicPtr::new(null_mut());

    extern "C" fn exit_at_once(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the address is that of a byte of the mapped `kvm_run`.
        unsafe { IMMEDIATE_EXIT.load(SeqCst).write_volatile(1) };
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_signal_before_the_run_ends_it() {
        let (_vm, mut vcpu, _) = guest(SPIN);
        IMMEDIATE_EXIT.store(&raw mut vcpu.get_kvm_run().immediate_exit, SeqCst);
        handle(libc::SIGALRM, exit_at_once, libc::SA_SIGINFO);
        for round in 0..3000 {
            vcpu.set_kvm_immediate_exit(0);
            let _alarm = Alarm::once(Duration::from_micros(1 + round % 60));
            assert_eq!(run(&vcpu), Err(libc::EINTR));
        }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_handler_that_resets_itself_runs_once() {
        let (_vm, vcpu, _) = guest(SPIN);
        let flags = libc::SA_RESETHAND | libc::SA_NODEFER;
        handle(libc::SIGALRM, count, flags);
        let shown = || {
            // SAFETY: the action is on the stack.
            unsafe {
                let mut action: libc::sigaction = zeroed();
                libc::sigaction(libc::SIGALRM, std::ptr::null(), &mut action);
                (
                    action.sa_sigaction,
                    action.sa_flags & (flags | libc::SA_SIGINFO),
                )
            }
        };
        assert_eq!(shown(), (count as *const () as usize, flags));
        let _alarm = Alarm::once(Duration::from_millis(5));
        assert_eq!(run(&vcpu), Err(libc::EINTR));
        assert_eq!(HANDLED.load(SeqCst), 1);
        assert_eq!(shown().0, libc::SIG_DFL);
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_fault_signal_that_was_sent_ends_the_run() {
        let (_vm, vcpu, _) = guest(SPIN);
        handle(libc::SIGSEGV, count, libc::SA_SIGINFO);
        // SAFETY: the call takes no pointer.
        let me = unsafe { libc::pthread_self() };
        for _ in 0..20 {
            let (before, ended) = (HANDLED.load(SeqCst), AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    // A signal that arrives before the run does not end it.
                    while !ended.load(SeqCst) {
                        std::thread::sleep(Duration::from_millis(2));
                        // SAFETY: the thread waits for the scope's end.
                        unsafe { libc::pthread_kill(me, libc::SIGSEGV) };
                    }
                });
                assert_eq!(run(&vcpu), Err(libc::EINTR));
                ended.store(true, SeqCst);
            });
            assert!(HANDLED.load(SeqCst) > before);
        }
    }
}
