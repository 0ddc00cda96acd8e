//! `Kvm`, `VmFd` and `VcpuFd`: the shape of kvm-ioctls, its method names and its types.
//!
//! A program moves over by changing `use kvm_ioctls::…` to `use slat_kvm::…`. Differences that a program can see:
//!
//! - A signal handler ends `KVM_RUN` through [`VcpuFd::set_kvm_immediate_exit`] (looked at every millisecond), or at once if
//!   the handler calls [`crate::signal_arrived`].
//! - Changes of the host's mappings under guest memory are found when the guest touches the page, or at once if they are
//!   made inside [`crate::notify::around`].
//! - A duplicate of a descriptor keeps no object alive: make a `VmFd`, `VcpuFd` or `DeviceFd` of it while there is another one.
//! - Descriptors are for these types. The kernel knows them only as memory to map: `ioctl` on them is refused, and so is `fallocate` on
//!   private memory, for which there is [`GuestMemfdFd`].

mod descriptors;
mod device;
mod encryption;
mod exits;
mod guest_memfd;
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
