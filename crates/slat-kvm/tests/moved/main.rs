//! Tests that a guest which is moved to another VM at an exit does there what it would have done in the first VM.
//! After `KVM_RUN` with `immediate_exit`, no part of an instruction remains that the client cannot read.
//!
//! Each program runs once in one VM. Then it is moved at each of its exits in turn: the client handles the exit,
//! calls `KVM_RUN` with `immediate_exit` until that returns `EINTR`, reads all state, and gives the state to a new
//! VM. The device counts its accesses, and a read changes the value that the next read returns. So the test finds an
//! access that is lost or made twice, and also wrong registers, flags and memory.
#![cfg(target_arch = "x86_64")]

#[path = "../common/mod.rs"]
mod common;
mod device;
#[path = "../long_mode/mod.rs"]
mod long_mode;
mod meanwhile;
mod nested;
mod programs;
mod state;

use device::{Access, Device};
use kvm_bindings::*;
use long_mode::Machine;
use programs::{END, PROGRAMS, Program, SET_TF};
use slat::MmuKind;
use slat_kvm::{Jit, Tier};
use slat_kvm::{Kvm, VcpuExit, VcpuFd};
use state::State;
use std::os::fd::AsRawFd;

/// The way in which guests are translated and executed.
#[derive(Clone, Copy, Debug)]
struct World {
    mmu: MmuKind,
    jit: Jit,
    /// Whether the program runs in a nested guest.
    nested: bool,
}

const PLAIN: World = World {
    mmu: MmuKind::Tdp,
    jit: Jit::Off,
    nested: false,
};

/// Returns all combinations of MMU and compiler.
fn worlds() -> impl Iterator<Item = World> {
    let jits = [
        Jit::Off,
        Jit::AtOnce(Tier::Baseline),
        Jit::AtOnce(Tier::Full),
    ];
    let mmus = MmuKind::ALL.iter().copied();
    mmus.flat_map(move |mmu| {
        jits.map(|jit| World {
            mmu,
            jit,
            nested: false,
        })
    })
}

/// Returns some of the combinations: each MMU and each compiler at least once.
fn some_worlds() -> impl Iterator<Item = World> {
    worlds().step_by(4)
}

/// A VM, and its vCPU, which runs a program.
struct Guest {
    vcpu: VcpuFd,
    machine: Machine,
}

/// The effects of a program.
#[derive(Debug, PartialEq)]
struct Outcome {
    accesses: Vec<Access>,
    regs: kvm_regs,
    /// The MXCSR, XMM and YMM registers, as XSAVE stores them.
    vectors: [Vec<u32>; 2],
    memory: u64,
}

impl Guest {
    /// Makes a VM whose guest memory contains only the tables of [`Machine`].
    fn new(world: World) -> Self {
        Guest::with(world, |_| {})
    }

    /// Like [`new`](Self::new), but calls `prepare` with the VM before its vCPU is made.
    fn with(world: World, prepare: impl FnOnce(&Machine)) -> Self {
        let kvm = Kvm::new().unwrap().with_mmu(world.mmu).with_jit(world.jit);
        let machine = Machine::of(kvm);
        common::enable(
            &machine.vm,
            KVM_CAP_X86_USER_SPACE_MSR,
            KVM_MSR_EXIT_REASON_UNKNOWN.into(),
        )
        .unwrap();
        common::enable(
            &machine.vm,
            KVM_CAP_EXIT_HYPERCALL,
            1 << programs::MAP_GPA_RANGE,
        )
        .unwrap();
        prepare(&machine);
        let vcpu = machine.vm.create_vcpu(0).unwrap();
        Guest { vcpu, machine }
    }

    /// Makes a VM that is about to run a program.
    fn about_to_run(world: World, code: &[u8]) -> Self {
        Guest::new(world).about(world, code)
    }

    /// Makes this VM begin with a program.
    fn about(self, world: World, code: &[u8]) -> Self {
        let guest = self;
        guest.machine.memory.write(long_mode::CODE, code);
        programs::prepare(&guest.machine);
        guest.machine.start(&guest.vcpu);
        let mut regs = guest.vcpu.get_regs().unwrap();
        programs::begin(&mut regs);
        guest.vcpu.set_regs(&regs).unwrap();
        programs::enable_avx(&guest.vcpu);
        if world.nested {
            nested::enter(&guest.machine, &guest.vcpu);
        }
        guest
    }

    /// Completes the last exit, and returns another VM with all state of this one.
    fn moved(mut self, world: World, device: &mut Device) -> Self {
        self.vcpu.set_kvm_immediate_exit(1);
        loop {
            match self.vcpu.run() {
                Ok(exit) => assert!(device.serve(exit), "the guest went on"),
                Err(error) => {
                    assert_eq!(error.errno(), libc::EINTR);
                    break;
                }
            }
        }
        self.vcpu.set_kvm_immediate_exit(0);
        let state = State::of(&self.machine.kvm, &self.vcpu);
        let mut memory = vec![0; long_mode::MEMORY as usize];
        self.machine.memory.read(0, &mut memory);
        drop(self);
        let there = Guest::new(world);
        there.machine.memory.write(0, &memory);
        state.give(&there.vcpu);
        there
    }

    /// Begins to log writes to the guest's memory.
    fn log_writes(&self) {
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: KVM_MEM_LOG_DIRTY_PAGES,
            guest_phys_addr: 0,
            memory_size: long_mode::MEMORY,
            userspace_addr: self.machine.memory.start as u64,
        };
        // SAFETY: the slot already has this memory.
        unsafe { self.machine.vm.set_user_memory_region(region) }.unwrap();
    }

    fn outcome(&self, device: Device) -> Outcome {
        let mut memory = vec![0; long_mode::MEMORY as usize];
        self.machine.memory.read(0, &mut memory);
        let (words, _) = memory.as_chunks::<8>();
        let hash = words.iter().fold(1, |hash: u64, word| {
            (hash ^ u64::from_le_bytes(*word))
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(23)
        });
        let saved = self.vcpu.get_xsave().unwrap().region;
        Outcome {
            accesses: device.accesses,
            regs: self.vcpu.get_regs().unwrap(),
            vectors: [
                saved[6..7].to_vec(),
                [&saved[40..104], &saved[144..208]].concat(),
            ],
            memory: hash,
        }
    }
}

/// A number of exits that no program reaches.
const MOST_EXITS: usize = 400;

/// Runs a program to its end. Moves it after each exit whose number `moves` accepts. Returns its effects, and the
/// number of its exits.
fn run(world: World, code: &[u8], moves: impl Fn(usize) -> bool) -> (Outcome, usize) {
    let mut guest = Guest::about_to_run(world, code);
    let mut device = Device::default();
    let mut exits = 0;
    loop {
        let exit = guest.vcpu.run().unwrap();
        if !device.serve(exit) {
            return (guest.outcome(device), exits);
        }
        exits += 1;
        assert!(exits < MOST_EXITS, "the program does not end");
        if moves(exits) {
            guest = guest.moved(world, &mut device);
        }
    }
}

/// Checks that a program has the same effects if it is moved at each exit that `moves` accepts.
fn check(world: World, name: &str, code: &[u8], moves: impl Fn(usize) -> bool) {
    let code = [code, END].concat();
    let (stays, exits) = run(world, &code, |_| false);
    // VMCALL in a nested guest exits to its hypervisor, and not to the client.
    assert!(exits > 0 || world.nested, "{name} has no exit");
    let moved = run(world, &code, moves).0;
    assert_eq!(moved, stays, "{name} in {world:?}, with {exits} exits");
}

#[test]
fn a_guest_that_is_moved_at_each_exit_does_what_it_would_have_done() {
    for world in worlds() {
        for Program { name, code } in PROGRAMS {
            check(world, name, code, |_| true);
        }
    }
}

#[test]
fn a_guest_with_single_steps_that_is_moved_does_what_it_would_have_done() {
    for world in some_worlds() {
        for Program { name, code } in PROGRAMS {
            let code = [SET_TF, code].concat();
            check(world, name, &code, |_| true);
        }
    }
}

#[test]
fn a_guest_of_a_guest_that_is_moved_does_what_it_would_have_done() {
    for mut world in some_worlds() {
        world.nested = true;
        for Program { name, code } in PROGRAMS {
            check(world, name, code, |_| true);
        }
    }
}

/// XSAVE and XRSTOR to a device have too many exits to move at each of them with each combination.
#[test]
fn a_guest_that_is_moved_while_it_loads_all_registers_does_what_it_would_have_done() {
    check(PLAIN, "xsave and xrstor", programs::XSAVE, |exit| {
        exit.is_multiple_of(9)
    });
}

/// This test moves each VM once. A VM that was just moved contains nothing of earlier exits, so moving at each exit
/// would miss an error there.
#[test]
fn a_guest_that_is_moved_once_does_what_it_would_have_done() {
    for world in some_worlds() {
        for Program { name, code } in PROGRAMS {
            for at in [1, 2] {
                check(world, name, code, |exit| exit == at);
            }
        }
    }
}

#[test]
fn random_programs_do_the_same_wherever_they_are_moved() {
    let rounds = common::hypervisors::number("SLAT_TEST_ROUNDS", 12);
    let first = common::hypervisors::number("SLAT_SEED", 1);
    for world in worlds() {
        for seed in first..first + rounds {
            let code = programs::random(seed);
            let (stays, exits) = run(world, &code, |_| false);
            let chosen =
                |exit: usize| (seed ^ exit as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62 == 0;
            let moved = run(world, &code, chosen).0;
            assert_eq!(moved, stays, "SLAT_SEED={seed} in {world:?}: {exits} exits");
        }
    }
}

/// Runs `code` until its first exit, and handles that exit. Then calls `meanwhile`, and completes the instruction.
fn complete(code: &[u8], meanwhile: impl FnOnce(&mut Guest)) -> (Guest, Device) {
    let mut guest = Guest::about_to_run(PLAIN, code);
    let mut device = Device::default();
    assert!(device.serve(guest.vcpu.run().unwrap()));
    meanwhile(&mut guest);
    guest.vcpu.set_kvm_immediate_exit(1);
    while let Ok(exit) = guest.vcpu.run() {
        assert!(device.serve(exit));
    }
    (guest, device)
}

/// mov eax,[rbx]; hlt
const LOAD: &[u8] = b"\x8b\x03\xf4";

#[test]
fn an_instruction_that_is_patched_meanwhile_is_completed_as_it_was_decoded() {
    let (guest, device) = complete(LOAD, |guest| {
        guest.machine.memory.write(long_mode::CODE, b"\xcc\xcc\xcc");
    });
    let regs = guest.vcpu.get_regs().unwrap();
    assert_eq!(regs.rip, long_mode::CODE + 2);
    assert_eq!(
        device.accesses,
        [Access::read(programs::DEVICE, regs.rax, 4)]
    );
}

#[test]
fn data_that_were_read_are_used_where_a_memslot_is_now() {
    let there = common::Memory::new(0x1000);
    there.write(0, &[0xee; 8]);
    let (guest, device) = complete(b"\x01\x0b\xf4", |guest| {
        let region = kvm_userspace_memory_region {
            slot: 1,
            flags: 0,
            guest_phys_addr: programs::DEVICE,
            memory_size: 0x1000,
            userspace_addr: there.start as u64,
        };
        // SAFETY: the memory outlives the guest, which is dropped first.
        unsafe { guest.machine.vm.set_user_memory_region(region) }.unwrap();
    });
    // `add [rbx],ecx` has read from the device, and writes to the memory that replaces it.
    let regs = guest.vcpu.get_regs().unwrap();
    assert_eq!(regs.rip, long_mode::CODE + 2);
    let [Access { value, .. }] = device.accesses[..] else {
        panic!("{:?}", device.accesses)
    };
    let mut sum = [0; 4];
    there.read(0, &mut sum);
    assert_eq!(
        u32::from_le_bytes(sum),
        (value as u32).wrapping_add(regs.rcx as u32)
    );
    drop(guest);
}

#[test]
fn a_comparison_is_completed_without_the_jump_that_follows_it() {
    // cmp eax,[rbx]; jmp by flags; hlt
    let (guest, _) = complete(b"\x3b\x03\x75\x00\xf4", |_| {});
    assert_eq!(guest.vcpu.get_regs().unwrap().rip, long_mode::CODE + 2);
}

#[test]
fn a_client_that_continues_elsewhere_has_the_access_forgotten() {
    let (guest, _) = complete(b"\x8b\x03\xf4\x90\xf4", |guest| {
        let mut regs = guest.vcpu.get_regs().unwrap();
        (regs.rip, regs.rax) = (long_mode::CODE + 3, 5);
        guest.vcpu.set_regs(&regs).unwrap();
    });
    let regs = guest.vcpu.get_regs().unwrap();
    assert_eq!((regs.rip, regs.rax), (long_mode::CODE + 3, 5));
}

#[test]
fn a_pending_signal_that_the_run_unblocks_lets_no_code_run() {
    // SAFETY: the signal sets are on the stack, and only this thread's mask changes.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGUSR2);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2);
        // The run completes `in al,dx`. It must not execute `inc ecx`.
        let mut guest = Guest::about_to_run(PLAIN, b"\xec\xff\xc1\xf4");
        let before = guest.vcpu.get_regs().unwrap();
        let VcpuExit::IoIn(_, data) = guest.vcpu.run().unwrap() else {
            panic!("no port")
        };
        data[0] = 0x5a;
        guest.vcpu.set_signal_mask(Some(0)).unwrap();
        assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
        let after = guest.vcpu.get_regs().unwrap();
        assert_eq!((after.rip, after.rcx), (long_mode::CODE + 1, before.rcx));
        assert_eq!(after.rax & 0xff, 0x5a);
        let time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        assert_eq!(
            libc::sigtimedwait(&set, std::ptr::null_mut(), &time),
            libc::SIGUSR2
        );
    }
}

#[test]
fn a_step_of_the_debugger_is_the_next_exit_of_an_instruction_that_is_completed() {
    let mut guest = Guest::about_to_run(PLAIN, LOAD);
    let debug = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
        ..Default::default()
    };
    guest.vcpu.set_guest_debug(&debug).unwrap();
    assert!(Device::default().serve(guest.vcpu.run().unwrap()));
    guest.vcpu.set_kvm_immediate_exit(1);
    match guest.vcpu.run().unwrap() {
        VcpuExit::Debug(debug) => assert_eq!(debug.pc, long_mode::CODE + 2),
        other => panic!("{other:?}"),
    }
    assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
}

#[test]
fn a_signal_between_the_pieces_of_a_store_loses_none() {
    // movups [rbx+1],xmm0 makes two accesses, each with an exit. `immediate_exit` is set after the first exit.
    let mut guest = Guest::about_to_run(PLAIN, b"\x0f\x11\x43\x01\xf4");
    let mut device = Device::default();
    assert!(device.serve(guest.vcpu.run().unwrap()));
    guest.vcpu.set_kvm_immediate_exit(1);
    assert!(device.serve(guest.vcpu.run().unwrap()));
    assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
    let at: Vec<_> = device.accesses.iter().map(|access| access.at).collect();
    assert_eq!(at, [programs::DEVICE + 1, programs::DEVICE + 9]);
}

#[test]
fn data_that_were_read_stay_until_there_is_memory_for_them() {
    let mut guest = Guest::about_to_run(PLAIN, b"\x48\x89\xde\xa4\xf4");
    let mut device = Device::default();
    assert!(device.serve(guest.vcpu.run().unwrap()));
    let page = long_mode::DATA;
    let protect = |rights| {
        let memory = &guest.machine.memory;
        // SAFETY: the page is guest memory, and slat handles faults of its accesses to guest memory.
        unsafe { libc::mprotect(memory.start.add(page as usize).cast(), 0x1000, rights) }
    };
    assert_eq!(protect(libc::PROT_NONE), 0);
    guest.vcpu.set_kvm_immediate_exit(1);
    for _ in 0..2 {
        assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EFAULT);
        let reason = guest.vcpu.get_kvm_run().exit_reason;
        assert_eq!(reason, KVM_EXIT_UNKNOWN, "no reason is left from before");
    }
    assert_eq!(protect(libc::PROT_READ | libc::PROT_WRITE), 0);
    assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
    let regs = guest.vcpu.get_regs().unwrap();
    assert_eq!(regs.rip, long_mode::CODE + 4);
    let [Access { value, .. }] = device.accesses[..] else {
        panic!("{:?}", device.accesses)
    };
    let mut stored = [0];
    guest.machine.memory.read(page + 0x800, &mut stored);
    assert_eq!(u64::from(stored[0]), value);
}

/// When translations become void, slat does not wait for a vCPU that is not in KVM_RUN. That vCPU drops its
/// translations when it enters KVM_RUN again.
#[test]
fn a_completion_does_not_use_translations_of_before_the_exit() {
    // mov [rdi],al, so that the page is translated for writes; insb; hlt
    for code in [b"\x88\x07\x6c\xf4", b"\x88\x07\xa4\xf4"] {
        let mut guest = Guest::about_to_run(PLAIN, code);
        let mut regs = guest.vcpu.get_regs().unwrap();
        regs.rsi = programs::DEVICE;
        guest.vcpu.set_regs(&regs).unwrap();
        let mut device = Device::default();
        assert!(device.serve(guest.vcpu.run().unwrap()));
        guest.log_writes();
        guest.vcpu.set_kvm_immediate_exit(1);
        assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
        let log = guest
            .machine
            .vm
            .get_dirty_log(0, long_mode::MEMORY as usize)
            .unwrap();
        let page = regs.rdi / 0x1000;
        assert_ne!(
            log[page as usize / 64] >> (page % 64) & 1,
            0,
            "a dirty page is lost"
        );
    }
}

#[test]
fn a_full_dirty_ring_comes_before_the_rest_of_an_instruction_and_loses_nothing() {
    // rep insb writes to so many pages that the ring becomes full. Each exit transfers the data of one page.
    const RING: u64 = 4096;
    const DIRTY: u32 = 1;
    const RESET: u32 = 2;
    let guest = Guest::with(PLAIN, |machine| {
        common::enable(&machine.vm, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, RING).unwrap();
    });
    let mut guest = guest.about(PLAIN, b"\xf3\x6c\xf4");
    guest.log_writes();
    let mut regs = guest.vcpu.get_regs().unwrap();
    let (first, pages) = (0x20_0000, 300);
    (regs.rdi, regs.rcx) = (first, pages * 0x1000);
    guest.vcpu.set_regs(&regs).unwrap();
    // SAFETY: the call makes a new mapping of the vCPU's descriptor, which has the ring at this offset.
    let ring = unsafe {
        let mapped = libc::mmap(
            std::ptr::null_mut(),
            RING as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            guest.vcpu.as_raw_fd(),
            64 * 4096,
        );
        assert_ne!(mapped, libc::MAP_FAILED);
        std::slice::from_raw_parts_mut(mapped.cast::<kvm_dirty_gfn>(), RING as usize / 16)
    };
    let mut device = Device::default();
    let mut fulls = 0;
    loop {
        match guest.vcpu.run() {
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                fulls += 1;
                guest.vcpu.set_kvm_immediate_exit(0);
                for entry in &mut *ring {
                    entry.flags = if entry.flags == DIRTY { RESET } else { 0 };
                }
                assert!(guest.machine.vm.reset_dirty_rings().unwrap() > 0);
            }
            Ok(exit) => {
                if !device.serve(exit) {
                    break;
                }
                guest.vcpu.set_kvm_immediate_exit(1);
            }
            Err(error) => {
                assert_eq!(error.errno(), libc::EINTR);
                guest.vcpu.set_kvm_immediate_exit(0);
            }
        }
    }
    assert!(fulls > 0, "the ring was never full");
    let sum: usize = device.accesses.iter().map(|access| access.len).sum();
    assert_eq!(sum as u64, pages * 0x1000);
    assert_eq!(guest.vcpu.get_regs().unwrap().rdi, first + pages * 0x1000);
}

#[test]
fn what_the_client_shares_by_its_run_page_is_of_after_the_completion() {
    let (guest, device) = complete(LOAD, |guest| {
        guest.vcpu.set_sync_valid_reg(slat_kvm::SyncReg::Register);
    });
    let regs = guest.vcpu.get_regs().unwrap();
    assert_eq!(guest.vcpu.sync_regs().regs, regs);
    assert_eq!(regs.rax, device.accesses[0].value);
}
