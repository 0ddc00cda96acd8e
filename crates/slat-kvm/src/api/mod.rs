//! `Kvm`, `VmFd` and `VcpuFd`, with the method names and types of kvm-ioctls.
//!
//! To port a program, change `use kvm_ioctls::…` to `use slat_kvm::…`. Differences that a program can see:
//!
//! - A signal handler ends `KVM_RUN` through [`VcpuFd::set_kvm_immediate_exit`] (polled every millisecond), or at once
//!   if the handler calls [`crate::signal_arrived`].
//! - Changes of the host's mappings under guest memory are found when the guest touches the page, or at once if they
//!   are made in [`crate::notify::around`].
//! - A duplicate of a descriptor keeps no object alive: make a `VmFd`, `VcpuFd` or `DeviceFd` of it while the
//!   object has another one.
//! - Descriptors are for these types. For the kernel they are memfds: it refuses `ioctl` on them, and `fallocate` on
//!   private memory; use [`GuestMemfdFd::fallocate`].

mod descriptors;
mod device;
mod encryption;
mod exits;
mod guest_memfd;
mod hyperv;
mod interrupts;
mod msr_filter;
mod registers;
mod stats;
mod system;
mod vcpu;
mod vm;

pub use device::DeviceFd;
pub use guest_memfd::GuestMemfdFd;
pub use stats::StatsFd;
pub use system::Kvm;
pub use vcpu::VcpuFd;
pub use vm::VmFd;
