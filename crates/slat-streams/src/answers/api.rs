//! KVM's API as slat serves it to the preload library, and as the host's kernel does.

use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_kvm::ioctl::{Answer, Object};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// slat.
    Slat,
    /// The host's kernel.
    Kernel,
}

/// An object of the API.
#[derive(Debug)]
pub enum Handle {
    /// slat's, and its descriptor, if it has one.
    Slat(Object, Option<OwnedFd>),
    /// The kernel's.
    Kernel(OwnedFd),
}

impl Handle {
    /// Opens /dev/kvm. `None`: the host does not have it for this user.
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
            // SAFETY: a request without pointer, or with one to memory of its size: `bytes` and `create` check that.
            Handle::Kernel(fd) => unsafe { ioctl(fd, request, argument) },
        }
    }

    /// Makes a request whose argument is a struct, which the request may read and write. A table in the struct has as
    /// many entries as its count says.
    ///
    /// # Errors
    /// The errno.
    pub fn bytes(&self, request: u32, argument: &mut [u8]) -> Result<i32, i32> {
        assert!((request >> 16 & 0x3fff) as usize <= argument.len());
        self.number(request, argument.as_mut_ptr() as u64)
    }

    /// Returns the struct of `len` bytes that a request reads.
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

/// # Safety
/// `argument` is what the request takes.
unsafe fn ioctl(fd: &OwnedFd, request: u32, argument: u64) -> Result<i32, i32> {
    // SAFETY: as the caller promises.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request.into(), argument) };
    match result {
        -1 => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        value => Ok(value),
    }
}

/// The interrupt controllers of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controllers {
    /// None: vCPUs have no local APIC.
    None,
    /// All of a PC's, with an 8254.
    Pc,
}

/// A VM with a vCPU.
#[derive(Debug)]
pub struct Machine {
    /// /dev/kvm.
    pub system: Handle,
    /// The VM.
    pub vm: Handle,
    /// Its vCPU with id 0.
    pub vcpu: Handle,
}

/// The most leaves of CPUID.
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

    /// Gives the guest the CPUID leaves that slat supports, also where the kernel runs it, so that rules that depend
    /// on CPUID are the same.
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
