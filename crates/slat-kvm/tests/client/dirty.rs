//! Tests dirty logs: bitmaps, manual protection and rings.

use crate::common::*;
use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_kvm::ioctl::Object;
use slat_kvm::{Kvm, VcpuExit, VmFd};
use std::os::fd::AsRawFd;

/// The flag with which slat marks a new ring entry.
const DIRTY: u32 = 1;
/// The bit of the page that contains the code. The first fetch maps the page, and is logged, as in KVM (policy
/// `dirty_log_reads`).
const FETCHED: u64 = 1 << 1;
/// The bit of the page that the code writes to.
const WRITTEN: u64 = 1 << 3;
const RESET: u32 = 2;

/// Returns the slot of `memory`, with a dirty log.
fn logged(memory: &Memory) -> kvm_userspace_memory_region {
    kvm_userspace_memory_region {
        slot: 0,
        flags: KVM_MEM_LOG_DIRTY_PAGES,
        guest_phys_addr: 0,
        memory_size: MEMORY as u64,
        userspace_addr: memory.start as u64,
    }
}

fn log(vm: &VmFd, memory: &Memory) {
    // SAFETY: the tests access this memory only by raw pointers, so a write of the guest breaks nothing.
    unsafe { vm.set_user_memory_region(logged(memory)).unwrap() };
}

fn run_again(guest: &mut Guest) {
    start_at_code(&guest.vcpu);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
}

#[test]
fn with_manual_protection_only_clearing_takes_pages_out() {
    let mut guest = Guest::with(WRITE_AND_HALT, |vm| {
        enable(vm, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, 1).unwrap();
    });
    log(&guest.vm, &guest.memory);
    run_again(&mut guest);
    let written = |guest: &Guest| guest.vm.get_dirty_log(0, MEMORY).unwrap()[0];
    assert_eq!(written(&guest), FETCHED | WRITTEN);
    assert_eq!(
        written(&guest),
        FETCHED | WRITTEN,
        "looking changes nothing"
    );
    guest.vm.clear_dirty_log(0, 0, 4, &[1 << 2]).unwrap();
    assert_eq!(written(&guest), FETCHED | WRITTEN, "another page was named");
    guest.vm.clear_dirty_log(0, 0, 4, &[WRITTEN]).unwrap();
    assert_eq!(written(&guest), FETCHED);
    guest.vm.clear_dirty_log(0, 0, 4, &[FETCHED]).unwrap();
    assert_eq!(written(&guest), 0);
    run_again(&mut guest);
    assert_eq!(written(&guest), WRITTEN, "the code was mapped still");
}

#[test]
fn a_log_may_begin_with_all_pages() {
    let mut guest = Guest::with(WRITE_AND_HALT, |vm| {
        enable(vm, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, 3).unwrap();
    });
    log(&guest.vm, &guest.memory);
    assert_eq!(guest.vm.get_dirty_log(0, MEMORY).unwrap(), [0b1111]);
    guest.vm.clear_dirty_log(0, 0, 4, &[u64::MAX]).unwrap();
    assert_eq!(guest.vm.get_dirty_log(0, MEMORY).unwrap(), [0]);
    run_again(&mut guest);
    assert_eq!(
        guest.vm.get_dirty_log(0, MEMORY).unwrap(),
        [FETCHED | WRITTEN]
    );
}

#[test]
fn manual_protection_has_two_options() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let cap = KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2;
    assert_eq!(vm.check_extension_raw(cap.into()), 3);
    assert_eq!(enable(&vm, cap, 2), Err(libc::EINVAL), "not alone");
    assert_eq!(enable(&vm, cap, 4), Err(libc::EINVAL));
    assert_eq!(enable(&vm, cap, 1 << 40), Err(libc::EINVAL));
    for options in [1, 3, 0] {
        enable(&vm, cap, options).unwrap();
    }
}

#[test]
fn wrong_ranges_of_a_log_are_refused() {
    let guest = Guest::new(WRITE_AND_HALT);
    let clear = |slot, first, pages| {
        (guest.vm.clear_dirty_log(slot, first, pages, &[u64::MAX])).map_err(|e| e.errno())
    };
    assert_eq!(clear(0, 0, 4), Err(libc::ENOENT), "not logged");
    assert_eq!(clear(7, 0, 4), Err(libc::ENOENT), "no slot");
    log(&guest.vm, &guest.memory);
    assert_eq!(clear(0, 0, 4), Ok(()));
    assert_eq!(clear(0, 0, 0), Ok(()), "nothing to do");
    assert_eq!(clear(0, 32, 1), Err(libc::EINVAL), "not at a word");
    assert_eq!(clear(0, 0, 3), Err(libc::EINVAL), "ends inside a word");
    assert_eq!(clear(0, 0, 64), Err(libc::EINVAL), "longer than the slot");
    assert_eq!(clear(0, 64, 4), Err(libc::EINVAL), "behind the slot");
    assert_eq!(clear(0, u64::MAX - 63, 64), Err(libc::EINVAL));
    assert_eq!(clear(1 << 16, 0, 4), Err(libc::ENOENT), "no slot in SMM's");
    assert_eq!(clear(2 << 16, 0, 4), Err(libc::EINVAL), "address space");
    assert_eq!(clear(32765, 0, 4), Err(libc::EINVAL), "slot id");
}

#[test]
fn what_the_client_writes_is_marked_when_it_says_so() {
    let guest = Guest::new(WRITE_AND_HALT);
    let mark = |space, start, len| (guest.vm.mark_dirty(space, start, len)).map_err(|e| e.errno());
    assert_eq!(mark(0, 0, 1), Ok(()), "no log");
    log(&guest.vm, &guest.memory);
    let marked = |page: u64| guest.vm.is_marked_dirty(0, page << 12).unwrap();
    for (start, len, pages) in [
        (0x1fff, 1, 0b0010),
        (0x1fff, 2, 0b0110),
        (0x2000, 0x1000, 0b0100),
        (0x1000, 0, 0),
        (0x2001, 1 << 40, 0b1100),
    ] {
        assert_eq!(mark(0, start, len), Ok(()));
        assert!((0..4).all(|page| marked(page) == (pages >> page & 1 != 0)));
        assert_eq!(guest.vm.get_dirty_log(0, MEMORY).unwrap(), [pages]);
    }
    assert_eq!(mark(0, u64::MAX, 1), Ok(()), "no slot");
    assert_eq!(mark(0, u64::MAX, 2), Err(libc::EINVAL));
    assert_eq!(mark(2, 0, 1), Err(libc::EINVAL), "address space");
    assert_eq!(guest.vm.get_dirty_log(0, MEMORY).unwrap(), [0]);
}

#[test]
fn a_log_that_cannot_be_given_away_is_not_taken() {
    let system = Object::system();
    let vm = create(&system, KVM_CREATE_VM, 0).0;
    let memory = Memory::new(MEMORY);
    memory.write(CODE, WRITE_AND_HALT);
    let region = logged(&memory);
    vm.ioctl(KVM_SET_USER_MEMORY_REGION, &raw const region as u64)
        .unwrap();
    let Object::Vcpu(vcpu) = create(&vm, KVM_CREATE_VCPU, 0).0 else {
        panic!()
    };
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs).unwrap();
    let regs = kvm_regs {
        rip: CODE,
        rflags: 2,
        ..Default::default()
    };
    vcpu.set_regs(&regs).unwrap();
    vcpu.run().unwrap();

    let mut bitmap = [0u64; 1];
    let mut log = kvm_dirty_log::default();
    let mut get = |to: *mut u64| {
        log.__bindgen_anon_1.dirty_bitmap = to.cast();
        let answer = vm.ioctl(KVM_GET_DIRTY_LOG, &raw const log as u64);
        answer.map(|_| ()).map_err(|error| error.errno())
    };
    assert_eq!(get(std::ptr::null_mut()), Err(libc::EFAULT));
    assert_eq!(get(&raw mut bitmap[0]), Ok(()));
    assert_eq!(bitmap, [FETCHED | WRITTEN], "nothing was lost");

    let mut clear = kvm_clear_dirty_log {
        num_pages: 4,
        ..Default::default()
    };
    clear.__bindgen_anon_1.dirty_bitmap = 8 as *mut _;
    let refused = vm.ioctl(KVM_CLEAR_DIRTY_LOG, &raw const clear as u64);
    assert_eq!(refused.unwrap_err().errno(), libc::EFAULT);
    for request in [KVM_GET_DIRTY_LOG, KVM_CLEAR_DIRTY_LOG] {
        assert_eq!(vm.ioctl(request, 8).unwrap_err().errno(), libc::EFAULT);
    }
}

#[test]
fn rings_have_sizes_that_kvm_allows() {
    let kvm = Kvm::new().unwrap();
    for cap in [KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL] {
        let vm = kvm.create_vm().unwrap();
        assert_eq!(vm.check_extension_raw(cap.into()), 65536 * 16);
        for size in [0, 16, 2048, 3 * 4096] {
            assert_eq!(enable(&vm, cap, size), Err(libc::EINVAL), "{size}");
        }
        assert_eq!(enable(&vm, cap, 2 << 20), Err(libc::E2BIG));
        assert_eq!(vm.reset_dirty_rings().unwrap_err().errno(), libc::EINVAL);
        enable(&vm, cap, 1 << 20).unwrap();
        assert_eq!(enable(&vm, cap, 4096), Err(libc::EINVAL), "only once");
        assert_eq!(vm.get_dirty_log(0, 0).unwrap_err().errno(), libc::ENXIO);
        let cleared = vm.clear_dirty_log(0, 0, 64, &[0]);
        assert_eq!(cleared.unwrap_err().errno(), libc::ENXIO);
        assert_eq!(vm.reset_dirty_rings().unwrap(), 0);
    }
    let vm = kvm.create_vm().unwrap();
    let _vcpu = vm.create_vcpu(0).unwrap();
    let late = enable(&vm, KVM_CAP_DIRTY_LOG_RING, 4096);
    assert_eq!(late, Err(libc::EINVAL));
}

#[test]
fn a_full_ring_stops_the_guest_until_it_is_collected() {
    const RING: usize = 4096;
    const FIRST: u64 = 0x1_0000;
    const PAGES: u64 = 240;
    // mov ax,0x1000; 1: mov ds,ax; mov [0],al; add ax,0x100; jnc 1b; hlt
    let code = [
        0xb8, 0x00, 0x10, 0x8e, 0xd8, 0xa2, 0, 0, 0x05, 0x00, 0x01, 0x73, 0xf6, 0xf4,
    ];
    let logged = Memory::new(PAGES as usize * 4096);
    let mut guest = Guest::with(&code, |vm| {
        enable(vm, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, RING as u64).unwrap();
        let region = kvm_userspace_memory_region {
            slot: 5,
            flags: KVM_MEM_LOG_DIRTY_PAGES,
            guest_phys_addr: FIRST,
            memory_size: PAGES * 4096,
            userspace_addr: logged.start as u64,
        };
        // SAFETY: the tests access this memory only by raw pointers, so a write of the guest breaks nothing.
        unsafe { vm.set_user_memory_region(region).unwrap() };
    });
    // SAFETY: the call makes a new mapping of the vCPU's descriptor, which has the ring at this offset.
    let entries = unsafe {
        let mapped = libc::mmap(
            std::ptr::null_mut(),
            RING,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            guest.vcpu.as_raw_fd(),
            64 * 4096,
        );
        assert_ne!(mapped, libc::MAP_FAILED);
        std::slice::from_raw_parts_mut(mapped.cast::<kvm_dirty_gfn>(), RING / 16)
    };
    let full = KVM_EXIT_DIRTY_RING_FULL;
    for _ in 0..2 {
        let exit = guest.vcpu.run().unwrap();
        assert!(matches!(exit, VcpuExit::Unsupported(reason) if reason == full));
    }
    let soft_limit = entries.len() - 64;
    for (page, entry) in entries[..soft_limit].iter_mut().enumerate() {
        let found = (entry.flags, entry.slot, entry.offset);
        assert_eq!(found, (DIRTY, 5, page as u64));
        entry.flags = RESET;
    }
    assert_eq!(entries[soft_limit].flags, 0);
    assert_eq!(guest.vm.reset_dirty_rings().unwrap() as usize, soft_limit);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    let last = &entries[PAGES as usize - 1];
    assert_eq!((last.flags, last.offset), (DIRTY, PAGES - 1));
    assert_eq!(entries[0].flags, 0, "reset");
}

#[test]
fn the_client_cannot_take_the_ring_away() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    enable(&vm, KVM_CAP_DIRTY_LOG_RING, 4096).unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    for size in [0, 1 << 20] {
        // SAFETY: the call takes no pointer, and is refused.
        let answer = unsafe { libc::ftruncate(vcpu.as_raw_fd(), size) };
        assert_eq!(answer, -1);
    }
}
