//! slat's KVM and the kernel's KVM, which the tests use by the same requests.

use crate::common::Memory;
use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_kvm::ioctl::{Answer, Object};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The kind of object that serves a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    System,
    Vm,
    Vcpu,
}

impl On {
    /// The kinds that have capabilities.
    pub const WITH_CAPABILITIES: [On; 2] = [On::System, On::Vm];
}

/// The number of bytes of guest memory.
const MEMORY: usize = 0x10000;
/// The MSR with the address of the guest's clock. Bit 0 enables the clock.
const MSR_KVM_SYSTEM_TIME_NEW: u32 = 0x4b56_4d01;

/// `/dev/kvm`, a VM with interrupt controllers and memory, and its vCPU, whose guest has enabled KVM's clock. All of
/// these exist so that no ioctl is refused because one is missing. The guest never runs.
pub struct Kvm {
    objects: [One; 3],
    _memory: Memory,
}

/// An object of slat, or a descriptor of the kernel.
enum One {
    Slat(Object, Option<OwnedFd>),
    Kernel(OwnedFd),
}

impl One {
    /// Makes a request. Returns its result and the object that it has created, or its errno.
    fn ioctl(&self, request: u32, argument: u64) -> Result<(i32, Option<One>), i32> {
        match self {
            One::Slat(object, _) => match object.ioctl(request, argument) {
                Ok(Answer::Value(value)) => Ok((value, None)),
                Ok(Answer::Created(object, fd) | Answer::Stored(object, fd)) => {
                    Ok((0, Some(One::Slat(object, Some(fd)))))
                }
                Ok(Answer::Kernels) => unreachable!("no request of KVM's"),
                Err(error) => Err(error.errno()),
            },
            One::Kernel(fd) => {
                // SAFETY: the callers' arguments are null, numbers, or addresses of structs of the request's size
                // that outlive the call.
                let value = unsafe { libc::ioctl(fd.as_raw_fd(), request.into(), argument) };
                match (value, request) {
                    (..0, _) => Err(std::io::Error::last_os_error().raw_os_error().unwrap()),
                    (fd, KVM_CREATE_VM | KVM_CREATE_VCPU | KVM_GET_STATS_FD) => {
                        // SAFETY: the call has returned a new descriptor, which nothing else owns.
                        Ok((0, Some(One::Kernel(unsafe { OwnedFd::from_raw_fd(fd) }))))
                    }
                    (value, _) => Ok((value, None)),
                }
            }
        }
    }

    fn create(&self, request: u32) -> One {
        let (_, created) = self.ioctl(request, 0).unwrap();
        created.unwrap()
    }

    /// Makes each KVM_RUN of a vCPU return without running the guest.
    fn exit_immediately(&self) {
        let (One::Slat(_, Some(fd)) | One::Kernel(fd)) = self else {
            panic!("/dev/kvm does not run")
        };
        let (access, len) = (libc::PROT_READ | libc::PROT_WRITE, size_of::<kvm_run>());
        let null = std::ptr::null_mut();
        // SAFETY: the call makes a new mapping of the vCPU's memory. The memory has a kvm_run at its start, and stays
        // mapped.
        unsafe {
            let run = libc::mmap(null, len, access, libc::MAP_SHARED, fd.as_raw_fd(), 0);
            assert_ne!(run, libc::MAP_FAILED);
            (*run.cast::<kvm_run>()).immediate_exit = 1;
        }
    }

    /// Makes a request with a struct.
    fn give<T>(&self, request: u32, argument: &T) {
        self.ioctl(request, std::ptr::from_ref(argument) as u64)
            .unwrap();
    }
}

impl Kvm {
    pub fn slat() -> Self {
        Kvm::of(One::Slat(Object::system(), None))
    }

    /// Opens the kernel's KVM. `None`: the machine does not have it, or does not let this process use it.
    pub fn kernel() -> Option<Self> {
        let file = File::options().read(true).write(true).open("/dev/kvm");
        Some(Kvm::of(One::Kernel(file.ok()?.into())))
    }

    fn of(system: One) -> Self {
        let vm = system.create(KVM_CREATE_VM);
        let memory = Memory::new(MEMORY);
        let region = kvm_userspace_memory_region {
            memory_size: MEMORY as u64,
            userspace_addr: memory.start as u64,
            ..Default::default()
        };
        vm.give(KVM_SET_USER_MEMORY_REGION, &region);
        vm.ioctl(KVM_CREATE_IRQCHIP, 0).unwrap();
        vm.give(KVM_CREATE_PIT2, &kvm_pit_config::default());
        let vcpu = vm.create(KVM_CREATE_VCPU);
        let clock = kvm_msr_entry {
            index: MSR_KVM_SYSTEM_TIME_NEW,
            data: 0x1001,
            ..Default::default()
        };
        let msrs = Msrs::from_entries(&[clock]).unwrap();
        let address = msrs.as_fam_struct_ptr() as u64;
        assert!(matches!(vcpu.ioctl(KVM_SET_MSRS, address), Ok((1, _))));
        vcpu.exit_immediately();
        Kvm {
            objects: [system, vm, vcpu],
            _memory: memory,
        }
    }

    /// Returns the value of a capability, system-wide or for the VM.
    pub fn check_extension(&self, on: On, capability: u32) -> i32 {
        let (value, _) = self.objects[on as usize]
            .ioctl(KVM_CHECK_EXTENSION, capability.into())
            .unwrap();
        value
    }

    /// Returns whether an object has a request: the request with a null argument is accepted, or is refused for
    /// another reason.
    pub fn has(&self, on: On, request: u32) -> bool {
        match self.objects[on as usize].ioctl(request, 0) {
            Err(libc::ENOTTY) => false,
            // `/dev/kvm` and vCPUs return this errno for an unknown request. No request in the table returns it for a
            // null argument.
            Err(libc::EINVAL) => on == On::Vm,
            _ => true,
        }
    }

    /// Enables a capability of the VM, without arguments.
    pub fn enable(&self, cap: u32) -> Result<(), i32> {
        let enable = kvm_enable_cap {
            cap,
            ..Default::default()
        };
        let address = &raw const enable as u64;
        self.objects[On::Vm as usize]
            .ioctl(KVM_ENABLE_CAP, address)
            .map(drop)
    }
}
