//! `Kvm`, `VmFd` and `VcpuFd`: the shape of kvm-ioctls, its method names and its types.
//!
//! A program moves over by changing `use kvm_ioctls::…` to `use slat_kvm::…`. Differences that a program can see:
//!
//! - A signal handler ends `KVM_RUN` through [`VcpuFd::set_kvm_immediate_exit`] (looked at every millisecond), or at once if
//!   the handler calls [`crate::signal_arrived`].
//! - Changes of the host's mappings under guest memory are found when the guest touches the page, or at once if they are
//!   made inside [`crate::notify::around`].
//! - Devices and nested state do not exist; their methods are not there.

mod guest_memfd;
mod interrupts;
mod stats;
mod system;
mod vcpu;
mod vm;

pub use guest_memfd::GuestMemfdFd;
pub use stats::StatsFd;
pub use system::Kvm;
pub use vcpu::VcpuFd;
pub use vm::VmFd;
