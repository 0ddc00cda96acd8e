//! Tests private memory and the exits for it, by the Rust API.

use crate::common::*;
use kvm_bindings::*;
use slat_kvm::guest_memfd::{FLAG_INIT_SHARED, FLAG_MMAP};
use slat_kvm::{Cap, GuestMemfdFd, VcpuExit, VmFd, caps};
use std::os::fd::AsRawFd;

const PAGES: u64 = 4;
const KEEP_SIZE: i32 = libc::FALLOC_FL_KEEP_SIZE;
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP_SIZE;

fn protected(code: &[u8]) -> Guest {
    Guest::of_type(KVM_X86_SW_PROTECTED_VM, code, |_| {})
}

fn convert(vm: &VmFd, address: u64, private: bool) -> Result<(), i32> {
    let attributes = kvm_memory_attributes {
        address,
        size: 4096,
        attributes: if private {
            KVM_MEMORY_ATTRIBUTE_PRIVATE.into()
        } else {
            0
        },
        flags: 0,
    };
    vm.set_memory_attributes(attributes)
        .map_err(|error| error.errno())
}

fn create(vm: &VmFd, size: u64) -> Result<GuestMemfdFd, i32> {
    let args = kvm_create_guest_memfd {
        size,
        ..Default::default()
    };
    let fd = vm.create_guest_memfd(args).map_err(|error| error.errno())?;
    // SAFETY: KVM has created the descriptor just now, and nothing else owns it.
    Ok(unsafe { GuestMemfdFd::from_raw(fd) }.unwrap())
}

/// Returns a slot at [`DEVICE`] with shared and private memory.
fn private_region(memory: &Memory, fd: i32) -> kvm_userspace_memory_region2 {
    kvm_userspace_memory_region2 {
        slot: 1,
        flags: KVM_MEM_GUEST_MEMFD,
        guest_phys_addr: DEVICE,
        memory_size: PAGES * 4096,
        userspace_addr: memory.start as u64,
        guest_memfd: fd as u32,
        ..Default::default()
    }
}

fn set(vm: &VmFd, region: kvm_userspace_memory_region2) -> Result<(), i32> {
    // SAFETY: the tests access this memory only by raw pointers, so a write of the guest breaks nothing.
    unsafe { vm.set_user_memory_region2(region) }.map_err(|error| error.errno())
}

/// The guest's code. It repeatedly reads a byte from a port, stores it at DEVICE unless it is 0, and writes the byte
/// at DEVICE to a port.
const STORE_AND_TELL: &[u8] = &[
    0xe4, 0x10, 0x84, 0xc0, 0x74, 0x03, 0xa2, 0x00, 0x80, 0xa0, 0x00, 0x80, 0xe6, 0x11, 0xeb, 0xf0,
];

/// Runs one round of [`STORE_AND_TELL`]. Returns the byte at DEVICE. `Err`: the address of a memory fault.
fn round(guest: &mut Guest, store: u8) -> Result<u8, u64> {
    loop {
        match guest.vcpu.run().unwrap() {
            VcpuExit::IoIn(0x10, data) => data[0] = store,
            VcpuExit::IoOut(0x11, data) => return Ok(data[0]),
            VcpuExit::MemoryFault { flags, gpa, size } => {
                assert_eq!((flags, size), (KVM_MEMORY_EXIT_FLAG_PRIVATE.into(), 4096));
                return Err(gpa);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn private_memory_is_the_guests_alone_until_it_is_given_back() {
    let mut guest = protected(STORE_AND_TELL);
    let shared = Memory::new((PAGES * 4096) as usize);
    let private = create(&guest.vm, PAGES * 4096).unwrap();
    set(&guest.vm, private_region(&shared, private.as_raw_fd())).unwrap();
    // SAFETY: the address is within the mapping.
    let host_sees = || unsafe { shared.start.read_volatile() };
    assert_eq!(round(&mut guest, 5), Ok(5));
    assert_eq!(host_sees(), 5);
    convert(&guest.vm, DEVICE, true).unwrap();
    assert_eq!(round(&mut guest, 0), Ok(0));
    assert_eq!(round(&mut guest, 6), Ok(6));
    assert_eq!(host_sees(), 5);
    convert(&guest.vm, DEVICE, false).unwrap();
    assert_eq!(round(&mut guest, 0), Ok(5));
    convert(&guest.vm, DEVICE, true).unwrap();
    assert_eq!(round(&mut guest, 0), Ok(6));
    // Punching a hole beside the page does not change the page. Punching a hole in it makes it zero.
    private.fallocate(PUNCH_HOLE, 4096, 4096).unwrap();
    assert_eq!(round(&mut guest, 0), Ok(6));
    private.fallocate(PUNCH_HOLE, 0, 8192).unwrap();
    assert_eq!(round(&mut guest, 0), Ok(0));
    assert_eq!(round(&mut guest, 7), Ok(7));
    // Dropping the last descriptor releases the memory. No later mapping gets its addresses.
    drop(private);
    let _others: Vec<_> = (0..8)
        .map(|_| Memory::new((PAGES * 4096) as usize))
        .collect();
    assert_eq!(round(&mut guest, 0), Err(DEVICE));
    convert(&guest.vm, DEVICE, false).unwrap();
    assert_eq!(round(&mut guest, 0), Ok(5));
}

#[test]
fn a_private_page_without_private_memory_is_a_memory_fault_that_can_be_repaired() {
    let mut guest = protected(STORE_AND_TELL);
    convert(&guest.vm, DEVICE, true).unwrap();
    for _ in 0..2 {
        assert_eq!(round(&mut guest, 9), Err(DEVICE));
    }
    let shared = Memory::new((PAGES * 4096) as usize);
    let private = create(&guest.vm, PAGES * 4096).unwrap();
    let region = private_region(&shared, private.as_raw_fd());
    set(
        &guest.vm,
        kvm_userspace_memory_region2 { flags: 0, ..region },
    )
    .unwrap();
    assert_eq!(round(&mut guest, 9), Err(DEVICE));
    set(
        &guest.vm,
        kvm_userspace_memory_region2 {
            flags: 0,
            memory_size: 0,
            ..region
        },
    )
    .unwrap();
    set(&guest.vm, region).unwrap();
    assert_eq!(round(&mut guest, 9), Ok(9));
}

#[test]
fn what_a_guest_memfd_is_not_for_is_refused() {
    let guest = protected(SPIN);
    let vm = &guest.vm;
    let einval = Err(libc::EINVAL);
    for size in [0, 1, 4095, 4097, 1 << 63] {
        assert_eq!(create(vm, size).err(), Some(libc::EINVAL), "size {size:#x}");
    }
    let private = create(vm, PAGES * 4096).unwrap();
    let fallocate = |mode, offset, len| {
        private
            .fallocate(mode, offset, len)
            .map_err(|error| error.errno())
    };
    for (offset, len) in [(0, 0), (1, 4096), (0, 4095), (-4096, 4096), (0, -4096)] {
        assert_eq!(fallocate(PUNCH_HOLE, offset, len), einval);
        assert_eq!(fallocate(KEEP_SIZE, offset, len), einval);
    }
    assert_eq!(fallocate(KEEP_SIZE, 0, 4096 * PAGES as i64), Ok(()));
    assert_eq!(fallocate(KEEP_SIZE, 4096, 4096 * PAGES as i64), einval);
    assert_eq!(fallocate(PUNCH_HOLE, 4096, 4096 * PAGES as i64), Ok(()));
    assert_eq!(fallocate(0, 0, 4096), Err(libc::EOPNOTSUPP));
    let zero = KEEP_SIZE | libc::FALLOC_FL_ZERO_RANGE;
    assert_eq!(fallocate(zero, 0, 4096), Err(libc::EOPNOTSUPP));
    // The kernel itself refuses access through the descriptor.
    let fd = private.as_raw_fd();
    let mut byte = [0u8];
    // SAFETY: the calls access only the buffer `byte`, and the mapping would be at an address of the kernel's choice.
    unsafe {
        assert_eq!(libc::read(fd, byte.as_mut_ptr().cast(), 1), -1);
        assert_eq!(libc::write(fd, byte.as_ptr().cast(), 1), -1);
        let mapped = libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ,
            libc::MAP_SHARED,
            fd,
            0,
        );
        assert_eq!(mapped, libc::MAP_FAILED);
    }

    let shared = Memory::new((2 * PAGES * 4096) as usize);
    let region = private_region(&shared, fd);
    let refused = |change: &dyn Fn(&mut kvm_userspace_memory_region2), errno| {
        let mut region = region;
        change(&mut region);
        assert_eq!(set(vm, region), Err(errno));
    };
    refused(&|r| r.flags |= KVM_MEM_READONLY, libc::EINVAL);
    refused(&|r| r.flags |= KVM_MEM_LOG_DIRTY_PAGES, libc::EINVAL);
    refused(&|r| r.guest_memfd_offset = 1, libc::EINVAL);
    refused(&|r| r.guest_memfd_offset = 4096, libc::EINVAL);
    refused(&|r| r.guest_memfd_offset = u64::MAX - 4095, libc::EINVAL);
    refused(&|r| r.guest_memfd = vm.as_raw_fd() as u32, libc::EINVAL);
    refused(&|r| r.guest_memfd = u32::MAX, libc::EBADF);
    let other = protected(SPIN);
    let foreign = create(&other.vm, PAGES * 4096).unwrap();
    refused(
        &|r| r.guest_memfd = foreign.as_raw_fd() as u32,
        libc::EINVAL,
    );
    set(vm, region).unwrap();
    // Another slot cannot use the same part, and the slot cannot be changed.
    refused(
        &|r| (r.slot, r.guest_phys_addr) = (2, 0x10_0000),
        libc::EEXIST,
    );
    refused(
        &|r| (r.slot, r.guest_phys_addr) = (2, DEVICE + 4096),
        libc::EEXIST,
    );
    refused(&|r| r.guest_phys_addr = 0x10_0000, libc::EINVAL);
    refused(&|r| r.flags = 0, libc::EINVAL);
    let gone = kvm_userspace_memory_region2 {
        memory_size: 0,
        ..region
    };
    set(vm, gone).unwrap();
    set(vm, region).unwrap();
}

#[test]
fn a_vm_of_the_default_type_has_files_and_no_private_memory() {
    let mut guest = Guest::new(STORE_AND_TELL);
    let vm = &guest.vm;
    assert_eq!(convert(vm, DATA, true), Err(libc::EINVAL));
    assert_eq!(convert(vm, DATA, false), Ok(()));
    assert!(vm.check_extension(Cap::GuestMemfd) && !vm.check_extension(Cap::MemoryAttributes));
    assert!(guest.kvm.check_extension(Cap::GuestMemfd));
    // The slot has a file, but does not use it, because the VM has no private memory.
    let shared = Memory::new((PAGES * 4096) as usize);
    let private = create(vm, PAGES * 4096).unwrap();
    set(vm, private_region(&shared, private.as_raw_fd())).unwrap();
    assert_eq!(round(&mut guest, 5), Ok(5));
    // SAFETY: the address is within the mapping.
    assert_eq!(unsafe { shared.start.read_volatile() }, 5);
    drop(private);
    assert_eq!(round(&mut guest, 0), Ok(5));
    let protected = protected(SPIN).vm;
    assert!(protected.check_extension(Cap::GuestMemfd));
    let set = |address, size, attributes, flags| {
        let attributes = kvm_memory_attributes {
            address,
            size,
            attributes,
            flags,
        };
        protected
            .set_memory_attributes(attributes)
            .map_err(|error| error.errno())
    };
    assert_eq!(set(0, 4096, 8, 0), Ok(()));
    for (address, size, attributes, flags) in [
        (0, 4096, 1, 0),
        (0, 4096, 8, 1),
        (0, 0, 8, 0),
        (1, 4096, 8, 0),
        (0, 4095, 8, 0),
        (u64::MAX - 4095, 8192, 8, 0),
    ] {
        assert_eq!(set(address, size, attributes, flags), Err(libc::EINVAL));
    }
}

#[test]
fn memory_that_can_be_private_may_be_mapped_and_is_never_shared_from_the_start() {
    let mut guest = protected(STORE_AND_TELL);
    let flags = caps::KVM_CAP_GUEST_MEMFD_FLAGS.into();
    assert_eq!(guest.vm.check_extension_raw(flags) as u64, FLAG_MMAP);
    assert_eq!(guest.kvm.check_extension_raw(flags), 3);
    let create = |flags| {
        let args = kvm_create_guest_memfd {
            size: PAGES * 4096,
            flags,
            ..Default::default()
        };
        let fd = guest.vm.create_guest_memfd(args);
        // SAFETY: KVM has created the descriptor just now, and nothing else owns it.
        fd.map(|fd| unsafe { GuestMemfdFd::from_raw(fd) }.unwrap())
            .map_err(|error| error.errno())
    };
    for flags in [FLAG_INIT_SHARED, FLAG_INIT_SHARED | FLAG_MMAP] {
        assert_eq!(create(flags).err(), Some(libc::EINVAL));
    }
    // The file is the slot's only memory, whatever the attributes are. So shared and private accesses reach the same
    // page.
    let (file, shared) = (
        create(FLAG_MMAP).unwrap(),
        Memory::new((PAGES * 4096) as usize),
    );
    set(&guest.vm, private_region(&shared, file.as_raw_fd())).unwrap();
    assert_eq!(round(&mut guest, 5), Ok(5));
    convert(&guest.vm, DEVICE, true).unwrap();
    assert_eq!(round(&mut guest, 0), Ok(5));
    assert_eq!(round(&mut guest, 6), Ok(6));
    convert(&guest.vm, DEVICE, false).unwrap();
    assert_eq!(round(&mut guest, 0), Ok(6));
    file.fallocate(PUNCH_HOLE, 0, 4096).unwrap();
    assert_eq!(round(&mut guest, 0), Ok(0));
    // SAFETY: the address is within the mapping.
    assert_eq!(unsafe { shared.start.read_volatile() }, 0);
    // Without the file, the slot has no memory. The exit tells the client whether the page is private.
    drop(file);
    for (private, flags) in [(false, 0), (true, KVM_MEMORY_EXIT_FLAG_PRIVATE.into())] {
        convert(&guest.vm, DEVICE, private).unwrap();
        let fault = |exit: VcpuExit<'_>| match exit {
            VcpuExit::MemoryFault { flags, gpa, size } => (flags, gpa, size),
            other => panic!("{other:?}"),
        };
        loop {
            match guest.vcpu.run().unwrap() {
                VcpuExit::IoIn(0x10, data) => data[0] = 0,
                exit => {
                    assert_eq!(fault(exit), (flags, DEVICE, 4096));
                    break;
                }
            }
        }
        let mut range = kvm_pre_fault_memory {
            gpa: DEVICE,
            size: 4096,
            ..Default::default()
        };
        let error = guest.vcpu.pre_fault_memory(&mut range).unwrap_err();
        assert_eq!((error.errno(), range.size), (libc::EFAULT, 4096));
    }
}

#[test]
fn the_guest_asks_for_a_conversion_by_a_hypercall_that_the_client_answers() {
    // mov eax,12; vmcall; hlt
    let code = [0x66, 0xb8, 12, 0, 0, 0, 0x0f, 0x01, 0xc1, 0xf4];
    let mut guest = Guest::new(&code);
    let ask = |guest: &mut Guest, pages: u64| {
        start_at_code(&guest.vcpu);
        let mut regs = guest.vcpu.get_regs().unwrap();
        (regs.rbx, regs.rcx, regs.rdx) = (DATA, pages, 3);
        guest.vcpu.set_regs(&regs).unwrap();
    };
    let answered = |guest: &mut Guest| {
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        guest.vcpu.get_regs().unwrap().rax as u32 as i32
    };
    const ENOSYS: i32 = 1000;
    ask(&mut guest, 1);
    assert_eq!(answered(&mut guest), -ENOSYS);
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_EXIT_HYPERCALL,
        args: [1 << 11, 0, 0, 0],
        ..Default::default()
    };
    assert_eq!(guest.vm.enable_cap(&cap).unwrap_err().errno(), libc::EINVAL);
    cap.args[0] = guest.vm.check_extension_int(Cap::ExitHypercall) as u64;
    guest.vm.enable_cap(&cap).unwrap();
    ask(&mut guest, 0);
    assert_eq!(answered(&mut guest), -libc::EINVAL);
    ask(&mut guest, 1);
    let VcpuExit::Hypercall(hypercall) = guest.vcpu.run().unwrap() else {
        panic!()
    };
    assert_eq!((hypercall.nr, hypercall.args), (12, [DATA, 1, 3, 0, 0, 0]));
    assert_eq!((*hypercall.ret, hypercall.longmode), (0, 0));
    *hypercall.ret = 77;
    assert_eq!(guest.vcpu.get_regs().unwrap().rip, CODE + 6);
    assert_eq!(answered(&mut guest), 77);
    // If the client changes RIP, it has finished the hypercall itself.
    ask(&mut guest, 1);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hypercall(_)));
    let mut regs = guest.vcpu.get_regs().unwrap();
    (regs.rip, regs.rax) = (CODE + 9, 5);
    guest.vcpu.set_regs(&regs).unwrap();
    assert_eq!(answered(&mut guest), 5);
}
