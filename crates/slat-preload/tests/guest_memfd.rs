//! Tests guest_memfds as a client sees them: which of them can be mapped, the content of a mapping, the errors of bad
//! calls, and guests whose memory is in a guest_memfd.
//!
//! Clients without a guest run under the library, and on the machine's own KVM if that KVM has the same flags. Clients
//! with a guest in real mode run under the library alone. A KVM that emulates the guest's instructions looks for the
//! guest's memory only in the client's mappings.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{on_both, on_slat};

on_both! {
    mappings_are_made_or_refused
    a_mapping_has_the_memory_that_is_shared_and_faults_elsewhere
    slots_are_bound_or_refused
    files_have_no_data_of_their_own
}

on_slat! {
    the_guest_and_the_client_use_the_same_memory
    a_hole_is_seen_by_the_guest_and_by_the_client
    the_memory_stays_as_long_as_it_is_open_or_mapped
}

mod client {
    use crate::common::guest::*;
    use crate::common::{demand_slats, is_native};
    use kvm_bindings::{
        KVM_MEM_GUEST_MEMFD, KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY,
        kvm_userspace_memory_region2,
    };
    use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    const KVM_CREATE_GUEST_MEMFD: u64 = 0xc040_aed4;
    const KVM_CHECK_EXTENSION: u64 = 0xae03;
    const KVM_CAP_GUEST_MEMFD: u64 = 234;
    const KVM_CAP_GUEST_MEMFD_FLAGS: u64 = 244;
    /// `GUEST_MEMFD_FLAG_MMAP` and `GUEST_MEMFD_FLAG_INIT_SHARED`.
    const MMAP: u64 = 1;
    const SHARED: u64 = 2;
    const RIGHTS: i32 = libc::PROT_READ | libc::PROT_WRITE;
    const KEEP_SIZE: i32 = libc::FALLOC_FL_KEEP_SIZE;
    const HOLE: i32 = KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE;

    const PAGE: usize = 4096;
    const SIZE: usize = 4 * PAGE;
    /// The guest address of slots whose memory comes from files. The address fits into 16 bits.
    const GPA: u64 = 0x8000;

    /// Whether the kernel does not have the flags, so that clients cannot run.
    fn is_too_old() -> bool {
        let kvm = Kvm::new().unwrap();
        // SAFETY: the call takes no pointer.
        let ask = |cap: u64| unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_CHECK_EXTENSION, cap) };
        demand_slats(kvm.as_raw_fd());
        let flags = ask(KVM_CAP_GUEST_MEMFD_FLAGS);
        if flags == 0 && is_native() {
            return true;
        }
        assert_eq!((ask(KVM_CAP_GUEST_MEMFD), flags), (1, 3));
        false
    }

    fn vm() -> VmFd {
        Kvm::new().unwrap().create_vm().unwrap()
    }

    fn create(vm: &VmFd, size: usize, flags: u64) -> Result<OwnedFd, i32> {
        let arguments = [size as u64, flags, 0, 0, 0, 0, 0, 0];
        // SAFETY: the call gets a struct of the size in its request number. No other code owns the new descriptor.
        unsafe {
            match libc::ioctl(vm.as_raw_fd(), KVM_CREATE_GUEST_MEMFD, &arguments) {
                -1 => Err(errno()),
                fd => Ok(OwnedFd::from_raw_fd(fd)),
            }
        }
    }

    fn map_file(
        file: &OwnedFd,
        len: usize,
        rights: i32,
        flags: i32,
        offset: i64,
    ) -> Result<*mut u8, i32> {
        let fd = file.as_raw_fd();
        // SAFETY: the call makes a new mapping at an address of the kernel's choice.
        match unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, fd, offset) } {
            libc::MAP_FAILED => Err(errno()),
            start => Ok(start.cast()),
        }
    }

    fn map_shared(file: &OwnedFd, len: usize) -> *mut u8 {
        map_file(file, len, RIGHTS, libc::MAP_SHARED, 0).unwrap()
    }

    fn unmap(start: *mut u8, len: usize) {
        // SAFETY: the client has made this mapping, and no reference into it is left.
        assert_eq!(unsafe { libc::munmap(start.cast(), len) }, 0);
    }

    fn fallocate(file: &OwnedFd, mode: i32, offset: i64, len: i64) -> Result<(), i32> {
        // SAFETY: the call takes no pointer.
        match unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) } {
            0 => Ok(()),
            _ => Err(errno()),
        }
    }

    /// Returns a slot at [`GPA`] with `len` bytes of the file, beginning at `offset`. The client does not map these
    /// bytes.
    fn region(file: &OwnedFd, offset: usize, len: usize) -> kvm_userspace_memory_region2 {
        kvm_userspace_memory_region2 {
            slot: 1,
            flags: KVM_MEM_GUEST_MEMFD,
            guest_phys_addr: GPA,
            memory_size: len as u64,
            guest_memfd: file.as_raw_fd() as u32,
            guest_memfd_offset: offset as u64,
            ..Default::default()
        }
    }

    fn set(vm: &VmFd, region: kvm_userspace_memory_region2) -> Result<(), i32> {
        // SAFETY: the guest may write all memory of the tests.
        unsafe { vm.set_user_memory_region2(region) }.map_err(|error| error.errno())
    }

    /// `in al,0x10; test al,al; jz +3; mov [0x8000],al; mov al,[0x8000]; out 0x11,al; jmp -16`
    const STORE_AND_TELL: &[u8] = &[
        0xe4, 0x10, 0x84, 0xc0, 0x74, 0x03, 0xa2, 0x00, 0x80, 0xa0, 0x00, 0x80, 0xe6, 0x11, 0xeb,
        0xf0,
    ];

    /// Makes the guest store a byte at [`GPA`], unless it is 0. Returns the byte that is there afterwards. `Err`:
    /// the errno of KVM_RUN.
    fn round(vcpu: &mut VcpuFd, store: u8) -> Result<u8, i32> {
        loop {
            match vcpu.run() {
                Ok(VcpuExit::IoIn(0x10, data)) => data[0] = store,
                Ok(VcpuExit::IoOut(0x11, data)) => return Ok(data[0]),
                Ok(VcpuExit::MemoryFault { gpa, size, flags }) => {
                    assert_eq!((gpa, size, flags), (GPA, 4096, 0));
                    return Err(libc::EFAULT);
                }
                Ok(other) => panic!("{other:?}"),
                Err(error) => return Err(error.errno()),
            }
        }
    }

    /// Returns the byte at `at`, or the signal that an access to it raises.
    fn byte(at: *const u8) -> Result<u8, i32> {
        // SAFETY: the child only accesses memory, and ends.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(at.read_volatile().into());
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            match libc::WIFEXITED(status) {
                true => Ok(libc::WEXITSTATUS(status) as u8),
                false => Err(libc::WTERMSIG(status)),
            }
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn mappings_are_made_or_refused() {
        if is_too_old() {
            return;
        }
        let vm = vm();
        for flags in 0..16 {
            let made = create(&vm, SIZE, flags).map(drop);
            let wanted = if flags < 4 { Ok(()) } else { Err(libc::EINVAL) };
            assert_eq!(made, wanted, "flags {flags}");
        }
        for flags in 0..4 {
            let file = create(&vm, SIZE, flags).unwrap();
            demand_slats(file.as_raw_fd());
            let refused =
                |rights, how, offset| map_file(&file, PAGE, rights, how, offset).unwrap_err();
            let (shared, private) = (libc::MAP_SHARED, libc::MAP_PRIVATE);
            assert_eq!(refused(RIGHTS, 0, 0), libc::EINVAL);
            assert_eq!(refused(RIGHTS, shared, 1), libc::EINVAL);
            assert_eq!(refused(RIGHTS, shared | libc::MAP_HUGETLB, 0), libc::EINVAL);
            assert_eq!(refused(RIGHTS | libc::PROT_EXEC, shared, 0), libc::EPERM);
            assert_eq!(refused(RIGHTS | libc::PROT_EXEC, private, 0), libc::EPERM);
            if flags & MMAP == 0 {
                assert_eq!(refused(RIGHTS, shared, 0), libc::ENODEV);
                assert_eq!(refused(RIGHTS, private, 0), libc::ENODEV);
                continue;
            }
            assert_eq!(refused(RIGHTS, private, 0), libc::EINVAL);
            for (how, offset) in [
                (shared, 0),
                (libc::MAP_SHARED_VALIDATE, 0),
                (shared | libc::MAP_POPULATE, 0),
                (shared, 1 << 20),
            ] {
                unmap(map_file(&file, PAGE, RIGHTS, how, offset).unwrap(), PAGE);
            }
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn a_mapping_has_the_memory_that_is_shared_and_faults_elsewhere() {
        if is_too_old() {
            return;
        }
        let vm = vm();
        let private = create(&vm, SIZE, MMAP).unwrap();
        let start = map_shared(&private, 4 * SIZE);
        for page in [0, 3, 4] {
            assert_eq!(
                byte(start.wrapping_add(page * PAGE)),
                Err(libc::SIGBUS),
                "page {page}"
            );
        }
        let file = create(&vm, SIZE, MMAP | SHARED).unwrap();
        let start = map_shared(&file, 4 * SIZE);
        // SAFETY: these are the first pages of the mapping, which no other code uses.
        unsafe { start.write_bytes(7, SIZE) };
        assert_eq!(byte(start.wrapping_add(SIZE - 1)), Ok(7));
        assert_eq!(byte(start.wrapping_add(SIZE)), Err(libc::SIGBUS));
        // Another mapping shows the same memory, and a mapping of a part shows that part.
        let part = map_file(&file, PAGE, RIGHTS, libc::MAP_SHARED, PAGE as i64).unwrap();
        // SAFETY: this is the first page of the mapping, which no other code uses.
        unsafe { part.write(9) };
        assert_eq!(byte(start.wrapping_add(PAGE)), Ok(9));
        // MADV_DONTNEED for a mapping keeps the memory's content. Removing the pages does not.
        // SAFETY: the mapping is the client's.
        let advise = |advice| unsafe { libc::madvise(start.cast(), PAGE, advice) };
        assert_eq!(advise(libc::MADV_DONTNEED), 0);
        assert_eq!(byte(start), Ok(7));
        assert_eq!(advise(libc::MADV_REMOVE), 0);
        assert_eq!(byte(start), Ok(0));
        // A guest_memfd cannot get huge pages.
        const MADV_COLLAPSE: i32 = 25;
        assert_eq!((advise(MADV_COLLAPSE), errno()), (-1, libc::EINVAL));
    }

    #[test]
    #[ignore = "runs as a client"]
    fn the_guest_and_the_client_use_the_same_memory() {
        if is_too_old() {
            return;
        }
        let (vm, mut vcpu, _) = guest(STORE_AND_TELL);
        let file = create(&vm, SIZE, MMAP | SHARED).unwrap();
        let start = map_shared(&file, SIZE);
        // Two slots use one file. The first slot's memory is in the middle of the file.
        set(&vm, region(&file, PAGE, PAGE)).unwrap();
        let other = kvm_userspace_memory_region2 {
            slot: 2,
            guest_phys_addr: 0x10_0000,
            ..region(&file, 2 * PAGE, 2 * PAGE)
        };
        set(&vm, other).unwrap();
        // SAFETY: the address is within the mapping.
        unsafe { start.add(PAGE).write(5) };
        assert_eq!(round(&mut vcpu, 0), Ok(5));
        assert_eq!(round(&mut vcpu, 6), Ok(6));
        assert_eq!(byte(start.wrapping_add(PAGE)), Ok(6));
        // The guest does not need the client's mapping.
        unmap(start, SIZE);
        assert_eq!(round(&mut vcpu, 0), Ok(6));
        // The slot is deleted and created again with another part of the file. The memory keeps its contents.
        let gone = region(&file, 0, 0);
        set(&vm, gone).unwrap();
        set(&vm, region(&file, 0, 2 * PAGE)).unwrap();
        assert_eq!(round(&mut vcpu, 0), Ok(0));
        let start = map_shared(&file, SIZE);
        assert_eq!(byte(start.wrapping_add(PAGE)), Ok(6));
        // A slot may use memory that the client cannot reach through a mapping. The guest reaches that memory
        // nevertheless.
        set(&vm, gone).unwrap();
        let private = create(&vm, SIZE, MMAP).unwrap();
        set(&vm, region(&private, 0, SIZE)).unwrap();
        assert_eq!(round(&mut vcpu, 8), Ok(8));
        assert_eq!(byte(map_shared(&private, SIZE)), Err(libc::SIGBUS));
        assert_eq!(round(&mut vcpu, 0), Ok(8));
        // If the file cannot be mapped, a slot uses the memory that the client names.
        set(&vm, gone).unwrap();
        for flags in [0, SHARED] {
            let file = create(&vm, SIZE, flags).unwrap();
            let memory = map(SIZE);
            let named = kvm_userspace_memory_region2 {
                userspace_addr: memory as u64,
                ..region(&file, 0, SIZE)
            };
            set(&vm, named).unwrap();
            assert_eq!(round(&mut vcpu, 11), Ok(11));
            assert_eq!(byte(memory), Ok(11));
            set(&vm, gone).unwrap();
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn a_hole_is_seen_by_the_guest_and_by_the_client() {
        if is_too_old() {
            return;
        }
        let (vm, mut vcpu, _) = guest(STORE_AND_TELL);
        for flags in [MMAP, MMAP | SHARED] {
            let file = create(&vm, SIZE, flags).unwrap();
            set(&vm, region(&file, 0, SIZE)).unwrap();
            let start = map_shared(&file, SIZE);
            assert_eq!(round(&mut vcpu, 6), Ok(6));
            fallocate(&file, HOLE, PAGE as i64, PAGE as i64).unwrap();
            assert_eq!(round(&mut vcpu, 0), Ok(6));
            fallocate(&file, HOLE, 0, 2 * PAGE as i64).unwrap();
            assert_eq!(round(&mut vcpu, 0), Ok(0));
            if flags & SHARED != 0 {
                assert_eq!(round(&mut vcpu, 7), Ok(7));
                fallocate(&file, HOLE, 0, SIZE as i64).unwrap();
                assert_eq!(byte(start), Ok(0));
            }
            fallocate(&file, KEEP_SIZE, 0, SIZE as i64).unwrap();
            assert_eq!(round(&mut vcpu, 9), Ok(9));
            set(&vm, region(&file, 0, 0)).unwrap();
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn the_memory_stays_as_long_as_it_is_open_or_mapped() {
        if is_too_old() {
            return;
        }
        let (vm, mut vcpu, _) = guest(STORE_AND_TELL);
        let file = create(&vm, SIZE, MMAP | SHARED).unwrap();
        set(&vm, region(&file, 0, SIZE)).unwrap();
        let duplicate = file.try_clone().unwrap();
        drop(file);
        assert_eq!(round(&mut vcpu, 5), Ok(5));
        // A mapping keeps the file open.
        let start = map_shared(&duplicate, SIZE);
        drop(duplicate);
        assert_eq!(round(&mut vcpu, 6), Ok(6));
        assert_eq!(byte(start), Ok(6));
        // Without a descriptor and a mapping, the slot has no memory. The slot can still be deleted.
        let gone = kvm_userspace_memory_region2 {
            memory_size: 0,
            slot: 1,
            ..Default::default()
        };
        set(&vm, gone).unwrap();
        let file = create(&vm, SIZE, MMAP | SHARED).unwrap();
        set(&vm, region(&file, 0, SIZE)).unwrap();
        unmap(map_shared(&file, SIZE), SIZE);
        assert_eq!(round(&mut vcpu, 7), Ok(7));
        drop(file);
        assert_eq!(round(&mut vcpu, 0), Err(libc::EFAULT));
        assert_eq!(round(&mut vcpu, 0), Err(libc::EFAULT));
        set(&vm, gone).unwrap();
    }

    #[test]
    #[ignore = "runs as a client"]
    fn slots_are_bound_or_refused() {
        if is_too_old() {
            return;
        }
        let (vm, memory) = (vm(), map(SIZE) as u64);
        let files: Vec<_> = (0..4)
            .map(|flags| create(&vm, SIZE, flags).unwrap())
            .collect();
        let foreign = self::vm();
        let foreign = create(&foreign, SIZE, MMAP).unwrap();
        let first = kvm_userspace_memory_region2 {
            userspace_addr: memory,
            ..region(&files[0], 0, SIZE)
        };
        set(&vm, first).unwrap();
        let closed = u32::MAX;
        let refused = |errno: i32, change: &dyn Fn(&mut kvm_userspace_memory_region2)| {
            let mut region = kvm_userspace_memory_region2 {
                slot: 2,
                guest_phys_addr: 0x20_0000,
                userspace_addr: memory,
                guest_memfd: closed,
                ..region(&files[1], 0, PAGE)
            };
            change(&mut region);
            assert_eq!(set(&vm, region), Err(errno), "{region:?}");
        };
        let (einval, fd) = (libc::EINVAL, |file: &OwnedFd| file.as_raw_fd() as u32);
        // Invalid addresses, sizes and flags of a slot are refused before the descriptor is checked.
        refused(libc::EBADF, &|_| {});
        refused(libc::EBADF, &|r| r.guest_phys_addr = 1 << 60);
        refused(libc::EEXIST, &|r| r.guest_phys_addr = GPA + 4096);
        refused(einval, &|r| {
            (r.slot, r.guest_phys_addr, r.memory_size) = (1, GPA, SIZE as u64);
        });
        refused(einval, &|r| r.guest_phys_addr = 1);
        refused(einval, &|r| r.guest_phys_addr = 0u64.wrapping_sub(4096) + 1);
        refused(einval, &|r| r.memory_size = 1);
        refused(einval, &|r| r.userspace_addr = 1);
        refused(einval, &|r| r.userspace_addr = u64::MAX - 4095);
        refused(einval, &|r| r.guest_memfd_offset = 1);
        refused(einval, &|r| r.guest_memfd_offset = u64::MAX - 4095);
        refused(einval, &|r| r.flags |= KVM_MEM_READONLY);
        refused(einval, &|r| r.flags |= KVM_MEM_LOG_DIRTY_PAGES);
        refused(einval, &|r| r.slot = 1 << 15);
        refused(einval, &|r| r.memory_size = 0);
        // Next, the descriptor is checked.
        refused(einval, &|r| r.guest_memfd = vm.as_raw_fd() as u32);
        refused(einval, &|r| r.guest_memfd = fd(&foreign));
        refused(einval, &|r| {
            (r.guest_memfd, r.guest_memfd_offset) = (fd(&files[1]), SIZE as u64);
        });
        refused(einval, &|r| {
            (r.guest_memfd, r.memory_size) = (fd(&files[1]), 2 * SIZE as u64);
        });
        // Next, the architecture's limit of the address is checked, and then the binding.
        refused(einval, &|r| {
            (r.guest_memfd, r.guest_phys_addr) = (fd(&files[0]), 1 << 60);
        });
        let taken = kvm_userspace_memory_region2 {
            slot: 2,
            guest_phys_addr: 0x20_0000,
            ..first
        };
        // Linux 7 reports that such a binding already exists, Linux 6 that the argument is invalid.
        let answer = set(&vm, taken).unwrap_err();
        assert!(answer == libc::EEXIST || is_native() && answer == einval);
        // A slot that is bound can only be deleted.
        assert_eq!(set(&vm, first), Err(einval));
        let plain = kvm_userspace_memory_region2 { flags: 0, ..first };
        assert_eq!(set(&vm, plain), Err(einval));
        let gone = kvm_userspace_memory_region2 {
            memory_size: 0,
            guest_memfd: closed,
            ..first
        };
        set(&vm, gone).unwrap();
        set(&vm, taken).unwrap();
    }

    #[test]
    #[ignore = "runs as a client"]
    fn files_have_no_data_of_their_own() {
        if is_too_old() {
            return;
        }
        let vm = vm();
        for flags in 0..4 {
            let file = create(&vm, SIZE, flags).unwrap();
            let fd = file.as_raw_fd();
            let mut bytes = [0u8; 8];
            let buffer = bytes.as_mut_ptr();
            // SAFETY: the calls use only a live buffer.
            unsafe {
                assert_eq!(
                    (libc::read(fd, buffer.cast(), 8), errno()),
                    (-1, libc::EINVAL)
                );
                assert_eq!(
                    (libc::write(fd, buffer.cast(), 8), errno()),
                    (-1, libc::EINVAL)
                );
                let read = libc::pread(fd, buffer.cast(), 8, 0);
                assert_eq!((read, errno()), (-1, libc::ESPIPE));
                let written = libc::pwrite(fd, buffer.cast(), 8, 0);
                assert_eq!((written, errno()), (-1, libc::ESPIPE));
                assert_eq!((libc::ftruncate(fd, 0), errno()), (-1, libc::EINVAL));
                let mut stat: libc::stat = std::mem::zeroed();
                assert_eq!(libc::fstat(fd, &mut stat), 0);
                let size = (stat.st_size, stat.st_blksize, stat.st_blocks);
                assert_eq!(size, (SIZE as i64, 4096, 0));
                assert_eq!(stat.st_mode, libc::S_IFREG | 0o600);
            }
            let len = SIZE as i64;
            for (mode, offset, len, answer) in [
                (0, 0, 4096, Err(libc::EOPNOTSUPP)),
                (KEEP_SIZE, 0, len, Ok(())),
                (KEEP_SIZE, len, 4096, Err(libc::EINVAL)),
                (KEEP_SIZE, 1, 4096, Err(libc::EINVAL)),
                (KEEP_SIZE, 0, 0, Err(libc::EINVAL)),
                (HOLE, 4096, 4096, Ok(())),
                (HOLE, 1, 4096, Err(libc::EINVAL)),
                (HOLE, len, 4096, Ok(())),
                (HOLE, 4096, i64::MAX - 4095, Err(libc::EFBIG)),
                (HOLE, 4096, i64::MAX - 4096, Err(libc::EINVAL)),
            ] {
                let got = fallocate(&file, mode, offset, len);
                assert_eq!(
                    got, answer,
                    "flags {flags} mode {mode} {offset:#x} {len:#x}"
                );
            }
        }
    }
}
