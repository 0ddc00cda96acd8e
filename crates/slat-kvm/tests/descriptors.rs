//! Tests raw descriptors of the Rust API, and devices.
#![cfg(target_arch = "x86_64")]

mod common;

use common::*;
use kvm_bindings::*;
use slat_kvm::{DeviceFd, GuestMemfdFd, Kvm, VcpuExit, VmFd};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

fn duplicate(of: &impl AsRawFd) -> RawFd {
    // SAFETY: the call takes no pointer.
    let fd = unsafe { libc::dup(of.as_raw_fd()) };
    assert!(fd >= 0);
    fd
}

fn errno<T: std::fmt::Debug>(result: Result<T, slat_kvm::Error>) -> i32 {
    result.unwrap_err().errno()
}

#[test]
fn a_duplicate_leads_to_the_same_vm() {
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    // SAFETY: the descriptor belongs to this test, which passes its ownership on.
    let same = unsafe { kvm.create_vmfd_from_rawfd(duplicate(&vm)) }.unwrap();
    assert_eq!(same.run_size(), vm.run_size());
    let vcpu = vm.create_vcpu(0).unwrap();
    assert_eq!(errno(same.create_vcpu(0)), libc::EEXIST);
    drop((vm, vcpu));
    let again = duplicate(&same);
    // SAFETY: the descriptor belongs to this test, which passes its ownership on.
    let same = unsafe { kvm.create_vmfd_from_rawfd(again) }.unwrap();
    assert_eq!(errno(same.create_vcpu(0)), libc::EEXIST);
}

#[test]
fn a_duplicate_leads_to_the_same_vcpu() {
    // in al, 0x10; out 0x11, al; hlt
    let mut guest = Guest::new(&[0xe4, 0x10, 0xe6, 0x11, 0xf4]);
    let VcpuExit::IoIn(0x10, data) = guest.vcpu.run().unwrap() else {
        panic!("no input");
    };
    data[0] = 7;
    let fd = duplicate(&guest.vcpu);
    // SAFETY: the descriptor belongs to this test, which passes its ownership on.
    let mut same = unsafe { guest.vm.create_vcpu_from_rawfd(fd) }.unwrap();
    let VcpuExit::IoOut(0x11, data) = same.run().unwrap() else {
        panic!("no output");
    };
    assert_eq!(data, [7]);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
}

#[test]
fn descriptors_of_other_things_are_refused_and_stay_open() {
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let null = File::open("/dev/null").unwrap();
    // SAFETY: the calls refuse these descriptors, so they do not take ownership of them.
    unsafe {
        for fd in [&vcpu as &dyn AsRawFd, &null].map(|other| other.as_raw_fd()) {
            assert_eq!(errno(kvm.create_vmfd_from_rawfd(fd)), libc::ENOTTY);
            assert!(libc::fcntl(fd, libc::F_GETFD) >= 0);
        }
        for fd in [&vm as &dyn AsRawFd, &null].map(|other| other.as_raw_fd()) {
            assert_eq!(errno(vm.create_vcpu_from_rawfd(fd)), libc::ENOTTY);
            assert!(libc::fcntl(fd, libc::F_GETFD) >= 0);
        }
        for fd in [-1, -2, i32::MAX] {
            assert_eq!(errno(kvm.create_vmfd_from_rawfd(fd)), libc::EBADF);
            assert_eq!(errno(vm.create_vcpu_from_rawfd(fd)), libc::EBADF);
        }
    }
}

#[test]
fn a_vm_that_is_dropped_is_not_found_by_its_duplicate() {
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    let fd = duplicate(&vm);
    drop(vm);
    // SAFETY: the descriptor belongs to this test. The first call refuses it, and then it is closed once.
    unsafe {
        assert_eq!(errno(kvm.create_vmfd_from_rawfd(fd)), libc::ENOTTY);
        drop(File::from_raw_fd(fd));
    }
}

#[test]
fn paths_lead_to_kvm_or_are_refused() {
    Kvm::new_with_path(c"/dev/kvm").unwrap();
    assert_eq!(errno(Kvm::new_with_path(c"/dev/null")), libc::ENOTTY);
    assert_eq!(errno(Kvm::new_with_path(c"/nowhere/kvm")), libc::ENOENT);
    for closes in [false, true] {
        let fd = Kvm::open_with_cloexec_at(c"/dev/kvm", closes).unwrap();
        // SAFETY: the descriptor was opened just now, and nothing else owns it.
        let kvm = unsafe { Kvm::from_raw_fd(fd) };
        // SAFETY: the call takes no pointer.
        let flags = unsafe { libc::fcntl(kvm.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags & libc::FD_CLOEXEC != 0, closes);
        kvm.create_vm().unwrap();
    }
}

#[test]
fn private_memory_lives_as_long_as_its_vm_or_what_is_made_of_it() {
    let kvm = Kvm::new().unwrap();
    let protected = || kvm.create_vm_with_type(KVM_X86_SW_PROTECTED_VM.into());
    let args = kvm_create_guest_memfd {
        size: 4096,
        ..Default::default()
    };
    let take_over = |fd| {
        // SAFETY: KVM has created the descriptor for this test, and nothing else owns it.
        unsafe { GuestMemfdFd::from_raw(fd) }
    };
    let vm = protected().unwrap();
    let taken = take_over(vm.create_guest_memfd(args).unwrap()).unwrap();
    let left = vm.create_guest_memfd(args).unwrap();
    drop(vm);
    taken.fallocate(libc::FALLOC_FL_KEEP_SIZE, 0, 4096).unwrap();
    assert_eq!(errno(take_over(left)), libc::ENOTTY);
    // SAFETY: `take_over` has refused the descriptor, so this test still owns it, and closes it once.
    drop(unsafe { File::from_raw_fd(left) });
}

fn vfio(flags: u32) -> kvm_create_device {
    kvm_create_device {
        type_: kvm_device_type_KVM_DEV_TYPE_VFIO,
        flags,
        ..Default::default()
    }
}

fn create(vm: &VmFd) -> Result<DeviceFd, slat_kvm::Error> {
    vm.create_device(&mut vfio(0))
}

#[test]
fn a_vm_has_one_vfio_device_and_no_other() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let mut gic = kvm_create_device {
        type_: kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
        ..Default::default()
    };
    assert_eq!(errno(vm.create_device(&mut gic)), libc::ENODEV);
    gic.type_ = u32::MAX;
    assert_eq!(errno(vm.create_device(&mut gic)), libc::ENODEV);
    let mut tested = vfio(KVM_CREATE_DEVICE_TEST);
    let nothing = vm.create_device(&mut tested).unwrap();
    assert_eq!(tested.fd, 0);
    let attribute = kvm_device_attr::default();
    assert_eq!(errno(nothing.has_device_attr(&attribute)), libc::ENOTTY);

    let mut made = vfio(0);
    let device = vm.create_device(&mut made).unwrap();
    assert_eq!(made.fd, device.as_raw_fd() as u32);
    assert_eq!(errno(create(&vm)), libc::EBUSY);
    drop(device);
    create(&vm).unwrap();
}

#[test]
fn a_vfio_device_takes_vfio_files_alone() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let device = create(&vm).unwrap();
    let device = {
        let fd = duplicate(&device);
        // SAFETY: the descriptor belongs to this test, which passes its ownership on.
        let same = unsafe { DeviceFd::from_raw_fd(fd) };
        drop(device);
        same
    };
    let attribute = |group, attr: u32, fd: Option<&RawFd>| kvm_device_attr {
        group,
        attr: attr.into(),
        addr: fd.map_or(0, |fd| std::ptr::from_ref(fd) as u64),
        ..Default::default()
    };
    let (add, delete) = (KVM_DEV_VFIO_FILE_ADD, KVM_DEV_VFIO_FILE_DEL);
    for known in [add, delete] {
        let known = attribute(KVM_DEV_VFIO_FILE, known, None);
        device.has_device_attr(&known).unwrap();
        assert_eq!(errno(device.set_device_attr(&known)), libc::EFAULT);
    }
    for (group, attr) in [(KVM_DEV_VFIO_FILE, 3), (0, add)] {
        let unknown = attribute(group, attr, None);
        assert_eq!(errno(device.has_device_attr(&unknown)), libc::ENXIO);
        assert_eq!(errno(device.set_device_attr(&unknown)), libc::ENXIO);
    }
    let set = |attr, fd: RawFd| {
        let set = attribute(KVM_DEV_VFIO_FILE, attr, Some(&fd));
        errno(device.set_device_attr(&set))
    };
    let (null, directory) = (File::open("/dev/null"), File::open("/"));
    for file in [null.unwrap(), directory.unwrap()] {
        assert_eq!(set(add, file.as_raw_fd()), libc::EINVAL);
        assert_eq!(set(delete, file.as_raw_fd()), libc::ENOENT);
    }
    for request in [add, delete] {
        assert_eq!(set(request, -1), libc::EBADF);
    }
    // SAFETY: the call is refused, and writes nothing.
    let read = unsafe { device.get_device_attr(&mut attribute(KVM_DEV_VFIO_FILE, add, None)) };
    assert_eq!(errno(read), libc::EPERM);
}
