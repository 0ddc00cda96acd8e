//! Clones of a Linux that has booted: it boots once to its first program, and each clone goes on from there with a
//! request of its own. Run it: `cargo run --release -p slat-kvm --example linux_clones -- VMLINUX INITRD 1000`,
//! with the kernel and the initrd that `conformance/vmm/materials` prepares (any vmlinux with CONFIG_PVH, any
//! initrd with /bin/busybox).
//!
//! The VMM has no devices but those in KVM, and a serial line without interrupts for the kernel's messages. The
//! guest's first program, a script, asks for its request by reading a port (`ASK`); there the guest stops and
//! is cloned (`guest`).
//!
//! On other machines than x86-64 the example says that it needs one.

#[cfg_attr(target_arch = "x86_64", path = "linux_clones/machine.rs")]
#[cfg_attr(not(target_arch = "x86_64"), path = "elsewhere/machine.rs")]
mod machine;

fn main() -> std::process::ExitCode {
    machine::main()
}
