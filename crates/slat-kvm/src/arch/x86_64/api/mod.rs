//! The methods of kvm-ioctls that only x86 has.

mod chips;
mod encryption;
mod hyperv;
mod msr_filter;
mod registers;
mod system;
mod vcpu;
mod vm;
