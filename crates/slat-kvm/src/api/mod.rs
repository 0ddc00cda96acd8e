//! `Kvm`, `VmFd` and `VcpuFd`, with the method names and types of kvm-ioctls.
//!
//! To port a program, change `use kvm_ioctls::…` to `use slat_kvm::…`. Differences that a program can see:
//!
//! - If a signal handler of the program calls [`VcpuFd::set_kvm_immediate_exit`], `KVM_RUN` ends within a millisecond,
//!   because slat polls `immediate_exit`. `KVM_RUN` ends at once if the handler calls [`crate::signal_arrived`].
//! - If the program changes the host's mappings under guest memory, slat finds the change when the guest touches the
//!   page. If the program makes the change in [`crate::notify::around`], slat finds the change at once.
//! - A duplicate of a descriptor keeps no object alive. Make a `VmFd`, `VcpuFd` or `DeviceFd` of a duplicate while the
//!   object has another descriptor.
//! - The descriptors work only with these types. To the kernel, the descriptors are memfds. So the kernel refuses
//!   `ioctl` on them, and `fallocate` on private memory. Call [`GuestMemfdFd::fallocate`] instead.

mod descriptors;
mod device;
mod exits;
mod guest_memfd;
mod interrupts;
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
