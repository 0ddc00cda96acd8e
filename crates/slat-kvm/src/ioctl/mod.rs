//! KVM's system-call interface: a request and an address, answered as the kernel would.
//!
//! The preload library calls this for descriptors that are KVM's. The Rust API does not: both stand on the same objects
//! ([`System`], [`VmObject`], [`VcpuObject`]), and nothing is written twice.

mod device;
mod system;
mod vcpu;
mod vm;

use crate::device::VfioDevice;
use crate::errno::{Result, fail};
use crate::guest_memfd::GuestMemfd;
use crate::heap;
use crate::report;
use crate::stats::StatsObject;
use crate::system::System;
use crate::thread::Section;
use crate::user;
use crate::vcpu::VcpuObject;
use crate::vm::VmObject;
use kvm_bindings::{kvm_cpuid_entry, kvm_cpuid_entry2, kvm_msr_entry};
use slat::Shared;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// What stands behind a KVM descriptor.
#[derive(Clone, Debug)]
pub enum Object {
    /// `/dev/kvm`.
    System(Arc<System>),
    /// What `KVM_CREATE_VM` gave.
    Vm(Arc<VmObject>),
    /// What `KVM_CREATE_VCPU` gave.
    Vcpu(Shared<VcpuObject>),
    /// What `KVM_GET_STATS_FD` gave.
    Stats(Shared<StatsObject>),
    /// What `KVM_CREATE_GUEST_MEMFD` gave.
    GuestMemfd(Arc<GuestMemfd>),
    /// What `KVM_CREATE_DEVICE` gave.
    Device(Arc<VfioDevice>),
    /// A module parameter, opened for writing.
    Parameter(&'static str),
    /// `/dev/kvm`, opened with `O_PATH`: the kernel lets nothing be done with it.
    DevicePath,
}

/// What a link in `/proc/self/fd` shows: see [`Object::link`].
#[derive(Clone, Copy, Debug)]
pub struct LinkName {
    name: &'static str,
    /// The id after the name.
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

/// What an ioctl answers when it succeeds.
#[derive(Debug)]
pub enum Answer {
    /// The return value.
    Value(i32),
    /// A new object and the descriptor that stands for it: the caller puts the two together.
    Created(Object, OwnedFd),
    /// Like `Created`, but the client finds the descriptor in its own struct, and the return value is 0.
    Stored(Object, OwnedFd),
}

impl Object {
    /// Opens `/dev/kvm`.
    pub fn system() -> Self {
        Object::System(Arc::new(System))
    }

    /// Whether this is the object of a parent process: its locks may be held for ever, it must not be dropped.
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

    /// What a descriptor's link in `/proc/self/fd` shows for KVM's object. `None`: slat's own file shows what it is. Takes no lock
    /// and allocates nothing.
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
            Object::Device(_) => ("anon_inode:kvm-vfio", None),
            Object::Parameter(_) => return None,
        };
        Some(LinkName { name, vcpu })
    }

    /// `ioctl(fd, request, argument)`.
    ///
    /// # Errors
    /// KVM's errno: for an unknown request `EINVAL` (`/dev/kvm`, vCPUs) or `ENOTTY` (the others), `EFAULT` for a bad pointer, what
    /// the call itself refuses.
    pub fn ioctl(&self, request: u32, argument: u64) -> Result<Answer> {
        let _section = Section::enter();
        let answer = match self {
            Object::System(object) => system::ioctl(object, request, argument),
            Object::Vm(object) => vm::ioctl(object, request, argument),
            Object::Vcpu(object) => vcpu::ioctl(object, request, argument),
            Object::Device(object) => device::ioctl(object, request, argument),
            Object::Stats(_) | Object::GuestMemfd(_) | Object::Parameter(_) => fail(libc::ENOTTY),
            Object::DevicePath => fail(libc::EBADF),
        };
        if let Err(error) = &answer
            && request != crate::abi::KVM_RUN
        {
            report::refused_ioctl(request, error.errno());
        }
        answer
    }
}

/// Success without a value.
const DONE: Result<Answer> = Ok(Answer::Value(0));

fn value(value: i32) -> Result<Answer> {
    Ok(Answer::Value(value))
}

/// Writes what the client asked for to where it asked for it.
fn give<T: user::Plain>(address: u64, value: &T) -> Result<Answer> {
    user::write(address, value)?;
    DONE
}

/// KVM's limit for CPUID tables.
const MAX_CPUID_ENTRIES: u32 = 256;
/// KVM's limit for one `KVM_GET_MSRS`.
const MAX_MSRS: u32 = 256;
/// Where the entries stand in `kvm_cpuid2` and `kvm_msrs`: behind the count and a padding word.
const ENTRIES: u64 = 8;
/// Where the indices stand in `kvm_msr_list`.
const INDICES: u64 = 4;

/// Gives a CPUID table to a client that said how much room it has.
fn give_cpuid(address: u64, table: &[kvm_cpuid_entry2]) -> Result<Answer> {
    let room = user::read::<u32>(address)?;
    let count = table.len() as u32;
    if room < count {
        return fail(libc::E2BIG);
    }
    user::write_slice(address + ENTRIES, table)?;
    give(address, &count)
}

fn take_cpuid(address: u64) -> Result<Vec<kvm_cpuid_entry2>> {
    let count = user::read::<u32>(address)?;
    if count > MAX_CPUID_ENTRIES {
        return fail(libc::E2BIG);
    }
    user::read_vec(address + ENTRIES, count as usize)
}

/// Takes a table without subleaves (`KVM_SET_CPUID`).
fn take_old_cpuid(address: u64) -> Result<Vec<kvm_cpuid_entry2>> {
    let count = user::read::<u32>(address)?;
    if count > MAX_CPUID_ENTRIES {
        return fail(libc::E2BIG);
    }
    let old = user::read_vec::<kvm_cpuid_entry>(address + ENTRIES, count as usize)?;
    let mut entries = heap::with_room(old.len())?;
    entries.extend(old.iter().map(|entry| kvm_cpuid_entry2 {
        function: entry.function,
        eax: entry.eax,
        ebx: entry.ebx,
        ecx: entry.ecx,
        edx: entry.edx,
        ..Default::default()
    }));
    Ok(entries)
}

/// Gives a list of MSR numbers: the count in any case, so that the client can come back with enough room.
fn give_msr_list(address: u64, list: &[u32]) -> Result<Answer> {
    let room = user::read::<u32>(address)?;
    user::write(address, &(list.len() as u32))?;
    if room < list.len() as u32 {
        return fail(libc::E2BIG);
    }
    user::write_slice(address + INDICES, list)?;
    DONE
}

fn take_msrs(address: u64) -> Result<Vec<kvm_msr_entry>> {
    let count = user::read::<u32>(address)?;
    if count >= MAX_MSRS {
        return fail(libc::E2BIG);
    }
    user::read_vec(address + ENTRIES, count as usize)
}
