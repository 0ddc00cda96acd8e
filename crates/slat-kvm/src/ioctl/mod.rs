//! KVM's system-call interface: carries out a request with its argument, as the kernel would.
//!
//! The preload library calls this for KVM's descriptors. The Rust API does not. Both call the same objects (`System`,
//! `VmObject`, `VcpuObject`), so no code is written twice.

mod device;
mod system;
mod vcpu;
mod vm;

use crate::abi::KVM_RUN;
use crate::device::DeviceObject;
use crate::errno::{Result, fail};
use crate::guest_memfd::GuestMemfd;
use crate::messages;
use crate::stats::StatsObject;
use crate::system::System;
use crate::thread::Section;
use crate::user;
use crate::vcpu::VcpuObject;
use crate::vm::VmObject;
use slat::Shared;
use slat_host::page_size;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The object that a KVM descriptor refers to.
#[derive(Clone, Debug)]
pub enum Object {
    /// `/dev/kvm`.
    System(Arc<System>),
    /// A VM, which `KVM_CREATE_VM` creates.
    Vm(Arc<VmObject>),
    /// A vCPU, which `KVM_CREATE_VCPU` creates.
    Vcpu(Shared<VcpuObject>),
    /// Statistics, which `KVM_GET_STATS_FD` creates.
    Stats(Shared<StatsObject>),
    /// Guest memory that is a file, which `KVM_CREATE_GUEST_MEMFD` creates.
    GuestMemfd(Arc<GuestMemfd>),
    /// A device, which `KVM_CREATE_DEVICE` creates.
    Device(Arc<DeviceObject>),
    /// A module parameter, opened for writing.
    Parameter(&'static str),
    /// `/dev/kvm`, opened with `O_PATH`: all its requests fail with `EBADF`.
    DevicePath,
}

/// The name that a link in `/proc/self/fd` shows for a descriptor of a KVM object.
#[derive(Clone, Copy, Debug)]
pub struct LinkName {
    name: &'static str,
    /// The vCPU's id, which follows the name.
    vcpu: Option<u32>,
}

impl fmt::Display for LinkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        match self.vcpu {
            Some(id) => write!(f, "{id}"),
            None => Ok(()),
        }
    }
}

/// The result of an ioctl that succeeds.
#[derive(Debug)]
pub enum Answer {
    /// The value that `ioctl` returns.
    Value(i32),
    /// A new object and its descriptor, which `ioctl` returns. The caller has to store in its table of descriptors that
    /// this descriptor refers to the object.
    Created(Object, OwnedFd),
    /// A new object and its descriptor, as in `Created`, but the descriptor's number is stored in the client's own
    /// struct, and `ioctl` returns 0.
    Stored(Object, OwnedFd),
    /// The request was not carried out. The kernel carries out this request itself for any descriptor, and does not
    /// pass it to the file (ioctl(2)). So the caller makes the system call.
    Kernels,
}

impl Object {
    /// Opens `/dev/kvm`.
    pub fn system() -> Self {
        Object::System(Arc::new(System))
    }

    /// Whether a parent process created this object. If so, the object's locks may be held forever, and the object must
    /// not be dropped.
    pub fn is_foreign(&self) -> bool {
        match self {
            Object::System(_) | Object::Parameter(_) | Object::DevicePath => false,
            Object::Vm(vm) => vm.is_foreign(),
            Object::Vcpu(vcpu) => vcpu.is_foreign(),
            Object::Stats(stats) => stats.is_foreign(),
            Object::GuestMemfd(guest_memfd) => guest_memfd.is_foreign(),
            Object::Device(device) => device.is_foreign(),
        }
    }

    /// Returns the text that the link in `/proc/self/fd` shows for a descriptor of KVM's object. `None`: the object is
    /// a module parameter, for which the text that the kernel shows is right. Takes no lock and allocates nothing.
    pub fn link(&self) -> Option<LinkName> {
        let (name, vcpu) = match self {
            Object::System(_) | Object::DevicePath => ("/dev/kvm", None),
            Object::Vm(_) => ("anon_inode:kvm-vm", None),
            Object::Vcpu(vcpu) => ("anon_inode:kvm-vcpu:", Some(vcpu.id())),
            Object::Stats(stats) => match stats.vcpu_id() {
                None => ("anon_inode:kvm-vm-stats", None),
                id => ("anon_inode:kvm-vcpu-stats:", id),
            },
            Object::GuestMemfd(_) => ("anon_inode:[kvm-gmem]", None),
            Object::Device(device) => (device.link(), None),
            Object::Parameter(_) => return None,
        };
        Some(LinkName { name, vcpu })
    }

    /// Carries out `ioctl(fd, request, argument)` for a descriptor that refers to this object.
    ///
    /// # Errors
    /// KVM's errno. For an unknown request the errno is `EINVAL` (`/dev/kvm`, vCPUs), `EBADF` (`O_PATH`) or `ENOTTY`
    /// (other objects). `EFAULT` for a bad pointer. Also the errors of the call itself.
    pub fn ioctl(&self, request: u32, argument: u64) -> Result<Answer> {
        let _section = Section::enter();
        let answer = match self {
            Object::Vcpu(object) if request == KVM_RUN => return vcpu::run(object, argument),
            Object::Vcpu(object) => vcpu::ioctl(object, request, argument),
            Object::Vm(object) => vm::ioctl(object, request, argument),
            Object::System(object) => system::ioctl(object, request, argument),
            Object::Device(object) => device::ioctl(object, request, argument),
            Object::Stats(_) | Object::GuestMemfd(_) | Object::Parameter(_) => {
                unknown(request, libc::ENOTTY)
            }
            Object::DevicePath => fail(libc::EBADF),
        };
        answer.inspect_err(|error| messages::refused_ioctl(request, error.errno()))
    }
}

impl Object {
    /// Checks whether the client may map `len` bytes from `offset` on of the object's descriptor, with this protection
    /// and these flags.
    ///
    /// # Errors
    /// `EINVAL` for an offset within a page or an empty mapping, `ENODEV` for an object without pages, and the errors
    /// of [`VcpuObject::check_mapping`] and [`GuestMemfd::check_mapping`].
    pub fn check_mapping(
        &self,
        offset: u64,
        len: usize,
        protection: i32,
        flags: i32,
    ) -> Result<()> {
        if !offset.is_multiple_of(page_size() as u64) || len == 0 {
            return fail(libc::EINVAL);
        }
        match self {
            Object::Vcpu(vcpu) => vcpu.check_mapping(offset, len, protection, flags),
            Object::GuestMemfd(guest_memfd) => guest_memfd.check_mapping(protection, flags),
            _ => fail(libc::ENODEV),
        }
    }

    /// Completes the client's new mapping of this object's descriptor: maps the pages of a vCPU that are not in the
    /// descriptor's file. If the host refuses such a mapping, the client sees an empty ring of coalesced I/O.
    ///
    /// # Safety
    /// `address` and `len` are a new mapping of this object's descriptor, from `offset` on.
    pub unsafe fn complete_mapping(&self, address: usize, len: usize, offset: u64) {
        if let Object::Vcpu(vcpu) = self {
            // SAFETY: the caller keeps this function's contract.
            let _ = unsafe { vcpu.complete_mapping(address, len, offset) };
        }
    }
}

/// Returns the result of an unknown request: the error `errno`, or, for a request that the kernel itself carries out,
/// [`Answer::Kernels`].
fn unknown(request: u32, errno: i32) -> Result<Answer> {
    match request as libc::Ioctl {
        libc::FIOCLEX | libc::FIONCLEX | libc::FIONBIO => Ok(Answer::Kernels),
        _ => fail(errno),
    }
}

/// Returns the result of a request that architecture-neutral code does not know. `answer` is the architecture's answer.
/// `None`: the architecture does not know the request either, so the result is that of [`unknown`].
fn of_arch(answer: Option<i32>, request: u32, errno: i32) -> Result<Answer> {
    match answer {
        Some(answer) => value(answer),
        None => unknown(request, errno),
    }
}

/// The result of a request that succeeds and has no value.
const DONE: Result<Answer> = Ok(Answer::Value(0));

fn value(value: i32) -> Result<Answer> {
    Ok(Answer::Value(value))
}

/// Writes `value` to the client's memory at `address`, and returns success.
fn give<T: user::Plain>(address: u64, value: &T) -> Result<Answer> {
    user::write(address, value)?;
    DONE
}
