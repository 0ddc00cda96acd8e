//! VMs and their memory.

use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_kvm::caps::{KVM_CAP_GUEST_MEMFD_FLAGS, KVM_CAP_USERFAULT};
use slat_kvm::ioctl::{Answer, Object};
use slat_kvm::{Cap, IoEventAddress, Kvm, NoDatamatch, VmFd};
use std::fmt::Debug;
use std::os::fd::AsRawFd;
use vmm_sys_util::eventfd::EventFd;

/// Returns the bytes of `pages` of the host's pages, in which the API counts.
fn pages(pages: u64) -> u64 {
    pages * slat_host::page_size() as u64
}

fn errno<T: Debug>(result: Result<T, slat_kvm::Error>) -> i32 {
    result.unwrap_err().errno()
}

/// Memory of this process, mapped until it is dropped.
struct Memory {
    start: u64,
    len: u64,
}

impl Memory {
    fn new(len: u64) -> Self {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len as usize, rights, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let start = start as u64;
        Memory { start, len }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        unsafe { libc::munmap(self.start as *mut _, self.len as usize) };
    }
}

/// Sets memslot `slot`.
fn set(
    vm: &VmFd,
    slot: u32,
    flags: u32,
    (gpa, size): (u64, u64),
    backing: u64,
) -> Result<(), slat_kvm::Error> {
    let region = kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: gpa,
        memory_size: size,
        userspace_addr: backing,
    };
    // SAFETY: no test relies on the memory's contents.
    unsafe { vm.set_user_memory_region(region) }
}

/// Returns a VM of the ioctl interface.
pub fn vm_object() -> Object {
    match Object::system().ioctl(KVM_CREATE_VM, 0).unwrap() {
        Answer::Created(vm, _) => vm,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_vm_has_the_ipa_bits_that_its_type_names() {
    let kvm = Kvm::new().unwrap();
    assert_eq!(kvm.get_api_version(), 12);
    let limit = kvm.get_host_ipa_limit() as u64;
    assert_eq!(limit, 48);
    assert_eq!(kvm.check_extension_int(Cap::ArmVmIPASize), 48);
    for bits in [0, 32, 36, 40, 47, limit] {
        kvm.create_vm_with_type(bits).unwrap();
    }
    let protected = 1 << 31;
    for refused in [
        1,
        31,
        limit + 1,
        64,
        255,
        256 | 40,
        protected,
        1 << 32,
        u64::MAX,
    ] {
        let result = kvm.create_vm_with_type(refused);
        assert_eq!(errno(result), libc::EINVAL, "{refused:#x}");
    }
    assert_eq!(
        kvm.get_vcpu_mmap_size().unwrap() as u64,
        pages(2),
        "kvm_run, and the ring of coalesced I/O"
    );
}

#[test]
fn memslots_end_where_the_guests_addresses_end() {
    let kvm = Kvm::new().unwrap();
    let memory = Memory::new(pages(4));
    for (bits, kind) in [(40, 0), (32, 32), (36, 36), (48, 48)] {
        let vm = kvm.create_vm_with_type(kind).unwrap();
        let end = 1 << bits;
        let beyond = set(&vm, 0, 0, (end - pages(1), pages(2)), memory.start);
        assert_eq!(errno(beyond), libc::EFAULT, "{bits} bits");
        let unaligned = set(&vm, 0, 0, (end, pages(2)), memory.start + 1);
        assert_eq!(errno(unaligned), libc::EINVAL, "KVM's order of checks");
        set(&vm, 0, 0, (end - pages(2), pages(2)), memory.start).unwrap();
        let moved = set(&vm, 0, 0, (end - pages(1), pages(2)), memory.start);
        assert_eq!(errno(moved), libc::EFAULT, "{bits} bits");
        set(&vm, 0, 0, (0, 0), 0).unwrap();
    }
}

#[test]
fn memslots_are_created_moved_changed_and_deleted() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let memory = Memory::new(pages(8));
    let whole = (0x4000_0000, pages(4));
    set(&vm, 0, 0, whole, memory.start).unwrap();
    let invalid = [
        ((whole.0 + 1, pages(1)), memory.start),
        ((whole.0, pages(1) - 1), memory.start),
        ((whole.0, pages(1)), memory.start + 0x800),
        ((whole.0, pages(1)), 1 << 63),
    ];
    for (range, backing) in invalid {
        assert_eq!(errno(set(&vm, 1, 0, range, backing)), libc::EINVAL);
    }
    let overlap = set(&vm, 1, 0, (whole.0 + pages(3), pages(2)), memory.start);
    assert_eq!(errno(overlap), libc::EEXIST);
    set(&vm, 1, 0, (whole.0 + pages(4), pages(2)), memory.start).unwrap();
    set(&vm, 1, 0, (whole.0 + pages(6), pages(2)), memory.start).unwrap();
    let read_only = KVM_MEM_READONLY;
    set(&vm, 2, read_only, (0, pages(1)), memory.start).unwrap();
    assert_eq!(
        errno(set(&vm, 2, 0, (0, pages(1)), memory.start)),
        libc::EINVAL
    );
    assert_eq!(
        errno(set(&vm, 3, 1 << 5, (0, pages(1)), memory.start)),
        libc::EINVAL
    );
    let other_space = 1 << 16;
    assert_eq!(
        errno(set(&vm, other_space, 0, (0, pages(1)), memory.start)),
        libc::EINVAL
    );
    set(&vm, 1, 0, (0, 0), 0).unwrap();
    assert_eq!(errno(set(&vm, 1, 0, (0, 0), 0)), libc::EINVAL);
    vm.engine().audit().unwrap();
}

#[test]
fn the_dirty_log_has_a_bit_for_each_page_of_the_host() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let memory = Memory::new(pages(70));
    let range = (0x8000_0000, pages(70));
    set(&vm, 0, 0, range, memory.start).unwrap();
    let log = || vm.get_dirty_log(0, range.1 as usize);
    assert_eq!(errno(log()), libc::ENOENT);
    set(&vm, 0, KVM_MEM_LOG_DIRTY_PAGES, range, memory.start).unwrap();
    assert_eq!(log().unwrap(), [0, 0]);
    vm.mark_dirty(0, range.0 + pages(3) - 1, 2).unwrap();
    vm.mark_dirty(0, range.0 + pages(69), 1).unwrap();
    assert!(vm.is_marked_dirty(0, range.0 + pages(3)).unwrap());
    assert!(!vm.is_marked_dirty(0, range.0 + pages(4)).unwrap());
    assert_eq!(log().unwrap(), [0b1100, 1 << 5]);
    assert_eq!(log().unwrap(), [0, 0]);
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
        ..Default::default()
    };
    cap.args[0] = KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE.into();
    vm.enable_cap(&cap).unwrap();
    vm.mark_dirty(0, range.0, 1).unwrap();
    assert_eq!((log().unwrap(), log().unwrap()), (vec![1, 0], vec![1, 0]));
    vm.clear_dirty_log(0, 0, 64, &[1]).unwrap();
    assert_eq!(log().unwrap(), [0, 0]);
}

#[test]
fn rings_need_the_order_that_their_capability_names() {
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_DIRTY_LOG_RING,
        ..Default::default()
    };
    cap.args[0] = pages(1);
    assert_eq!(vm.check_extension_raw(cap.cap.into()), 0);
    assert_eq!(errno(vm.enable_cap(&cap)), libc::EINVAL);
    cap.cap = KVM_CAP_DIRTY_LOG_RING_ACQ_REL;
    assert!(vm.check_extension_raw(cap.cap.into()) > 0);
    cap.args[0] = pages(1) / 2;
    assert_eq!(errno(vm.enable_cap(&cap)), libc::EINVAL);
    cap.args[0] = pages(1);
    vm.enable_cap(&cap).unwrap();
    assert_eq!(vm.reset_dirty_rings().unwrap(), 0);
    assert_eq!(errno(vm.get_dirty_log(0, 0)), libc::ENXIO);
}

#[test]
fn slots_take_their_memory_from_a_file_but_none_is_private() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let mmap = slat_kvm::guest_memfd::FLAG_MMAP;
    let shared = slat_kvm::guest_memfd::FLAG_INIT_SHARED;
    assert_eq!(
        vm.check_extension_raw(KVM_CAP_GUEST_MEMFD_FLAGS.into()) as u64,
        mmap | shared
    );
    let create = |size, flags| {
        vm.create_guest_memfd(kvm_create_guest_memfd {
            size,
            flags,
            ..Default::default()
        })
    };
    assert_eq!(errno(create(pages(1) / 2, mmap)), libc::EINVAL);
    let memory = Memory::new(pages(2));
    for (flags, expected) in [(mmap | shared, None), (0, Some(libc::EINVAL))] {
        let fd = create(pages(4), flags).unwrap();
        let slot = kvm_userspace_memory_region2 {
            flags: KVM_MEM_GUEST_MEMFD,
            guest_phys_addr: 0,
            memory_size: pages(2),
            userspace_addr: memory.start,
            guest_memfd_offset: pages(2),
            guest_memfd: fd as u32,
            ..Default::default()
        };
        // SAFETY: no test relies on the memory's contents.
        let set = unsafe { vm.set_user_memory_region2(slot) };
        assert_eq!(set.err().map(|error| error.errno()), expected);
        // SAFETY: the descriptor is this test's own.
        drop(unsafe { slat_kvm::GuestMemfdFd::from_raw(fd) }.unwrap());
    }
    assert_eq!(vm.check_extension_raw(KVM_CAP_MEMORY_ATTRIBUTES.into()), 0);
    let attributes = kvm_memory_attributes {
        size: pages(1),
        ..Default::default()
    };
    assert_eq!(errno(vm.set_memory_attributes(attributes)), libc::ENOTTY);
}

#[test]
fn eventfds_need_no_controller_as_far_as_no_interrupt_is_meant() {
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let at = IoEventAddress::Mmio(0x900_0000);
    vm.register_ioevent(&event, &at, NoDatamatch).unwrap();
    let again = vm.register_ioevent(&event, &at, NoDatamatch);
    assert_eq!(errno(again), libc::EEXIST);
    vm.unregister_ioevent(&event, &at, NoDatamatch).unwrap();
    vm.register_coalesced_mmio(at, 8).unwrap();
    assert_eq!(errno(vm.register_irqfd(&event, 32)), libc::EAGAIN);
    vm.unregister_irqfd(&event, 32).unwrap();
    let line = |kind: u32| errno(vm.set_irq_line(kind << KVM_ARM_IRQ_TYPE_SHIFT, true));
    assert_eq!(line(KVM_ARM_IRQ_TYPE_SPI), libc::ENXIO);
    assert_eq!(line(KVM_ARM_IRQ_TYPE_PPI), libc::ENXIO);
    assert_eq!(line(KVM_ARM_IRQ_TYPE_CPU), libc::EINVAL, "no vCPU");
    assert_eq!(line(7), libc::EINVAL);
    assert_eq!(errno(vm.signal_msi(kvm_msi::default())), libc::EINVAL);
}

#[test]
fn capabilities_are_those_that_work() {
    let kvm = Kvm::new().unwrap();
    for cap in [
        Cap::UserMemory,
        Cap::ReadonlyMem,
        Cap::OneReg,
        Cap::ArmPsci,
        Cap::ArmPsci02,
        Cap::VcpuEvents,
        Cap::MpState,
        Cap::Ioeventfd,
        Cap::SyncMmu,
        Cap::DestroyMemoryRegionWorks,
        Cap::SetGuestDebug,
        Cap::DebugHwBps,
        Cap::DebugHwWps,
    ] {
        assert!(kvm.check_extension(cap), "{cap:?}");
    }
    for cap in [Cap::ArmPmuV3, Cap::ArmSve, Cap::Hlt, Cap::ExtCpuid] {
        assert!(!kvm.check_extension(cap), "{cap:?}");
    }
    assert_eq!(kvm.get_nr_memslots(), 32764);
    assert_eq!(kvm.get_max_vcpu_id(), kvm.get_max_vcpus());
    // The posted series' number is KVM_CAP_ARM_CACHEABLE_PFNMAP_SUPPORTED in Linux.
    assert_eq!(kvm.check_extension_raw(243), 0);
    assert_eq!(kvm.check_extension_raw(KVM_CAP_USERFAULT.into()), 0);
}

#[test]
fn statistics_describe_a_vm() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let memory = Memory::new(pages(1));
    set(&vm, 0, 0, (0, pages(1)), memory.start).unwrap();
    let stats = vm.get_stats_fd().unwrap();
    let mut header = [0; 24];
    assert_eq!(stats.read_at(&mut header, 0).unwrap(), 24);
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    let (name_size, count, id, data) = (word(4), word(8), word(12), word(20));
    let mut name = vec![0; name_size as usize];
    stats.read_at(&mut name, id.into()).unwrap();
    assert!(name.starts_with(format!("kvm-{}\0", std::process::id()).as_bytes()));
    let values = stats.values().unwrap();
    assert_eq!(values.len(), count as usize);
    assert!(data > count * name_size);
    let of = |name: &str| values.iter().find(|(known, _)| *known == name).unwrap();
    assert_eq!(of("slot_changes").1, [1]);
    assert_eq!(of("pages_4k").1, [0]);
    assert!(values.iter().any(|(name, _)| *name == "remote_tlb_flush"));
}

#[test]
fn a_client_learns_for_which_target_to_initialise_vcpus() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let mut init = kvm_vcpu_init {
        target: 99,
        features: [u32::MAX; 7],
    };
    vm.get_preferred_target(&mut init).unwrap();
    assert_eq!(
        (init.target, init.features),
        (KVM_ARM_TARGET_GENERIC_V8, [0; 7])
    );
    let object = vm_object();
    let mut init = kvm_vcpu_init::default();
    let to = &raw mut init as u64;
    object.ioctl(KVM_ARM_PREFERRED_TARGET, to).unwrap();
    assert_eq!(init.target, KVM_ARM_TARGET_GENERIC_V8);
    let bad = object.ioctl(KVM_ARM_PREFERRED_TARGET, 1);
    assert_eq!(errno(bad), libc::EFAULT);
}

#[test]
fn one_offset_sets_both_counters_and_keeps_them_equal() {
    let (system, vm) = (Object::system(), vm_object());
    let cap = system.ioctl(KVM_CHECK_EXTENSION, KVM_CAP_COUNTER_OFFSET.into());
    assert!(matches!(cap, Ok(Answer::Value(1))));
    let vcpus = [0, 1].map(|id| match vm.ioctl(KVM_CREATE_VCPU, id).unwrap() {
        Answer::Created(vcpu, _) => vcpu,
        other => panic!("{other:?}"),
    });
    let mut target = kvm_vcpu_init::default();
    vm.ioctl(KVM_ARM_PREFERRED_TARGET, &raw mut target as u64)
        .unwrap();
    for vcpu in &vcpus {
        vcpu.ioctl(KVM_ARM_VCPU_INIT, &raw const target as u64)
            .unwrap();
    }
    // KVM_REG_ARM_TIMER_CNT and KVM_REG_ARM_PTIMER_CNT.
    let counters = [0x6030_0000_0013_df1a, 0x6030_0000_0013_df01];
    let access = |vcpu: &Object, request, id, value: &mut u64| {
        let addr = &raw mut *value as u64;
        let register = kvm_one_reg { id, addr };
        vcpu.ioctl(request, &raw const register as u64).unwrap();
    };
    let set_offset = |counter_offset, reserved| {
        let offset = kvm_arm_counter_offset {
            counter_offset,
            reserved,
        };
        vm.ioctl(KVM_ARM_SET_COUNTER_OFFSET, &raw const offset as u64)
    };
    assert_eq!(errno(set_offset(0, 1)), libc::EINVAL);
    access(&vcpus[0], KVM_SET_ONE_REG, counters[0], &mut (1 << 60));
    set_offset(1 << 62, 0).unwrap();
    access(&vcpus[1], KVM_SET_ONE_REG, counters[1], &mut (1 << 61));
    for vcpu in &vcpus {
        for id in counters {
            let mut value = 0;
            access(vcpu, KVM_GET_ONE_REG, id, &mut value);
            assert_eq!(value >> 62, 3, "{id:#x}");
        }
    }
}

#[test]
fn requests_of_other_architectures_do_not_exist() {
    let (system, vm) = (Object::system(), vm_object());
    // KVM_GET_MSR_INDEX_LIST, KVM_GET_SUPPORTED_CPUID, KVM_X86_GET_MCE_CAP_SUPPORTED.
    for request in [0xc004_ae02, 0xc008_ae05, 0x8008_ae9d] {
        assert_eq!(
            errno(system.ioctl(request, 0)),
            libc::EINVAL,
            "{request:#x}"
        );
    }
    // KVM_SET_NR_MMU_PAGES, KVM_SET_TSS_ADDR, KVM_SET_IDENTITY_MAP_ADDR, KVM_CREATE_PIT2, KVM_SET_BOOT_CPU_ID,
    // KVM_GET_CLOCK, KVM_X86_SET_MSR_FILTER, and KVM_GET_REGS of a vCPU.
    for request in [
        0xae44,
        0xae47,
        0x4008_ae48,
        0x4040_ae77,
        0xae78,
        0x8030_ae7c,
        0x4188_aec6,
        0x8090_ae81,
    ] {
        assert_eq!(errno(vm.ioctl(request, 0)), libc::ENOTTY, "{request:#x}");
    }
    let attribute = kvm_device_attr {
        group: 99,
        ..Default::default()
    };
    let at = &raw const attribute as u64;
    for request in [KVM_HAS_DEVICE_ATTR, KVM_SET_DEVICE_ATTR] {
        assert_eq!(errno(vm.ioctl(request, at)), libc::ENXIO);
        assert_eq!(errno(system.ioctl(request, at)), libc::EINVAL);
    }
}

#[test]
fn descriptors_are_duplicated_like_the_kernels() {
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    // SAFETY: the call takes no pointer.
    let fd = unsafe { libc::dup(vm.as_raw_fd()) };
    // SAFETY: the descriptor is this test's own.
    let same = unsafe { kvm.create_vmfd_from_rawfd(fd) }.unwrap();
    let memory = Memory::new(pages(1));
    set(&vm, 0, 0, (0, pages(1)), memory.start).unwrap();
    let overlap = set(&same, 1, 0, (0, pages(1)), memory.start);
    assert_eq!(errno(overlap), libc::EEXIST);
}

/// `KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE`: 0 and the sizes of blocks, before there is a memslot.
#[test]
fn a_client_chooses_how_huge_leaves_are_split_eagerly() {
    let kvm = Kvm::new().unwrap();
    let sizes = kvm.check_extension_raw(KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES.into()) as u64;
    let page = pages(1);
    let entries = page / 8;
    let least = page | (page * entries);
    assert_eq!(sizes & least, least);
    assert_eq!(sizes & (page - 1), 0);
    let vm = kvm.create_vm().unwrap();
    let set_chunk = |bytes| {
        vm.enable_cap(&kvm_enable_cap {
            cap: KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE,
            args: [bytes, 0, 0, 0],
            ..Default::default()
        })
    };
    let chunk = || vm.check_extension_raw(KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE.into()) as u64;
    assert!(chunk() > 0, "the policy of a new VM");
    for size in [0, page, page * entries] {
        set_chunk(size).unwrap();
        assert_eq!(chunk(), size);
    }
    for size in [1, page / 2, 2 * page, page | (page * entries), 1 << 63] {
        assert_eq!(errno(set_chunk(size)), libc::EINVAL, "{size:#x}");
    }
    set_chunk(0).unwrap();
    let memory = Memory::new(pages(16));
    set(&vm, 0, 0, (0, pages(16)), memory.start).unwrap();
    assert_eq!(errno(set_chunk(page)), libc::EINVAL, "there is a memslot");
    assert_eq!(chunk(), 0);
}
