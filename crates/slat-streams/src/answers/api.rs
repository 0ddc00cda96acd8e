//! One interface to two implementations of KVM's API: slat's API as the preload library uses it, and the host kernel's
//! API.

use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_kvm::ioctl::{Answer, Object};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The implementation of KVM that serves a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// slat answers the requests.
    Slat,
    /// The KVM of the host's kernel answers the requests.
    Kernel,
}

/// An object of the API.
#[derive(Debug)]
pub enum Handle {
    /// An object of slat, with its descriptor if it has one.
    Slat(Object, Option<OwnedFd>),
    /// An object of the kernel.
    Kernel(OwnedFd),
}

impl Handle {
    /// Opens /dev/kvm. `None`: the host has no /dev/kvm, or this user may not open it.
    pub fn system(who: Who) -> Option<Self> {
        if who == Who::Slat {
            return Some(Handle::Slat(Object::system(), None));
        }
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm");
        Some(Handle::Kernel(file.ok()?.into()))
    }

    /// Makes a request whose argument is a number.
    ///
    /// # Errors
    /// The errno.
    pub fn number(&self, request: u32, argument: u64) -> Result<i32, i32> {
        match self {
            Handle::Slat(object, _) => match object.ioctl(request, argument) {
                Ok(Answer::Value(value)) => Ok(value),
                Ok(_) => panic!("an object where a value was expected"),
                Err(error) => Err(error.errno()),
            },
            // SAFETY: the request has no pointer, or a pointer to memory of the request's size. `bytes` and `create`
            // check that.
            Handle::Kernel(fd) => unsafe { ioctl(fd, request, argument) },
        }
    }

    /// Makes a request with a struct as its argument. The request may read and write the struct. If the struct has a
    /// table, the table has as many entries as its count says.
    ///
    /// # Errors
    /// The errno.
    pub fn bytes(&self, request: u32, argument: &mut [u8]) -> Result<i32, i32> {
        assert!((request >> 16 & 0x3fff) as usize <= argument.len());
        self.number(request, argument.as_mut_ptr() as u64)
    }

    /// Makes a request that reads state. Returns the struct of `len` bytes with the state.
    ///
    /// # Errors
    /// The errno.
    pub fn read(&self, request: u32, len: usize) -> Result<Vec<u8>, i32> {
        let mut bytes = vec![0; len];
        self.bytes(request, &mut bytes).map(|_| bytes)
    }

    /// Makes a request that creates an object.
    ///
    /// # Errors
    /// The errno.
    pub fn create(&self, request: u32, argument: u64) -> Result<Handle, i32> {
        match self {
            Handle::Slat(object, _) => match object.ioctl(request, argument) {
                Ok(Answer::Created(object, fd)) => Ok(Handle::Slat(object, Some(fd))),
                Ok(other) => panic!("{other:?} where an object was expected"),
                Err(error) => Err(error.errno()),
            },
            Handle::Kernel(_) => {
                let fd = self.number(request, argument)?;
                // SAFETY: the descriptor is new.
                Ok(Handle::Kernel(unsafe { OwnedFd::from_raw_fd(fd) }))
            }
        }
    }
}

/// Makes an ioctl.
///
/// # Safety
/// `argument` is valid for the request: a number, or the address of a struct of the request's size.
unsafe fn ioctl(fd: &OwnedFd, request: u32, argument: u64) -> Result<i32, i32> {
    // SAFETY: `argument` is valid for the request, as this function's `# Safety` requires.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request.into(), argument) };
    match result {
        -1 => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        value => Ok(value),
    }
}

/// The interrupt controllers of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controllers {
    /// No controllers, so that vCPUs have no local APIC.
    None,
    /// All controllers of a PC, including an 8254.
    Pc,
}

/// A VM with a vCPU.
#[derive(Debug)]
pub struct Machine {
    /// /dev/kvm.
    pub system: Handle,
    /// The VM.
    pub vm: Handle,
    /// The VM's vCPU with id 0.
    pub vcpu: Handle,
}

/// The maximum number of CPUID leaves.
const LEAVES: usize = 128;

impl Machine {
    /// Creates a VM and a vCPU. `None`: there is no /dev/kvm.
    pub fn new(who: Who, controllers: Controllers) -> Option<Self> {
        let system = Handle::system(who)?;
        let vm = system.create(KVM_CREATE_VM, 0).ok()?;
        if controllers == Controllers::Pc {
            vm.number(KVM_CREATE_IRQCHIP, 0).expect("controllers");
            let len = size_of::<kvm_pit_config>();
            vm.bytes(KVM_CREATE_PIT2, &mut vec![0; len])
                .expect("an 8254");
        }
        let vcpu = vm.create(KVM_CREATE_VCPU, 0).expect("a vCPU");
        Some(Machine { system, vm, vcpu })
    }

    /// Gives the guest the CPUID leaves that slat supports. The guest gets them also if the kernel runs it, because
    /// rules that depend on CPUID must then be the same.
    pub fn set_cpuid(&self) {
        let slat = Handle::system(Who::Slat).expect("slat has one");
        let entry = size_of::<kvm_cpuid_entry2>();
        let mut table = vec![0; 8 + LEAVES * entry];
        table[..4].copy_from_slice(&(LEAVES as u32).to_le_bytes());
        slat.bytes(KVM_GET_SUPPORTED_CPUID, &mut table)
            .expect("leaves");
        self.vcpu
            .bytes(KVM_SET_CPUID2, &mut table)
            .expect("they are valid");
    }
}
