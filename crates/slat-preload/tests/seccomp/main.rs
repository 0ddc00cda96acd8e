//! Tests vCPU threads under seccomp filters: the filters of VMMs, and a filter with the documentation's list.
#![cfg(target_arch = "x86_64")]

#[path = "../common/mod.rs"]
mod common;
mod filter;
mod guest;
mod lists;

use common::on_slat;
use slat_process::calls::{Call, Instead};
use std::collections::BTreeSet;

on_slat! {
    a_vcpu_runs_under_the_filter_of_firecracker
    a_vcpu_runs_under_the_filter_of_cloud_hypervisor
    a_vcpu_runs_with_the_documented_calls_alone
    a_filter_that_lacks_a_call_is_told_so
}

/// The tables of the documentation name exactly the calls of slat's list.
#[test]
fn the_documentation_names_each_call() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/seccomp.md");
    let text = std::fs::read_to_string(path).unwrap();
    for (title, instead) in [
        ("## Needed", Instead::Nobody),
        ("## Made by the helper", Instead::Helper),
        ("## Done without", Instead::Omitted),
    ] {
        let (_, section) = text.split_once(title).unwrap();
        let section = section.split("\n## ").next().unwrap();
        let documented: BTreeSet<_> = (section.lines())
            .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"))
            .map(|(name, _)| name)
            .collect();
        let entries = Call::ALL.iter().map(|call| call.entry());
        let listed = entries.filter(|entry| entry.instead == instead);
        let listed: BTreeSet<_> = listed.map(|entry| entry.name).collect();
        assert_eq!(documented, listed, "{title}");
    }
}

mod client {
    use crate::common::guest::{map, region};
    use crate::filter::{self, Allowed, calls, requests};
    use crate::guest::{self, CLIENTS, DATA, phase};
    use crate::lists;
    use kvm_bindings::*;
    use kvm_ioctls::{IoEventAddress, Kvm, NoDatamatch, VcpuExit, VcpuFd, VmFd};
    use slat_process::calls::{Call, Instead};
    use std::fs::File;
    use std::io::{Read, Seek};
    use std::mem::zeroed;
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::ptr::null_mut;
    use std::sync::Arc;
    use std::sync::atomic::{
        AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicUsize, Ordering::SeqCst,
    };
    use std::time::{Duration, Instant};
    use vmm_sys_util::eventfd::EventFd;

    const GSI: u32 = 24;
    const PAGE: usize = 4096;

    static PHASE: AtomicU8 = AtomicU8::new(0);
    static ROUNDS: AtomicUsize = AtomicUsize::new(0);
    static ENOUGH: AtomicU8 = AtomicU8::new(0);
    static THREAD: AtomicI32 = AtomicI32::new(0);
    static MMIO: AtomicU32 = AtomicU32::new(0);
    static INTERRUPTED: AtomicUsize = AtomicUsize::new(0);
    static HANDLED: AtomicUsize = AtomicUsize::new(0);
    static CODE: AtomicI32 = AtomicI32::new(0);

    extern "C" fn count(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the information comes from the kernel.
        CODE.store(unsafe { (*info).si_code }, SeqCst);
        HANDLED.fetch_add(1, SeqCst);
    }

    fn eventfd() -> EventFd {
        EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).unwrap()
    }

    fn until(what: &str, mut condition: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !condition() {
            assert!(begin.elapsed() < Duration::from_secs(30), "never: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sets the registers: 32-bit code and data segments of 4 GiB.
    fn start(vcpu: &VcpuFd) {
        let mut sregs = vcpu.get_sregs().unwrap();
        let flat = kvm_segment {
            limit: u32::MAX,
            selector: 16,
            type_: 3,
            present: 1,
            db: 1,
            s: 1,
            g: 1,
            ..Default::default()
        };
        let code = kvm_segment {
            selector: 8,
            type_: 11,
            ..flat
        };
        (sregs.cs, sregs.ds, sregs.es, sregs.ss) = (code, flat, flat, flat);
        (sregs.fs, sregs.gs) = (flat, flat);
        // IRET and the handlers load these descriptors.
        (sregs.gdt.base, sregs.gdt.limit) = (0x400, 0x17);
        (sregs.idt.base, sregs.idt.limit) = (guest::IDT, 0x7ff);
        sregs.cr0 |= 1;
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rip, regs.rflags) = (guest::CODE, 2);
        vcpu.set_regs(&regs).unwrap();
    }

    /// Does what a VMM does when a guest enables a message-signalled interrupt. VMMs often do it on the vCPU's thread.
    fn route_and_register(vm: &VmFd, irqfd: &EventFd) {
        let mut routing = KvmIrqRouting::new(1).unwrap();
        let entry = &mut routing.as_mut_slice()[0];
        entry.gsi = GSI;
        entry.type_ = KVM_IRQ_ROUTING_MSI;
        entry.u.msi.address_lo = 0xfee0_0000;
        entry.u.msi.data = guest::VECTOR;
        vm.set_gsi_routing(&routing).unwrap();
        vm.register_irqfd(irqfd, GSI).unwrap();
    }

    /// Ends the process. If the filter forbids the call for that, the filter ends the process.
    fn give_up(why: &str) -> ! {
        eprintln!("{why}");
        // SAFETY: the call ends the process.
        unsafe { libc::_exit(1) }
    }

    /// Runs the vCPU's thread as long as the process lives.
    fn run(vm: &VmFd, mut vcpu: VcpuFd, irqfd: &EventFd, allowed: &[Allowed]) -> ! {
        // SAFETY: the call takes no pointer.
        THREAD.store(unsafe { libc::gettid() }, SeqCst);
        filter::install(allowed);
        loop {
            match vcpu.run() {
                Ok(VcpuExit::IoOut(0x10, data)) => {
                    let phase = data[0];
                    if phase == phase::WAITS {
                        route_and_register(vm, irqfd);
                    }
                    // The guest disables the interrupt.
                    if phase == phase::ROUND && ROUNDS.fetch_add(1, SeqCst) == 0 {
                        vm.unregister_irqfd(irqfd, GSI).unwrap();
                    }
                    PHASE.store(phase, SeqCst);
                }
                Ok(VcpuExit::IoIn(0x10, data)) => data[0] = ENOUGH.load(SeqCst),
                Ok(VcpuExit::MmioWrite(0xd000_0000, data)) => {
                    MMIO.store(u32::from_le_bytes(data.try_into().unwrap()), SeqCst);
                }
                Ok(VcpuExit::MmioRead(0xd000_0004, data)) => data.fill(9),
                Ok(other) => give_up(&format!("{other:?}")),
                Err(error) if error.errno() == libc::EINTR => {
                    INTERRUPTED.fetch_add(1, SeqCst);
                }
                Err(error) => give_up(&error.to_string()),
            }
        }
    }

    fn interrupt() {
        let (handled, interrupted) = (HANDLED.load(SeqCst), INTERRUPTED.load(SeqCst));
        // SAFETY: a plain system call for a thread of this process.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_tgkill,
                libc::getpid(),
                THREAD.load(SeqCst),
                libc::SIGUSR1,
            )
        };
        assert_eq!(sent, 0);
        until("the handler runs", || HANDLED.load(SeqCst) == handled + 1);
        // (The signal may arrive between two runs.)
        let begin = Instant::now();
        while INTERRUPTED.load(SeqCst) == interrupted && begin.elapsed() < Duration::from_millis(5)
        {
        }
        assert_eq!(CODE.load(SeqCst), libc::SI_TKILL);
    }

    fn guest_runs_under(allowed: Vec<Allowed>) {
        let low = map(0x10000);
        let len = (DATA.end - DATA.start) as usize;
        let data = map(len);
        // SAFETY: the mapping that was just made.
        guest::load(unsafe { std::slice::from_raw_parts_mut(low, 0x10000) });
        // A flat code segment and a flat data segment.
        let descriptors = [0u64, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
        // SAFETY: the address is inside the mapping.
        unsafe { low.add(0x400).cast::<[u64; 3]>().write(descriptors) };

        let vm = Kvm::new().unwrap().create_vm().unwrap();
        vm.create_irq_chip().unwrap();
        let mut slot = region(1, DATA.start, data, len);
        slot.flags = KVM_MEM_LOG_DIRTY_PAGES;
        // SAFETY: the mappings live as long as the process.
        unsafe {
            vm.set_user_memory_region(region(0, 0, low, 0x10000))
                .unwrap();
            vm.set_user_memory_region(slot).unwrap();
        }
        let (door, port, irqfd) = (eventfd(), eventfd(), eventfd());
        for (fd, place) in [
            (&door, IoEventAddress::Mmio(guest::DOORBELL)),
            (&port, IoEventAddress::Pio(guest::DOORBELL_PORT)),
        ] {
            vm.register_ioevent(fd, &place, NoDatamatch).unwrap();
        }
        let vcpu = vm.create_vcpu(0).unwrap();
        let cpuid = Kvm::new()
            .unwrap()
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .unwrap();
        vcpu.set_cpuid2(&cpuid).unwrap();
        start(&vcpu);
        // SAFETY: the action is on the stack, and the handler is async-signal-safe.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = count as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGUSR1, &action, null_mut()), 0);
        }

        let vm = Arc::new(vm);
        let its = (vm.clone(), irqfd.try_clone().unwrap());
        std::thread::spawn(move || run(&its.0, vcpu, &its.1, &allowed));
        until("the guest waits", || PHASE.load(SeqCst) == phase::WAITS);
        assert_eq!(MMIO.load(SeqCst), 0x1122_3344);
        assert_eq!((door.read().unwrap(), port.read().unwrap()), (1, 1));
        // SAFETY: the address is inside the mapping.
        let delivered = || unsafe { low.add(CLIENTS as usize).cast::<u32>().read_volatile() };
        for count in 1..=5 {
            irqfd.write(1).unwrap();
            until("an interrupt", || delivered() >= count);
        }
        until("a round", || ROUNDS.load(SeqCst) > 2);

        // The host's memory changes and is read while the guest writes to it.
        for turn in 0..40 {
            let at = data.wrapping_add(turn * 20 * PAGE).cast();
            // SAFETY: the address is inside the mapping, which only the guest uses.
            unsafe {
                let advice = [
                    libc::MADV_DONTNEED,
                    libc::MADV_HUGEPAGE,
                    libc::MADV_NOHUGEPAGE,
                ];
                libc::madvise(at, 16 * PAGE, advice[turn % 3]);
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                let rights = libc::PROT_READ | libc::PROT_WRITE;
                let again = libc::mmap(at, 8 * PAGE, rights, flags, -1, 0);
                assert_eq!(again, at);
                libc::munmap(map(PAGE).cast(), PAGE);
            }
            let rounds = ROUNDS.load(SeqCst);
            until("more rounds", || ROUNDS.load(SeqCst) > rounds + 1);
            let dirty: u32 = (vm.get_dirty_log(1, len).unwrap().iter())
                .map(|word| word.count_ones())
                .sum();
            assert!(dirty > 1000, "{dirty} pages are dirty");
            interrupt();
        }
        assert!(INTERRUPTED.load(SeqCst) > 0);
        ENOUGH.store(1, SeqCst);
        until("the guest halts", || PHASE.load(SeqCst) == phase::HALTS);
        std::thread::sleep(Duration::from_millis(20));
        interrupt();
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_vcpu_runs_under_the_filter_of_firecracker() {
        guest_runs_under(lists::firecracker());
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_vcpu_runs_under_the_filter_of_cloud_hypervisor() {
        guest_runs_under(lists::cloud_hypervisor());
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_vcpu_runs_with_the_documented_calls_alone() {
        guest_runs_under(lists::needed());
    }

    /// Returns the text that a thread writes to standard error while it installs a filter.
    fn words_about(allowed: Vec<Allowed>) -> String {
        let mut file = tempfile();
        // SAFETY: the descriptors belong to this process, and the test restores its standard error afterwards.
        let before = unsafe {
            let before = libc::dup(2);
            libc::dup2(file.as_raw_fd(), 2);
            before
        };
        let installed = Arc::new(AtomicBool::new(false));
        let tells = installed.clone();
        std::thread::spawn(move || {
            filter::install(&allowed);
            tells.store(true, SeqCst);
            // The thread does not end, because that would need more calls than its filter allows.
            loop {
                // SAFETY: the call has no arguments.
                unsafe { libc::pause() };
            }
        });
        until("it is installed", || installed.load(SeqCst));
        // SAFETY: `before` is a copy of the test's own output.
        unsafe { libc::dup2(before, 2) };
        let mut words = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut words).unwrap();
        words
    }

    fn tempfile() -> File {
        // SAFETY: the name ends with 0, and no other code owns the new descriptor.
        unsafe { File::from_raw_fd(libc::memfd_create(c"words".as_ptr(), 0)) }
    }

    #[test]
    #[ignore = "runs under the library"]
    fn a_filter_that_lacks_a_call_is_told_so() {
        let _guest = crate::common::guest::guest(crate::common::guest::SPIN);
        let and_pause = |list: Vec<Allowed>| [list, calls![SYS_pause].to_vec()].concat();
        assert_eq!(words_about(and_pause(lists::needed())), "");
        let words = words_about(and_pause(requests![lists::KVM_RUN].to_vec()));
        for call in Call::ALL.iter().map(|call| call.entry()) {
            let needed = call.instead == Instead::Nobody;
            assert_eq!(words.contains(call.name), needed, "{}: {words}", call.name);
        }
        // slat prints nothing about a filter that is not for a vCPU's thread.
        assert_eq!(words_about(and_pause(Vec::new())), "");
    }
}
